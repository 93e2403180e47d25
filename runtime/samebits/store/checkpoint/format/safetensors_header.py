"""The header of a ``data.safetensors`` file: where each tensor's bytes lie. Pure; hashing and files live elsewhere.

The format (github.com/huggingface/safetensors, "Format"): the header's length as u64, a JSON object padded with blanks,
then the tensors' bytes without gaps. The one idea: the widest elements come first, as in the library's own writer, so
every tensor is aligned to its element, and the header is padded so that the first one is aligned to a cache line.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from samebits.errors import CheckpointError
from samebits.store.checkpoint.format.tensor_part import BITS_BY_DTYPE, TensorPart, nbytes_of

MAX_HEADER_BYTES = 100_000_000  # the library's own limit

_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size
_ALIGNMENT_BYTES = 64
_METADATA_KEY = "__metadata__"
_FIELDS = (b'"dtype"', b'"shape"', b'"data_offsets"')


class TensorEntry(NamedTuple):
    """One tensor's place: its bytes are ``start`` to ``end`` of the whole file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def in_file_order(parts: Iterable[TensorPart]) -> list[TensorPart]:
    """The order in which the tensors' bytes are written: the widest elements first, and of those first the tensors
    that fill whole cache lines, so that what follows one of them is aligned as it is; else as given.
    """

    def key(part: TensorPart) -> tuple[int, bool]:
        bits = BITS_BY_DTYPE.get(part.dtype, 0)
        return -bits, bits * math.prod(part.shape) % (8 * _ALIGNMENT_BYTES) != 0

    return sorted(parts, key=key)


def encode_header(parts: Iterable[TensorPart | TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """The file's beginning, up to the first tensor's bytes, for tensors in file order; ``metadata`` is for readers."""
    entries: dict[str, Any] = {}
    offset = 0
    for part in parts:
        if part.name in entries or part.name == _METADATA_KEY:
            raise CheckpointError(f"tensor {part.name!r}: the name is taken; each tensor of a point has its own")
        end = offset + nbytes_of(part.name, part.dtype, part.shape)
        entries[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [offset, end]}
        offset = end
    if metadata:
        entries = {_METADATA_KEY: dict(metadata), **entries}
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a tensor's name is no valid text: {error}; rename it") from None
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(entries)} tensors need a header of {len(text)} bytes; at most {MAX_HEADER_BYTES}")
    return _LENGTH.pack(len(text)) + text


def decode_header_length(data: bytes, file_bytes: int) -> int:
    """The length of the JSON text, from a file's first eight bytes; bounded by the file and by the format."""
    length: int = _LENGTH.unpack(data)[0] if len(data) == LENGTH_BYTES else MAX_HEADER_BYTES + 1
    if length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise CheckpointError(f"not a safetensors file: a header of {length} bytes in a file of {file_bytes}")
    return length


def decode_header(text: bytes, file_bytes: int) -> list[TensorEntry]:
    """The tensors of a file in the order of its header; :class:`CheckpointError` unless they cover it without gaps."""
    try:
        fields = json.loads(text)
        # Where every tensor has each field once, written as it is, nothing stands twice; to ask for that is slower.
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
                f"tensor {entry.name!r}: lies at {entry.start} to {entry.end}; expected {entry.dtype} of shape "
                f"{entry.shape} from {offset} on"
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
