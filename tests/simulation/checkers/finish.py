"""S19: training is finished when every member's last commit is durable, and nobody returns before that is written."""

from __future__ import annotations

from runtime.core.agent_events import Notice, Over
from runtime.core.point import Point
from runtime.core.ready import Ready
from runtime.core.records import GenerationCommitted, JobFinished, Record, TrainingFinished
from runtime.core.scheduler import Event, SchedulerCore
from tests.simulation.checkers.base import Checker
from tests.simulation.worker import Worker


class Finish(Checker):
    """Looks at the members' disks when the scheduler says that all is done."""

    def watch(self) -> None:
        self._committed: GenerationCommitted | None = None
        self._final: Point | None = None
        self._is_final = False  # as this life of the scheduler believes
        self.world.watch_loaded.append(self._loaded)
        self.world.watch_decided.append(self._decided)
        self.world.watch_durable.append(self._durable)
        self.world.watch_notice.append(self._noticed)

    def _loaded(self, core: SchedulerCore) -> None:
        self._is_final = self._final is not None

    def _durable(self, records: list[Record]) -> None:
        for record in records:
            if isinstance(record, GenerationCommitted):
                self._committed = record
            elif isinstance(record, TrainingFinished):
                if self._final not in (None, record.point):
                    self.violated("S19", f"finished twice: at {self._final} and at {record.point}")
                self._final = record.point

    def _decided(self, event: Event | None, ready: Ready) -> None:
        for record in ready.records:
            if isinstance(record, TrainingFinished):
                assert self._committed is not None
                self._is_final = True
                for node, _ in self._committed.members:
                    if not self.world.checkpoints_of(node).was_saved(record.point):
                        self.violated("S19", f"{record}, but {node} has never saved it")
            elif isinstance(record, JobFinished) and self._committed is not None and not self._is_final:
                self.violated("S19", "JobFinished, and what was trained is not finished")

    def _noticed(self, worker: Worker, notice: Notice) -> None:
        if isinstance(notice, Over) and notice.point != self._final:
            self.violated("S19", f"{worker} returns at {notice.point}; finished is {self._final}")
