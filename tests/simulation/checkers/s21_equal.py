"""S21: training is finished, and a point is common, only if every member's state is the same.

This uses the members' true states from the world's own books, not the reported digests.
"""

from __future__ import annotations

from samebits.core.agent.agent_events import Over
from samebits.core.point import Point
from samebits.core.records import PointCommitted, TrainingFinished
from samebits.core.scheduler import SchedulerEvent
from tests.simulation.checkers.base import Checker
from tests.simulation.worker import Worker


class Equal(Checker):
    """Examines the members' states when the scheduler reports the end, or a point held by all."""

    name = "S21"

    def begin_job(self) -> None:
        self._point: Point | None = None

    def watch(self) -> None:
        self.world.when_recorded[TrainingFinished].append(self._finished)
        self.world.when_recorded[PointCommitted].append(self._committed)
        self.world.when_noticed[Over].append(self._over)

    def _finished(self, event: SchedulerEvent | None, record: TrainingFinished) -> None:
        self._require_equal(record.point, record)

    def _committed(self, event: SchedulerEvent | None, record: PointCommitted) -> None:
        self._require_equal(record.point, record)

    def _require_equal(self, point: Point, record: TrainingFinished | PointCommitted) -> None:
        witness = self.world.witness
        states = {node: self.world.odd_states.of(witness.job, node, point) for node in witness.line.members}
        if len(set(states.values())) > 1:
            self.violated(f"{record}, and the members' states are {states}")

    def _over(self, worker: Worker, notice: Over) -> None:
        state = self.world.witness.disk
        if worker.agent.job == self.world.witness.job and state.final is None:
            self.violated(f"{worker} returns, and nothing says that all are equal")
