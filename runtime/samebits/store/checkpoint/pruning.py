"""Which points may go: only whole ones, only those older than one that every rank holds, never below two.

No policy about *when* to prune, which line of the job's history is alive or what others hold lives here; the caller
says all three. The one idea: a point loses its name by one rename before anything of it is removed, so a kill in
between never leaves a half point that looks whole.
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
SPARE_ROOM = 2  # so many points beyond ``keep`` wait for the other ranks
ALL = Point(2**63 - 1, 2**63 - 1)
"""As ``committed``: there are no other ranks to wait for."""


class _HasPoint(Protocol):
    @property
    def point(self) -> Point: ...


Kept = TypeVar("Kept", bound=_HasPoint)


@dataclass(frozen=True, slots=True)
class Retention:
    """What decides how long a rank's points stay: ``keep``, ``committed`` and ``told`` of :func:`disposable`."""

    keep: int
    committed: Point | None = ALL
    told: frozenset[Point] = frozenset()


@dataclass(frozen=True, slots=True)
class Pruning:
    """What a rank's folder is asked to let go.

    Attributes:
        newest: it was just saved; what it has left behind is abandoned.
        retention: how long the others stay.
        verified, damaged: points that are known to be the one or the other, and need not be read.
    """

    newest: Point
    retention: Retention
    verified: Collection[Point] = ()
    damaged: Collection[Point] = ()


@dataclass(frozen=True, slots=True)
class Pruned:
    """What became of it.

    Attributes:
        gone: the points that were deleted.
        damaged: those that were found to be so only now, and why; they stay.
        problem: what kept others from going: a StoreError's text, or nothing.
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
    """Delete what :func:`disposable` says of a rank's whole points; the caller holds the folder's lock.

    Args:
        directory: the rank's folder.
        job: points of another job are damaged ones here: never counted, never deleted.
        keep: how many whole points stay; 2 where it is less.
        keep_points: never deleted, and counted only if they are among the newest.
        abandoned: points that lie on no line the job can resume. They are not counted, and are deleted only when a
            later generation has a whole point here.
        committed: the newest point that every rank is known to hold; None where none is.
        told: the points that others may count on.
        verified: points whose data the caller has itself written or verified and need not be read again. Of the others
            those are read that are to go, and of the newest as many as must never be fewer.
        damaged: points that the caller knows to be so.

    Raises:
        StoreError: the folder refuses.
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
    """Tells which points are whole, reading those of which that is not known, and remembers what it found damaged.

    Args:
        verify: reads one; :class:`CheckpointError` where it is not what was saved.
        verified, damaged: those that are known to be the one or the other.
    """

    def __init__(self, verify: Callable[[Kept], None], verified: Collection[Point], damaged: Collection[Point]) -> None:
        self.found_damaged: dict[Point, str] = {}
        self._verify = verify
        self._verified = verified
        self._damaged = damaged

    def is_whole(self, found: Kept) -> bool:
        """Whether this point is what was saved."""
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
    """Of these points, newest first, those that turn out damaged until as many are whole as must never be fewer."""
    damaged: set[Point] = set()
    whole = 0
    for one in found:
        if whole == MIN_KEEP:
            break
        if not is_whole(one):
            damaged.add(one.point)  # not counted and not touched
        elif one.point not in abandoned:
            whole += 1
    return damaged


def points_to_delete(
    whole: Collection[Point], retention: Retention, keep_points: Collection[Point], abandoned: Collection[Point]
) -> set[Point]:
    """Of a rank's whole points, those that go; ``keep_points`` and ``abandoned`` are :func:`prune`'s."""
    alive = [point for point in whole if point not in abandoned]
    newest_generation = max((point.generation for point in alive), default=0)
    superseded = {point for point in whole if point in abandoned and point.generation < newest_generation}
    unneeded = disposable(alive, retention.keep, retention.committed, retention.told)
    return (unneeded | superseded).difference(keep_points)


def is_abandoned(point: Point, newest: Point) -> bool:
    """Whether it lies on a line of the job's history that ``newest`` has left behind."""
    return point.generation < newest.generation and point.step > newest.step


def disposable(
    points: Collection[Point], keep: int, committed: Point | None, told: Collection[Point] = ()
) -> set[Point]:
    """Of the points of one line, those a rank may delete.

    Beyond the ``keep`` newest only what is older than ``committed`` goes. What is newer piles up while other ranks'
    disks fail, or nobody tells what they hold. Of those whom nobody was told of the newest alone stays, so that each
    save replaces the one before it, and no point goes that others count on.

    Args:
        points: whole, of the line that is alive.
        keep: how many stay at the least.
        committed: the newest that every rank is known to hold; None where none is.
        told: those that others may count on (:func:`tellable`).
    """
    newest_first = sorted(points, reverse=True)
    unconfirmed = [point for point in newest_first if committed is None or point > committed]
    replaced = {point for point in unconfirmed[1:] if committed is not ALL and point not in told}
    return replaced | {
        point for point in newest_first[max(keep, MIN_KEEP) :] if committed is not None and point < committed
    }


def tellable(points: Collection[Point], keep: int, committed: Point | None, told: Collection[Point]) -> set[Point]:
    """Of the points a rank holds, those that others may count on from now on: what they do already, and the oldest of
    the others, until ``SPARE_ROOM`` more than ``keep`` wait to be committed.
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
