"""L5: a finished job ends on every node."""

from __future__ import annotations

from tests.simulation.checkers.base import Checker
from tests.simulation.checkers.deadlines import finished_s, people, together_s


class TheEnd(Checker):
    """Schedules one check when the faults stop."""

    name = "L5"

    def watch(self) -> None:
        self.world.watch_calm.append(self._calm)

    def _calm(self) -> None:
        self.world.after(together_s(self.world) + finished_s(self.world), self._must_be_over)

    def _must_be_over(self) -> None:
        if not self.world.is_over():
            host = self.world.host
            phase = host.core.phase() if host.core is not None else f"scheduler ended: {host.ended}"
            self.violated(f"not over: {phase}; {people(self.world)}")
