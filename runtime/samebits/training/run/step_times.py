"""Measure how long this rank's last steps took: data, computing, waiting for others, committing.

Three of the four parts are measured where they happen, and the fourth is the rest, so measuring costs only three
microseconds per step. ``core.watch.stragglers`` decides which ranks are slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from samebits.core.reports import MAX_STEP_US, StepTime, StepTiming
from samebits.core.watch.stragglers import STEPS, mean_of
from samebits.training.main_thread_time import MainThreadTime, main_thread

FIRST_STEPS = 2
"""Number of first steps of a generation that are left out, because they build, compile and warm up."""


MOST_TOLD_A_S = 1000
"""Limit on windows of steps reported to the scheduler per second, by all ranks together."""


class StepTimes:
    """Measures the step times of one process.

    Args:
        least_s: minimum length of a window in seconds; None: nothing is measured.
        waited: the main thread's waiting times.
        clock: monotonic seconds.

    Attributes:
        pace: the newest window of the current generation.
    """

    def __init__(
        self,
        least_s: float | None,
        waited: MainThreadTime = main_thread,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pace: StepTiming | None = None
        self._shortest_s = least_s
        self._waited, self._clock = waited, clock
        self._least_us: float | None = None  # None: nothing is measured in this generation
        self._commit_s = self._before_commit_s = 0.0

    def begin(self, step: int, world_size: int) -> None:
        """Begin a generation after this many completed steps."""
        self.pace, waited = None, self._waited
        is_off = self._shortest_s is None or world_size < 2
        self._least_us = None if is_off else 1e6 * max(self._shortest_s or 0.0, world_size / MOST_TOLD_A_S)
        self._step, self._first = step, step + FIRST_STEPS
        self._ended_s = self._clock()
        self._data_s, self._communication_s = waited.data_s, waited.communication_s
        self._steps: list[StepTime] = []
        self._means: list[StepTime] = []  # one per window of STEPS
        self._spent_us = 0

    def commit_begins(self) -> None:
        """Start timing a commit. Waiting for other ranks during the commit does not count as committing."""
        self._commit_s, self._before_commit_s = self._clock(), self._waited.communication_s

    def commit_ends(self, step: int) -> StepTiming | None:
        """Stop timing a commit; return the newest window of the current generation."""
        if self._least_us is not None:
            self._committed(step, self._commit_s, self._before_commit_s, self._least_us)
        return self.pace

    def _committed(self, step: int, since_s: float, before_s: float, least_us: float) -> None:
        waited, now_s, taken = self._waited, self._clock(), step - self._step
        data_s, communication_s = waited.data_s - self._data_s, waited.communication_s - self._communication_s
        commit_s = now_s - since_s - (waited.communication_s - before_s)
        compute_s = now_s - self._ended_s - data_s - communication_s - commit_s
        self._step, self._ended_s = step, now_s
        self._data_s, self._communication_s = waited.data_s, waited.communication_s
        if taken < 1 or step <= self._first:
            return
        parts = (data_s, compute_s, communication_s, commit_s)
        one = StepTime(*(min(max(0, int(part * 1e6 / taken)), MAX_STEP_US) for part in parts))
        self._steps += [one] * min(taken, STEPS - len(self._steps))
        self._spent_us += sum(one) * taken
        if len(self._steps) < STEPS:
            return
        self._means.append(mean_of(self._steps))
        self._steps.clear()
        if self._spent_us >= least_us:
            means, self._means, self._spent_us = self._means, [], 0
            mean = StepTime(*(sum(part) // len(means) for part in zip(*means, strict=True)))
            self.pace = StepTiming(len(means) * STEPS, mean)
