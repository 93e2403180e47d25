"""Detect losses and gradient norms that are not finite or far outside their usual range. Pure functions.

The range is learned from the last values: their median, and the median distance from it. A single spike therefore does
not widen the range, and a series that has permanently moved is accepted after a while.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass
from statistics import median

WINDOW = 64
"""Values that the band is learned from. Until half of them exist, only non-finite values are reported."""
FACTOR = 12.0
"""Values further from the median than this many median distances are outside the band."""
LEAST_SHARE = 0.25
"""Distances below this share of the median are always inside the band, however steady the series was."""
MOVED = 16
"""After this many values in a row outside the band, they count as the series' new level."""


class Band:
    """The band of one series, whose steps go back after a rollback.

    A repeated step is compared only with the values of earlier steps, because the first steps of a training often have
    far larger losses than those that were reached later.
    """

    def __init__(self) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # step and value
        self._outside: list[tuple[int, float]] = []  # those in a row outside the band, up to the last
        self._told_at: int | None = None  # the step whose problem was returned, until a value has none
        self._step = 0  # the last value's

    def take(self, step: int, value: float) -> str:
        """Add a value. Return its problem, or "" if it has none or the previous value had one, too."""
        if step < self._step:
            self._rewind(step)
        self._step = step
        problem = self.problem(value)
        if not problem:
            self._outside, self._told_at = [], None
            self._values.append((step, value))
            return ""
        if math.isfinite(value):
            self._outside.append((step, value))
            if len(self._outside) >= MOVED:
                self._values.clear()
                self._values.extend(self._outside)
                self._outside, self._told_at = [], None
                return ""
        if self._told_at is not None:
            return ""
        self._told_at = step
        return problem

    def _rewind(self, step: int) -> None:
        """Forget the values from this step on: they are computed again."""
        self._values = deque((one for one in self._values if one[0] < step), maxlen=WINDOW)
        self._outside = [one for one in self._outside if one[0] < step]
        if self._told_at is not None and self._told_at >= step:
            self._told_at = None

    def problem(self, value: float) -> str:
        """Return a value's problem, or "", without adding the value to the series."""
        if math.isnan(value):
            return "is not a number"
        if math.isinf(value):
            return "is infinite"
        if len(self._values) < WINDOW // 2:
            return ""
        middle = median(one for _, one in self._values)
        distance = max(FACTOR * median(abs(one - middle) for _, one in self._values), LEAST_SHARE * abs(middle))
        if abs(value - middle) <= distance or value < middle:  # a sudden drop of the loss is not a fault
            return ""
        return f"is {value:.4g} after {middle:.4g} ± {distance:.2g} so far"


class AnomalyVerdict(enum.Enum):
    """What follows from computing a step a second time from the same commit."""

    TRANSIENT = "a different, plausible value"
    LASTING = "the same value"
    UNSTEADY = "a different, implausible value"
    MISSED = "the step was not computed again"


@dataclass(frozen=True, slots=True)
class Odd:
    """An implausible number, with its step, its name (such as ``loss``) and its problem."""

    step: int
    title: str
    value: float
    problem: str

    def judge(self, step: int, value: float, problem: str) -> AnomalyVerdict | None:
        """Return the verdict from a later report, or None if that report is about an earlier step."""
        if step < self.step:
            return None
        if step > self.step:
            return AnomalyVerdict.MISSED
        if value == self.value or (math.isnan(value) and math.isnan(self.value)):
            return AnomalyVerdict.LASTING
        return AnomalyVerdict.UNSTEADY if problem else AnomalyVerdict.TRANSIENT

    def sentence(self, verdict: AnomalyVerdict, value: float) -> str:
        """Describe the verdict; ``value`` is the recomputed number."""
        first, again = f"the {self.title} {self.problem}", f"was {value:.4g} when recomputed"
        return {
            AnomalyVerdict.TRANSIENT: f"{first}, but {again} from the last commit: a transient error, most likely of "
            "this worker's device or host",
            AnomalyVerdict.LASTING: f"{first}, and the same value was recomputed from the last commit: the model or "
            "the data is at fault, or what was committed before",
            AnomalyVerdict.UNSTEADY: f"{first}, but {again}: either each computation gives a different value, or "
            "this worker's device is defective",
            AnomalyVerdict.MISSED: f"{first}, and was not recomputed: its step was committed before it was reported. "
            "Fix: call state.report() before state.commit()",
        }[verdict]
