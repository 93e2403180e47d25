"""``runtime.LossMonitor``: says the loss every so many steps, and names one that is no number any more."""

from __future__ import annotations

import math
from typing import Any

from runtime.errors import UsageError
from runtime.service import log

__all__ = ["LossMonitor"]


class LossMonitor:
    """Follows one loss.

    Args:
        per_print_times: say it every so many steps; 0: only what is wrong.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        if per_print_times < 0:
            raise UsageError(f"LossMonitor(per_print_times={per_print_times!r}): expected a number of steps, 0 or more")
        self._every = per_print_times
        self.last: float | None = None

    def step_end(self, step: int, loss: Any, epoch: int | None = None) -> bool:
        """Take a step's loss, a number or a tensor of one; whether it is finite."""
        self.last = float(loss)
        where = f"step {step}" if epoch is None else f"epoch {epoch} step {step}"
        if not math.isfinite(self.last):
            log.warn(f"{where}: the loss is {self.last}")
            return False
        if self._every and step % self._every == 0:
            log.say(f"{where} loss {self.last:.6g}")
        return True
