"""One protocol for the points of a rank, in a local folder or an object store.

``LocalPointStore`` and ``remote_points`` implement it. A location is a ``Path``, or the text of a URL for an object
store; only this module distinguishes the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from samebits.core.point import Point
from samebits.errors import StoreError
from samebits.store import private
from samebits.store.checkpoint import folder, pruning, reading, writing
from samebits.store.checkpoint.folder import FoundPoint
from samebits.store.checkpoint.point_format import (
    Manifest,
    PointHeader,
    TensorPart,
    bytes_of,
    cut,
    encode_header,
    hash_of,
    in_file_order,
)
from samebits.store.checkpoint.pruning import Pruned, Pruning
from samebits.store.checkpoint.reading import LoadedPoint
from samebits.store.checkpoint.remote_points import RemotePointStore, slots_at
from samebits.store.checkpoint.tree import Tree
from samebits.store.durable import BytesLike
from samebits.store.owner import claim_folder, make_claim_durable

Location = Path | str
"""A job's checkpoint folder: a ``Path``, or a URL such as ``s3://bucket/folder``."""


LOCAL_STATE = "remote_checkpoints"
"""A folder below RECOVERY_PATH for local files of ranks whose points are in an object store."""

_FINAL = ".final"
"""A folder below a checkpoint folder, for final states that differ from the last commit; its name is no prefix."""


class StoredPoint(Protocol):
    """One point in a store, usable or not."""

    @property
    def point(self) -> Point:
        """Return the point's step and generation."""

    @property
    def where(self) -> str:
        """Return the point's path or URL, for messages."""

    @property
    def is_usable(self) -> bool:
        """Return whether the manifest and the sizes are valid."""

    def require_manifest(self) -> Manifest:
        """Return the manifest, or raise :class:`CheckpointError` with the problem."""


FoundHere = TypeVar("FoundHere", bound=StoredPoint)


class PointStore(Protocol[FoundHere]):
    """The points of one slot.

    The methods behave and raise as the local folder's functions do: ``folder.scan``, ``reading.verify`` and ``read``,
    ``writing.write_point`` and ``write_prepared``, ``pruning.prune``.
    """

    def claim(self) -> None:
        """Claim the folder durably for this job, before anything is saved."""

    def scan(self) -> list[FoundHere]:
        """Return the points, newest first."""

    def find(self, point: Point) -> FoundHere | None:
        """Return this point as :meth:`scan` lists it, or None."""

    def verify(self, found: FoundHere) -> None:
        """Compare every hash."""

    def read(
        self, found: FoundHere, targets: Mapping[str, TensorPart] | None = None, *, threads: int = 1
    ) -> LoadedPoint:
        """Return the verified contents; ``targets`` may be filled or left unchanged."""

    def write(self, header: PointHeader, tensors: Iterable[TensorPart], tree: Tree, layout: Tree) -> None:
        """Save a point."""

    def write_prepared(
        self, header: PointHeader, manifest: Callable[[], BytesLike], data: Sequence[memoryview]
    ) -> None:
        """Save a point whose two files are already in memory."""

    def prune(self, asked: Pruning) -> Pruned:
        """Delete points that are not needed now that ``asked.newest`` is saved; return the result."""


