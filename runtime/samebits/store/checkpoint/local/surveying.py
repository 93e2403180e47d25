"""What lies in a job's checkpoint folder, for people: every rank's points and what is not yet, or no longer, one.

Looking only: nothing here takes a lock, writes, or reads a point's data, so it may be done while the job trains. The
one idea: whatever has a name of ours is in the list with its state, and what a writer renamed or removed between two
looks is left out instead of being called damaged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from samebits.core.point import Point
from samebits.errors import StoreError
from samebits.store import durable
from samebits.store.checkpoint.format.manifest import PointHeader
from samebits.store.checkpoint.local.folder import (
    MANIFEST_FILE,
    is_prefix,
    parse_aside_name,
    parse_point_name,
    parse_temporary_name,
    rank_directory,
    slots_in,
)
from samebits.store.checkpoint.local.scanning import FoundPoint, inspect_point
from samebits.store.owner import read_owner


class EntryState(Enum):
    """What an entry of a rank's folder is; ``WHOLE`` goes by the manifest and the sizes, not by the data's hashes."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    BEING_WRITTEN = "being written"
    LEFT_BEHIND = "left half written"
    MOVED_ASIDE = "moved aside"


@dataclass(frozen=True, slots=True)
class Entry:
    """One directory of a rank's folder.

    Attributes:
        slot: whose folder.
        path: the directory.
        point: which point it is, or was to be, by its name.
        state, why: and, where it is not whole, the reason.
        header: what its manifest says; of a whole point only.
        size_bytes: of the files in it.
        changed_at_s: when its newest file was written, in seconds since 1970.
    """

    slot: int
    path: Path
    point: Point | None
    state: EntryState
    why: str
    header: PointHeader | None
    size_bytes: int
    changed_at_s: float


def survey(root: Path) -> list[Entry]:
    """Everything of ours below a job's checkpoint folder, by slot, each slot's newest point first.

    Raises:
        StoreError: a folder cannot be read.
    """
    return [entry for slot in slots_in(root) for entry in _in_order(rank_directory(root, slot), slot)]


def newest_common_point(entries: list[Entry]) -> tuple[Point, int] | None:
    """The newest point that every rank of its world holds whole, and the size of that world; none where there is none.

    By manifests and sizes, as :func:`survey` saw them.
    """
    ranks: dict[tuple[Point, int], set[int]] = {}
    for entry in entries:
        if entry.header is not None:
            ranks.setdefault((entry.header.point, entry.header.world_size), set()).add(entry.header.rank)
    return max((key for key, held in ranks.items() if len(held) == key[1]), default=None)


def folders_with_points(root: Path) -> list[Path]:
    """The job's folder where ranks have folders in it, and those below it that CheckpointConfig(prefix=…) made."""
    with durable.disk_errors(root, "looking for checkpoints"):
        try:
            below = sorted(entry for entry in root.iterdir() if is_prefix(entry.name) and entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [folder for folder in (root, *below) if slots_in(folder)]


def job_of(directory: Path) -> str | None:
    """The job whose points lie in a rank's folder; None where that is not said."""
    try:
        owner = read_owner(directory)
    except StoreError:
        return None  # whoever writes there is told; to look at the points it is not needed
    return None if owner is None else owner.job


def is_gone(found: FoundPoint) -> bool:
    """Whether its writer removed or renamed the point since it was found."""
    return not os.path.lexists(found.path)


def _in_order(directory: Path, slot: int) -> list[Entry]:
    with durable.disk_errors(directory, "listing the points"):
        try:
            paths = sorted(directory.iterdir())
        except FileNotFoundError:
            return []
    entries = list(_entries(paths, slot, job_of(directory)))
    return sorted(
        entries, key=lambda entry: (entry.point or Point(0, 0), entry.state is EntryState.WHOLE), reverse=True
    )


def _entries(paths: list[Path], slot: int, job: str | None) -> Iterator[Entry]:
    for path in paths:
        found = _described(path, job)
        if found is None:
            continue
        point, state, why, header = found
        measured = _measured(path)
        if measured is not None:
            yield Entry(slot, path, point, state, why, header, *measured)


def _described(path: Path, job: str | None) -> tuple[Point | None, EntryState, str, PointHeader | None] | None:
    point = parse_point_name(path.name)
    if point is not None:
        found = inspect_point(path, point, job)
        if found.manifest is not None:
            return point, EntryState.WHOLE, "", found.manifest.header
        return point, EntryState.DAMAGED, found.problem or "", None
    aside = parse_aside_name(path.name)
    if aside is not None:
        return aside, EntryState.MOVED_ASIDE, "it was damaged when its step was saved anew; yours to delete", None
    temporary = parse_temporary_name(path.name)
    if temporary is None:
        return None
    writer, point = temporary
    if writer.is_alive():
        return point, EntryState.BEING_WRITTEN, f"or removed, by {writer}", None
    return (
        point,
        EntryState.LEFT_BEHIND,
        f"by {writer}, which does not run on this host; the next save removes it",
        None,
    )


def _measured(path: Path) -> tuple[int, float] | None:
    """The bytes in the directory, and when it was last written to; none where it is gone."""
    try:
        stats = [entry.stat() for entry in path.iterdir()] if path.is_dir() else [path.stat()]
        manifest = path / MANIFEST_FILE
        newest = manifest.stat() if manifest.is_file() else path.stat()
    except FileNotFoundError:
        return None
    return sum(stat.st_size for stat in stats), newest.st_mtime
