"""Extract this rank's shards from a state, describe them, and put them back.

In a checkpoint, a description (``Piece``) replaces the DTensor, and the local tensor is saved with the rank's own
values. The description includes the shard's position, so loading it in a different place raises an error instead of
giving wrong weights. A tensor that was saved unsharded is cut to the part that this rank needs.
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
from samebits.training import torch_private, value_trees

__all__ = [
    "PIECE",
    "UNFILLED",
    "Own",
    "Piece",
    "Putting",
    "cut_for",
    "cut_like",
    "in_place_of",
    "is_distributed",
    "is_without_memory",
    "local",
    "paths_of",
    "take_out",
]

Own: TypeAlias = dict[str, dict[str, Any]]
"""By path in the state: this rank's piece (``local``) and its start in the whole tensor (``offsets``)."""

PIECE = "$piece"  # {"$piece": …} replaces a tensor
UNFILLED = "$unfilled"  # {"$unfilled": …} replaces a tensor that has no memory yet
_REPLICATED = "Replicate()"
_PLACEMENT = re.compile(
    r"Replicate\(\)|Shard\(dim=(?P<dim>\d+)\)|_StridedShard\(dim=(?P<strided>\d+), sf=(?P<parts>\d+)\)"
)
_ADVICE = (
    "continue with the world size and the sharding of that point, or convert it with "
    "`samebits ckpt export --format dcp` and samebits.elastic.load_dcp"
)


def is_distributed(value: object) -> bool:
    """Return whether the value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor on this rank: a DTensor's local tensor, or the tensor itself."""
    if not is_distributed(tensor):
        return tensor
    piece: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return piece.detach()


def is_without_memory(tensor: torch.Tensor) -> bool:
    """Return whether this rank has no memory for the tensor.

    Either the tensor is not initialized yet, or it belongs to another rank's pipeline stage.
    """
    return tensor.is_meta or local(tensor).is_meta


