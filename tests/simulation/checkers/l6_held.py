"""L6: a worker that blocks the others for good is ended, whatever else happens, once the step timeout permits it."""

from __future__ import annotations

from tests.simulation.checkers.base import Checker
from tests.simulation.checkers.deadlines import people
from tests.simulation.main_thread import Hold
from tests.simulation.worker import Worker


class Held(Checker):
    """Schedules a check for every worker that is still held when the faults stop."""

    name = "L6"

    def watch(self) -> None:
        self.world.watch_calm.append(self._calm)

    def _calm(self) -> None:
        stay = [(one, hold) for one in self.world.workers if (hold := self.world.operator.leaves_held(one)) is not None]
        if len(stay) == 1:  # of two neither may wait for the other
            (worker, hold), patience = stay[0], self.world.patience
            self.world.after(patience.most_s(worker.step), self._must_be_gone, worker, hold)

    def _must_be_gone(self, worker: Worker, hold: Hold) -> None:
        core = self.world.host.core
        if core is None or worker.thread.hold is not hold or not worker.is_alive:
            return
        seat = core.state.seats.get(worker.node)
        holds = seat is not None and seat.session == worker.session and seat.is_held and seat.slot is not None
        beside = [one for one in self.world.workers if one is not worker and one.agent.slot is not None]
        others = [one for one in beside if one.rank_in(worker.generation) >= 0]
        if holds and others and core.state.final is None and worker.agent.job == core.state.job:
            self.violated(
                f"{worker} is held since {hold.since:.3f} and still there: {core.phase()}; {people(self.world)}"
            )
