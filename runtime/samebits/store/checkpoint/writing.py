"""Saving a point: data → fsync → manifest → fsync → rename → fsync of the folder, and never over an existing point.

Everything happens in a temporary directory, hashed while it is written, and the point exists from one rename on. Data
goes past the page cache if the file system allows it (O_DIRECT in open(2)): it is not read again soon, so copying
gigabytes into the cache would cost a processor and evict other processes' pages for nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from samebits.errors import CheckpointError, StoreError
from samebits.store import durable
from samebits.store.checkpoint import folder, reading
from samebits.store.checkpoint.folder import DATA_FILE, MANIFEST_FILE, inspect_point
from samebits.store.checkpoint.point_format import (
    CHUNK_BYTES,
    Manifest,
    PointHeader,
    TensorPart,
    bytes_of,
    cut,
    encode_header,
    encode_manifest,
    hash_of,
    in_file_order,
)
from samebits.store.checkpoint.tree import Tree
from samebits.store.durable import BytesLike

_WRITE_BYTES = 8 * 1024 * 1024
_BLOCK_BYTES = 4096  # what lengths and offsets must be multiples of, on any file system in use
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def write_point(
    root: Path,
    header: PointHeader,
    tensors: Iterable[TensorPart],
    tree: Tree,
    layout: Tree,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> Path:
    """Save one point of one rank, durably; the caller holds the lock of ``folder.rank_directory(root, header.slot)``.

    Where the same point is already saved and whole this changes nothing and succeeds; where it is damaged that one is
    moved aside and this one takes its name.

    Args:
        root: the checkpoint folder of the job (CHECKPOINT_PATH).
        header: which point it is and whose.
        tensors: their bytes are read while this runs and must not change meanwhile; none of them is copied.
        tree: everything of the state that is no tensor; see ``tree`` for the types that are kept faithfully.
        layout: what belongs to the point besides the state, such as the gradient buckets; a tree too.
        chunk_bytes: bytes of data per hash.

    Returns:
        The point's directory.

    Raises:
        CheckpointError: the state cannot be saved faithfully; the message names the value.
        StoreError: the disk refuses; nothing is left of the attempt, and what was saved before is unharmed.
    """

    def write_files(temporary: Path) -> None:
        data_bytes, chunks = _write_data(temporary / DATA_FILE, in_file_order(tensors), chunk_bytes)
        manifest = Manifest(header, layout, tree, data_bytes, chunk_bytes, chunks)
        durable.write_file(temporary / MANIFEST_FILE, encode_manifest(manifest))

    return _save(root, header, write_files)


def write_prepared(root: Path, header: PointHeader, manifest: Callable[[], BytesLike], data: memoryview) -> Path:
    """As :func:`write_point`, for a point whose two files are there already, byte for byte, in memory.

    Args:
        root, header: as there; the same lock is held.
        manifest: gives the manifest's file, digests and all; asked for when the data is written.
        data: the data file, which must not change meanwhile; past the page cache where its address is a page's.
    """

    def write_files(temporary: Path) -> None:
        write_new_file(temporary / DATA_FILE, data)
        durable.write_file(temporary / MANIFEST_FILE, manifest())

    return _save(root, header, write_files)


def write_linked(root: Path, header: PointHeader, manifest: BytesLike, data: Path) -> bool:
    """As :func:`write_point`, for a point with the tensors of another one below the same folder: one file for both.

    Args:
        root, header: as there; the same lock is held.
        manifest: the manifest's file.
        data: the other point's data file.

    Returns:
        False if this file system has no hard links; nothing is saved then.
    """
    has_links = True

    def write_files(temporary: Path) -> None:
        nonlocal has_links
        try:
            os.link(data, temporary / DATA_FILE)
        except OSError:
            has_links = False
            raise
        durable.write_file(temporary / MANIFEST_FILE, manifest)

    try:
        _save(root, header, write_files)
    except StoreError:
        if has_links:
            raise
    return has_links


def _save(root: Path, header: PointHeader, write_files: Callable[[Path], None]) -> Path:
    directory = folder.rank_directory(root, header.slot)
    durable.make_missing_directory(directory)
    path = directory / folder.point_name(header.point)
    if os.path.lexists(path) and _is_whole(path, header):
        _make_durable(path)
        return path
    with durable.disk_errors(path, "saving the point"):
        folder.sweep_temporaries(directory)
        temporary = folder.temporary_directory(directory, path.name)
        try:
            temporary.mkdir(mode=durable.DIRECTORY_MODE)
            write_files(temporary)
            durable.fsync_dir(temporary)
            if os.path.lexists(path):
                folder.move_damaged_aside(path)
            durable.publish(temporary, path)
        except BaseException:
            # Not of interest whether that works: what stays is swept by the next save and is in nobody's way.
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return path


def _is_whole(path: Path, header: PointHeader) -> bool:
    found = inspect_point(path, header.point, header.job)
    try:
        reading.verify(found)
    except CheckpointError:
        return False  # not hidden: the point is saved anew, and this one is kept under a name that says so
    return True


def _make_durable(path: Path) -> None:
    """A save that was killed between its rename and its last fsync is completed by repeating it."""
    with durable.disk_errors(path, "making the point durable"):
        for file in (path / DATA_FILE, path / MANIFEST_FILE):
            descriptor = durable.open_regular(file)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    durable.fsync_dir(path)
    durable.fsync_dir(path.parent)


def _write_data(path: Path, parts: list[TensorPart], chunk_bytes: int) -> tuple[int, tuple[bytes, ...]]:
    views = [memoryview(encode_header(parts)), *map(bytes_of, parts)]
    chunks: list[bytes] = []
    descriptor = durable.create(path)
    try:
        for pieces in cut(views, chunk_bytes):
            chunks.append(hash_of(pieces))
            for piece in pieces:
                durable.write_all(descriptor, piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return sum(map(len, views)), tuple(chunks)


def write_new_file(path: Path, data: memoryview) -> None:
    """Create ``path`` with ``data`` and fsync it, but not its directory's entry; raises the bare :class:`OSError`."""
    descriptor, is_direct = _create(path)
    try:
        done = 0
        while done < len(data):
            if is_direct and (done % _BLOCK_BYTES or len(data) - done < _BLOCK_BYTES):
                is_direct = _leave_direct(descriptor)
            end = min(done + _WRITE_BYTES, len(data))
            if is_direct:
                end -= (end - done) % _BLOCK_BYTES
            try:
                done += os.write(descriptor, data[done:end])
            except OSError as error:
                if not is_direct or error.errno != errno.EINVAL:
                    raise
                is_direct = _leave_direct(descriptor)  # a file system with larger blocks, or a mapping it cannot read
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path) -> tuple[int, bool]:
    if _O_DIRECT:
        try:
            return durable.create(path, _O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some kernels create the file before they refuse
    return durable.create(path), False


def _leave_direct(descriptor: int) -> bool:
    """The ordinary way from now on; returns what is then true of the descriptor."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_O_DIRECT)
    return False
