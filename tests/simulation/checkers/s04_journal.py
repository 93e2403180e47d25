"""S4: terms and generations only rise, and the disk always replays to the scheduler's state.

Which records a crash may leave is checked where they are read (``RecoveryPath``), under the same name.
"""

from __future__ import annotations

from samebits.core.records import GenerationCommitted, JobRebuilt, Record, TermStarted
from samebits.core.scheduler import SchedulerCore
from tests.simulation.checkers.base import Checker


class Journal(Checker):
    """Compares the scheduler with the replay of the records, whenever some have become durable."""

    name = "S4"

    def begin_job(self) -> None:
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
            elif isinstance(record, JobRebuilt):
                self._term, self._generation = record.term, record.generation.generation
        core, disk = self.world.host.core, self.world.witness.disk
        if core is not None and core.state != disk:
            self.violated(f"the journal says {disk}, the scheduler believes {core.state}")

    def _loaded(self, core: SchedulerCore) -> None:
        disk = self.world.witness.disk
        if core.state != disk:
            self.violated(f"the journal said {disk}, a new scheduler reads {core.state}")
