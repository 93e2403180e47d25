"""Save a point durably, without ever overwriting an intact one.

The order is: data → fsync → manifest → fsync → rename → fsync of the folder. Everything is hashed while it is written
to a temporary directory; one rename makes the point exist. Data bypasses the page cache if the file system allows it
(O_DIRECT in open(2)): it is not read again soon, and copying gigabytes into the cache would cost CPU time and evict
other processes' pages.
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
_BLOCK_BYTES = 4096  # lengths and offsets must be multiples of this on all common file systems
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
    """Save one point durably; the caller holds the lock of the rank's folder.

    If the same point is already saved and intact, nothing changes. If it is damaged, it is moved aside, and the new one
    takes its name.

    Args:
        root: the checkpoint folder of the job (CHECKPOINT_PATH).
        header: identifies the point.
        tensors: the tensors; their bytes are not copied and must not change during the call.
        tree: the rest of the state; see ``tree`` for the supported types.
        layout: further data of the point, such as the gradient buckets; also a tree.
        chunk_bytes: the number of data bytes per hash.

    Returns:
        The point's directory.

    Raises:
        CheckpointError: the state cannot be saved faithfully; the message names the value.
        StoreError: the disk reports an error; nothing of this attempt is left, and earlier points are unaffected.
    """

    def write_files(temporary: Path) -> None:
        data_bytes, chunks = _write_data(temporary / DATA_FILE, in_file_order(tensors), chunk_bytes)
        manifest = Manifest(header, layout, tree, data_bytes, chunk_bytes, chunks)
        durable.write_file(temporary / MANIFEST_FILE, encode_manifest(manifest))

    return _save(root, header, write_files)


def write_prepared(root: Path, header: PointHeader, manifest: Callable[[], BytesLike], data: memoryview) -> Path:
    """Save a point whose two files are already in memory, byte for byte.

    Otherwise the same as :func:`write_point`.

    Args:
        root: as for :func:`write_point`; the same lock must be held.
        header: identifies the point.
        manifest: returns the bytes of the manifest file with all digests; called once the data is written.
        data: the data file, which must not change meanwhile. It bypasses the page cache if it is page-aligned.
    """

    def write_files(temporary: Path) -> None:
        write_new_file(temporary / DATA_FILE, data)
        durable.write_file(temporary / MANIFEST_FILE, manifest())

    return _save(root, header, write_files)


def write_linked(root: Path, header: PointHeader, manifest: BytesLike, data: Path) -> bool:
    """Save a point as a hard link to the data file of another point in the same folder.

    Args:
        root: as for :func:`write_point`; the same lock must be held.
        header: identifies the point.
        manifest: the bytes of the manifest file.
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
            # If this fails, the next save removes what is left.
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return path


def _is_whole(path: Path, header: PointHeader) -> bool:
    found = inspect_point(path, header.point, header.job)
    try:
        reading.verify(found)
    except CheckpointError:
        return False  # the point is saved again, and the damaged one is kept under another name
    return True


def _make_durable(path: Path) -> None:
    """Sync an existing point.

    An earlier save may have been killed between its rename and its last fsync.
    """
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
    """Write and fsync a new file, but not its directory; raise the plain :class:`OSError`."""
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
                # The file system has larger blocks, or cannot read from this mapping.
                is_direct = _leave_direct(descriptor)
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
    """Clear O_DIRECT; return the descriptor's new mode, False."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_O_DIRECT)
    return False
