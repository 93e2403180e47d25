"""What this rank holds of tensors that all ranks hold together: taken out of a state, described, put back.

Here lives the form in which a DTensor is part of a point: which piece of which whole (``Piece``) in the tree, where the
tensor was, and its local tensor among the rank's own parts. Never here: where a group or a mesh comes from. The one
idea: a piece says of itself where it lies in the whole, so that one that is put back where another one was is an error
in a sentence, never other weights; and a tensor that was saved whole is cut as this rank needs it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from samebits.errors import CheckpointError
from samebits.spelling import spelled
from samebits.training import value_trees

__all__ = ["PIECE", "Own", "Piece", "Putting", "cut_like", "is_distributed", "local", "paths_of", "take_out"]

Own: TypeAlias = dict[str, dict[str, Any]]
"""By its path in the state: ``local``, this rank's piece, and ``offsets``, where it begins in the whole."""

PIECE = "$piece"  # {"$piece": …} stands where a tensor was
_REPLICATED = "Replicate()"
_PLACEMENT = re.compile(r"Shard\(dim=(\d+)\)|Replicate\(\)")
_MEND = (
    "go on with the world size and the sharding the point was made with, or take it elsewhere with "
    "`samebits ckpt export --format dcp` and samebits.elastic.load_dcp"
)


def is_distributed(value: object) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own memory of a tensor: of a DTensor its local tensor, else the tensor itself."""
    if not is_distributed(tensor):
        return tensor
    piece: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return piece.detach()


@dataclass(frozen=True, slots=True)
class Piece:
    """Which part of which tensor a rank holds.

    Attributes:
        shape: of the whole tensor.
        mesh: how many ranks there are along each of the mesh's dimensions.
        placements: one for each of them, as torch writes it, such as ``Shard(dim=0)``.
        offsets, sizes: where the part begins in the whole, and how far it goes, along each of the tensor's dimensions.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any, path: str) -> Piece:
        """A DTensor's.

        Raises:
            CheckpointError: its ranks' parts do not lie beside each other.
        """
        mesh = tensor.device_mesh
        piece = _placed(tuple(tensor.shape), tuple(mesh.shape), tuple(mesh.get_coordinate()), tensor.placements)
        if piece is None:
            raise CheckpointError(
                f"{path}: a DTensor placed as {', '.join(map(repr, tensor.placements))} cannot be saved: expected "
                "Shard or Replicate; redistribute() it before state.commit()"
            )
        return piece

    @classmethod
    def from_plain(cls, shared: Mapping[str, Any], offsets: Any, sizes: Any) -> Piece:
        """Of what a point holds of it: the description in the tree, and the own part's.

        Raises:
            CheckpointError: it is none.
        """
        try:
            return cls(
                tuple(shared["shape"]), tuple(shared["mesh"]), tuple(shared["placements"]), tuple(offsets), tuple(sizes)
            )
        except (KeyError, TypeError):
            raise CheckpointError(f"{shared!r} describes no piece of a tensor") from None

    def to_plain(self) -> dict[str, Any]:
        """What is the same on every rank."""
        return {"shape": self.shape, "mesh": self.mesh, "placements": self.placements}

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of it; that one happens to, of what is too little for all, does not count."""
        return all(
            ranks == 1 or placement == _REPLICATED for ranks, placement in zip(self.mesh, self.placements, strict=True)
        )

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of the whole tensor: a view."""
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dimension, min(offset, whole.shape[dimension] - size), size)
        return whole

    def torch_placements(self) -> tuple[Any, ...]:
        """As torch has them.

        Raises:
            CheckpointError: one that is none of torch's.
        """
        from torch.distributed.tensor import Replicate, Shard

        found = [_PLACEMENT.fullmatch(one) for one in self.placements]
        if None in found:
            raise CheckpointError(f"a placement of {', '.join(self.placements)}: expected Shard(dim=…) or Replicate()")
        return tuple(Replicate() if one[1] is None else Shard(int(one[1])) for one in found if one is not None)

    def __str__(self) -> str:
        part = ", ".join(f"{offset}:{offset + size}" for offset, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{part}] of shape {self.shape}, {', '.join(self.placements)} over {' x '.join(map(str, self.mesh))}"


