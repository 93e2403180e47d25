"""A point's manifest: which point it is, whose, the state that is no tensor, and the hash of every chunk of its data.

Only the value and its bytes live here, no files. ``manifest.msgpack`` is two msgpack objects: a map, and the xxh3_128
of every byte before it. The one idea: the manifest is written last and proves itself, so that a point with a good
manifest says all there is to know about its data file, down to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.store.checkpoint.format import tree as trees
from samebits.store.checkpoint.format.tree import Tree

FORMAT = "samebits point"
VERSION = 1
CHUNK_BYTES = 8 * 1024 * 1024
MAX_CHUNK_BYTES = 256 * 1024 * 1024
"""A chunk is read into memory before its hash is known to be right."""
_DIGEST_PREFIX = b"\xc4\x10"  # msgpack: 16 bytes of binary follow
_DIGEST_BYTES = 16
_TRAILER_BYTES = len(_DIGEST_PREFIX) + _DIGEST_BYTES
MAX_MANIFEST_BYTES = trees.MAX_TREE_BYTES + _TRAILER_BYTES
_MAX_INT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PointHeader:
    """Whose point it is: the job, the place in it, and the process that saved it."""

    job: str
    point: Point
    world_size: int
    rank: int
    slot: int
    node: str

    def __post_init__(self) -> None:
        numbers = (self.point.step, self.point.generation, self.world_size, self.rank, self.slot)
        if not all(type(number) is int and 0 <= number <= _MAX_INT for number in numbers):
            raise CheckpointError(f"a point's numbers are integers from 0 on; found {self}")
        if self.point.generation == 0 or self.rank >= self.world_size:
            raise CheckpointError(f"a point has a generation from 1 on and a rank below its world size; found {self}")
        if type(self.job) is not str or type(self.node) is not str:
            raise CheckpointError(f"a point's job and node are texts; found {self}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a point is, except its tensors' bytes; ``chunks`` are the xxh3_128 digests of its data file."""

    header: PointHeader
    layout: Tree
    tree: Tree
    data_bytes: int
    chunk_bytes: int
    chunks: tuple[bytes, ...]

    def __post_init__(self) -> None:
        sizes = (self.data_bytes, self.chunk_bytes)
        if not all(type(size) is int and 0 <= size <= _MAX_INT for size in sizes) or self.chunk_bytes == 0:
            raise CheckpointError(f"sizes {self.data_bytes!r} and {self.chunk_bytes!r} of a data file and its chunks")
        if self.chunk_bytes > MAX_CHUNK_BYTES:
            raise CheckpointError(f"chunks of {self.chunk_bytes} bytes; at most {MAX_CHUNK_BYTES} are read at once")
        if not all(type(chunk) is bytes and len(chunk) == _DIGEST_BYTES for chunk in self.chunks):
            raise CheckpointError(f"the chunks' digests are not {_DIGEST_BYTES} bytes each")
        if len(self.chunks) != -(-self.data_bytes // self.chunk_bytes):
            raise CheckpointError(
                f"{len(self.chunks)} chunks of {self.chunk_bytes} bytes for a file of {self.data_bytes}"
            )


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's bytes; :class:`CheckpointError` where layout or tree cannot be saved."""
    header = manifest.header
    body = trees.encode(
        {
            "format": FORMAT,
            "version": VERSION,
            "job": header.job,
            "step": header.point.step,
            "generation": header.point.generation,
            "world_size": header.world_size,
            "rank": header.rank,
            "slot": header.slot,
            "node": header.node,
            "data_bytes": manifest.data_bytes,
            "chunk_bytes": manifest.chunk_bytes,
            "chunks": list(manifest.chunks),
            "layout": manifest.layout,
            "tree": manifest.tree,
        },
        "manifest",
    )
    return b"".join([body, _DIGEST_PREFIX, xxhash.xxh3_128_digest(body)])


def decode_manifest(data: bytes) -> Manifest:
    """The manifest of these bytes; :class:`CheckpointError` says what is wrong with them."""
    body, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
    if len(data) <= _TRAILER_BYTES or trailer != _DIGEST_PREFIX + xxhash.xxh3_128_digest(body):
        raise CheckpointError(f"the manifest's {len(data)} bytes are not those that were saved: their hash differs")
    try:
        fields = trees.decode(body)
    except ValueError as error:
        raise CheckpointError(f"the manifest is no manifest: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CheckpointError(f"the manifest is no manifest: it is not marked {FORMAT!r}")
    if fields.get("version") != VERSION:
        raise CheckpointError(
            f"the manifest has format version {fields.get('version')!r}, this program reads {VERSION}: "
            "run the version that wrote it"
        )
    return _from_fields(fields)


def _from_fields(fields: dict[str, Any]) -> Manifest:
    try:
        header = PointHeader(
            job=fields["job"],
            point=Point(fields["step"], fields["generation"]),
            world_size=fields["world_size"],
            rank=fields["rank"],
            slot=fields["slot"],
            node=fields["node"],
        )
        return Manifest(
            header=header,
            layout=fields["layout"],
            tree=fields["tree"],
            data_bytes=fields["data_bytes"],
            chunk_bytes=fields["chunk_bytes"],
            chunks=tuple(fields["chunks"]),
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the manifest is incomplete: {error!r}") from None


def hash_chunks(views: Iterable[memoryview], chunk_bytes: int) -> tuple[int, tuple[bytes, ...]]:
    """The size of the data, and the hash of each chunk, wherever the views begin and end."""
    size_bytes, chunks, digest = 0, [], xxhash.xxh3_128()
    for view in views:
        while view:
            piece, view = view[: chunk_bytes - size_bytes % chunk_bytes], view[chunk_bytes - size_bytes % chunk_bytes :]
            digest.update(piece)
            size_bytes += len(piece)
            if size_bytes % chunk_bytes == 0:
                chunks.append(digest.digest())
                digest = xxhash.xxh3_128()
    if size_bytes % chunk_bytes:
        chunks.append(digest.digest())
    return size_bytes, tuple(chunks)
