"""Every node's restore points, as its disk holds them; damaged bytes belong to the tests of ``store``."""

from __future__ import annotations

from runtime.core.point import Point


class Checkpoints:
    """The restore points of one job on one node's disk, by (generation, step)."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._points: list[Point] = []
        self._ever: set[Point] = set()

    def save(self, point: Point) -> None:
        """The point is durable; older ones beyond ``keep`` go, those of an older line first."""
        if point in self._ever and point in self._points:
            return
        self._ever.add(point)
        points = self._points
        points.append(point)
        if len(points) > 1 and (points[-2].generation, points[-2].step) > (point.generation, point.step):
            points.sort(key=lambda held: (held.generation, held.step))
        del points[: -self._keep]

    def lose(self) -> None:
        """The directory is gone."""
        self._points.clear()

    def was_saved(self, point: Point) -> bool:
        """Whether the point was durable once."""
        return point in self._ever

    def held(self) -> tuple[Point, ...]:
        """Every point that would pass verification."""
        return tuple(self._points)
