"""S25: the calls to each key are linearizable across any number of schedulers."""

from __future__ import annotations

from tests.core.linearizability import is_linearizable
from tests.simulation.checkers.base import Checker


class KeysInOrder(Checker):
    """Checks the history of each key when a job's keys are lost with its folder, and at the end of the run."""

    name = "S25"

    def watch(self) -> None:
        self.world.watch_end.append(self._look)

    def begin_job(self) -> None:
        self._look()

    def _look(self) -> None:
        for key, calls in self.world.keys.history.items():
            if not is_linearizable(calls):
                self.violated(f"no order of the calls to {key.decode()} gives their answers: {calls}")
