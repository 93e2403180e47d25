"""What lies in a rank's folder: every point by name, the usable and the damaged, told apart without reading the data.

Scanning reads the manifests and the sizes of the data files, no more; the data's hashes are ``reading``'s. The one
idea: nothing is skipped silently: a directory with a point's name is in the list, with the reason if it cannot be used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.store import durable
from samebits.store.checkpoint.format.manifest import MAX_MANIFEST_BYTES, Manifest, PointHeader, decode_manifest
from samebits.store.checkpoint.local.folder import DATA_FILE, MANIFEST_FILE, parse_point_name, rank_directory


@dataclass(frozen=True, slots=True)
class FoundPoint:
    """One point on disk or in memory. Either ``manifest`` is there, or ``problem`` says why the point cannot be used.

    A found point with a manifest may still have a changed byte in its data: only verifying or reading it tells.

    Attributes:
        path: the point's directory, or the memory slot that holds it.
        data_offset: where in the slot the bytes of the data file begin; None for a directory.
    """

    path: Path
    point: Point
    manifest: Manifest | None
    problem: str | None
    data_offset: int | None = None

    @property
    def data_file(self) -> Path:
        """The file the tensors' bytes are in."""
        return self.path / DATA_FILE if self.data_offset is None else self.path

    @property
    def where(self) -> str:
        """The path, for people."""
        return str(self.path)

    @property
    def is_usable(self) -> bool:
        """Whether manifest and sizes are as they should be."""
        return self.manifest is not None

    def require_manifest(self) -> Manifest:
        """The manifest; :class:`CheckpointError` with the problem where there is none."""
        if self.manifest is None:
            raise CheckpointError(self.problem or f"{self.path}: cannot be used")
        return self.manifest


def scan(directory: Path, job: str | None) -> list[FoundPoint]:
    """The points in a rank's folder (``rank_directory``), the newest first; names of other kinds are ignored.

    A point that another job, another rank or another step saved is listed as unusable, like a damaged one. ``job`` is
    None for who only looks at points of whatever job.

    Raises:
        StoreError: the folder itself cannot be read. A missing one has no points.
    """
    with durable.disk_errors(directory, "listing the points"):
        try:
            names = [entry.name for entry in directory.iterdir()]
        except FileNotFoundError:
            return []
    points = sorted(((point, name) for name in names if (point := parse_point_name(name)) is not None), reverse=True)
    return [inspect_point(directory / name, point, job) for point, name in points]


def inspect_point(path: Path, point: Point, job: str | None) -> FoundPoint:
    """One point of a rank's folder, as :func:`scan` lists it."""
    try:
        manifest = _manifest_in(path)
        _require_identity(path, point, job, manifest.header)
    except CheckpointError as error:
        return FoundPoint(path, point, None, _with_place(path, error))
    return FoundPoint(path, point, manifest, None)


def point_in(path: Path) -> FoundPoint:
    """The point in a directory of any name and place, by what its manifest says it is.

    Raises:
        CheckpointError: there is no manifest that can be read, or its data file has another size.
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
        raise CheckpointError(f"was saved by job {header.job}, this is job {job}")
    if header.point != point:
        raise CheckpointError(f"its manifest is that of {header.point}")
    if rank_directory(path.parent.parent, header.slot) != path.parent:
        raise CheckpointError(f"its manifest is that of slot {header.slot}, it lies in the folder {path.parent.name}")
