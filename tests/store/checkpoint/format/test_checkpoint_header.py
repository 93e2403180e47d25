"""Headers that the reader refuses although every hash is right: files that another program wrote."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from samebits.errors import CheckpointError
from samebits.store.checkpoint import point_format as header_format
from samebits.store.checkpoint.point_format import TensorPart


def decode(data: bytes) -> list[header_format.TensorEntry]:
    length = header_format.decode_header_length(data[:8], len(data))
    return header_format.decode_header(data[8 : 8 + length], len(data))


def file_of(header: Any, data_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def tensor(first: int, last: int, shape: Any = (2,), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def test_header_with_metadata_in_any_order_is_read() -> None:
    data = file_of({"__metadata__": {"format": "pt"}, "b": tensor(2, 4), "a": tensor(0, 2)}, 4)
    start = len(data) - 4
    assert [(entry.name, entry.start, entry.end) for entry in decode(data)] == [
        ("b", start + 2, start + 4),
        ("a", start, start + 2),
    ]


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        ({"a": tensor(0, 2)}, 3),
        ({"a": tensor(0, 2)}, 1),
        ({"a": tensor(1, 3)}, 3),
        ({"a": tensor(0, 2), "b": tensor(0, 2)}, 2),
        ({"a": tensor(0, 2), "b": tensor(3, 5)}, 5),
        ({"a": tensor(0, 3)}, 3),
        ({"a": tensor(-2, 0)}, 0),
        ({"a": tensor(0, 2, shape=[-2])}, 2),
        ({"a": tensor(0, 2, shape=["2"])}, 2),
        ({"a": tensor(0, 2, shape=2)}, 2),
        ({"a": tensor(0, 2, dtype="U9")}, 2),
        ({"a": tensor(0, 2, dtype=["U8"])}, 2),
        ({"a": {"dtype": "U8", "shape": [0]}}, 0),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1, 2]}}, 2),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0.0, 2.0]}}, 2),
        ({"a": 5}, 0),
        ([], 0),
        (b"{", 0),
        (b"\xff", 0),
        (b"[" * 100_000, 0),
        (b'{"a": %(one)s, "a": %(one)s}' % {b"one": json.dumps(tensor(0, 2)).encode()}, 2),
    ],
)
def test_header_that_does_not_fit_its_file_is_refused(header: Any, data_bytes: int) -> None:
    with pytest.raises(CheckpointError):
        decode(file_of(header, data_bytes))


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, struct.pack("<Q", 1), struct.pack("<Q", 2**63) + bytes(100)])
def test_length_that_does_not_fit_its_file_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode(data)


def test_tensors_are_aligned_to_their_element_or_to_a_cache_line() -> None:
    shapes = {"F32": ((), (16, 3), (5,), (32,)), "F64": ((), (8,)), "BF16": ((3,), (32,)), "U8": ((1,), (64,))}
    parts = [
        TensorPart(f"{dtype} {shape} {number}", dtype, shape, b"")
        for number in range(3)
        for dtype, of_dtype in shapes.items()
        for shape in of_dtype
    ]
    data = header_format.encode_header(header_format.in_file_order(parts))
    file_bytes = len(data) + sum(header_format.nbytes_of(part.name, part.dtype, part.shape) for part in parts)
    entries = header_format.decode_header(data[8:], file_bytes)
    assert {entry.name for entry in entries} == {part.name for part in parts}
    for entry in entries:
        assert entry.start % (header_format.BITS_BY_DTYPE[entry.dtype] // 8) == 0, entry
        if entry.dtype == "F64" and (entry.end - entry.start) % 64 == 0:
            assert entry.start % 64 == 0, entry
    first = min(entry.start for entry in entries if entry.dtype == "F32")
    filling = [entry for entry in entries if entry.dtype == "F32" and (entry.end - entry.start) % 64 == 0]
    assert {(entry.start - first) % 64 for entry in filling} == {0}
