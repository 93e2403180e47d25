"""Every node's restore points as on its disk; damaged bytes are tested in ``store``.

The product's own rule decides which are removed; S20 checks that none is removed that others need.
"""

from __future__ import annotations

from bisect import insort
from typing import Protocol

from samebits.core.point import Point
from samebits.store.checkpoint import disposable, tellable


class Holder(Protocol):
    """A process as seen by a folder's lock: a stopped one keeps it."""

    @property
    def is_alive(self) -> bool: ...


class Checkpoints:
    """The restore points of one job on one node's disk, by (generation, step)."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._points: list[Point] = []  # rising
        self._held: set[Point] = set()  # the same
        self._ever: set[Point] = set()
        self._told: set[Point] = set()
        self._holder: Holder | None = None
        self.was_lost = False
        self._elsewhere: set[Point] = set()  # in what was lost

    def take(self, process: Holder) -> bool:
        """Return whether this process may save here: it holds the folder's lock from its first save to its end."""
        if self._holder is None or not self._holder.is_alive:
            self._holder = process
        return self._holder is process

    def save(self, point: Point, committed: Point | None) -> None:
        """Store the point durably; then remove those that the product would delete, knowing the committed one."""
        if point not in self._held:
            insort(self._points, point)
            self._held.add(point)
        self._ever.add(point)
        alive, left = self._points, set[Point]()
        if point < alive[-1]:  # of later steps, those of an older generation are on an abandoned line
            left = {held for held in alive if held.generation < point.generation and held.step > point.step}
            alive = [held for held in alive if held not in left]
        gone = (disposable(alive, self._keep, committed, self._told) | left) - {point}
        if gone:
            self._held -= gone
            self._points = [held for held in self._points if held not in gone]

    def tellable(self, committed: Point | None) -> tuple[Point, ...]:
        """Return what is reported to the scheduler."""
        self._told = tellable(self._points, self._keep, committed, self._told)
        return tuple(sorted(self._told))

    def lose(self) -> None:
        """Remove the directory."""
        self._elsewhere |= self._held
        self._points.clear()
        self._held.clear()
        self.was_lost = True

    def bring_back(self) -> bool:
        """Restore what was lost; return whether there was anything."""
        found, self._elsewhere = self._elsewhere - self._held, set()
        self._held |= found
        self._points = sorted(self._held)
        return bool(found)

    def was_saved(self, point: Point) -> bool:
        """Return whether the point was durable once."""
        return point in self._ever

    def holds(self, point: Point) -> bool:
        """Return whether the point would pass verification."""
        return point in self._held

    def held(self) -> tuple[Point, ...]:
        """Return every point that would pass verification."""
        return tuple(self._points)
