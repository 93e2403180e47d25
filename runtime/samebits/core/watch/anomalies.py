"""Whether a loss or a gradient's norm is one that training can have: not a number, infinite, or far out of its band.

Pure. Here lives the band of one series of numbers, what is said of a value outside of it, and what a value says that
was computed twice; what follows is the caller's. The one idea: the band is learned from the last values and by their
ranks (median and median distance), so one spike does not widen it, and a series that has moved for good is believed
after a while.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass
from statistics import median

WINDOW = 64
"""Values that the band is learned from; before half of them are there only numbers that are none are told."""
FACTOR = 12.0
"""So many median distances from the median a value is out of the band."""
LEAST_SHARE = 0.25
"""A distance of less than this share of the median is never out of it, however calm the series was."""
MOVED = 16
"""So many values in a row outside the band are the series' new place."""


class Band:
    """Of one series."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._outside: list[float] = []  # in a row, up to the last value
        self._is_told = False

    def take(self, value: float) -> str:
        """Take the next value; what is wrong with it, where it is the first in a row with anything wrong."""
        problem = self.problem(value)
        if not problem:
            self._outside, self._is_told = [], False
            self._values.append(value)
            return ""
        if math.isfinite(value):
            self._outside.append(value)
            if len(self._outside) >= MOVED:
                self._values.clear()
                self._values.extend(self._outside)
                self._outside, self._is_told = [], False
                return ""
        was_told, self._is_told = self._is_told, True
        return "" if was_told else problem

    def problem(self, value: float) -> str:
        """What is wrong with a value, whatever was told before; it is not taken."""
        if math.isnan(value):
            return "is not a number"
        if math.isinf(value):
            return "is infinite"
        if len(self._values) < WINDOW // 2:
            return ""
        middle = median(self._values)
        distance = max(FACTOR * median(abs(one - middle) for one in self._values), LEAST_SHARE * abs(middle))
        if abs(value - middle) <= distance or value < middle:  # a loss that falls at once is no fault
            return ""
        return f"is {value:.4g} after {middle:.4g} ± {distance:.2g} so far"


class Verdict(enum.Enum):
    """What it says of a number that its step was computed a second time from the same commit."""

    TRANSIENT = "another value, which training can have"
    LASTING = "the same value"
    UNSTEADY = "another value, which training cannot have either"
    MISSED = "the step was not computed again"


@dataclass(frozen=True, slots=True)
class Odd:
    """A number that training cannot have: of which step, which one (``loss``), and what is wrong with it."""

    step: int
    title: str
    value: float
    problem: str

    def judge(self, step: int, value: float, problem: str) -> Verdict | None:
        """Whether the value that is reported now tells what was at fault; None where its step comes before."""
        if step < self.step:
            return None
        if step > self.step:
            return Verdict.MISSED
        if value == self.value or (math.isnan(value) and math.isnan(self.value)):
            return Verdict.LASTING
        return Verdict.UNSTEADY if problem else Verdict.TRANSIENT

    def sentence(self, verdict: Verdict, value: float) -> str:
        """What is said of it; ``value`` is the second one."""
        first, again = f"the {self.title} {self.problem}", f"is {value:.4g} now that it was computed again"
        return {
            Verdict.TRANSIENT: f"{first}, and {again} from the last commit: a transient error, most likely of this "
            "worker's device or host",
            Verdict.LASTING: f"{first}, and the same value came again from the last commit: the model or the data is "
            "at fault, or what was committed before",
            Verdict.UNSTEADY: f"{first}, and {again}: either the computation gives another value each time, or this "
            "worker's device fails for good",
            Verdict.MISSED: f"{first}, and was not computed again: its step was committed before it was reported. Fix: "
            "call state.report() before state.commit()",
        }[verdict]