@dataclass(frozen=True, slots=True)
class Piece:
    """Description of the part of a tensor that a rank holds.

    Attributes:
        shape: shape of the whole tensor.
        mesh: number of ranks along each dimension of the mesh.
        placements: one per mesh dimension, as torch prints it, such as ``Shard(dim=0)``.
        offsets, sizes: the part's start and size along each dimension of the tensor.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any, path: str) -> Piece:
        """Describe the local part of a DTensor.

        Raises:
            CheckpointError: the ranks' parts are not contiguous blocks.
        """
        mesh = tensor.device_mesh
        piece = _placed(tuple(tensor.shape), tuple(mesh.shape), tuple(mesh.get_coordinate()), tensor.placements)
        if piece is None:
            raise CheckpointError(
                f"{path}: a DTensor placed as {', '.join(map(repr, tensor.placements))} cannot be saved: expected "
                "Shard or Replicate. Fix: redistribute() it before state.commit()"
            )
        return piece

    @classmethod
    def from_plain(cls, shared: Mapping[str, Any], offsets: Any, sizes: Any) -> Piece:
        """Rebuild a description from a checkpoint: from its shared part and the rank's own part.

        Raises:
            CheckpointError: the parts are not a description of a piece.
        """
        try:
            return cls(
                tuple(shared["shape"]), tuple(shared["mesh"]), tuple(shared["placements"]), tuple(offsets), tuple(sizes)
            )
        except (KeyError, TypeError):
            raise CheckpointError(f"{shared!r} does not describe a piece of a tensor") from None

    def to_plain(self) -> dict[str, Any]:
        """Return the part of the description that is the same on every rank."""
        return {"shape": self.shape, "mesh": self.mesh, "placements": self.placements}

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole tensor.

        False if a small sharded tensor just happens to be completely on this rank.
        """
        return all(
            ranks == 1 or placement == _REPLICATED for ranks, placement in zip(self.mesh, self.placements, strict=True)
        )

    @property
    def part(self) -> tuple[object, ...]:
        """What determines the part's values: everything but the mesh dimensions along which all ranks hold the same."""
        return self.shape, _split_over(self.mesh, self.placements), self.offsets, self.sizes

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of the whole tensor as a view."""
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dimension, min(offset, whole.shape[dimension] - size), size)
        return whole

    def torch_placements(self) -> tuple[Any, ...]:
        """Convert the placements to torch's objects.

        Raises:
            CheckpointError: torch has no such placement.
        """
        return tuple(_torch_placement(one) for one in self.placements)

    def __str__(self) -> str:
        part = ", ".join(f"{offset}:{offset + size}" for offset, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{part}] of shape {self.shape}, {', '.join(self.placements)} over {' x '.join(map(str, self.mesh))}"


def _torch_placement(printed: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    found = _PLACEMENT.fullmatch(printed)
    if found is None:
        raise CheckpointError(f"a tensor is placed as {printed}: expected Shard(dim=…) or Replicate()")
    if found["strided"] is not None:
        return torch_private.strided_shard()(int(found["strided"]), split_factor=int(found["parts"]))
    return Replicate() if found["dim"] is None else Shard(int(found["dim"]))


@functools.lru_cache(maxsize=4096)  # called at every save, for every tensor
def _placed(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> Piece | None:
    """Return the piece at these coordinates.

    torch splits a dimension as torch.chunk does, rounding up. If FSDP2 splits a dimension that tensor parallelism has
    already split, FSDP2's placement comes first and is strided.
    """
    from torch.distributed.tensor import Replicate, Shard

    offsets, sizes = [0] * len(shape), list(shape)
    parts = [1] * len(shape)  # number of parts into which each dimension is split so far

    def split(ranks: int, rank: int, dim: int) -> None:
        part = -(-sizes[dim] // ranks)
        start = min(rank * part, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(part, sizes[dim] - start)
        parts[dim] *= ranks

    strided = []
    for ranks, rank, placement in zip(mesh, coordinate, placements, strict=True):
        if type(placement) is torch_private.strided_shard():
            strided.append((ranks, rank, placement))
        elif type(placement) is Shard:
            split(ranks, rank, placement.dim)
        elif type(placement) is not Replicate:
            return None
    for ranks, rank, placement in strided:
        if placement.split_factor != parts[placement.dim]:
            return None
        split(ranks, rank, placement.dim)
    return Piece(shape, mesh, tuple(map(repr, placements)), tuple(offsets), tuple(sizes))


def take_out(tree: Any, path: str, own: Own) -> Any:
    """Replace the shards in a tree by descriptions, and put the shards into ``own``; tensors are not copied.

    A DTensor that this rank holds completely stays in the tree as a plain tensor; without a group, all DTensors are
    complete.

    Raises:
        CheckpointError: a DTensor cannot be described.
    """
    if isinstance(tree, torch.Tensor) and is_without_memory(tree):
        return {UNFILLED: list(tree.shape)}
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
    """Converts saved pieces back to DTensors.

    Attributes:
        own: this rank's own pieces in a point; empty if the point is another rank's.
        mesh: the mesh over which this program's tensors are sharded.
        like: returns, for a path, a DTensor whose placement a new tensor of the same shape must have, or None.
        is_elsewhere: returns whether a tensor belongs to another rank's pipeline stage.
    """

    own: Mapping[str, Any]
    mesh: Any
    like: Callable[[str], Any]
    is_elsewhere: Callable[[Any], bool] = lambda _: False

    def back(self, tree: Any, path: str, live: Any) -> Any:
        """Convert a saved tree of pieces or whole tensors to the form that this state loads.

        Args:
            tree, path: a point's content, and its path.
            live: the value at the same place in the current state.

        Raises:
            CheckpointError: a piece is missing, or its position is not this rank's.
        """
        if isinstance(tree, dict) and tree.keys() == {PIECE}:
            return self._piece_back(tree[PIECE], path, live)
        if isinstance(tree, dict) and tree.keys() == {UNFILLED}:
            return live
        if isinstance(tree, torch.Tensor):
            if self.is_elsewhere(live):
                return live
            target = live if is_distributed(live) else self.like(path)
            if target is None or tree.shape != target.shape:
                return tree
            if target.is_meta:
                raise CheckpointError(
                    f"{path} is on the meta device, which holds no values. Fix: build the model in memory to start "
                    "from loaded values (samebits.elastic.load_dcp)"
                )
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
                f"{path}: no remaining point holds this rank's part, and no other rank holds it. Fix: restore "
                f"this rank's checkpoint folder, or start over with `{spelled('run', '--fresh')}`, from a "
                "directory that `samebits ckpt export --format dcp` has written and samebits.elastic.load_dcp "
                "reads"
            )
        tensor: torch.Tensor = self.own[path]["local"]
        saved = Piece.from_plain(shared, self.own[path]["offsets"], tensor.shape)
        target = live if is_distributed(live) else self.like(path)
        if target is not None and tuple(target.shape) == saved.shape:
            _require_same(path, saved, Piece.of(target, path))
            return _wrapped(tensor, target, target.device_mesh, target.placements)
        mesh, placements = tuple(self.mesh.shape), saved.placements
        if len(mesh) != len(saved.mesh) or _split_over(mesh, placements) != _split_over(saved.mesh, placements):
            here = f"this program's tensors are sharded over {' x '.join(map(str, self.mesh.shape))}"
            raise CheckpointError(f"{path}: the restore point holds {saved}; {here}: {_ADVICE}")
        whole = torch.empty(saved.shape, dtype=tensor.dtype, device="meta")
        found = _wrapped(tensor, whole, self.mesh, saved.torch_placements())
        _require_same(path, saved, Piece.of(found, path))
        return found


def _split_over(mesh: tuple[int, ...], placements: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    """Return the sizes and placements of the mesh dimensions over which a tensor is split."""
    return tuple(one for one in zip(mesh, placements, strict=False) if one[1] != _REPLICATED)


def _require_same(path: str, saved: Piece, here: Piece) -> None:
    if saved.part != here.part:
        raise CheckpointError(f"{path}: the restore point holds {saved}; this rank's part is {here}: {_ADVICE}")


def _wrapped(piece: torch.Tensor, whole: torch.Tensor, mesh: Any, placements: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    tensor: torch.Tensor = DTensor.from_local(
        piece, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return tensor


def in_place_of(part: torch.Tensor, target: Any) -> torch.Tensor:
    """Return a new value for the local memory of ``target`` in the form that ``target`` has: a DTensor, or as it is."""
    return _wrapped(part, target, target.device_mesh, target.placements) if is_distributed(target) else part


def cut_for(whole: torch.Tensor, mesh: Any, placements: Any) -> torch.Tensor:
    """Shard a whole tensor over a mesh, and return it as a DTensor in newly allocated memory."""
    coordinate = mesh.get_coordinate()
    piece = _placed(tuple(whole.shape), tuple(mesh.shape), tuple(coordinate), tuple(placements))
    assert piece is not None, "placements are checked before a tensor is cut"
    return _wrapped(piece.cut(whole).clone(memory_format=torch.contiguous_format), whole, mesh, placements)


def cut_like(whole: torch.Tensor, target: Any) -> torch.Tensor:
    """Shard a whole tensor like ``target``, and return it as a DTensor in newly allocated memory."""
    return cut_for(whole, target.device_mesh, target.placements)


def paths_of(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every DTensor in the tree with its path."""
    if is_distributed(tree):
        yield path, tree
    else:
        for key, item in value_trees.children(tree) or ():
            yield from paths_of(item, f"{path}.{key}")
