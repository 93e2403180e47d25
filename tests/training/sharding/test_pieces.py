"""Pieces of sharded tensors: extracted, saved in a point and put back in place, or refused with both places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from samebits.errors import CheckpointError
from samebits.training.sharding import pieces
from samebits.training.sharding.pieces import Piece, Putting
from samebits.training.sharding.whole import has_pieces, whole
from samebits.training.state import snapshot
from tests.training.sharding.worlds import RANKS, world

WHOLE = torch.arange(35.0).reshape(7, 5)


def mesh_of(size: int = RANKS) -> Any:
    return init_device_mesh("cpu", (size,))


def piece_of(rank: int, tensor: torch.Tensor = WHOLE, dim: int = 0, size: int = RANKS) -> DTensor:
    """Return this rank's part of the tensor in a world of that size."""
    chunks = list(tensor.chunk(size, dim))
    empty = tensor.new_empty(0, *tensor.shape[1:]) if dim == 0 else tensor.new_empty(tensor.shape[0], 0)
    part = chunks[rank].clone() if rank < len(chunks) else empty
    return DTensor.from_local(
        part, mesh_of(size), [Shard(dim)], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def through_a_point(rank: int, tree: Any) -> tuple[Any, dict[str, Any]]:
    """Return what a point restores of the tree: plain values and the rank's own parts."""
    own: pieces.Own = {}
    taken = pieces.take_out(tree, "state", own)
    content = {"shared": taken, "own": own}
    plain, parts = snapshot.split(content, "point")
    copied = {part.name: type(part)(part.name, part.dtype, part.shape, bytearray(part.data)) for part in parts}
    joined = snapshot.join(plain, copied)
    return joined["shared"], joined["own"]


def putting(own: dict[str, Any], mesh: Any = None) -> Putting:
    return Putting(own=own, mesh=mesh or mesh_of(), like=lambda path: None)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("has_live", [True, False])
def test_piece_is_restored_on_the_rank_it_was_taken_from(rank: int, has_live: bool) -> None:
    with world(rank, RANKS):
        tree = {"a": [piece_of(rank), torch.ones(2)], "small": piece_of(rank, torch.arange(2.0)), "n": 3}
        shared, own = through_a_point(rank, tree)
        assert has_pieces(shared) and sorted(own) == ["state.a.0", "state.small"]
        assert torch.equal(shared["a"][1], torch.ones(2)) and shared["n"] == 3
        back = putting(own).back(shared, "state", tree if has_live else {})
        for one, other in ((back["a"][0], tree["a"][0]), (back["small"], tree["small"])):
            assert isinstance(one, DTensor) and one.shape == other.shape and one.placements == other.placements
            assert torch.equal(one._local_tensor, other._local_tensor)


def test_description_is_the_same_on_every_rank() -> None:
    described = []
    for rank in range(RANKS):
        with world(rank, RANKS):
            # of which rank 0 happens to have everything
            tree = {"a": piece_of(rank), "few": piece_of(rank, torch.ones(1))}
            described.append(through_a_point(rank, tree)[0])
    assert described[0] == described[1] == described[2]


def test_pieces_of_all_ranks_form_the_whole_in_any_order() -> None:
    by_rank = []
    for rank in range(RANKS):
        with world(rank, RANKS):
            tree = {
                "rows": piece_of(rank),
                "columns": [piece_of(rank, dim=1)],
                "few": piece_of(rank, torch.ones(1)),
                "n": 1,
            }
            by_rank.append(through_a_point(rank, tree))
    for described, _ in by_rank:
        together = whole([described], [own for _, own in reversed(by_rank)])
        assert torch.equal(together["rows"], WHOLE) and torch.equal(together["columns"][0], WHOLE)
        assert torch.equal(together["few"], torch.ones(1)) and together["n"] == 1
    with pytest.raises(CheckpointError, match=r"state\.rows: the points of 2 ranks hold 20 of its 35 .* all 3 ranks"):
        whole([by_rank[0][0]], [own for _, own in by_rank[1:]])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ((2, 0), r"state\.rows: two points claim to hold the same elements: \[0:3, 0:5\] of .*; \[2:5, 0:5\] of"),
        ((5, 0), r"state\.rows: a point claims to hold \[5:8, 0:5\] of shape \(7, 5\).*not inside the tensor"),
        ((-1, 0), r"state\.rows: a point claims to hold \[-1:2, 0:5\]"),
    ],
    ids=["overlapping", "outside", "negative"],
)
def test_false_offsets_are_refused_and_leave_no_gap_in_the_whole(offsets: tuple[int, int], message: str) -> None:
    by_rank = []
    for rank in range(RANKS):
        with world(rank, RANKS):
            by_rank.append(through_a_point(rank, {"rows": piece_of(rank)}))
    by_rank[1][1]["state.rows"]["offsets"] = offsets
    with pytest.raises(CheckpointError, match=message):
        whole([by_rank[0][0]], [own for _, own in by_rank])


@pytest.mark.parametrize("rank", range(RANKS))
def test_tensor_saved_whole_is_cut_for_this_rank(rank: int) -> None:
    with world(rank, RANKS):
        live = {"a": piece_of(rank), "few": piece_of(rank, torch.ones(1))}
        back = putting({}).back({"a": WHOLE, "few": torch.full((1,), 2.0)}, "state", live)
        assert torch.equal(back["a"]._local_tensor, live["a"]._local_tensor)
        assert back["few"]._local_tensor.tolist() == ([2.0] if rank == 0 else [])


