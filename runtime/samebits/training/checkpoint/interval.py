"""How long to train between two points, and how far ahead of the next one the ranks talk again. Arithmetic only.

What a save costs, how often the job has failed and how long a step takes are handed in; measuring them, and agreeing
on the answer, is ``save_rhythm``'s. The one idea is Young's (J. W. Young, "A first order approximation to the optimum
checkpoint interval", CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006, refines it where a save costs a good part of the
time between failures): what is spent on saving and what is redone after a failure are least together at the square
root of twice the cost times the mean time between failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Choice", "choose", "mean_time_between_failures_s", "steps_to_next_look", "text_of_seconds"]

PRIOR_MTBF_OF_A_PROCESS_S = 50_000 * 3600.0
"""One failure in 50,000 hours of one process is assumed before this job has shown any, and weighs as much as one.

419 unexpected interruptions in 54 days on 16,384 GPUs, one every 3.1 h ("The Llama 3 Herd of Models", 2024, section
3.3.4), are one in 50,700 h for each of them.
"""
MIN_INTERVAL_S = 5.0
"""Below it a recovery itself (imports, a new group) takes longer than what saving more often would spare."""
MAX_INTERVAL_S = 3600.0
"""Above it more would hang on the assumed failure rate than an hour of saving less could be worth."""
FURTHEST_LOOK_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Choice:
    """An interval in seconds of training, and the sentence that says why."""

    interval_s: float
    text: str


def mean_time_between_failures_s(world_size: int, failures: int, watched_s: float) -> float:
    """The expectation once ``failures`` were seen in ``watched_s`` seconds: a gamma prior worth one failure.

    Args:
        world_size: processes, any of which may fail.
        failures: seen so far.
        watched_s: for how long.
    """
    return (PRIOR_MTBF_OF_A_PROCESS_S / world_size + watched_s) / (1 + failures)


def choose(*, cost_s: float, step_s: float, world_size: int, failures: int, watched_s: float) -> Choice:
    """When to save, where the user leaves it to us.

    Args:
        cost_s: what a save took from training: the time it blocked and what it slowed the steps behind it.
        step_s: of one step, for the sentence alone.
        world_size, failures, watched_s: as in :func:`mean_time_between_failures_s`.
    """
    mtbf_s = mean_time_between_failures_s(world_size, failures, watched_s)
    best_s = math.sqrt(2 * max(0.0, cost_s) * mtbf_s)
    interval_s = min(max(best_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
    bound = ""
    if interval_s != best_s:
        bound = f"; {'more' if best_s < interval_s else 'less'} often than every {spoken(interval_s)} does not pay"
    return Choice(
        interval_s,
        f"saves every {_steps(interval_s, step_s)} ({spoken(interval_s)}): a save costs {cost_s:.2g} s, a failure is "
        f"expected every {spoken(mtbf_s)} ({failures} seen in {spoken(watched_s)}){bound}",
    )


def text_of_seconds(interval_s: float, step_s: float) -> str:
    """The sentence where the user has given the seconds."""
    return (
        f"saves every {_steps(interval_s, step_s)} ({spoken(interval_s)}, save_checkpoint_seconds): a step takes "
        f"{step_s:.2g} s"
    )


def steps_to_next_look(left_s: float, step_s: float) -> int:
    """After how many steps to look at the clock again: at half of the way, so that slower steps are noticed in time.

    Args:
        left_s: until a point is due.
        step_s: of one step, as far as is known.
    """
    if step_s <= 0 or left_s <= step_s:
        return 1
    return max(1, int(min(left_s / step_s / 2, FURTHEST_LOOK_STEPS)))


def spoken(seconds: float) -> str:
    """A duration for people, in the unit that fits."""
    if seconds < 1e-3:
        return "0 s"
    for limit_s, unit_s, unit in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit_s:
            return f"{seconds / unit_s:.{0 if seconds / unit_s >= 10 else 1}f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def _steps(interval_s: float, step_s: float) -> str:
    steps = max(1, round(interval_s / max(step_s, 1e-9)))
    return f"{steps} steps" if steps > 1 else "step"
