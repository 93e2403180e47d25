"""How long a rank's own part of a step takes, and how the ranks compare: what is slow, and its sentence. Pure.

Here live the mean of a window of steps, the comparison and its words. Never here: how times are taken
(``training.run.step_times``), or from when on a rank is said to be slow (``stragglers``). The one idea: ranks that
train together end every step at the same moment, so only the time that a rank does *not* wait for the others tells who
they wait for. A mean leaves out the slowest steps and the fastest: a save, or a host's pause, makes nobody slow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from samebits.core.reports import MAX_STEP_US, StepTime

STEPS = 20
"""Of one window: a rank is compared over so many steps, or a multiple of it where they are fast."""
LEFT_OUT = 5
"""Of a window, the fastest and the slowest so many are not looked at: what is left is the interquartile mean."""
LEAST_EXCESS_US = 1000
"""Who takes less than so much longer for a step holds nobody up to speak of."""
OWN = ("data", "compute", "commit")
"""The parts of a step in which a rank waits for no other."""


def mean_of(steps: Sequence[StepTime]) -> StepTime:
    """The mean of the steps that are left once the slowest and the fastest are taken away."""
    kept = sorted(steps, key=own_us)
    if len(kept) > 2 * LEFT_OUT:
        kept = kept[LEFT_OUT:-LEFT_OUT]
    return StepTime(*(min(sum(part) // len(kept), MAX_STEP_US) for part in zip(*kept, strict=True)))


def own_us(time: StepTime) -> int:
    """What a rank needs for a step by itself, in microseconds."""
    return time.data_us + time.compute_us + time.commit_us


@dataclass(frozen=True, slots=True)
class Slowness:
    """One rank beside the others.

    Attributes:
        ratio: its own part of a step, of the median of all ranks'.
        part: what in it is longest beyond the others'.
        part_us: how long that takes.
        usual_us: how long that takes for the median rank.
        excess_us: of its own part, beyond the median.
    """

    ratio: float
    part: str
    part_us: int
    usual_us: int
    excess_us: int

    def exceeds(self, factor: float) -> bool:
        """Whether it is slower than that, and by more than nothing."""
        return self.ratio > factor and self.excess_us >= LEAST_EXCESS_US


def compare(times: Mapping[str, StepTime], of: Collection[str] | None = None) -> dict[str, Slowness]:
    """Each rank beside the median; of an even number the faster of the two in the middle, so two can be compared.

    Args:
        times: of all ranks.
        of: those that are asked for; None: all. With ten thousand, few are new at a time.
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
    """``worker 2 is 1.8 × slower than the median over 20 steps: data (96 ms a step, 12 ms elsewhere)``."""
    times = f"{_ms(slowness.part_us)} a step, {_ms(slowness.usual_us)} elsewhere"
    return (
        f"worker {node} is {slowness.ratio:.1f} × slower than the median over {steps} steps: {slowness.part} ({times})"
    )


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.{0 if microseconds >= 10_000 else 1}f} ms"
