"""Decide which of a rank's points may be deleted, and delete them.

Only intact points are deleted, and only those older than a point that every rank holds. At least two points are always
left. The caller decides when to prune, which line of the job's history is current, and which points the other ranks
hold. A point is renamed before anything in it is removed, so a kill in between never leaves a partial point that looks
intact.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.store import durable
from samebits.store.checkpoint import folder
from samebits.store.checkpoint.folder import FoundPoint, scan
from samebits.store.checkpoint.reading import verify

MIN_KEEP = 2
SPARE_ROOM = 2  # points beyond ``keep`` that may wait for the other ranks
ALL = Point(2**63 - 1, 2**63 - 1)
"""Value of ``committed`` if there are no other ranks to wait for."""


class _HasPoint(Protocol):
    @property
    def point(self) -> Point: ...


Kept = TypeVar("Kept", bound=_HasPoint)


@dataclass(frozen=True, slots=True)
class Retention:
    """How many of a rank's points are kept, and which: the arguments of :func:`disposable`."""

    keep: int
    committed: Point | None = ALL
    told: frozenset[Point] = frozenset()


@dataclass(frozen=True, slots=True)
class Pruning:
    """A request to prune a rank's points.

    Attributes:
        newest: the point just saved; points on a line of history that it left behind are abandoned.
        retention: how long the other points are kept.
        verified: points that are known to be intact and need not be read.
        damaged: points that are known to be damaged and need not be read.
    """

    newest: Point
    retention: Retention
    verified: Collection[Point] = ()
    damaged: Collection[Point] = ()


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of pruning.

    Attributes:
        gone: the points that were deleted.
        damaged: points newly found to be damaged, and why; they are kept.
        problem: the text of the StoreError that prevented other deletions; empty if there was none.
    """

    gone: Collection[Point] = ()
    damaged: Mapping[Point, str] = field(default_factory=dict)
    problem: str = ""


def prune(
    directory: Path,
    job: str,
    keep: int,
    *,
    keep_points: Collection[Point] = (),
    abandoned: Collection[Point] = (),
    verified: Collection[Point] = (),
    damaged: Collection[Point] = (),
    committed: Point | None = ALL,
    told: Collection[Point] = (),
) -> Pruned:
    """Delete the points that :func:`disposable` selects; the caller holds the folder's lock.

    Args:
        directory: the rank's folder.
        job: the points' job. Points of another job are treated as damaged: they are neither counted nor deleted.
        keep: how many intact points are kept; at least 2.
        keep_points: points that are never deleted; they are counted only if they are among the newest.
        abandoned: points on lines of history that the job cannot resume. They are not counted, and are deleted only if
            a later generation has an intact point here.
        verified: points whose data the caller wrote or verified itself; these are not read again. Of the other points,
            those to be deleted are read, and as many of the newest as must always remain.
        damaged: points that the caller knows to be damaged.
        committed: the newest point that every rank is known to hold; None if there is none.
        told: points that other ranks may rely on.

    Raises:
        StoreError: the disk reports an error.
    """

    check = Check(verify, verified, damaged)
    usable = [found for found in scan(directory, job) if found.is_usable]
    not_counted = damaged_among_newest(usable, abandoned, check.is_whole)
    whole = [found for found in usable if found.point not in not_counted]
    retention = Retention(keep, committed, frozenset(told))
    points = points_to_delete([found.point for found in whole], retention, keep_points, abandoned)
    doomed = [found for found in whole if found.point in points and check.is_whole(found)]
    _delete(directory, doomed)
    return Pruned([found.point for found in doomed], check.found_damaged)


class Check(Generic[Kept]):
    """Determine which points are intact, by reading those of unknown state.

    Points found to be damaged are recorded.

    Args:
        verify: reads one point; raises :class:`CheckpointError` if it is damaged.
        verified: points known to be intact.
        damaged: points known to be damaged.
    """

    def __init__(self, verify: Callable[[Kept], None], verified: Collection[Point], damaged: Collection[Point]) -> None:
        self.found_damaged: dict[Point, str] = {}
        self._verify = verify
        self._verified = verified
        self._damaged = damaged

    def is_whole(self, found: Kept) -> bool:
        """Return whether this point is intact."""
        if found.point in self._verified:
            return True
        if found.point in self._damaged:
            return False
        try:
            self._verify(found)
        except CheckpointError as error:
            self.found_damaged[found.point] = str(error)
            return False
        return True


def damaged_among_newest(
    found: Iterable[Kept], abandoned: Collection[Point], is_whole: Callable[[Kept], bool]
) -> set[Point]:
    """Return the damaged points among the newest.

    The points, given newest first, are checked until ``MIN_KEEP`` intact ones are found.
    """
    damaged: set[Point] = set()
    whole = 0
    for one in found:
        if whole == MIN_KEEP:
            break
        if not is_whole(one):
            damaged.add(one.point)  # neither counted nor deleted
        elif one.point not in abandoned:
            whole += 1
    return damaged


def points_to_delete(
    whole: Collection[Point], retention: Retention, keep_points: Collection[Point], abandoned: Collection[Point]
) -> set[Point]:
    """Return the intact points of a rank to delete; see :func:`prune` for the arguments."""
    alive = [point for point in whole if point not in abandoned]
    newest_generation = max((point.generation for point in alive), default=0)
    superseded = {point for point in whole if point in abandoned and point.generation < newest_generation}
    unneeded = disposable(alive, retention.keep, retention.committed, retention.told)
    return (unneeded | superseded).difference(keep_points)


def is_abandoned(point: Point, newest: Point) -> bool:
    """Return whether ``newest`` has left behind the point's line of the job's history."""
    return point.generation < newest.generation and point.step > newest.step


def disposable(
    points: Collection[Point], keep: int, committed: Point | None, told: Collection[Point] = ()
) -> set[Point]:
    """Return the points of one line of history that a rank may delete.

    Beyond the ``keep`` newest, only points older than ``committed`` are deleted. Newer ones accumulate while other
    ranks' disks fail or their points are unknown. Of the points that were never reported to other ranks, only the
    newest is kept. So each save replaces the one before, and no point is deleted that other ranks rely on.

    Args:
        points: the intact points on the current line.
        keep: the minimum number of points to keep.
        committed: the newest point that every rank is known to hold; None if there is none.
        told: points that other ranks may rely on (:func:`tellable`).
    """
    newest_first = sorted(points, reverse=True)
    unconfirmed = [point for point in newest_first if committed is None or point > committed]
    replaced = {point for point in unconfirmed[1:] if committed is not ALL and point not in told}
    return replaced | {
        point for point in newest_first[max(keep, MIN_KEEP) :] if committed is not None and point < committed
    }


def tellable(points: Collection[Point], keep: int, committed: Point | None, told: Collection[Point]) -> set[Point]:
    """Return the points that other ranks may rely on from now on.

    These are the points that they already rely on, and the oldest of the rest, up to ``keep`` plus ``SPARE_ROOM``
    points that wait to be committed.
    """
    known = {point for point in points if point in told or (committed is not None and point <= committed)}
    waiting = len(known) if committed is None else len([point for point in known if point > committed])
    room = max(0, max(keep, MIN_KEEP) + SPARE_ROOM - waiting)
    return known | set(sorted(set(points) - known)[:room])


def _delete(directory: Path, doomed: list[FoundPoint]) -> None:
    if not doomed:
        return
    with durable.disk_errors(directory, "deleting old points"):
        nameless = [folder.temporary_directory(directory, found.path.name) for found in doomed]
        for found, temporary in zip(doomed, nameless, strict=True):
            found.path.rename(temporary)
        durable.fsync_dir(directory)
        for temporary in nameless:
            shutil.rmtree(temporary)
