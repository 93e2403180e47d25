"""The binary format of a point: its manifest, its data file's header, and its tensors.

This module does no I/O.

``manifest.msgpack`` is two msgpack objects: a map, and the xxh3_128 of every byte before it. The manifest is written
last, so a point with a valid manifest is complete. It describes the data file down to the byte.

``data.safetensors`` (github.com/huggingface/safetensors, "Format") begins with the header's length as u64 and a JSON
object padded with blanks; the tensors' bytes follow without gaps. As in the library's own writer, tensors with the
widest elements come first, so each tensor is aligned to its element size. The header is padded so that the first tensor
is aligned to a cache line. Elements are never interpreted, so every dtype that safetensors can name is supported.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.store.checkpoint import tree as trees
from samebits.store.checkpoint.tree import Tree
from samebits.store.durable import BytesLike

FORMAT = "samebits point"
VERSION = 1
CHUNK_BYTES = 8 * 1024 * 1024
MAX_CHUNK_BYTES = 256 * 1024 * 1024
"""Limit of a chunk, which is read into memory before its hash is compared."""
_DIGEST_PREFIX = b"\xc4\x10"  # msgpack: 16 bytes of binary data follow
_DIGEST_BYTES = 16
_TRAILER_BYTES = len(_DIGEST_PREFIX) + _DIGEST_BYTES
MAX_MANIFEST_BYTES = trees.MAX_TREE_BYTES + _TRAILER_BYTES
_MAX_INT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PointHeader:
    """The identity of a point: its job, step, rank and node."""

    job: str
    point: Point
    world_size: int
    rank: int
    slot: int
    node: str

    def __post_init__(self) -> None:
        numbers = (self.point.step, self.point.generation, self.world_size, self.rank, self.slot)
        if not all(type(number) is int and 0 <= number <= _MAX_INT for number in numbers):
            raise CheckpointError(f"a point's numbers are integers from 0; found {self}")
        if self.point.generation == 0 or self.rank >= self.world_size:
            raise CheckpointError(
                f"a point needs a generation of 1 or more and a rank below the world size, found {self}"
            )
        if type(self.job) is not str or type(self.node) is not str:
            raise CheckpointError(f"a point's job and node are texts; found {self}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a point except its tensors' bytes.

    ``chunks`` are the xxh3_128 digests of the data file's chunks.
    """

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
    """Encode the manifest; raise :class:`CheckpointError` if its layout or tree cannot be saved."""
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
    """Decode a manifest; raise :class:`CheckpointError` with the reason if it is invalid."""
    body, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
    if len(data) <= _TRAILER_BYTES or trailer != _DIGEST_PREFIX + xxhash.xxh3_128_digest(body):
        raise CheckpointError(f"the manifest has changed since it was saved: its hash differs ({len(data)} bytes)")
    try:
        fields = trees.decode(body)
    except ValueError as error:
        raise CheckpointError(f"this is not a manifest: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CheckpointError(f"this is not a manifest: it is not marked {FORMAT!r}")
    if fields.get("version") != VERSION:
        raise CheckpointError(
            f"the manifest has format version {fields.get('version')!r}, but this program reads {VERSION}: "
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


def cut(views: Iterable[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """Split the concatenated views into lists of ``chunk_bytes`` each; the last one may be shorter."""
    pieces, room = list[memoryview](), chunk_bytes
    for view in views:
        while view:
            piece, view = view[:room], view[room:]
            pieces.append(piece)
            room -= len(piece)
            if room == 0:
                yield pieces
                pieces, room = [], chunk_bytes
    if pieces:
        yield pieces


def hash_of(pieces: Iterable[memoryview]) -> bytes:
    """Return the hash of one chunk, given as pieces."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


MAX_HEADER_BYTES = 100_000_000  # the library's own limit

_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size
_ALIGNMENT_BYTES = 64
_METADATA_KEY = "__metadata__"
_FIELDS = (b'"dtype"', b'"shape"', b'"data_offsets"')


class TensorEntry(NamedTuple):
    """A tensor's place: its bytes are ``start`` to ``end`` of the file, including the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def in_file_order(parts: Iterable[TensorPart]) -> list[TensorPart]:
    """Return the tensors in the order in which their bytes are written.

    Tensors with the widest elements come first. Among tensors of equal width, those that fill whole cache lines come
    first, so that the tensors after them are aligned too. Otherwise the order is kept.
    """

    def key(part: TensorPart) -> tuple[int, bool]:
        bits = BITS_BY_DTYPE.get(part.dtype, 0)
        return -bits, bits * math.prod(part.shape) % (8 * _ALIGNMENT_BYTES) != 0

    return sorted(parts, key=key)


def encode_header(parts: Iterable[TensorPart | TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Encode the header of a data file; ``metadata`` is for other readers of the file."""
    entries: dict[str, Any] = {}
    offset = 0
    for part in parts:
        if part.name in entries or part.name == _METADATA_KEY:
            raise CheckpointError(f"tensor {part.name!r}: the name is already used in this point")
        end = offset + nbytes_of(part.name, part.dtype, part.shape)
        entries[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [offset, end]}
        offset = end
    if metadata:
        entries = {_METADATA_KEY: dict(metadata), **entries}
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a tensor's name is not valid text: {error}; rename it") from None
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(entries)} tensors need a header of {len(text)} bytes; at most {MAX_HEADER_BYTES}")
    return _LENGTH.pack(len(text)) + text


def decode_header_length(data: bytes, file_bytes: int) -> int:
    """Decode the length of the JSON text from a file's first eight bytes.

    The length is checked against the file's size and the format's limit.
    """
    length: int = _LENGTH.unpack(data)[0] if len(data) == LENGTH_BYTES else MAX_HEADER_BYTES + 1
    if length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise CheckpointError(f"not a safetensors file: a header of {length} bytes in a file of {file_bytes}")
    return length


def decode_header(text: bytes, file_bytes: int) -> list[TensorEntry]:
    """Decode the tensors' places, in header order; raise :class:`CheckpointError` for gaps."""
    try:
        fields = json.loads(text)
        # If every tensor has each field once, unescaped, there can be no duplicate; the exact check is slower.
        if b"\\" in text or any(text.count(field) != len(fields) for field in _FIELDS):
            fields = json.loads(text, object_pairs_hook=_unique)
        data_start = LENGTH_BYTES + len(text)
        entries = [_entry(name, value, data_start) for name, value in fields.items() if name != _METADATA_KEY]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"not a safetensors header: {error!r}") from None
    offset = LENGTH_BYTES + len(text)
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start != offset or entry.end - entry.start != nbytes_of(entry.name, entry.dtype, entry.shape):
            raise CheckpointError(
                f"tensor {entry.name!r} is at {entry.start} to {entry.end}; expected {entry.dtype} of shape "
                f"{entry.shape} from {offset}"
            )
        offset = entry.end
    if offset != file_bytes:
        raise CheckpointError(f"the tensors end at byte {offset}, the file at {file_bytes}")
    return entries


def _entry(name: str, fields: dict[str, Any], data_start: int) -> TensorEntry:
    dtype, shape, (first, last) = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(dtype) is not str or type(shape) is not list or type(first) is not int or type(last) is not int:
        raise ValueError(f"tensor {name!r} has the fields {fields!r}")
    return TensorEntry(name, dtype, tuple(shape), data_start + first, data_start + last)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


# The names of the safetensors format (0.8) and the size of one element; an F4 or F6 tensor must fill whole bytes.
BITS_BY_DTYPE = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


class TensorPart(NamedTuple):
    """A tensor's bytes and their meaning; a tuple, because a state has thousands of them.

    Attributes:
        name: unique within one point.
        dtype: the safetensors name, e.g. ``"F32"`` or ``"BF16"``.
        shape: elements along each axis; ``()`` for a scalar.
        data: the C-contiguous, little-endian bytes, which are written without a copy. After a read, a writable view
            into one buffer that all tensors of the point share, aligned to the element's size. Empty if an axis is 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: BytesLike


def nbytes_of(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Return a tensor's size in bytes; raise :class:`CheckpointError` if the format forbids it."""
    if dtype not in BITS_BY_DTYPE:
        raise CheckpointError(f"tensor {name!r}: dtype {dtype!r}; expected one of {', '.join(BITS_BY_DTYPE)}")
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise CheckpointError(f"tensor {name!r}: shape {shape}; expected integers from 0")
    bits = math.prod(shape) * BITS_BY_DTYPE[dtype]
    if bits % 8:
        raise CheckpointError(f"tensor {name!r}: {dtype} of shape {shape} does not fill whole bytes; pad it")
    return bits // 8


def bytes_of(part: TensorPart) -> memoryview:
    """Return the part's data as a flat view of bytes, checked against its dtype and shape."""
    expected = nbytes_of(part.name, part.dtype, part.shape)
    view = memoryview(part.data)
    if view.nbytes != expected:
        raise CheckpointError(
            f"tensor {part.name!r}: {view.nbytes} bytes; {part.dtype} of shape {part.shape} has {expected}"
        )
    if not view.c_contiguous:
        raise CheckpointError(
            f"tensor {part.name!r}: its bytes are not contiguous; make it contiguous before it is saved"
        )
    return view.cast("B") if expected else memoryview(b"")