@functools.lru_cache(maxsize=4096)  # at every save, for every tensor
def _placed(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> Piece | None:
    """The piece of the rank at these coordinates: torch cuts a dimension into parts as torch.chunk does, rounded up."""
    from torch.distributed.tensor import Replicate, Shard

    offsets, sizes = [0] * len(shape), list(shape)
    for ranks, rank, placement in zip(mesh, coordinate, placements, strict=True):
        if type(placement) is Shard:
            size = sizes[placement.dim]
            part = -(-size // ranks)
            start = min(rank * part, size)
            offsets[placement.dim] += start
            sizes[placement.dim] = min(part, size - start)
        elif type(placement) is not Replicate:
            return None
    return Piece(shape, mesh, tuple(map(repr, placements)), tuple(offsets), tuple(sizes))


def take_out(tree: Any, path: str, own: Own) -> Any:
    """The tree without its pieces, which go into ``own``; tensors are not copied.

    A DTensor that this rank holds whole, as every one is before there is a group, stays there as a plain tensor.

    Raises:
        CheckpointError: a DTensor that cannot be described.
    """
    if is_distributed(tree):
        piece = Piece.of(tree, path)
        if piece.is_whole:
            return local(tree)
        own[path] = {"offsets": piece.offsets, "local": local(tree)}
        return {PIECE: piece.to_plain()}
    items = value_trees.children(tree)
    if items is None:
        return tree
    return value_trees.rebuilt(tree, [(key, take_out(item, f"{path}.{key}", own)) for key, item in items])


@dataclass(frozen=True, slots=True)
class Putting:
    """How pieces become DTensors again.

    Attributes:
        own: this rank's own pieces in a point; none where they are another rank's.
        mesh: the one that this program's tensors are sharded over.
        like: by path, a DTensor that a tensor of its shape has to be placed as where there is none yet.
    """

    own: Mapping[str, Any]
    mesh: Any
    like: Callable[[str], Any]

    def back(self, tree: Any, path: str, live: Any) -> Any:
        """The tree that ``take_out`` was given, or one whose tensors are whole, as this program's state can load it.

        Args:
            tree, path: what a point holds.
            live: the same place in the state as it stands.

        Raises:
            CheckpointError: a piece is not here, or lies elsewhere than this rank's.
        """
        if isinstance(tree, dict) and tree.keys() == {PIECE}:
            return self._piece_back(tree[PIECE], path, live)
        if isinstance(tree, torch.Tensor):
            target = live if is_distributed(live) else self.like(path)
            if target is None or tree.shape != target.shape:
                return tree
            return _wrapped(
                Piece.of(target, path).cut(tree).contiguous(), target, target.device_mesh, target.placements
            )
        items = value_trees.children(tree)
        if items is None:
            return tree
        below = dict(value_trees.children(live) or ())
        return value_trees.rebuilt(
            tree, [(key, self.back(item, f"{path}.{key}", below.get(key))) for key, item in items]
        )

    def _piece_back(self, shared: Mapping[str, Any], path: str, live: Any) -> torch.Tensor:
        if path not in self.own:
            raise CheckpointError(
                f"{path}: this rank's part of it is in no point that is left, and no other rank holds it: bring back "
                f"this rank's checkpoint folder, or begin anew with `{spelled('run', '--fresh')}`, from a directory "
                "that `samebits ckpt export --format dcp` has written and samebits.elastic.load_dcp reads"
            )
        tensor: torch.Tensor = self.own[path]["local"]
        saved = Piece.from_plain(shared, self.own[path]["offsets"], tensor.shape)
        if is_distributed(live):
            _require_same(path, saved, Piece.of(live, path))
            return _wrapped(tensor, live, live.device_mesh, live.placements)
        if saved.mesh != tuple(self.mesh.shape):
            here = f"this program's tensors are sharded over {' x '.join(map(str, self.mesh.shape))}"
            raise CheckpointError(f"{path}: the restore point holds {saved}; {here}: {_MEND}")
        whole = torch.empty(saved.shape, dtype=tensor.dtype, device="meta")
        found = _wrapped(tensor, whole, self.mesh, saved.torch_placements())
        _require_same(path, saved, Piece.of(found, path))
        return found


def _require_same(path: str, saved: Piece, here: Piece) -> None:
    if saved != here:
        raise CheckpointError(f"{path}: the restore point holds {saved}; this rank's part is {here}: {_MEND}")


def _wrapped(piece: torch.Tensor, whole: torch.Tensor, mesh: Any, placements: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    tensor: torch.Tensor = DTensor.from_local(
        piece, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return tensor


def cut_like(whole: torch.Tensor, target: Any) -> torch.Tensor:
    """A whole tensor's DTensor, in memory of its own, placed as ``target`` is, whose shape it has."""
    piece = Piece.of(target, "a moment").cut(whole).clone()
    return _wrapped(piece, target, target.device_mesh, target.placements)


def paths_of(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every DTensor in the tree, with its path."""
    if is_distributed(tree):
        yield path, tree
    else:
        for key, item in value_trees.children(tree) or ():
            yield from paths_of(item, f"{path}.{key}")
