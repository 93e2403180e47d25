"""Read and verify a point.

Every chunk is hashed as it is read, and nothing is returned before all hashes match. The file is read in one pass, into
one buffer or into the caller's tensors.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from samebits.errors import CheckpointError
from samebits.store import durable
from samebits.store.checkpoint import point_format
from samebits.store.checkpoint.folder import FoundPoint
from samebits.store.checkpoint.point_format import (
    Manifest,
    PointHeader,
    TensorEntry,
    TensorPart,
    bytes_of,
    cut,
    encode_header,
)
from samebits.store.checkpoint.tree import Tree

_MEND = "an older point, or another rank's copy of this one, is whole; this one is kept for inspection"
_ALIGNMENT_BYTES = 64
_CACHED_BYTES = 256 * 1024
"""Bytes read at a time, so that they are hashed while they are still in the core's own cache."""
_CACHED_BYTES_OF_SEVERAL = 2 * 1024 * 1024
"""The same with several threads, which contend for the GIL after each read."""
_MOST_PIECES = 512  # per system call; readv(2), IOV_MAX


@dataclass(frozen=True, slots=True)
class LoadedPoint:
    """A point's verified contents: tensors by name, as writable memory, and the plain values."""

    header: PointHeader
    tensors: dict[str, TensorPart]
    tree: Tree
    layout: Tree


def verify(found: FoundPoint, on_bytes: Callable[[int], object] | None = None) -> None:
    """Read all of the point's data and compare every hash.

    Args:
        found: the point.
        on_bytes: called with the number of bytes verified, chunk by chunk.

    Raises:
        CheckpointError: names the file and the chunk.
    """
    for _, chunk in verified_chunks(found):
        if on_bytes is not None:
            on_bytes(len(chunk))
    tensor_entries(found)


def verified_chunks(found: FoundPoint) -> Iterator[tuple[int, memoryview]]:
    """Yield each verified chunk's offset and bytes; the next chunk overwrites the bytes."""
    manifest = found.require_manifest()
    scratch = memoryview(bytearray(min(manifest.chunk_bytes, manifest.data_bytes)))
    with _opened(found, manifest) as descriptor:
        for index, start, end in chunks_of(manifest):
            _read_chunk(descriptor, [scratch[: end - start]], found, manifest, index)
            yield start, scratch[: end - start]