def test_point_before_a_group_exists_holds_whole_tensors() -> None:
    with world():
        own: pieces.Own = {}
        taken = pieces.take_out({"a": piece_of(0, size=1)}, "state", own)
        assert own == {} and type(taken["a"]) is torch.Tensor and torch.equal(taken["a"], WHOLE)
        assert isinstance(putting({}, mesh_of(1)).back(taken, "state", {"a": piece_of(0, size=1)})["a"], DTensor)


def test_replicated_tensor_is_not_a_piece() -> None:
    with world(1, RANKS):
        own: pieces.Own = {}
        tensor = DTensor.from_local(WHOLE, mesh_of(), [Replicate()], run_check=False)
        assert torch.equal(pieces.take_out(tensor, "state", own), WHOLE) and own == {}


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_piece_of_another_rank_is_refused_with_both_places() -> None:
    with world(0, RANKS):
        shared, own = through_a_point(0, {"a": piece_of(0)})
    with world(1, RANKS), pytest.raises(CheckpointError) as refused:
        putting(own).back(shared, "state", {"a": piece_of(1)})
    assert str(refused.value).startswith(
        "state.a: the restore point holds [0:3, 0:5] of shape (7, 5), Shard(dim=0) over 3; "
        "this rank's part is [3:6, 0:5] of shape (7, 5), Shard(dim=0) over 3: continue with"
    )


def test_piece_of_another_rank_is_refused_even_without_a_target() -> None:
    with world(0, RANKS):
        shared, own = through_a_point(0, {"a": piece_of(0)})
    with world(1, RANKS), pytest.raises(CheckpointError, match=r"state\.a: .*\[0:3, 0:5\].*part is \[3:6, 0:5\]"):
        putting(own).back(shared, "state", {})


@pytest.mark.parametrize("has_live", [True, False])
def test_other_world_size_is_refused(has_live: bool) -> None:
    with world(0, RANKS):
        shared, own = through_a_point(0, {"a": piece_of(0)})
    with world(0, 2), pytest.raises(CheckpointError, match=r"state\.a: .* over 3; .* over 2: .*load_dcp"):
        putting(own, mesh_of(2)).back(shared, "state", {"a": piece_of(0, size=2)} if has_live else {})


@pytest.mark.parametrize("has_live", [True, False])
def test_number_of_replicas_may_differ_and_that_of_the_shards_may_not(has_live: bool) -> None:
    def replicated(replicas: int, shards: int) -> DTensor:
        mesh, part = init_device_mesh("cpu", (replicas, shards)), WHOLE.chunk(shards)[1].clone()
        return DTensor.from_local(
            part, mesh, [Replicate(), Shard(0)], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
        )

    with world(3, 4):
        shared, own = through_a_point(3, {"a": replicated(2, 2)})
    with world(1, 2):
        live = replicated(1, 2)
        back = putting(own, live.device_mesh).back(shared, "state", {"a": live} if has_live else {})
        assert torch.equal(back["a"]._local_tensor, live._local_tensor) and back["a"].device_mesh == live.device_mesh
    with world(1, 4), pytest.raises(CheckpointError, match=r"over 2 x 2; .* over 1 x 4"):
        live = replicated(1, 4)
        putting(own, live.device_mesh).back(shared, "state", {"a": live} if has_live else {})


def test_other_placement_is_refused() -> None:
    with world(0, RANKS):
        shared, own = through_a_point(0, {"a": piece_of(0)})
        with pytest.raises(CheckpointError, match=r"Shard\(dim=0\) over 3; .* Shard\(dim=1\) over 3"):
            putting(own).back(shared, "state", {"a": piece_of(0, dim=1)})


def test_missing_piece_is_refused() -> None:
    with world(0, RANKS):
        shared, _ = through_a_point(0, {"a": piece_of(0)})
        with pytest.raises(CheckpointError, match=r"state\.a: no remaining point holds this rank's part"):
            putting({}).back(shared, "state", {"a": piece_of(0)})


def test_unsavable_placement_is_refused_by_its_path() -> None:
    with world(0, RANKS):
        tensor = DTensor.from_local(WHOLE, mesh_of(), [Partial()], run_check=False)
        with pytest.raises(CheckpointError, match=r"state\.b: a DTensor placed as Partial.*redistribute"):
            pieces.take_out({"b": tensor}, "state", {})


@pytest.mark.parametrize("shape", [(1,), (5,), (6, 4), (7, 1, 3)])
@pytest.mark.parametrize(
    "placements", [(Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Replicate())], ids=str
)
def test_piece_has_the_offsets_that_torch_gives_it(shape: tuple[int, ...], placements: tuple[Any, ...]) -> None:
    for rank in range(6):
        with world(rank, 6):
            mesh = init_device_mesh("cpu", (2, 3))
            sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
            part = torch.empty(sizes)
            tensor = DTensor.from_local(
                part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=torch.empty(shape).stride()
            )
            piece = Piece.of(tensor, "a")
            assert piece.sizes == sizes
            assert piece.offsets == offsets or 0 in sizes  # an empty part may start anywhere


def test_piece_describes_its_place() -> None:
    with world(2, RANKS):
        piece = Piece.of(piece_of(2), "a")
    assert (piece.shape, piece.mesh, piece.placements) == ((7, 5), (3,), ("Shard(dim=0)",))
    assert (piece.offsets, piece.sizes, piece.is_whole) == ((6, 0), (1, 5), False)
