"""At which steps all ranks are compared (CONSISTENCY_EVERY): the same on every rank, without a word or with very few.

Here live the fixed rhythm and the one that follows what a comparison costs. Never here: what is compared. The one
idea: the first commit of a generation is one, for what comes before it may be gone with a process; from then on it is
the step alone that tells, or rank 0, at a step that all know.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from samebits.training.checkpoint.save_rhythm import Agree

__all__ = ["AUTO", "Comparisons", "comparisons_by"]

AUTO = "auto"
SHARE = 0.01
"""Of training, a comparison may cost so much with ``auto``."""
OFTENEST, SELDOMEST = 10, 1000


def comparisons_by(every: int | str, agree: Agree) -> Comparisons:
    """The rhythm that CONSISTENCY_EVERY asks for."""
    return Measured(agree) if every == AUTO else Comparisons(int(every))


class Comparisons:
    """Every so many steps: at its multiples; 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._next = 1

    def begins(self, step: int, *, leads: bool) -> None:
        """A generation begins at this step; ``leads``: as rank 0."""
        self._next = step + 1

    def is_at(self, step: int) -> bool:
        """Whether to compare at this commit: the same answer on every rank. May be a collective."""
        if not self._every or step < self._next:
            return False
        self._next = self._after(step)
        return True

    def _after(self, step: int) -> int:
        return (step // self._every + 1) * self._every

    def took(self, seconds: float) -> None:
        """So long one has kept the training's thread, and the one that hashes."""


class Measured(Comparisons):
    """So often that it costs ``SHARE`` of training at most, as rank 0 measures it.

    Args:
        agree: how rank 0's decision reaches the others.
        clock: monotonic seconds.
    """

    def __init__(self, agree: Agree, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(OFTENEST)
        self._agree = agree
        self._clock = clock
        self._leads = False
        self._cost_s = 0.0  # of the last one
        self._since = (0, clock())  # the step of the last one, and when

    def begins(self, step: int, *, leads: bool) -> None:
        """As :meth:`Comparisons.begins`."""
        super().begins(step, leads=leads)
        self._leads, self._since = leads, (step, self._clock())

    def took(self, seconds: float) -> None:
        """As :meth:`Comparisons.took`."""
        self._cost_s += seconds

    def _after(self, step: int) -> int:
        at, (before, since) = self._clock(), self._since
        steps = OFTENEST
        if self._leads and step > before:
            step_s = max((at - since) / (step - before), 1e-9)
            steps = min(max(math.ceil(self._cost_s / (SHARE * step_s)), OFTENEST), SELDOMEST)
        self._since, self._cost_s = (step, at), 0.0
        _, following = self._agree((0, step + steps) if self._leads else (0, 0))
        return following
