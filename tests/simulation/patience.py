"""How long a worker that blocks the others may stay: the step timeout and its doublings, in true time.

It records which workers the scheduler gave up at which step: after twice the step timeout the first time, and twice as
long as before each further time at the same step. It covers one start of the scheduler, since a new one
has forgotten it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from samebits.core.messages import GiveUp

if TYPE_CHECKING:
    from tests.simulation.world import World

TIMES = 2.0
TELLS_S = 15.0
"""To find a scheduler, to report a standstill, to judge it, and to end it."""
LEAST_LEARNED_S = 30.0


class Patience:
    """The records of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ended_at: dict[int, set[float]] = defaultdict(set)  # step → the times
        world.when_answered[GiveUp].append(self._ended)
        world.watch_loaded.append(lambda _: self._ended_at.clear())

    def begin_job(self) -> None:
        """No worker has been ended at any step."""
        self._ended_at.clear()

    def times(self, step: int) -> int:
        """Return how many times before a worker got this order at this step."""
        return len(self._ended_at[step] - {self._world.now})

    def least_s(self, step: int) -> float:
        """Return how long a worker must have stood still before it may be ended at this step."""
        mix = self._world.mix
        least_s = LEAST_LEARNED_S if mix.step_timeout_s is None else TIMES * mix.step_timeout_s
        return least_s * 2.0 ** self.times(step) / (1.0 + mix.clock_spread)

    def most_s(self, step: int) -> float:
        """Return the bound from now to the end of such a worker, if HANG sets one and all must be seen again."""
        mix = self._world.mix
        patience_s = TIMES * (mix.step_timeout_s or 0.0) * 2.0 ** self.times(step)
        return (patience_s + TELLS_S) / (1.0 - mix.clock_spread)

    def _ended(self, session: str, message: GiveUp) -> None:
        worker = next((one for one in self._world.workers if one.session == session), None)
        if worker is not None:
            self._ended_at[worker.step].add(self._world.now)
