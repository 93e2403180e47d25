"""L4: no worker waits in a round of a dead scheduler."""

from __future__ import annotations

from samebits.core.messages import Activity
from samebits.core.scheduler import SchedulerCore
from tests.simulation.checkers.base import Checker
from tests.simulation.checkers.deadlines import HEARTBEAT_INTERVAL_S, SOME_MESSAGES_S, slowest
from tests.simulation.worker import Stage

LOOKS_AFTER_S = 6 * HEARTBEAT_INTERVAL_S  # to find the scheduler, to be welcomed, and to be invited by a heartbeat


class NoDeadRounds(Checker):
    """Checks some heartbeats after each start of a scheduler without faults, and after the faults have stopped."""

    name = "L4"

    def watch(self) -> None:
        self.world.watch_loaded.append(self._loaded)
        self.world.watch_calm.append(self._plan)

    def _loaded(self, core: SchedulerCore) -> None:
        if self.world.is_calm:
            self._plan()

    def _plan(self) -> None:
        self.world.after(LOOKS_AFTER_S * slowest(self.world), self._look, self.world.host.life)

    def _look(self, life: int) -> None:
        host = self.world.host
        if host.core is None or host.life != life or host.core.phase() == "ending":
            return
        patience_s = (2 * HEARTBEAT_INTERVAL_S + SOME_MESSAGES_S) * slowest(self.world)
        for worker in self.world.workers:
            in_round = worker.stage is Stage.RENDEZVOUS and worker.agent.activity is Activity.WAITING
            if not in_round or worker.registered_for_s() < patience_s or worker.waiting_for_s() < patience_s:
                continue
            if worker.agent.slot is None:
                # made a spare again by a scheduler that does not know of that round: it waits for a place, in no round
                continue
            if worker.joined is None or worker.joined.term == host.core.state.term:
                continue
            if host.core.phase().startswith("forming"):
                self.violated(
                    f"{worker} waits in round {worker.joined}, the scheduler's term is {host.core.state.term}"
                )
