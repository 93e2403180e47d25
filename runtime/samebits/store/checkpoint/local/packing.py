"""One whole point as bytes, for a rank that does not hold it, and back; verified on both sides.

::

    magic "\\x93SBPNT\\x01\\n" | manifest size u64 | data size u64 | manifest.msgpack | data.safetensors

How the bytes travel is not known here. The one idea: it is the two files as they lie on disk, so the manifest's hashes
protect the journey as they protect the disk.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable

import xxhash

from samebits.errors import CheckpointError
from samebits.store.checkpoint.format.manifest import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    PointHeader,
    decode_manifest,
    encode_manifest,
)
from samebits.store.checkpoint.format.safetensors_header import encode_header, in_file_order
from samebits.store.checkpoint.format.tensor_part import TensorPart, bytes_of
from samebits.store.checkpoint.format.tree import Tree
from samebits.store.checkpoint.local.reading import Checkpoint, checkpoint_of, copy_data, new_buffer, read_data
from samebits.store.checkpoint.local.scanning import FoundPoint
from samebits.store.durable import BytesLike

_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"\x93SBPNT\x01\n"
_DIGEST_BYTES = 16
_ORIGIN = "a point received from another rank"


def pack(found: FoundPoint) -> memoryview:
    """The point's bytes, verified; :class:`CheckpointError` where it is not whole."""
    manifest = found.require_manifest()
    return pack_data(manifest, lambda buffer: read_data(found, manifest, buffer))


def pack_data(manifest: Manifest, read_into: Callable[[memoryview], None]) -> memoryview:
    """The bytes of a point with this manifest; ``read_into`` fills a buffer with its data file, verified."""
    manifest_data = encode_manifest(manifest)
    head = _HEAD.pack(_MAGIC, len(manifest_data), manifest.data_bytes)
    data_start = len(head) + len(manifest_data)
    packed = new_buffer(data_start + manifest.data_bytes)
    packed[:data_start] = head + manifest_data
    read_into(packed[data_start:])
    return packed


def pack_state(
    header: PointHeader, tensors: Iterable[TensorPart], tree: Tree, layout: Tree, *, chunk_bytes: int = CHUNK_BYTES
) -> memoryview:
    """A point that is on no disk, as the bytes that :func:`pack` would give of it. The arguments are ``write_point``'s.

    Raises:
        CheckpointError: the state cannot be taken apart faithfully; the message names the value.
    """
    parts = in_file_order(tensors)
    views = [memoryview(encode_header(parts)), *map(bytes_of, parts)]
    data_bytes = sum(map(len, views))
    unknown = (bytes(_DIGEST_BYTES),) * -(-data_bytes // chunk_bytes)
    manifest = Manifest(header, layout, tree, data_bytes, chunk_bytes, unknown)
    data_start = _HEAD.size + len(encode_manifest(manifest))  # digests are of one size, so it is known before they are
    packed = new_buffer(data_start + data_bytes)
    position = data_start
    for view in views:
        packed[position : position + len(view)] = view
        position += len(view)
    data = packed[data_start:]
    digests = [xxhash.xxh3_128_digest(data[start : start + chunk_bytes]) for start in range(0, data_bytes, chunk_bytes)]
    manifest_data = encode_manifest(dataclasses.replace(manifest, chunks=tuple(digests)))
    packed[:data_start] = _HEAD.pack(_MAGIC, len(manifest_data), data_bytes) + manifest_data
    return packed


def unpack(packed: BytesLike, job: str) -> Checkpoint:
    """The point of :func:`pack`, its tensors in memory of their own.

    Raises:
        CheckpointError: the bytes are not all there, not what was sent, or of another job.
    """
    manifest, data = taken_apart(packed)
    if manifest.header.job != job:
        raise CheckpointError(f"{_ORIGIN}: it is of job {manifest.header.job}, this is job {job}")
    buffer = new_buffer(len(data))
    copy_data(data, manifest, buffer, _ORIGIN)
    return checkpoint_of(manifest, buffer, _ORIGIN)


def taken_apart(packed: BytesLike) -> tuple[Manifest, memoryview]:
    """The manifest and the data file in the bytes of :func:`pack`; the data is not verified.

    Raises:
        CheckpointError: the bytes are not all there, or not what was sent.
    """
    view = memoryview(packed).cast("B")
    magic, manifest_bytes, data_bytes = _HEAD.unpack_from(view) if len(view) >= _HEAD.size else (b"", 0, 0)
    data_start = _HEAD.size + manifest_bytes
    if magic != _MAGIC or manifest_bytes > MAX_MANIFEST_BYTES or data_start + data_bytes != len(view):
        raise CheckpointError(f"{_ORIGIN}: {len(view)} bytes that are no packed point; ask for it again")
    try:
        manifest = decode_manifest(bytes(view[_HEAD.size : data_start]))
    except CheckpointError as error:
        raise CheckpointError(f"{_ORIGIN}: {error}; ask for it again") from None
    if manifest.data_bytes != data_bytes:
        raise CheckpointError(f"{_ORIGIN}: {data_bytes} bytes of data, its manifest says {manifest.data_bytes}")
    return manifest, view[data_start:]
