"""List the points in a rank's folder, without reading their data.

::

  <root>/<rank>/step_0000000120_gen_000003/{data.safetensors,manifest.msgpack}    a point
  <root>/<rank>/.tmp-<pid>-<start time>-<n>-step_…                                being written or being removed
  <root>/<rank>/damaged-<n>-step_…                                                a damaged point, kept
  <root>/<prefix>/<rank>/…                                                        the same, below a prefix

A directory has a point's name only while both of its files are complete: one rename gives it the name, and another
removes it. :func:`scan` lists the points, with a reason for each that cannot be used; it reads only manifests and the
sizes of data files. :func:`survey` lists all entries, for display. It takes no lock and may run during training, so
entries that a writer renames or removes meanwhile are left out instead of being reported as damaged.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from samebits.core.point import Point
from samebits.errors import CheckpointError, StoreError
from samebits.store import durable
from samebits.store.checkpoint.point_format import MAX_MANIFEST_BYTES, Manifest, PointHeader, decode_manifest
from samebits.store.owner import read_owner
from samebits.store.process_identity import ProcessIdentity

DATA_FILE = "data.safetensors"
MANIFEST_FILE = "manifest.msgpack"

_POINT_NAME = re.compile(r"step_(\d{10,19})_gen_(\d{6,19})", re.ASCII)
_TEMPORARY_NAME = re.compile(r"\.tmp-(\d+)-(\d+)-\d+-(.*)", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z_][\w-]{0,127}", re.ASCII)
_ASIDE_NAME = re.compile(r"damaged-\d+-(.*)", re.ASCII)

_log = logging.getLogger(__name__)
_temporary_numbers = itertools.count()


def rank_directory(root: Path, rank: int) -> Path:
    """Return the folder of a rank's points; its live writer holds that folder's lock."""
    return root / str(rank)


def slots_in(root: Path) -> list[int]:
    """Return the slots that have a folder below ``root``, in order.

    Raises:
        StoreError: the folder cannot be read.
    """
    with durable.disk_errors(root, "looking for checkpoints"):
        if not root.is_dir():
            return []
        return sorted(int(entry.name) for entry in root.iterdir() if entry.name.isdecimal() and entry.is_dir())


def point_name(point: Point) -> str:
    """Return the name of the point's directory."""
    return f"step_{point.step:010d}_gen_{point.generation:06d}"


def is_prefix(name: str) -> bool:
    """Return whether ``name`` may be a prefix: a folder in the job's folder that holds ranks' folders."""
    return _PREFIX.fullmatch(name) is not None and parse_point_name(name) is None


def parse_point_name(name: str) -> Point | None:
    """Return the point that a directory's name encodes; None for any other name."""
    match = _POINT_NAME.fullmatch(name)
    if match is None:
        return None
    point = Point(int(match[1]), int(match[2]))
    return point if point_name(point) == name and point.generation > 0 else None


def oldest_step_in(directory: Path) -> int:
    """Return the step of the oldest point in a rank's folder, by name; 0 if there is none."""
    with durable.disk_errors(directory, "looking for the oldest point"):
        points = [parse_point_name(entry.name) for entry in directory.iterdir()]
    return min((point.step for point in points if point is not None), default=0)


def parse_temporary_name(name: str) -> tuple[ProcessIdentity, Point | None] | None:
    """Parse a temporary directory's name: the process that uses it, and its point.

    Returns:
        None for other names.
    """
    match = _TEMPORARY_NAME.fullmatch(name)
    return None if match is None else (ProcessIdentity(int(match[1]), int(match[2])), parse_point_name(match[3]))


def parse_aside_name(name: str) -> Point | None:
    """Return the damaged point that was moved aside under this name; None for other names."""
    match = _ASIDE_NAME.fullmatch(name)
    return None if match is None else parse_point_name(match[1])


def temporary_directory(directory: Path, name: str) -> Path:
    """Return a new temporary name, which contains this process's identity."""
    identity = ProcessIdentity.current()
    return directory / f".tmp-{identity.pid}-{identity.started_at}-{next(_temporary_numbers)}-{name}"


def sweep_temporaries(directory: Path) -> None:
    """Remove the half-written and half-removed points of dead writers; the caller holds the folder's lock.

    This only frees space: temporary names are never reused, so an entry that cannot be removed does no harm.
    """
    for entry in list(directory.iterdir()):
        temporary = parse_temporary_name(entry.name)
        if temporary is None or temporary[0].is_alive():
            continue
        try:
            shutil.rmtree(entry)
        except OSError as error:
            _log.warning("%s: left by a dead process and cannot be removed: %s", entry, error)


