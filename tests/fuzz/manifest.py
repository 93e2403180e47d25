"""Target: the manifest of a point, and the header of its data file.

The first byte of an input selects: raw bytes of a manifest; a body of any content with its right hash; the fields of a
good manifest with some replaced, hashed; or the text of a safetensors header. Each is refused as a ``CheckpointError``,
or it is a value that encodes and decodes to itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import xxhash

from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.store.checkpoint import point_format
from samebits.store.checkpoint.point_format import (
    LENGTH_BYTES,
    Manifest,
    PointHeader,
    TensorPart,
    decode_manifest,
    encode_manifest,
)

GOOD = Manifest(
    header=PointHeader("job", Point(40, 3), world_size=4, rank=1, slot=1, node="1"),
    layout={"buckets": [[0, 1], [2]], "rebuilt": False},
    tree={"lr": 0.1, "betas": (0.9, 0.999), "seed": 2**100, "names": ["a", b"\0"], 3: None},
    data_bytes=250,
    chunk_bytes=100,
    chunks=(b"1" * 16, b"2" * 16, b"3" * 16),
)
_SEAL_BYTES = 18
_BODY = encode_manifest(GOOD)[:-_SEAL_BYTES]
FIELDS: dict[str, bytes] = {}  # by name: the msgpack bytes of the name and of its value, in the file's order


def _split_fields() -> None:
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(_BODY)
    for _ in range(unpacker.read_map_header()):
        name, first = unpacker.unpack(), unpacker.tell()
        unpacker.skip()
        FIELDS[name] = _BODY[first : unpacker.tell()]


_split_fields()


def check(data: bytes) -> None:
    kind, rest = (data[0] % 4, data[1:]) if data else (0, b"")
    if kind == 0:
        _check_manifest(rest)
    elif kind == 1:
        _check_manifest(sealed(rest))
    elif kind == 2:
        _check_manifest(sealed(with_field(rest)))
    else:
        _check_header(rest)


def sealed(body: bytes) -> bytes:
    """Return the body with its hash."""
    return body + b"\xc4\x10" + xxhash.xxh3_128_digest(body)


def with_field(data: bytes) -> bytes:
    """Return the good manifest's body with one value replaced by the bytes of ``data``."""
    fields = dict(FIELDS)
    if data:
        fields[list(fields)[data[0] % len(fields)]] = data[1:]
    pairs = (msgpack.packb(name) + value for name, value in fields.items())
    return bytes([0x80 | len(fields)]) + b"".join(pairs)


def _check_manifest(data: bytes) -> None:
    try:
        manifest = decode_manifest(data)
    except CheckpointError as error:
        assert str(error)
        return
    assert manifest.data_bytes >= 0
    assert all(type(chunk) is bytes and len(chunk) == 16 for chunk in manifest.chunks), "a digest of another kind"
    encoded = encode_manifest(manifest)
    assert encode_manifest(decode_manifest(encoded)) == encoded, "the value does not write and read back the same"
    assert _shape(decode_manifest(encoded).tree) == _shape(manifest.tree)


def _shape(tree: Any) -> Any:
    """Return the tree's types and places, which ``==`` does not compare: 1 == True == 1.0."""
    if type(tree) in (list, tuple):
        return type(tree), [_shape(item) for item in tree]
    if type(tree) is dict:
        return dict, [(key, type(key), _shape(item)) for key, item in tree.items() if key == key]
    return type(tree)


def _check_header(data: bytes) -> None:
    try:
        length = point_format.decode_header_length(data[:LENGTH_BYTES], len(data))
        entries = point_format.decode_header(data[LENGTH_BYTES : LENGTH_BYTES + length], len(data))
    except CheckpointError as error:
        assert str(error)
        return
    assert sum(entry.end - entry.start for entry in entries) + LENGTH_BYTES + length == len(data)
    assert all(LENGTH_BYTES + length <= entry.start <= entry.end <= len(data) for entry in entries)


def seeds() -> Iterator[bytes]:
    whole = encode_manifest(GOOD)
    yield b"\0" + whole
    yield b"\0" + whole[: len(whole) // 2]
    yield b"\1" + _BODY
    for index, value in enumerate(FIELDS.values()):
        yield bytes([2, index]) + value
    parts = [TensorPart("w", "F32", (2, 3), bytes(24)), TensorPart("b", "BF16", (3,), bytes(6))]
    yield b"\3" + point_format.encode_header(parts) + bytes(30)
