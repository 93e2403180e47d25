"""Virtual workers of HSDP models: which models have them, and gradients that stay within a shard group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from samebits.errors import UsageError
from samebits.training.group import meshes
from samebits.training.sharding import regrouping, replicas
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.torch_state import TorchState
from tests.training.sharding.worlds import alone, loss_of, sharded_model, world

NAMES = ("dp_replicate", "dp_shard")


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # otherwise the state would set it, and change this process's threads


def mesh_of(*sizes: int, names: tuple[str, ...] = NAMES) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names[-len(sizes) :])


def state_of(model: nn.Module, global_batch: int = 8) -> TorchState:
    optimizer, sampler = torch.optim.Adam(model.parameters()), ElasticSampler(range(32))
    return TorchState(model, optimizer, sampler=sampler, global_batch=global_batch, micro_batch=1)


def one_dimension() -> nn.Module:
    return fully_shard(nn.Linear(4, 4), mesh=mesh_of(4))


def another_dimension() -> nn.Module:
    mesh = mesh_of(2, 2, 2, names=("other", *NAMES))
    return fully_shard(nn.Linear(4, 4), mesh=mesh[NAMES])


def experts() -> nn.Module:
    mesh = mesh_of(2, 2, 2, names=(*NAMES, "ep"))
    layer = parallelize_module(nn.Linear(4, 4), mesh["ep"], ColwiseParallel(), src_data_rank=None)
    return fully_shard(nn.Sequential(layer, nn.Linear(4, 4)), mesh=mesh[NAMES], ignored_params=set(layer.parameters()))


def tensor_parallel(*sizes: int) -> nn.Module:
    mesh = mesh_of(*sizes, names=(*NAMES, "tp"))
    layer = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel(), src_data_rank=None)
    return fully_shard(nn.Sequential(layer, nn.Linear(4, 4)), mesh=mesh[NAMES])


def part_that_is_not_sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return fully_shard(model, mesh=mesh_of(2, 2), ignored_params=set(model[1].parameters()))


def batch_statistics() -> nn.Module:
    return fully_shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), mesh=mesh_of(2, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (one_dimension, r"state\.model, which is sharded, but not by fully_shard over a device mesh with replicas"),
        (another_dimension, r"the device mesh 2 x 2 x 2 \(other, dp_replicate, dp_shard\)"),
        (experts, r"parts of state\.model that are DTensors without fully_shard"),
        (part_that_is_not_sharded, "trained parameters that are not sharded"),
        (batch_statistics, r"batch statistics in state\.model, which is sharded"),
    ],
)
def test_sharding_whose_gradients_cannot_be_summed_is_refused(make: Any, message: str) -> None:
    with alone(), pytest.raises(UsageError, match=f"virtual workers are not possible with {message}.*Fix: "):
        state_of(make())


def test_virtual_workers_that_do_not_fill_the_shard_groups_are_refused() -> None:
    message = "5 / 1 gives 5 virtual workers, and each replica .* computes 2 at a time.*multiple of 2 x 1"
    with alone(), pytest.raises(UsageError, match=message):
        state_of(sharded_model(mesh=mesh_of(2, 2)), global_batch=5)


@pytest.mark.parametrize("reshards", [True, False])
def test_gradients_are_reduced_within_a_shard_group_in_every_generation(
    reshards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(*_: object, **__: object) -> None:
        raise AssertionError("a sum over the replicas")

    with alone():
        model = sharded_model(mesh=(mesh := mesh_of(3, 2)), reshard_after_forward=reshards)
        regrouping.require_supported("model", model, [])
        meshes.let_shrink(mesh, 0)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    for generation, (rank, ranks) in enumerate([(5, 6), (3, 4), (1, 2)]):
        with world(rank, ranks):
            meshes.form_all()
            regrouping.attach([model], [])
            if generation == 0:
                with pytest.raises(AssertionError, match="a sum over the replicas"):
                    loss_of(model).backward()
                regrouping.reset(model)
            place = replicas.reduce_within_shard_groups([model])
            assert (place.index, place.count, place.shard, place.shards) == (rank // 2, ranks // 2, 1, 2)
            assert place.across is mesh.get_group("dp_replicate")
            assert place.within == (mesh.get_group("dp_shard"),)
            loss_of(model).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad._spec == parameter._spec  # type: ignore[attr-defined]
                parameter.grad = None


def test_tensor_parallel_ranks_belong_to_the_virtual_worker_of_their_shard() -> None:
    for rank, index, shard in ((0, 0, 0), (1, 0, 0), (3, 0, 1), (4, 1, 0), (7, 1, 1)):
        with alone():
            model = tensor_parallel(2, 2, 2)
            state_of(model)
            regrouping.require_supported("model", model, [])
        with world(rank, 8):
            meshes.form_all()
            regrouping.attach([model], [])
            place = replicas.reduce_within_shard_groups([model])
            assert (place.index, place.count, place.shard, place.shards) == (index, 2, shard, 2)
            assert [one.size() for one in place.within] == [2, 2] and place.across not in place.within


def test_later_states_of_the_model_may_have_virtual_workers_or_not() -> None:
    def infos() -> list[object]:
        groups = regrouping.parameter_groups(model)
        return [info for one in groups for info in (one.mesh_info, one.post_forward_mesh_info)]

    with alone():
        model = sharded_model(mesh=mesh_of(2, 2))
        state_of(model)
    with world(3, 4):
        meshes.form_all()
        regrouping.attach([model], [])
        before = infos()
        replicas.reduce_within_shard_groups([model])
        assert infos() != before and replicas.unsupported({"model": model}) == ""
        replicas.reduce_over_replicas([model])
        assert all(one is other for one, other in zip(infos(), before, strict=True))
