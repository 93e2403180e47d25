"""Join the pieces of all ranks into whole tensors.

Every piece contains its position, so the order of the ranks does not matter, and missing parts are an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from samebits.errors import CheckpointError
from samebits.training import value_trees
from samebits.training.sharding.pieces import PIECE, UNFILLED, Piece

__all__ = ["has_pieces", "whole"]


def whole(trees: Sequence[Any], owns: Sequence[Mapping[str, Any]], path: str = "state") -> Any:
    """Return the values of one step's points, with whole tensors in place of pieces.

    Args:
        trees: the values of every rank's point; in a pipeline, each lacks the stages of other ranks.
        owns: every rank's own pieces, by path.
        path: the tree's path when the pieces were taken out.

    Raises:
        CheckpointError: a part of a tensor is missing.
    """
    filled = [one for one in trees if not (isinstance(one, dict) and one.keys() == {UNFILLED})]
    if not filled:
        raise CheckpointError(
            f"{path}: the point of step 0 of a model built on the meta device holds no weights: every rank fills its "
            "part when training begins. Fix: name a later step"
        )
    tree = filled[0]
    if isinstance(tree, dict) and tree.keys() == {PIECE}:
        return _together(tree[PIECE], owns, path)
    if value_trees.children(tree) is None:
        return tree
    found: dict[Any, list[Any]] = {}  # an optimizer has moments only for the parameters of its own stages
    for one in filled:
        for key, item in value_trees.children(one) or ():
            found.setdefault(key, []).append(item)
    keys = sorted(found) if all(type(key) is int for key in found) else list(found)
    return value_trees.rebuilt(tree, [(key, whole(found[key], owns, f"{path}.{key}")) for key in keys])


def _together(shared: Mapping[str, Any], owns: Sequence[Mapping[str, Any]], path: str) -> torch.Tensor:
    try:
        return _put_together(shared, owns, path)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration, RuntimeError) as error:
        raise CheckpointError(f"{path}: its pieces in the points differ from what was saved: {error!r}") from None


def _put_together(shared: Mapping[str, Any], owns: Sequence[Mapping[str, Any]], path: str) -> torch.Tensor:
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Piece, torch.Tensor]] = {}
    for own in owns:
        if path in own:
            part: torch.Tensor = own[path]["local"]
            piece = Piece.from_plain(shared, own[path]["offsets"], part.shape)
            found[piece.offsets, piece.sizes] = piece, part  # copies are equal, so any one will do
    covered, expected = sum(part.numel() for _, part in found.values()), math.prod(shared["shape"])
    if covered != expected:
        raise CheckpointError(
            f"{path}: the points of {len(owns)} ranks hold {covered} of its {expected} elements: those of all "
            f"{math.prod(shared['mesh'])} ranks of one step are needed"
        )
    _require_tiling([piece for piece, part in found.values() if part.numel()], path)
    tensor = torch.empty(shared["shape"], dtype=next(part.dtype for _, part in found.values()))
    for piece, part in found.values():
        piece.cut(tensor).copy_(part)
    return tensor


def _require_tiling(parts: Sequence[Piece], path: str) -> None:
    """Raise unless the parts, which have as many elements as the tensor, cover it without gaps.

    Raises:
        CheckpointError: a part extends beyond the tensor, or two parts overlap.
    """
    for one in parts:
        if any(
            not 0 <= offset <= extent - size
            for offset, size, extent in zip(one.offsets, one.sizes, one.shape, strict=True)
        ):
            raise CheckpointError(f"{path}: a point claims to hold {one}, which is not inside the tensor. {_DAMAGED}")
    for one, other in itertools.combinations(parts, 2):
        ends = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        if all(max(first, second) < min(first + size, second + length) for first, size, second, length in ends):
            raise CheckpointError(f"{path}: two points claim to hold the same elements: {one}; {other}. {_DAMAGED}")


_DAMAGED = "The description in one of them is wrong. Fix: use another step, for which every rank has its own checkpoint"


def has_pieces(tree: Any) -> bool:
    """Return whether the tree contains a piece, or a tensor without memory."""
    if isinstance(tree, dict) and tree.keys() in ({PIECE}, {UNFILLED}):
        return True
    return any(has_pieces(item) for _, item in value_trees.children(tree) or ())
