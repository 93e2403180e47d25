"""Print the loss every few steps, and warn if it is not finite, with ``samebits.LossMonitor``."""

from __future__ import annotations

import math
from typing import Any

from samebits.errors import UsageError
from samebits.service import log

__all__ = ["LossMonitor"]


class LossMonitor:
    """Print the loss every few steps, and warn if it is not finite.

    Use it in your own loop or as a callback of :meth:`Model.train`.

    Args:
        per_print_times: number of steps between printed losses; 0 to only warn.

    Attributes:
        last: the last loss; None before the first step.

    Raises:
        UsageError: ``per_print_times`` is negative.

    Example::

        monitor = samebits.LossMonitor(per_print_times=10)
        assert monitor.step_end(10, loss=0.25)
    """

    def __init__(self, per_print_times: int = 1) -> None:
        if per_print_times < 0:
            raise UsageError(f"LossMonitor(per_print_times={per_print_times!r}): expected a number of steps, 0 or more")
        self._every = per_print_times
        self.last: float | None = None

    def step_end(self, step: int, loss: Any, epoch: int | None = None) -> bool:
        """Record a step's loss, a number or one-element tensor; return whether it is finite."""
        self.last = float(loss)
        where = f"step {step}" if epoch is None else f"epoch {epoch} step {step}"
        if not math.isfinite(self.last):
            log.warn(f"{where}: the loss is {self.last}")
            return False
        if self._every and step % self._every == 0:
            log.say(f"{where} loss {self.last:.6g}")
        return True