def move_damaged_aside(path: Path) -> Path:
    """Rename a damaged point to free its name; nothing is deleted."""
    for number in itertools.count(1):
        aside = path.with_name(f"damaged-{number}-{path.name}")
        if not os.path.lexists(aside):
            break
    durable.publish(path, aside)
    return aside


@dataclass(frozen=True, slots=True)
class FoundPoint:
    """A point on disk or in memory, possibly unusable.

    It has either a ``manifest``, or a ``problem`` that makes it unusable.

    A point with a manifest may still have a changed byte in its data; only verifying or reading it shows that.

    Attributes:
        path: the point's directory, or the memory slot that holds it.
        point: its step and generation.
        manifest: None if the point cannot be used.
        problem: why it cannot be used; None if it can.
        data_offset: where the data file's bytes begin in the memory slot; None for a directory.
    """

    path: Path
    point: Point
    manifest: Manifest | None
    problem: str | None
    data_offset: int | None = None

    @property
    def data_file(self) -> Path:
        """Return the file that holds the tensors' bytes."""
        return self.path / DATA_FILE if self.data_offset is None else self.path

    @property
    def where(self) -> str:
        """Return the path, for messages."""
        return str(self.path)

    @property
    def is_usable(self) -> bool:
        """Return whether the manifest and the sizes are valid."""
        return self.manifest is not None

    def require_manifest(self) -> Manifest:
        """Return the manifest, or raise :class:`CheckpointError` with the problem."""
        if self.manifest is None:
            raise CheckpointError(self.problem or f"{self.path} cannot be used")
        return self.manifest


def scan(directory: Path, job: str | None) -> list[FoundPoint]:
    """Return the points in a rank's folder (``rank_directory``), newest first.

    Other entries are ignored. A point whose manifest names another job, rank or step is listed as unusable, like a
    damaged one.

    Args:
        directory: the rank's folder.
        job: the job that the points must belong to; None accepts any.

    Raises:
        StoreError: the folder cannot be read. A missing one has no points.
    """
    with durable.disk_errors(directory, "listing the points"):
        try:
            names = [entry.name for entry in directory.iterdir()]
        except FileNotFoundError:
            return []
    points = sorted(((point, name) for name in names if (point := parse_point_name(name)) is not None), reverse=True)
    return [inspect_point(directory / name, point, job) for point, name in points]


def inspect_point(path: Path, point: Point, job: str | None) -> FoundPoint:
    """Inspect one point of a rank's folder, as :func:`scan` does."""
    try:
        manifest = _manifest_in(path)
        _require_identity(path, point, job, manifest.header)
    except CheckpointError as error:
        return FoundPoint(path, point, None, _with_place(path, error))
    return FoundPoint(path, point, manifest, None)


def point_in(path: Path) -> FoundPoint:
    """Inspect the point in any directory; its manifest identifies it.

    Raises:
        CheckpointError: there is no readable manifest, or the data file has a different size.
    """
    try:
        manifest = _manifest_in(path)
    except CheckpointError as error:
        raise CheckpointError(_with_place(path, error)) from None
    return FoundPoint(path, manifest.header.point, manifest, None)


def _manifest_in(path: Path) -> Manifest:
    manifest = decode_manifest(_read_manifest(path / MANIFEST_FILE))
    with durable.disk_errors(path / DATA_FILE, "looking at the data", CheckpointError):
        size_bytes = (path / DATA_FILE).stat().st_size
    if size_bytes != manifest.data_bytes:
        raise CheckpointError(f"{DATA_FILE} has {size_bytes} bytes, {manifest.data_bytes} were saved")
    return manifest


def _with_place(path: Path, error: CheckpointError) -> str:
    text = str(error)
    return text if text.startswith(str(path)) else f"{path}: {text}"


def _read_manifest(path: Path) -> bytes:
    with (
        durable.disk_errors(path, "reading the manifest", CheckpointError),
        os.fdopen(durable.open_regular(path), "rb") as file,
    ):
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path}: {size_bytes} bytes; a manifest has at most {MAX_MANIFEST_BYTES}")
        return file.read(size_bytes)


