"""``samebits.LossMonitor``: print the loss every so many steps, and warn of one that is not finite."""

from __future__ import annotations

import math
from typing import Any

from samebits.errors import UsageError
from samebits.service import log

__all__ = ["LossMonitor"]


class LossMonitor:
    """Follow one loss, from a loop of your own or as a callback of ``Model.train``.

    Args:
        per_print_times: print it every so many steps; 0: only warn.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        if per_print_times < 0:
            raise UsageError(f"LossMonitor(per_print_times={per_print_times!r}): expected a number of steps, 0 or more")
        self._every = per_print_times
        self.last: float | None = None

    def step_end(self, step: int, loss: Any, epoch: int | None = None) -> bool:
        """Take a step's loss, a number or a tensor of one element; return whether it is finite."""
        self.last = float(loss)
        where = f"step {step}" if epoch is None else f"epoch {epoch} step {step}"
        if not math.isfinite(self.last):
            log.warn(f"{where}: the loss is {self.last}")
            return False
        if self._every and step % self._every == 0:
            log.say(f"{where} loss {self.last:.6g}")
        return True
