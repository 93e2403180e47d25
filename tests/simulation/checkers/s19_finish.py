"""S19: training is finished when every member's last commit is durable, and no worker returns before that record."""

from __future__ import annotations

from samebits.core.agent.agent_events import Over
from samebits.core.point import Point
from samebits.core.records import JobFinished, JobRebuilt, TrainingFinished
from samebits.core.scheduler import SchedulerCore, SchedulerEvent
from tests.simulation.checkers.base import Checker
from tests.simulation.worker import Worker


class Finish(Checker):
    """Examines the members' disks when the scheduler reports the end of training."""

    name = "S19"

    def begin_job(self) -> None:
        self._final: Point | None = None
        self._is_final = False  # as this start of the scheduler believes

    def rebuilt(self, record: JobRebuilt) -> None:
        self._final, self._is_final = record.final, record.final is not None

    def watch(self) -> None:
        self.world.watch_loaded.append(self._loaded)
        self.world.when_durable[TrainingFinished].append(self._durable)
        self.world.when_recorded[TrainingFinished].append(self._finished)
        self.world.when_recorded[JobFinished].append(self._job_finished)
        self.world.when_noticed[Over].append(self._over)

    def _loaded(self, core: SchedulerCore) -> None:
        self._is_final = self._final is not None

    def _durable(self, record: TrainingFinished) -> None:
        if self._final not in (None, record.point):
            self.violated(f"finished twice: at {self._final} and at {record.point}")
        self._final = record.point

    def _finished(self, event: SchedulerEvent | None, record: TrainingFinished) -> None:
        self._is_final = True
        witness = self.world.witness
        for node in witness.line.members:
            if not self.world.checkpoints_of(witness.job, node).was_saved(record.point):
                self.violated(f"{record}, but {node} has never saved it")

    def _job_finished(self, event: SchedulerEvent | None, record: JobFinished) -> None:
        if self.world.witness.line.committed and not self._is_final:
            self.violated("JobFinished, and what was trained is not finished")
        core = self.world.host.core
        if core is not None and self._is_final:
            seats = [core.state.seats[node] for node in core.state.by_slot.values()]
            not_done = [seat.node for seat in seats if not seat.has_left]
            if not_done:
                self.violated(f"JobFinished, and the scripts of {not_done} have not reached their ends")

    def _over(self, worker: Worker, notice: Over) -> None:
        if worker.agent.job == self.world.witness.job and notice.point != self._final:
            self.violated(f"{worker} returns at {notice.point}; finished is {self._final}")