def tensor_entries(found: FoundPoint) -> list[TensorEntry]:
    """Return the tensors' places in file order; read only the chunks that contain the header."""
    manifest = found.require_manifest()
    beginning = bytearray()

    def read_range(start: int, end: int) -> bytes:
        while len(beginning) < min(end, manifest.data_bytes):
            offset = len(beginning)
            chunk = memoryview(bytearray(min(manifest.chunk_bytes, manifest.data_bytes - offset)))
            _read_chunk(descriptor, [chunk], found, manifest, offset // manifest.chunk_bytes)
            beginning.extend(chunk)
        return bytes(beginning[start:end])

    with _opened(found, manifest) as descriptor:
        entries = decode_tensor_header(read_range, manifest, str(found.data_file))
    return sorted(entries, key=lambda entry: (entry.start, entry.end))


def read(found: FoundPoint, targets: Mapping[str, TensorPart] | None = None, *, threads: int = 1) -> LoadedPoint:
    """Return the point's contents, verified while they are read.

    Args:
        found: the point.
        targets: tensors in writable memory, by name. A tensor with the same dtype and shape is read into its target,
            which is then part of the result, so that restoring a state needs no second copy of it. After an error the
            content of the targets is undefined.
        threads: how many threads share the chunks.

    Raises:
        CheckpointError: names the file and the chunk.
    """
    manifest = found.require_manifest()
    with _opened(found, manifest) as descriptor:
        try:  # the header is unverified, but only selects destinations; its chunks are verified with the rest
            entries = _entries_in(descriptor, found, manifest)
        except CheckpointError:
            verify(found)  # raises with the chunk's number
            raise
        tensors, views = places_of(entries, targets or {}, manifest.data_bytes)
        _read_chunks(descriptor, views, found, manifest, threads)
    return LoadedPoint(manifest.header, tensors, manifest.tree, manifest.layout)


def places_of(
    entries: list[TensorEntry], targets: Mapping[str, TensorPart], file_bytes: int
) -> tuple[dict[str, TensorPart], list[memoryview]]:
    """Return the unfilled tensors, and all destinations in file order, the header's first."""
    tensors: dict[str, TensorPart] = {}
    in_order = sorted(entries, key=lambda entry: (entry.start, entry.end))
    header_bytes = in_order[0].start if in_order else file_bytes
    views = [memoryview(bytearray(header_bytes))]
    fitting = [_fitting(entry, targets) for entry in in_order]
    own = new_buffer(sum(_padded(entry) for entry, part in zip(in_order, fitting, strict=True) if part is None))
    for entry, target in zip(in_order, fitting, strict=True):
        if target is None:
            view, own = own[: entry.end - entry.start], own[_padded(entry) :]
            target = TensorPart(entry.name, entry.dtype, entry.shape, view)
        tensors[entry.name] = target
        views.append(bytes_of(target))
    return {entry.name: tensors[entry.name] for entry in entries}, views


def _fitting(entry: TensorEntry, targets: Mapping[str, TensorPart]) -> TensorPart | None:
    target = targets.get(entry.name)
    return target if target is not None and target.dtype == entry.dtype and target.shape == entry.shape else None


def _padded(entry: TensorEntry) -> int:
    return -(-(entry.end - entry.start) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def checkpoint_of(manifest: Manifest, buffer: memoryview, origin: str) -> LoadedPoint:
    """Return the point whose verified data file is in ``buffer``; errors name it ``origin``."""
    tensors = {
        entry.name: TensorPart(entry.name, entry.dtype, entry.shape, buffer[entry.start : entry.end])
        for entry in decode_tensor_header(lambda start, end: bytes(buffer[start:end]), manifest, origin)
    }
    return LoadedPoint(manifest.header, tensors, manifest.tree, manifest.layout)


def new_buffer(size_bytes: int) -> memoryview:
    """Return writable, page-aligned memory that is not touched before it is filled.

    A bytearray would be zeroed first. Huge pages are requested, because faulting in small pages takes longer than
    reading and hashing them.

    Raises:
        CheckpointError: the size exceeds this machine's memory.
    """
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    if size_bytes > machine_bytes:  # Linux may overcommit, and then kill the process that fills the memory
        raise CheckpointError(f"its {size_bytes} bytes do not fit into the {machine_bytes} of this machine's memory")
    memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages; the memory is usable anyway
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size_bytes]


def _entries_in(descriptor: int, found: FoundPoint, manifest: Manifest) -> list[TensorEntry]:
    base = found.data_offset or 0
    return decode_tensor_header(
        lambda start, end: os.pread(descriptor, end - start, base + start), manifest, str(found.data_file)
    )


def decode_tensor_header(read_range: Callable[[int, int], bytes], manifest: Manifest, origin: str) -> list[TensorEntry]:
    """Return the places of the data file's tensors; ``read_range`` returns bytes of the file."""
    first, file_bytes = point_format.LENGTH_BYTES, manifest.data_bytes
    try:
        length = point_format.decode_header_length(read_range(0, first), file_bytes)
        return point_format.decode_header(read_range(first, first + length), file_bytes)
    except CheckpointError as error:
        raise CheckpointError(f"{origin}: {error}; {_MEND}") from None


@contextlib.contextmanager
def _opened(found: FoundPoint, manifest: Manifest) -> Iterator[int]:
    path = found.data_file
    with durable.disk_errors(path, "reading the point", CheckpointError):
        descriptor = durable.open_regular(path)
        try:
            size_bytes = os.fstat(descriptor).st_size
            if found.data_offset is None and size_bytes != manifest.data_bytes:
                raise CheckpointError(f"{path}: {size_bytes} bytes, {manifest.data_bytes} were saved; {_MEND}")
            yield descriptor
        finally:
            os.close(descriptor)


def chunks_of(manifest: Manifest) -> Iterator[tuple[int, int, int]]:
    """Yield the number, start and end of each chunk of the data file."""
    for index in range(len(manifest.chunks)):
        start = index * manifest.chunk_bytes
        yield index, start, min(start + manifest.chunk_bytes, manifest.data_bytes)


def _read_chunks(descriptor: int, views: list[memoryview], found: FoundPoint, manifest: Manifest, threads: int) -> None:
    """Fill the views, in order, with the entire file; this thread is one of ``threads``."""
    others = min(threads, len(manifest.chunks)) - 1
    chunks, taking = enumerate(cut(views, manifest.chunk_bytes)), threading.Lock()
    cached_bytes = _CACHED_BYTES_OF_SEVERAL if others > 0 else _CACHED_BYTES
    failures: dict[int, BaseException] = {}

    def read_some() -> None:
        index = -1
        try:
            while not failures:
                with taking:
                    index, pieces = next(chunks, (-1, []))
                if not pieces:
                    return
                _read_chunk(descriptor, pieces, found, manifest, index, cached_bytes)
        except BaseException as error:  # any error at all: an unread chunk is not verified
            failures[index] = error

    beside: list[threading.Thread] = []
    try:
        for _ in range(others):
            thread = threading.Thread(target=read_some, name="samebits-read")
            thread.start()
            beside.append(thread)
        read_some()
    finally:
        for thread in beside:
            thread.join()  # no thread may write to the views after this returns
    if failures:
        raise failures[min(failures)]  # report the first bad chunk


def _read_chunk(
    descriptor: int,
    pieces: list[memoryview],
    found: FoundPoint,
    manifest: Manifest,
    index: int,
    cached_bytes: int = _CACHED_BYTES,
) -> None:
    """Fill the pieces, in order, with a chunk, and compare its hash."""
    digest, offset = xxhash.xxh3_128(), (found.data_offset or 0) + index * manifest.chunk_bytes
    for batch in cut(pieces, cached_bytes):
        offset = _fill(descriptor, batch, offset, found)
        for piece in batch:
            digest.update(piece)
    require_digest(digest.digest(), sum(map(len, pieces)), str(found.data_file), manifest, index)


def _fill(descriptor: int, pieces: list[memoryview], offset: int, found: FoundPoint) -> int:
    """Read from ``offset`` until all pieces are full; return the offset after them."""
    rest = pieces[::-1]
    while rest:
        count = os.preadv(descriptor, rest[: -_MOST_PIECES - 1 : -1], offset)
        if count == 0:
            raise CheckpointError(f"{found.data_file} ends at byte {offset} while it is read; {_MEND}")
        offset += count
        while count:
            piece = rest.pop()
            if count < len(piece):
                rest.append(piece[count:])
            count -= min(count, len(piece))
    return offset


def require_digest(digest: bytes, size_bytes: int, origin: str, manifest: Manifest, index: int) -> None:
    """Raise :class:`CheckpointError` unless ``digest`` is the chunk's saved hash.

    ``origin`` is the file's name in the message.
    """
    if digest != manifest.chunks[index]:
        start = index * manifest.chunk_bytes
        raise CheckpointError(
            f"{origin}: chunk {index} of {len(manifest.chunks)} (bytes {start} to {start + size_bytes}) is not what "
            f"was saved: xxh3_128 is {digest.hex()}, the manifest says {manifest.chunks[index].hex()}; {_MEND}"
        )


def export_tensors(
    found: FoundPoint,
    path: Path,
    metadata: Mapping[str, str],
    *,
    replace: bool = False,
    on_bytes: Callable[[int], object] | None = None,
) -> None:
    """Write the point's tensors to the file ``path``, durably.

    Args:
        found: the point.
        path: the new file.
        metadata: written to the file's header.
        replace: whether an existing file may be replaced.
        on_bytes: called with the number of bytes verified and written, chunk by chunk.

    Raises:
        CheckpointError: the point is damaged; no file is left.
        StoreError: the disk reports an error, or the file exists.
    """
    entries = tensor_entries(found)
    data_start = min((entry.start for entry in entries), default=found.require_manifest().data_bytes)
    with durable.new_file(path, replace=replace) as descriptor:
        durable.write_all(descriptor, encode_header(entries, metadata))
        for start, chunk in verified_chunks(found):
            durable.write_all(descriptor, chunk[max(0, data_start - start) :])
            if on_bytes is not None:
                on_bytes(len(chunk))
