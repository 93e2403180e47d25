"""Export a point as a file that ``torch.load(weights_only=True)`` reads, for programs without SameBits.

SameBits writes torch's own format only here and never reads it. The state has the same structure and names as in the
training script. If such a file could not restore a value, the export is refused before anything is written.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import torch

from samebits.errors import CheckpointError
from samebits.store import durable
from samebits.store.checkpoint import LoadedPoint, PointHeader
from samebits.training import value_trees
from samebits.training.sharding.whole import has_pieces
from samebits.training.state import snapshot

ORIGIN = "samebits"
"""The key in the file that records its origin, beside the state's own names."""

_LARGEST_INTEGER_BITS = 2039  # limit of pickle's LONG1, the only long integer that weights_only reads


def export_for_torch(checkpoint: LoadedPoint, path: Path, *, replace: bool = False) -> None:
    """Write the point to the file ``path``, durably.

    Args:
        checkpoint: a verified point.
        path: the file to write.
        replace: whether an existing file may be overwritten.

    Raises:
        CheckpointError: the state holds a value that such a file cannot give back; the message names it.
        StoreError: a disk error, or the file exists and ``replace`` is false.
    """
    content = nested(checkpoint)
    require_readable(content, "state")
    with durable.new_file(path, replace=replace) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as file:
        torch.save(content, file)


def nested(checkpoint: LoadedPoint) -> dict[str, Any]:
    """Return the state's values by name, and the point's origin and other parts under ``samebits``."""
    contents = snapshot.state_in(checkpoint.tree, checkpoint.tensors)
    header = checkpoint.header
    values = values_of(checkpoint.header, contents)
    if has_pieces(values):
        raise CheckpointError(
            f"{header.point}: the state is sharded, and a rank's point holds only its own part of it: export it with "
            "--format dcp, which takes all ranks' points"
        )
    shared = {name: value for name, value in contents["shared"].items() if name != "values"}
    rest = {name: value for name, value in contents.items() if name != "shared"}
    origin = {
        "job": header.job,
        "step": header.point.step,
        "generation": header.point.generation,
        "rank": header.rank,
        "world_size": header.world_size,
        **shared,
        **rest,
        "layout": checkpoint.layout,
    }
    if ORIGIN in values:
        raise CheckpointError(f"{header.point}: the state has a value called {ORIGIN!r}; export it as safetensors")
    return {**values, ORIGIN: origin}


def values_of(header: PointHeader, contents: Any) -> dict[str, Any]:
    """Return the state's values by name from a point's contents.

    Raises:
        CheckpointError: the contents are not a state.
    """
    try:
        return {name: _nearest(value) for name, value in contents["shared"]["values"].items()}
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{header.point} does not hold a state saved by samebits.elastic; export its tensors as safetensors"
        ) from None


def _nearest(value: Any) -> Any:
    """Convert a value, at any depth, to the most similar type that ``torch.load(weights_only=True)`` reads."""
    kind = type(value)
    if kind is frozenset:
        return set(value)
    if kind is range:
        return list(value)
    if kind.__module__ == "numpy":
        return torch.from_numpy(value.copy()) if value.ndim else value.item()
    items = value_trees.children(value)
    if items is None:
        return value
    nearest = [(key, _nearest(item)) for key, item in items]
    if kind is defaultdict:
        return dict(nearest)
    return [item for _, item in nearest] if kind is deque else value_trees.rebuilt(value, nearest)


def require_readable(value: Any, path: str) -> None:
    """Raise CheckpointError if torch can write the value but ``weights_only`` cannot read it."""
    if isinstance(value, dict):
        for key, item in value.items():
            require_readable(key, f"{path}: the key {key!r}")
            require_readable(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_readable(item, f"{path}.{index}")
    elif isinstance(value, bytes) and not value:
        raise CheckpointError(
            f"{path}: torch.load(weights_only=True) cannot read empty bytes; export it as safetensors"
        )
    elif isinstance(value, int) and value.bit_length() > _LARGEST_INTEGER_BITS:
        raise CheckpointError(
            f"{path}: torch.load(weights_only=True) cannot read an integer of {value.bit_length()} bits; export it as "
            "safetensors"
        )