def _require_identity(path: Path, point: Point, job: str | None, header: PointHeader) -> None:
    if job is not None and header.job != job:
        raise CheckpointError(f"was saved by job {header.job}, but this is job {job}")
    if header.point != point:
        raise CheckpointError(f"its manifest is that of {header.point}")
    if rank_directory(path.parent.parent, header.slot) != path.parent:
        raise CheckpointError(f"its manifest names slot {header.slot}, but it is in the folder {path.parent.name}")


class EntryState(Enum):
    """The state of an entry in a rank's folder.

    ``WHOLE`` means that the manifest and the sizes are valid; the data's hashes are not compared.
    """

    WHOLE = "whole"
    DAMAGED = "damaged"
    BEING_WRITTEN = "being written"
    LEFT_BEHIND = "left half written"
    MOVED_ASIDE = "moved aside"


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """One directory of a rank's folder.

    Attributes:
        slot: the rank's slot.
        path: the directory.
        point: the point that the directory's name encodes.
        state: the state of the directory.
        why: the reason if the state is not ``WHOLE``.
        header: the manifest's header; None unless the state is ``WHOLE``.
        size_bytes: the total size of its files.
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


def survey(root: Path) -> list[FolderEntry]:
    """Return all entries of the ranks' folders, by slot, newest point first.

    Args:
        root: the job's checkpoint folder.

    Raises:
        StoreError: a folder cannot be read.
    """
    return [entry for slot in slots_in(root) for entry in _in_order(rank_directory(root, slot), slot)]


def newest_common_point(entries: list[FolderEntry]) -> tuple[Point, int] | None:
    """Return the newest point that every rank of its world has saved, with the world size.

    Manifests and sizes decide, as :func:`survey` found them.

    Returns:
        None if there is no such point.
    """
    ranks: dict[tuple[Point, int], set[int]] = {}
    for entry in entries:
        if entry.header is not None:
            ranks.setdefault((entry.header.point, entry.header.world_size), set()).add(entry.header.rank)
    return max((key for key, held in ranks.items() if len(held) == key[1]), default=None)


def folders_with_points(root: Path) -> list[Path]:
    """Return the folders that contain ranks' folders.

    These are the job's own folder and those of CheckpointConfig(prefix=…).
    """
    with durable.disk_errors(root, "looking for checkpoints"):
        try:
            below = sorted(entry for entry in root.iterdir() if is_prefix(entry.name) and entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [folder for folder in (root, *below) if slots_in(folder)]


def job_of(directory: Path) -> str | None:
    """Return the job whose points are in a rank's folder; None if unknown."""
    try:
        owner = read_owner(directory)
    except StoreError:
        return None  # the folder's writer reports this; listing points does not need the owner
    return None if owner is None else owner.job


def is_gone(found: FoundPoint) -> bool:
    """Return whether the point has been removed or renamed since it was found."""
    return not os.path.lexists(found.path)


def _in_order(directory: Path, slot: int) -> list[FolderEntry]:
    with durable.disk_errors(directory, "listing the points"):
        try:
            paths = sorted(directory.iterdir())
        except FileNotFoundError:
            return []
    entries = list(_entries(paths, slot, job_of(directory)))
    return sorted(
        entries, key=lambda entry: (entry.point or Point(0, 0), entry.state is EntryState.WHOLE), reverse=True
    )


def _entries(paths: list[Path], slot: int, job: str | None) -> Iterator[FolderEntry]:
    for path in paths:
        found = _described(path, job)
        if found is None:
            continue
        point, state, why, header = found
        measured = _measured(path)
        if measured is not None:
            yield FolderEntry(slot, path, point, state, why, header, *measured)


def _described(path: Path, job: str | None) -> tuple[Point | None, EntryState, str, PointHeader | None] | None:
    point = parse_point_name(path.name)
    if point is not None:
        found = inspect_point(path, point, job)
        if found.manifest is not None:
            return point, EntryState.WHOLE, "", found.manifest.header
        return point, EntryState.DAMAGED, found.problem or "", None
    aside = parse_aside_name(path.name)
    if aside is not None:
        return aside, EntryState.MOVED_ASIDE, "it was damaged when its step was saved again; it may be deleted", None
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
    """Return the bytes in the directory and the time of its newest change; None if it is gone."""
    try:
        stats = [entry.stat() for entry in path.iterdir()] if path.is_dir() else [path.stat()]
        manifest = path / MANIFEST_FILE
        newest = manifest.stat() if manifest.is_file() else path.stat()
    except FileNotFoundError:
        return None
    return sum(stat.st_size for stat in stats), newest.st_mtime
