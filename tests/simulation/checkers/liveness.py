"""L1, L2, L3, L5: once faults stop, everybody comes together, trains, and ends, within stated bounds.

The bounds add up what may lawfully be waited for: a lease and a cool-down that begin when the faults stop, both again
where the job itself had just been ended and its processes start anew, and the slowest process's preparations.
"""

from __future__ import annotations

from runtime.core.messages import Refusal, Refused
from runtime.core.ready import Ready
from runtime.core.records import TrainingFinished
from runtime.core.scheduler import Event
from tests.simulation.checkers.base import Checker
from tests.simulation.faults import Naming
from tests.simulation.group import Group
from tests.simulation.worker import Worker

END_GRACE_S = 10.0
HEARTBEAT_INTERVAL_S = 1.0
SOME_MESSAGES_S = 0.5
SLACK_S = 20.0


class Liveness(Checker):
    """Plans two appointments when the faults stop, and one more for everybody who is told to wait after that."""

    def watch(self) -> None:
        self._together_at: float | None = None
        self.world.watch_calm.append(self._calm)
        self.world.watch_trained.append(self._trained)
        self.world.watch_decided.append(self._decided)

    def together_s(self) -> float:
        """L1, L2: from the last fault to the first step of everybody."""
        policy, mix = self.world.policy, self.world.mix
        once = policy.cool_down_s + 3 * policy.node_timeout_s + mix.prepares_s
        return 2 * once + END_GRACE_S + SLACK_S

    def finished_s(self) -> float:
        """L3, L5: from everybody's first step to the last process's end, or else from TOPO_TIMEOUT after the job's."""
        policy, mix = self.world.policy, self.world.mix
        training = mix.target_step * mix.step_s + mix.saves_s
        return training + 2 * policy.topo_timeout_s + policy.cool_down_s + 5 * policy.node_timeout_s + SLACK_S

    def _calm(self) -> None:
        self.world.after(self.together_s(), self._must_be_together)
        self.world.after(self.together_s() + self.finished_s(), self._must_be_over)

    def _trained(self, group: Group) -> None:
        core = self.world.host.core
        if self.world.is_calm and core is not None and core.state.generation_number == group.generation:
            self._together_at = self.world.now

    def _decided(self, event: Event | None, ready: Ready) -> None:
        """L2: whoever is told to wait for a cool-down is in when it is over, one interval later at most."""
        if not self.world.is_calm:
            return
        for send in ready.sends:
            message = send.message
            if isinstance(message, Refused) and message.refusal is Refusal.COOLING_DOWN:
                appointment = message.retry_after_s + HEARTBEAT_INTERVAL_S + SOME_MESSAGES_S
                self.world.after(appointment, self._must_be_in, send.session, self.world.host.life)

    def _must_be_in(self, session: str, life: int) -> None:
        core = self.world.host.core
        worker = next((one for one in self.world.workers if one.session == session), None)
        if worker is None or core is None or life != self.world.host.life or worker.agent.seated:
            return
        if core.phase() != "ending" and not self._somebody_else_has_it(worker):
            self.violated("L2", f"{worker} was told to wait, has waited, and has no seat: {core.phase()}")

    def _somebody_else_has_it(self, worker: Worker) -> bool:
        """A rival for the seat: another process of the node, or where any name will do, whoever asked first."""
        rivals = any(one.node == worker.node and one is not worker for one in self.world.workers)
        return rivals or self.world.mix.naming is Naming.FRESH

    def _must_be_together(self) -> None:
        core = self.world.host.core
        is_final = any(isinstance(record, TrainingFinished) for record in self.world.host.journal.durable)
        if self._together_at is None and not is_final:
            phase = core.phase() if core is not None else "no scheduler"
            self.violated("L1", f"not together {self.together_s():g} s after the last fault: {phase}; {self._people()}")

    def _must_be_over(self) -> None:
        if not self.world.is_over():
            host = self.world.host
            phase = host.core.phase() if host.core is not None else f"scheduler ended: {host.ended}"
            self.violated("L5", f"not over: {phase}; {self._people()}")

    def _people(self) -> str:
        return "; ".join(
            f"{worker} {worker.stage.value}, agent {worker.agent.activity.name}, generation {worker.generation}"
            for worker in self.world.workers
        )
