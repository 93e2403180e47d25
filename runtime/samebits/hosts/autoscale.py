"""Decide how many workers a job should have, with a reason, from its load and the gain of larger sizes.

The size is changed only for a reason that persists. A load must miss its target by more than a tolerance, and a smaller
size must have been sufficient for a while. A larger size is kept only if it has made the job faster in proportion to
its cost. While a queue is not empty, all workers are busy, so a queue that shrinks, grows or is empty does not in
itself justify a smaller size. Once it is empty, a smaller size must keep up with arrivals, judged by speeds measured
while work was waiting.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from samebits.errors import UsageError
from samebits.printable import counted

_NONE = 0.0
_QUEUE = "the queue"
_MOST_LOAD = 1e6  # a figure may be any finite number
_ROOM = "there is room for one more, to see whether it pays"


@dataclass(frozen=True, slots=True)
class Limits:
    """Parameters of the policy. A target of 0 means that there is no target.

    Attributes:
        least, most: limits of the size.
        cpu, memory: target share used by a worker, 0 to 1.
        queue: target number of waiting samples or requests per worker.
        tolerance: a load whose distance from its target is within this share changes nothing.
        settle_s: seconds after a change during which no decision is made.
        shrink_after_s: seconds for which a smaller size must have sufficed.
        least_gain: minimum share, 0 to 1, of the gain that linear scaling would bring; with less, the job shrinks
            again. 0 disables this check.

    Raises:
        UsageError: a value is out of range.
    """

    least: int
    most: int
    cpu: float = _NONE
    memory: float = _NONE
    queue: float = _NONE
    tolerance: float = 0.1
    settle_s: float = 30.0
    shrink_after_s: float = 300.0
    least_gain: float = 0.3

    def __post_init__(self) -> None:
        checks = {
            f"sizes from {self.least} to {self.most}: expected 1 or more, the smaller first": 1
            <= self.least
            <= self.most,
            f"targets cpu={self.cpu:g}, memory={self.memory:g}: expected shares from 0 to 1": (
                0 <= self.cpu <= 1 and 0 <= self.memory <= 1
            ),
            f"queue={self.queue:g}: expected 0 or more for each worker": 0 <= self.queue < math.inf,
            f"tolerance={self.tolerance:g}: expected a share below 1": 0 <= self.tolerance < 1,
            f"least_gain={self.least_gain:g}: expected a share from 0 to 1": 0 <= self.least_gain <= 1,
            f"settle_s={self.settle_s:g}, shrink_after_s={self.shrink_after_s:g}: expected 0 or more": (
                0 <= self.settle_s < math.inf and 0 <= self.shrink_after_s < math.inf
            ),
        }
        for problem, holds in checks.items():
            if not holds:
                raise UsageError(f"autoscaling: {problem}. Fix: change it")


@dataclass(frozen=True, slots=True)
class LoadReading:
    """Measurements since the last reading. A value that was not measured is None.

    Attributes:
        at_s: time of the reading in seconds, always on the same clock.
        workers: number of training workers.
        cpu, memory: mean share used by a worker, 0 to 1.
        queue: number of items waiting for all workers.
        speed: samples per second of the entire job.
        room: the most workers that the cluster could take.
    """

    at_s: float
    workers: int
    cpu: float | None = None
    memory: float | None = None
    queue: float | None = None
    speed: float | None = None
    room: int | None = None


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """The wanted size, and the reason."""

    size: int
    reason: str


@dataclass(slots=True)
class Autoscaler:
    """The state of the policy: when the size changed, which sizes sufficed, and which growth was not worth its cost."""

    limits: Limits
    _size: int = 0
    _changed_s: float = -math.inf
    _before: tuple[int, float] | None = None  # size and speed before the last growth
    _enough: deque[tuple[float, int]] = field(default_factory=deque)  # time → size that would have sufficed
    _enough_at: tuple[int, float] | None = None  # a size beyond which nothing was gained, and the load at that time
    _can: dict[int, float] = field(default_factory=dict)  # by size: its speed when work was last waiting
    _queue: float | None = None  # queue length at the last reading of this size

    def decide(self, reading: LoadReading) -> ScalingDecision:
        """Decide what to do after the next reading. Readings must be in order of time."""
        limits, size = self.limits, reading.workers
        if size != self._size:  # changed by the policy or by another cause
            self._size, self._changed_s, self._queue = size, reading.at_s, None
            self._enough.clear()
            return self._within(size, f"it has just changed to {size} workers", reading)
        if reading.at_s < self._changed_s + limits.settle_s:
            return self._within(size, f"it has had {size} workers for less than {limits.settle_s:g} s", reading)
        went_back = self._judge_growth(reading)
        if went_back is not None:
            return went_back
        load, name = _load(reading, limits)
        wanted = size if abs(load - 1) <= limits.tolerance else math.ceil(size * load - 1e-9)
        if not name and reading.room is not None and reading.room > size:
            wanted, name = size + 1, _ROOM
        if limits.queue and reading.queue is not None and reading.speed is not None:
            wanted = max(wanted, self._keeps_up(reading.queue, reading.speed, size))
        wanted = min(max(wanted, limits.least), limits.most)
        self._enough.append((reading.at_s, wanted))
        if wanted > size:
            return self._grow(wanted, load, name, reading)
        return self._shrink(load, name, reading)

    def _keeps_up(self, queue: float, speed: float, size: int) -> int:
        """Return the smallest size, up to this one, that keeps up with arrivals and has a margin."""
        before, self._queue = self._queue, queue
        if before and queue > 0:
            self._can[size] = speed
        if before is not None and 0 < queue != before:
            return size  # the arrival rate shows only when nothing waits
        if queue > 0 or not self._can:
            return 1
        needed = speed / (1 - self.limits.tolerance)
        return next((one for one in range(1, size) if self._speed_of(one) >= needed), size)

    def _speed_of(self, size: int) -> float:
        """Return a size's measured speed, or an estimate from the nearest measured size."""
        nearest = min(self._can, key=lambda seen: (abs(seen - size), seen))
        return self._can[nearest] * size / nearest

    def _judge_growth(self, reading: LoadReading) -> ScalingDecision | None:
        """Return to the size before the last growth if the growth was not worth its cost.

        This is checked only once. It is skipped if the load is now below its target, because the growth has then served
        its purpose.
        """
        limits, before = self.limits, self._before
        self._before = None
        if before is None or reading.speed is None or not limits.least_gain:
            return None
        size, speed = before
        load, name = _load(reading, limits)
        most = 1 - limits.tolerance if name == _QUEUE else 1 + limits.tolerance  # a share is already met at its target
        if size >= reading.workers or speed <= 0 or (name and load < most):
            return None
        gain = (reading.speed / speed - 1) / (reading.workers / size - 1)
        if gain >= limits.least_gain:
            return None
        self._enough_at = (size, load * reading.workers)
        return self._within(
            size, f"{reading.workers} workers brought {max(gain, 0):.0%} of what they cost beside {size}", reading
        )

    def _grow(self, wanted: int, load: float, name: str, reading: LoadReading) -> ScalingDecision:
        if self._enough_at is not None:
            size, then = self._enough_at
            if load * reading.workers <= then * (1 + self.limits.tolerance):
                wanted = min(wanted, max(reading.workers, size))
            else:
                self._enough_at = None  # the load has changed
        decision = self._within(wanted, _said(load, name), reading)
        if decision.size > reading.workers and reading.speed is not None:
            self._before = (reading.workers, reading.speed)
        return decision

    def _shrink(self, load: float, name: str, reading: LoadReading) -> ScalingDecision:
        since = reading.at_s - self.limits.shrink_after_s
        is_old_enough = self._enough[0][0] <= since
        while len(self._enough) > 1 and self._enough[1][0] <= since:
            self._enough.popleft()
        most = max(size for _, size in self._enough)
        if most >= reading.workers or not is_old_enough:
            return self._within(reading.workers, _said(load, name), reading)
        return self._within(
            most,
            f"{counted(most, 'worker')} would have been enough for {self.limits.shrink_after_s:g} s: "
            f"{_said(load, name)}",
            reading,
        )

    def _within(self, size: int, reason: str, reading: LoadReading) -> ScalingDecision:
        """Limit a size to the allowed range, and growth to the available room."""
        limits = self.limits
        bound = max(limits.least, min(limits.most, size))
        if reading.room is not None and bound > reading.workers:
            bound = max(reading.workers, min(bound, reading.room))
        if bound != size:
            reason += f"; {size} would be {'above' if size > bound else 'below'} the limits or the available room"
        return ScalingDecision(bound, reason)


def _load(reading: LoadReading, limits: Limits) -> tuple[float, str]:
    """Return the highest load relative to its target, and its name, or 1 and "" without targets."""
    loads = [
        (min(value / target / count, _MOST_LOAD), name)
        for value, target, count, name in (
            (reading.cpu, limits.cpu, 1, "CPU"),
            (reading.memory, limits.memory, 1, "memory"),
            (reading.queue, limits.queue, reading.workers, _QUEUE),
        )
        if value is not None and target
    ]
    return max(loads, default=(1.0, ""))


def _said(load: float, name: str) -> str:
    if name == _ROOM:
        return name
    return f"{name} is {load:.0%} of its target" if name else "no target is missed"
