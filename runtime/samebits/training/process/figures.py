"""``samebits.report(queue=…)``: numbers measured by a script, used for autoscaling.

The newest number of each name is stored and sent with the next heartbeat, so even frequent reports do not slow a step.
"""

from __future__ import annotations

import math
from typing import Any

from samebits.core.reports import MAX_FIGURE_CHARS, MAX_FIGURES, MEASURED, Figure
from samebits.errors import UsageError
from samebits.training.process import context

__all__ = ["report"]

MOST = MAX_FIGURES - len(MEASURED)


def report(**figures: Any) -> None:
    """Publish numbers that this worker measures.

    The numbers appear in ``samebits status --json`` and in the page's metrics.
    ``samebits autoscale --queue-per-worker`` resizes the job by ``queue``, the total number of waiting items for all
    workers; if several workers report ``queue``, the number from the lowest slot counts. A name keeps its last number
    until it is reported again.

    Args:
        figures: finite numbers or one-element tensors, by name; at most 14 names. Reading a tensor on an accelerator
                waits for the device.

    Raises:
        UsageError: called before :func:`samebits.init`, there are too many names, or a value is not a finite number.

    Example::

        samebits.report(queue=12, tokens_per_second=8100.5)
    """
    agent = context.current("samebits.report()").agent
    known = {one.name: one for one in agent.figures}
    for name, given in figures.items():
        if name in MEASURED or len(name) > MAX_FIGURE_CHARS or not name.isprintable():
            raise UsageError(
                f"samebits.report({name[:80]!r}): the worker measures {' and '.join(MEASURED)} by itself, and a name "
                f"has at most {MAX_FIGURE_CHARS} characters. Fix: report it under another name"
            )
        try:
            value = float(given)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UsageError(f"samebits.report({name}=…): it is not a number ({error}). Fix: pass one number") from None
        if not math.isfinite(value):
            raise UsageError(f"samebits.report({name}={value}): expected a finite number. Fix: leave it out")
        known[name] = Figure(name, value)
    if len(known) > MOST:
        raise UsageError(
            f"samebits.report: found {len(known)} names, expected at most {MOST}. Fix: report only figures that "
            "decide the job's size"
        )
    agent.figures = tuple(known.values())
