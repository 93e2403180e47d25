"""Whether a loss or a gradient's norm is one that training can have: not a number, infinite, or far out of its band.

Pure. Here lives the band of one series of numbers and what is said of a value outside of it; what follows is the
caller's. The one idea: the band is learned from the last values and by their ranks (median and median distance), so one
spike does not widen it, and a series that has moved for good is believed after a while.
"""

from __future__ import annotations

import math
from collections import deque
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
        problem = self._problem(value)
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

    def _problem(self, value: float) -> str:
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
