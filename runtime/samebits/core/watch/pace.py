"""Compare how long each rank's own part of a step takes. Pure functions.

Ranks that train together end every step at the same moment. Only the time in which a rank does *not* wait for others
shows which rank is slow. The slowest and fastest steps are left out of the mean, so that a save or a pause of the host
has no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from samebits.core.reports import MAX_STEP_US, StepTime

STEPS = 20
"""Steps in a window. Fast ranks are compared over a multiple of this number."""
LEFT_OUT = 5
"""Number of the fastest, and of the slowest, steps left out of a window, which gives an interquartile mean."""
LEAST_EXCESS_US = 1000
"""A smaller excess over the median does not count as slow."""
OWN = ("data", "compute", "commit")
"""The parts of a step in which a rank waits for no other."""


def mean_of(steps: Sequence[StepTime]) -> StepTime:
    """Return the mean times, without the slowest and fastest steps."""
    kept = sorted(steps, key=own_us)
    if len(kept) > 2 * LEFT_OUT:
        kept = kept[LEFT_OUT:-LEFT_OUT]
    return StepTime(*(min(sum(part) // len(kept), MAX_STEP_US) for part in zip(*kept, strict=True)))


def own_us(time: StepTime) -> int:
    """Return the time of a step in which the rank did not wait for others, in microseconds."""
    return time.data_us + time.compute_us + time.commit_us


@dataclass(frozen=True, slots=True)
class Slowness:
    """One rank compared with the others.

    Attributes:
        ratio: its own part of a step, relative to the median of all ranks.
        part: the part of the step with the largest excess.
        part_us: its duration.
        usual_us: the median rank's duration of that part.
        excess_us: how far its own part as a whole exceeds the median rank's.
    """

    ratio: float
    part: str
    part_us: int
    usual_us: int
    excess_us: int

    def exceeds(self, factor: float) -> bool:
        """Return whether the rank is slower by this factor and by a noticeable time."""
        return self.ratio > factor and self.excess_us >= LEAST_EXCESS_US


def compare(times: Mapping[str, StepTime], of: Collection[str] | None = None) -> dict[str, Slowness]:
    """Compare each rank with the median rank.

    Of an even number of ranks, the lower middle value is used, so that two ranks can be compared.

    Args:
        times: the times of all ranks.
        of: the ranks to compare; None: all. Of ten thousand ranks, only a few have new times at once.
    """
    if not times:
        return {}
    data, compute, _, commit = zip(*times.values(), strict=True)
    usual = median_low(map(sum, zip(data, compute, commit, strict=True)))
    parts = dict(zip(OWN, map(median_low, (data, compute, commit)), strict=True))
    return {node: _beside(time, usual, parts) for node, time in times.items() if of is None or node in of}


def _beside(time: StepTime, usual_us: int, parts: Mapping[str, int]) -> Slowness:
    own, beyond = own_us(time), {part: getattr(time, f"{part}_us") - parts[part] for part in OWN}
    part = max(OWN, key=beyond.__getitem__)
    return Slowness(own / max(usual_us, 1), part, parts[part] + beyond[part], parts[part], own - usual_us)


def sentence(node: str, slowness: Slowness, steps: int) -> str:
    """Return a text such as ``worker 2 is 1.8 × slower than the median over 20 steps: data (96 ms a step, …)``."""
    times = f"{_ms(slowness.part_us)} a step, {_ms(slowness.usual_us)} elsewhere"
    return (
        f"worker {node} is {slowness.ratio:.1f} × slower than the median over {steps} steps: {slowness.part} ({times})"
    )


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.{0 if microseconds >= 10_000 else 1}f} ms"
