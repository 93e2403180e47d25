"""Reading a point's data: every chunk is hashed as it passes, and nothing is handed out before all of them fit.

Here live verifying, reading, and the point as a value; scanning and writing do not. The one idea: one pass over the
file into one buffer, and the tensors are views into it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from runtime.errors import CheckpointError
from runtime.store import durable
from runtime.store.checkpoint import safetensors_header
from runtime.store.checkpoint.manifest import Manifest, PointHeader
from runtime.store.checkpoint.safetensors_header import TensorEntry
from runtime.store.checkpoint.scanning import FoundPoint
from runtime.store.checkpoint.tensor_part import TensorPart
from runtime.store.checkpoint.tree import Tree

_MEND = "an older point, or another rank's copy of this one, is whole; this one is kept for inspection"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A point's contents, verified: tensors by name, as writable views into one buffer, and all that is no tensor."""

    header: PointHeader
    tensors: dict[str, TensorPart]
    tree: Tree
    layout: Tree


def verify(found: FoundPoint, on_bytes: Callable[[int], object] | None = None) -> None:
    """Read the whole point and compare every hash; :class:`CheckpointError` names the file and the chunk.

    Args:
        found: the point.
        on_bytes: is told how many bytes were read and compared, chunk by chunk.
    """
    for _, chunk in verified_chunks(found):
        if on_bytes is not None:
            on_bytes(len(chunk))
    tensor_entries(found)


def verified_chunks(found: FoundPoint) -> Iterator[tuple[int, memoryview]]:
    """The data file chunk by chunk, compared: where each begins, and its bytes, which the next one overwrites."""
    manifest = found.require_manifest()
    scratch = memoryview(bytearray(min(manifest.chunk_bytes, manifest.data_bytes)))
    with _opened(found, manifest) as descriptor:
        for index, start, end in chunks_of(manifest):
            _read_chunk(descriptor, scratch[: end - start], found, manifest, index)
            yield start, scratch[: end - start]


def tensor_entries(found: FoundPoint) -> list[TensorEntry]:
    """Where the tensors lie, in the order of the file; of the data only the chunks with the header are read."""
    manifest = found.require_manifest()
    beginning = bytearray()

    def read_range(start: int, end: int) -> bytes:
        while len(beginning) < min(end, manifest.data_bytes):
            offset = len(beginning)
            chunk = memoryview(bytearray(min(manifest.chunk_bytes, manifest.data_bytes - offset)))
            _read_chunk(descriptor, chunk, found, manifest, offset // manifest.chunk_bytes)
            beginning.extend(chunk)
        return bytes(beginning[start:end])

    with _opened(found, manifest) as descriptor:
        entries = decode_tensor_header(read_range, manifest.data_bytes, str(found.data_file))
    return sorted(entries, key=lambda entry: (entry.start, entry.end))


def read(found: FoundPoint) -> Checkpoint:
    """The point's contents, verified in the same pass; :class:`CheckpointError` names the file and the chunk."""
    manifest = found.require_manifest()
    buffer = new_buffer(manifest.data_bytes)
    read_data(found, manifest, buffer)
    return checkpoint_of(manifest, buffer, str(found.data_file))


def read_data(found: FoundPoint, manifest: Manifest, buffer: memoryview) -> None:
    """Fill ``buffer`` with the bytes of the data file, verified."""
    with _opened(found, manifest) as descriptor:
        for index, start, end in chunks_of(manifest):
            _read_chunk(descriptor, buffer[start:end], found, manifest, index)


def copy_data(source: memoryview, manifest: Manifest, buffer: memoryview, origin: str) -> None:
    """Fill ``buffer`` from a data file that lies in memory, verified; ``origin`` names it in the error."""
    for index, start, end in chunks_of(manifest):
        buffer[start:end] = source[start:end]
        require_hash(buffer[start:end], origin, manifest, index)


def checkpoint_of(manifest: Manifest, buffer: memoryview, origin: str) -> Checkpoint:
    """The point whose verified data file is ``buffer``; ``origin`` names it in an error."""
    tensors = {
        entry.name: TensorPart(entry.name, entry.dtype, entry.shape, buffer[entry.start : entry.end])
        for entry in decode_tensor_header(lambda start, end: bytes(buffer[start:end]), manifest.data_bytes, origin)
    }
    return Checkpoint(manifest.header, tensors, manifest.tree, manifest.layout)


def new_buffer(size_bytes: int) -> memoryview:
    """Writable, page-aligned memory that is not touched before it is filled, unlike a bytearray, which is zeroed.

    Faulting in small pages one by one costs more than reading and hashing them, so huge ones are asked for.
    """
    memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them: it is advice, and the memory is good anyway
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size_bytes]


def decode_tensor_header(read_range: Callable[[int, int], bytes], file_bytes: int, origin: str) -> list[TensorEntry]:
    """The tensors that the data file's header names; ``read_range`` gives its bytes from a start to an end."""
    first = safetensors_header.LENGTH_BYTES
    try:
        length = safetensors_header.decode_header_length(read_range(0, first), file_bytes)
        return safetensors_header.decode_header(read_range(first, first + length), file_bytes)
    except CheckpointError as error:
        raise CheckpointError(f"{origin}: {error}; {_MEND}") from None


@contextlib.contextmanager
def _opened(found: FoundPoint, manifest: Manifest) -> Iterator[int]:
    path = found.data_file
    with durable.disk_errors(path, "reading the point", CheckpointError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size_bytes = os.fstat(descriptor).st_size
            if found.data_offset is None and size_bytes != manifest.data_bytes:
                raise CheckpointError(f"{path}: {size_bytes} bytes, {manifest.data_bytes} were saved; {_MEND}")
            yield descriptor
        finally:
            os.close(descriptor)


def chunks_of(manifest: Manifest) -> Iterator[tuple[int, int, int]]:
    """The chunks of the data file: number, first byte, and the byte after the last."""
    for index in range(len(manifest.chunks)):
        start = index * manifest.chunk_bytes
        yield index, start, min(start + manifest.chunk_bytes, manifest.data_bytes)


def _read_chunk(descriptor: int, target: memoryview, found: FoundPoint, manifest: Manifest, index: int) -> None:
    path, offset = found.data_file, (found.data_offset or 0) + index * manifest.chunk_bytes
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{path}: ends at byte {offset + done} while it is read; {_MEND}")
        done += count
    require_hash(target, str(path), manifest, index)


def require_hash(chunk: memoryview, origin: str, manifest: Manifest, index: int) -> None:
    """:class:`CheckpointError` where this is not the chunk that was saved; ``origin`` names the file."""
    found = xxhash.xxh3_128_digest(chunk)
    if found != manifest.chunks[index]:
        start = index * manifest.chunk_bytes
        raise CheckpointError(
            f"{origin}: chunk {index} of {len(manifest.chunks)} (bytes {start} to {start + len(chunk)}) is not "
            f"what was saved: xxh3_128 is {found.hex()}, the manifest says {manifest.chunks[index].hex()}; {_MEND}"
        )
