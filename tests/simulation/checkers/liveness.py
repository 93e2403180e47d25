"""L1, L2, L3, L5: once faults stop, everybody comes together, trains, and ends, within stated bounds.

The bounds add up what may lawfully be waited for: a lease and a cool-down that begin when the faults stop, both again
where the job itself had just been ended and its processes start anew, and the slowest process's preparations.
"""

from __future__ import annotations

from runtime.core.records import TrainingFinished
from tests.simulation.checkers.base import Checker
from tests.simulation.group import Group

END_GRACE_S = 10.0
SLACK_S = 20.0


class Liveness(Checker):
    """Plans two appointments when the faults stop."""

    def watch(self) -> None:
        self._together_at: float | None = None
        self.world.watch_calm.append(self._calm)
        self.world.watch_trained.append(self._trained)

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