class LocalPointStore:
    """The folder of one slot below ``root``; a ``PointStore``.

    Args:
        root: the job's checkpoint folder.
        slot: the points' slot.
        job: id of their job.
        job_name: the job's display name.
        claims: whether to claim the folder now; :meth:`claim` makes the claim durable. A full disk raises only there.
    """

    def __init__(self, root: Path, slot: int, *, job: str, job_name: str, claims: bool) -> None:
        self._root = root
        self._job = job
        self._directory = folder.rank_directory(root, slot)
        # Hashes reveal damage, not forgery, so the folder must not be writable by others.
        private.check_folder(self._directory, "CHECKPOINT_PATH")
        self._claim = functools.partial(claim_folder, self._directory, job, job_name)
        self._is_claimed = False
        if claims:
            try:
                self._claim(sync=False)  # not synced, so that no process waits for the disk before there is state
            except StoreError as error:
                if not error.may_pass:
                    raise
            else:
                self._is_claimed = True

    def __str__(self) -> str:
        return str(self._directory)

    def claim(self) -> None:
        """Make the constructor's claim durable."""
        if self._is_claimed:
            make_claim_durable(self._directory)
        else:
            self._claim()
            self._is_claimed = True

    def scan(self) -> list[FoundPoint]:
        """See ``folder.scan``."""
        return folder.scan(self._directory, self._job)

    def find(self, point: Point) -> FoundPoint | None:
        """Return this point as :meth:`scan` lists it, or None; the other points are not read."""
        path = self._directory / folder.point_name(point)
        return folder.inspect_point(path, point, self._job) if path.is_dir() else None

    def verify(self, found: FoundPoint) -> None:
        """See ``reading.verify``."""
        reading.verify(found)

    def read(
        self, found: FoundPoint, targets: Mapping[str, TensorPart] | None = None, *, threads: int = 1
    ) -> LoadedPoint:
        """See ``reading.read``."""
        return reading.read(found, targets, threads=threads)

    def write(self, header: PointHeader, tensors: Iterable[TensorPart], tree: Tree, layout: Tree) -> None:
        """See ``writing.write_point``."""
        writing.write_point(self._root, header, tensors, tree, layout)

    def write_prepared(
        self, header: PointHeader, manifest: Callable[[], BytesLike], data: Sequence[memoryview]
    ) -> None:
        """See ``writing.write_prepared``."""
        (view,) = data
        writing.write_prepared(self._root, header, manifest, view)

    def prune(self, asked: Pruning) -> Pruned:
        """See ``pruning.prune``."""
        points = [found.point for found in self.scan()]
        return pruning.prune(
            self._directory,
            self._job,
            asked.retention.keep,
            keep_points=[asked.newest],
            abandoned={point for point in points if pruning.is_abandoned(point, asked.newest)},
            verified=asked.verified,
            damaged=asked.damaged,
            committed=asked.retention.committed,
            told=asked.retention.told,
        )


def is_remote(location: Location) -> bool:
    """Return whether the location is an object store."""
    return isinstance(location, str)


def local_folder(location: Location, recovery_path: Path) -> Path:
    """Return this host's folder for each rank's lock and step log.

    An object store cannot hold these files.
    """
    return recovery_path / LOCAL_STATE if isinstance(location, str) else location


def open_point_store(location: Location, slot: int, *, job: str, job_name: str, claims: bool = True) -> PointStore[Any]:
    """Open the point store of a slot.

    If ``claims`` is true, a local folder is claimed. A remote folder is not accessed yet.

    Raises:
        ForeignFolderError: a local folder belongs to another job.
        StoreError: a local folder cannot be created, or the package for the URL is not installed.
    """
    if isinstance(location, str):
        return RemotePointStore(location, slot, job=job, job_name=job_name)
    return LocalPointStore(location, slot, job=job, job_name=job_name, claims=claims)


def final_location(location: Location) -> Location:
    """Return the location of final states that differ from the saved last commit."""
    return f"{location}/{_FINAL}" if isinstance(location, str) else location / _FINAL


def manifest_of(
    header: PointHeader, tensors: Iterable[TensorPart], tree: Tree, layout: Tree, *, chunk_bytes: int
) -> Manifest:
    """Return the manifest with which these contents would be saved."""
    parts = in_file_order(tensors)
    views = [memoryview(encode_header(parts)), *map(bytes_of, parts)]
    chunks = tuple(map(hash_of, cut(views, chunk_bytes)))
    return Manifest(header, layout, tree, sum(map(len, views)), chunk_bytes, chunks)


def slots_in(location: Location) -> list[int]:
    """Return the slots that have a folder in this location, in order."""
    return slots_at(location) if isinstance(location, str) else folder.slots_in(location)
