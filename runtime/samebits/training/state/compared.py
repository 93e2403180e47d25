"""What of a state is compared between ranks, by name, and the digest of it.

Here live the parts of a state (steps, sampler positions, parameters, moments, and all else, which may differ), how each
is hashed, and the digest that a rank reports. Never here: which parts a state has (its class says so in ``compared``
and ``loose``), when it is compared (``checkpoint.digests``), what follows (``core.watch.equality``). The one idea:
every part has a name and a hash of its own, so the few bytes that are reported can be explained afterwards without the
tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from samebits.core.reports import MAX_PART_CHARS, Part, PartKind
from samebits.errors import CheckpointError
from samebits.printable import printable
from samebits.training.state import snapshot

__all__ = ["Named", "digest_of", "is_hashable", "parts_of", "shown"]


class Named(NamedTuple):
    """A part of a state: text that can be shown, a tensor, or any tree with tensors."""

    kind: PartKind
    name: str
    value: Any


def parts_of(named: Iterable[Named]) -> list[Part]:
    """Each with its hash; what has none, because it cannot be saved either, is left out."""
    hashed = ((one, _value_of(one.value)) for one in named)
    return [Part(one.kind, printable(one.name, MAX_PART_CHARS), value) for one, value in hashed if value is not None]


def digest_of(parts: Sequence[Part]) -> bytes:
    """Of all of them, in this order."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(f"{part.kind:d}\0{part.name}\0{part.value}\0".encode())
    return digest.digest()


def is_hashable(value: object) -> bool:
    """Whether it is a tensor whose bytes are all there is to it."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided  # type: ignore[attr-defined]


def shown(value: Any) -> Any:
    """The value's text if that is all there is to it and can be shown; else the value, to be hashed."""
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
