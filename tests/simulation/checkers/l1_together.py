"""L1: once faults stop, every seat's current incarnation is in one generation within a stated bound."""

from __future__ import annotations

from samebits.core.end_kinds import EndKind
from tests.simulation.checkers.base import Checker
from tests.simulation.checkers.deadlines import people, together_s
from tests.simulation.group import Group


class Together(Checker):
    """Schedules one check when the faults stop."""

    name = "L1"

    def watch(self) -> None:
        self._are_together = False
        self.world.watch_calm.append(self._calm)
        self.world.watch_trained.append(self._trained)

    def _calm(self) -> None:
        self.world.after(together_s(self.world), self._must_be_together)

    def _trained(self, group: Group) -> None:
        core = self.world.host.core
        if self.world.is_calm and not self._are_together and core is not None and core.state.job == group.job:
            state = core.state
            seats = [state.seats[node] for node in state.by_slot.values()]
            committed = state.generation
            if committed is not None and committed.generation == group.generation:
                nodes = {node for node, _ in committed.members}
                self._are_together = all(seat.node in nodes for seat in seats if seat.is_held)

    def _must_be_together(self) -> None:
        core, host = self.world.host.core, self.world.host
        is_over = host.ended is EndKind.FINISHED or host.path.is_finished()
        if not self._are_together and not is_over:
            phase = core.phase() if core is not None else "no scheduler"
            bound_s = together_s(self.world)
            self.violated(f"not together {bound_s:g} s after the last fault: {phase}; {people(self.world)}")
