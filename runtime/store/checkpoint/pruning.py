"""Which points may go: only whole ones, only the oldest, never below two.

No policy about *when* to prune or which line of the job's history is alive lives here; the caller says both. The one
idea: a point loses its name by one rename before anything of it is removed, so a kill in between never leaves a half
point that looks whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from runtime.core.point import Point
from runtime.errors import CheckpointError
from runtime.store import durable
from runtime.store.checkpoint import folder
from runtime.store.checkpoint.reading import verify
from runtime.store.checkpoint.scanning import FoundPoint, scan

MIN_KEEP = 2


def prune(
    directory: Path,
    job: str,
    keep: int,
    *,
    keep_points: Collection[Point] = (),
    abandoned: Collection[Point] = (),
    verified: Collection[Point] = (),
) -> list[Point]:
    """Delete the oldest whole points of a rank's folder beyond ``keep``; the caller holds the folder's lock.

    Args:
        directory: the rank's folder.
        job: points of another job are damaged ones here: never counted, never deleted.
        keep: how many whole points stay; 2 where it is less.
        keep_points: never deleted, and counted only if they are among the newest.
        abandoned: points that lie on no line the job can resume. They are not counted, and are deleted only when a
            later generation has a whole point here.
        verified: points whose data this process has itself written or verified and need not be read again.

    Returns:
        The points that are gone.

    Raises:
        StoreError: the folder refuses.
    """
    whole = [found for found in scan(directory, job) if _is_whole(found, verified)]
    points = points_to_delete([found.point for found in whole], keep, keep_points=keep_points, abandoned=abandoned)
    doomed = [found for found in whole if found.point in points]
    _delete(directory, doomed)
    return [found.point for found in doomed]


def is_abandoned(point: Point, newest: Point) -> bool:
    """Whether it lies on a line of the job's history that ``newest`` has left behind."""
    return point.generation < newest.generation and point.step > newest.step


def points_to_delete(
    whole: Sequence[Point], keep: int, *, keep_points: Collection[Point], abandoned: Collection[Point]
) -> set[Point]:
    """Of a rank's whole points, the newest first, those that go; the arguments are :func:`prune`'s."""
    alive = [point for point in whole if point not in abandoned]
    kept = {*alive[: max(keep, MIN_KEEP)], *keep_points}
    newest_generation = max((point.generation for point in alive), default=0)
    return {
        point
        for point in whole
        if point not in kept and (point not in abandoned or point.generation < newest_generation)
    }


def _is_whole(found: FoundPoint, verified: Collection[Point]) -> bool:
    if not found.is_usable:
        return False
    if found.point in verified:
        return True
    try:
        verify(found)
    except CheckpointError:
        return False  # whoever restores is told; here it only means: not counted and not touched
    return True


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
