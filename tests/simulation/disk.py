"""What survives kill -9: the scheduler's journal and every node's checkpoints.

A record is durable when the shell's fsync has returned; a crash before that leaves any prefix of what was being
written. Damaged bytes belong to the tests of ``store``; here a disk keeps what it has, or is lost as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.core.point import Point
from runtime.core.records import Record
from runtime.core.state import JobState


class Journal:
    """The scheduler's journal on one recovery path."""

    def __init__(self) -> None:
        self.durable: list[Record] = []

    def append(self, records: Sequence[Record]) -> None:
        """fsync has returned for these."""
        self.durable += records

    def load(self, *, compact: bool) -> JobState:
        """What a scheduler start reads; ``compact`` replaces the records by a snapshot first."""
        if compact and self.durable:
            self.durable = list(JobState.replay(self.durable).snapshot())
        return JobState.replay(self.durable)


class Checkpoints:
    """The restore points on one node's disk, by (generation, step)."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._points: list[Point] = []
        self._ever: set[Point] = set()

    def save(self, point: Point) -> None:
        """The point is durable; older ones beyond ``keep`` go, those of an older line first."""
        self._ever.add(point)
        if point not in self._points:
            self._points.append(point)
            self._points.sort(key=lambda held: (held.generation, held.step))
            del self._points[: -self._keep]

    def lose(self) -> None:
        """The directory is gone."""
        self._points.clear()

    def was_saved(self, point: Point) -> bool:
        """Whether the point was durable once."""
        return point in self._ever

    def held(self) -> tuple[Point, ...]:
        """Every point that would pass verification."""
        return tuple(self._points)
