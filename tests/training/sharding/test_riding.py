"""FSDP2 modules moved from whole to sharded and to the next group, in place and as fully_shard does it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from samebits.errors import UsageError
from samebits.training.sharding import regrouping
from tests.training.sharding.worlds import (
    RANKS,
    locals_of,
    loss_of,
    sharded_model,
    sharded_state,
    train_one_step,
    world,
)

KEPT_BY_TORCH = ("sharded_size", "contiguous_sharded_stride", "padded_sharded_param_size", "_sharded_param_data")


@pytest.mark.parametrize("rank", range(RANKS))
def test_parameters_are_cut_as_fully_shard_cuts_them_in_that_world(rank: int) -> None:
    with world():
        model = sharded_model()
        loss_of(model)  # a forward pass initialises FSDP2 for a group of one
    with world(rank, RANKS):
        regrouping.attach([model], [])
        stock = sharded_model()
        for one, other in zip(model.parameters(), stock.parameters(), strict=True):
            assert one._spec == other._spec  # type: ignore[attr-defined]
            torch.testing.assert_close(one._local_tensor, other._local_tensor, rtol=0, atol=0)  # type: ignore[attr-defined]
        pairs = zip(regrouping._groups(model), regrouping._groups(stock), strict=True)
        for mine, theirs in (
            pair for one, other in pairs for pair in zip(one.fsdp_params, other.fsdp_params, strict=True)
        ):
            for name in KEPT_BY_TORCH:
                here, there = getattr(mine, name), getattr(theirs, name)
                assert torch.equal(here, there) if isinstance(here, torch.Tensor) else here == there, name
            assert mine._sharded_param_data.data_ptr() == mine.sharded_param._local_tensor.data_ptr() or rank == 2
            assert (mine.mesh_info.shard_mesh_rank, mine.mesh_info.shard_mesh_size) == (rank, RANKS)
            assert mine.mesh_info.shard_process_group is dist.group.WORLD
            assert mine.all_gather_outputs == [] and not hasattr(mine, "_unsharded_param")
        loss_of(model)  # shapes match: with silent peers there are no values to compare


def test_parameters_stay_the_objects_that_optimizers_hold() -> None:
    with world():
        state = sharded_state()
        train_one_step(state)
        before = list(state.model.parameters())
        whole = [state.optimizer.state[one]["exp_avg"]._local_tensor for one in before]
    with world(1, RANKS):
        regrouping.attach([state.model], [state.optimizer])
        assert all(one is other for one, other in zip(state.model.parameters(), before, strict=True))
        for one, moment in zip(before, whole, strict=True):
            cut = state.optimizer.state[one]["exp_avg"]
            assert cut._spec.placements == one._spec.placements and cut._spec.mesh == one._spec.mesh
            assert torch.equal(cut._local_tensor, list(moment.chunk(RANKS))[1])
        for one in before:
            one.grad = torch.zeros_like(one)
        state.optimizer.step()


def test_next_group_of_the_same_size_replaces_only_the_group() -> None:
    with world():
        model = sharded_model()
    with world(2, RANKS):
        regrouping.attach([model], [])
        before, places = locals_of(model), [one._local_tensor.data_ptr() for one in model.parameters()]
    with world(2, RANKS):
        regrouping.attach([model], [])
        assert [one._local_tensor.data_ptr() for one in model.parameters()] == places
        assert all(torch.equal(one, other) for one, other in zip(locals_of(model), before, strict=True))
        for group in regrouping._groups(model):
            assert group.mesh_info.shard_process_group is dist.group.WORLD is group.mesh_info.mesh.get_group()
            assert group._all_gather_process_group is dist.group.WORLD is group._reduce_scatter_process_group


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, RANKS), (0, 1)])
def test_other_place_is_refused_with_the_supported_way(rank: int, size: int) -> None:
    with world():
        model = sharded_model()
    with world(0, RANKS):
        regrouping.attach([model], [])
    with world(rank, size), pytest.raises(UsageError, match=f"over 3 ranks, this one being rank 0.* has {size}.*dcp"):
        regrouping.attach([model], [])


def test_interrupted_step_leaves_nothing_behind() -> None:
    with world():
        model, undisturbed = sharded_model(), sharded_model()
        loss_of(undisturbed, 1).backward()

        def cut_off(*_: object) -> None:
            raise ConnectionError("a peer is gone")

        handle = model[0].register_forward_hook(lambda module, inputs, output: output.register_hook(cut_off) and None)
        with pytest.raises(ConnectionError):
            loss_of(model, 0).backward()
        handle.remove()
        assert any(not group.is_sharded for group in regrouping._groups(model)), "the test shows nothing"
        regrouping.reset(model)
        assert all(group.is_sharded for group in regrouping._groups(model))
        assert [one.grad for one in model.parameters()] == [None] * 6
        loss_of(model, 1).backward()
        for one, other in zip(model.parameters(), undisturbed.parameters(), strict=True):
            assert torch.equal(one.grad._local_tensor, other.grad._local_tensor)  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}], ids=str)
def test_interrupted_window_adds_nothing_to_the_next_one(policy: dict[str, torch.dtype]) -> None:
    with world():
        model, undisturbed = (sharded_model(mp_policy=MixedPrecisionPolicy(**policy)) for _ in range(2))
        loss_of(undisturbed, 1).backward()
        model.set_requires_gradient_sync(False)
        loss_of(model, 0).backward()
        regrouping.reset(model)
        model.set_requires_gradient_sync(True)
        loss_of(model, 1).backward()
        for one, other in zip(model.parameters(), undisturbed.parameters(), strict=True):
            assert torch.equal(one.grad._local_tensor, other.grad._local_tensor)  # type: ignore[union-attr]


# --- what is not supported --------------------------------------------------------------------------------------------


def require(model: nn.Module) -> None:
    regrouping.require_supported("model", model, [])


def test_fully_shards_defaults_are_supported() -> None:
    with world():
        require(sharded_model())
        frozen = sharded_model()
        frozen[0].requires_grad_(False)
        require(frozen)


@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_fsdp1_is_refused() -> None:
    with world():
        model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
        with pytest.raises(UsageError, match="model is in FullyShardedDataParallel"):
            require(model)


def test_parameters_without_values_are_refused() -> None:
    with world(), torch.device("meta"):
        model = fully_shard(nn.Linear(4, 4))
        with pytest.raises(UsageError, match=r"model\.weight is on the meta device"):
            require(model)


def test_hybrid_sharding_is_refused() -> None:
    with world():
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        with pytest.raises(UsageError, match=r"model \(FSDPLinear\) uses a mesh of its own \(hybrid"):
            require(model)


def test_tensor_parallel_parameters_are_refused() -> None:
    with world():
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[1])
        parallelize_module(model[0], mesh, ColwiseParallel())
        with pytest.raises(UsageError, match=r"model\.0\.weight is a DTensor that no fully_shard module manages"):
            require(model)


def test_manually_distributed_tensor_is_refused() -> None:
    with world():
        model = nn.Linear(4, 4, bias=False)
        mesh = init_device_mesh("cpu", (1,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(UsageError, match=r"model\.weight is a DTensor"):
            require(model)
