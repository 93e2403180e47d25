"""S4: terms and generations only rise, and what is on disk always replays to what the scheduler believes.

Which records a crash may leave is judged where they are read (``RecoveryPath``), under the same name.
"""

from __future__ import annotations

from runtime.core.records import GenerationCommitted, Record, TermStarted
from runtime.core.scheduler import SchedulerCore
from runtime.core.state import JobState
from tests.simulation.checkers.base import Checker


class Journal(Checker):
    """Replays every record as it becomes durable."""

    name = "S4"

    def begin_job(self) -> None:
        self._state = JobState()
        self._term = self._generation = 0

    def watch(self) -> None:
        self.world.watch_durable.append(self._durable)
        self.world.watch_loaded.append(self._loaded)

    def _durable(self, records: list[Record]) -> None:
        for record in records:
            if isinstance(record, TermStarted):
                if record.term <= self._term:
                    self.violated(f"term {record.term} after term {self._term}")
                self._term = record.term
            elif isinstance(record, GenerationCommitted):
                if record.generation <= self._generation:
                    self.violated(f"generation {record.generation} after generation {self._generation}")
                self._generation = record.generation
            self._state.apply(record)
        core = self.world.host.core
        if core is not None and core.state != self._state:
            self.violated(f"the journal says {self._state}, the scheduler believes {core.state}")

    def _loaded(self, core: SchedulerCore) -> None:
        if core.state != self._state:
            self.violated(f"the journal said {self._state}, a new scheduler reads {core.state}")
