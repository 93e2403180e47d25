"""Hash the parts of a state that are compared between ranks, and combine the hashes into one digest.

Each part has a name and its own hash, so ranks only exchange a few bytes. If the digests differ, the hashes show which
parts differ, without sending the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from samebits.core.reports import MAX_PART_CHARS, Part, PartKind
from samebits.errors import CheckpointError
from samebits.printable import printable
from samebits.training.state import snapshot


class Named(NamedTuple):
    """A named part of a state: text, a tensor, or a nested structure with tensors."""

    kind: PartKind
    name: str
    value: Any


def parts_of(named: Iterable[Named]) -> list[Part]:
    """Hash each named part. Parts that cannot be saved cannot be hashed and are left out."""
    hashed = ((one, _value_of(one.value)) for one in named)
    return [Part(one.kind, printable(one.name, MAX_PART_CHARS), value) for one, value in hashed if value is not None]


def shard_parts(shards: Mapping[str, Any]) -> list[Part]:
    """Return the parts of these shards, or of their hashes, by name. Replicas have them in the same order."""
    return parts_of(Named(PartKind.SHARD, name, one) for name, one in sorted(shards.items()))


def digest_of(parts: Sequence[Part]) -> bytes:
    """Return the combined digest of these parts, which depends on their order."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(f"{part.kind:d}\0{part.name}\0{part.value}\0".encode())
    return digest.digest()


def is_hashable(value: object) -> bool:
    """Return whether the value is a plain tensor, whose bytes describe it completely."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided  # type: ignore[attr-defined]


def shown(value: Any) -> Any:
    """Return a plain value's text if it is short enough for a message; otherwise, return the value, to be hashed."""
    items = value.values() if type(value) is dict else (value,)
    text = repr(value) if all(type(item) in (bool, int, float, str, type(None), tuple) for item in items) else ""
    return text if 0 < len(text) <= MAX_PART_CHARS else value


def _value_of(value: Any) -> str | None:
    if type(value) is str:
        return printable(value, MAX_PART_CHARS)
    if isinstance(value, torch.Tensor):
        return xxhash.xxh3_64_hexdigest(snapshot.bytes_of(value)) if is_hashable(value) else None
    try:
        tree, tensors = snapshot.take_apart(value, "")
    except CheckpointError:
        return None
    digest = xxhash.xxh3_64(repr(tree).encode())
    for name, tensor in tensors:
        if is_hashable(tensor):
            digest.update(printable(name).encode())
            digest.update(snapshot.bytes_of(tensor))
    return digest.hexdigest()
