"""Each private interface of torch's that SameBits relies on is there, and does what ``torch_private`` says it does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from runtime.training import torch_private

TIMEOUT = timedelta(seconds=30)
Made = tuple[dist.ProcessGroup, dist.ProcessGroupGloo, dist.Store]


@pytest.fixture
def group() -> Iterator[Made]:
    """A group of one, made as ours are and known to torch as the default."""
    store = dist.HashStore()
    mesh = torch_private.gloo_mesh(store, 0, 1, torch_private.gloo_device("127.0.0.1"), TIMEOUT, TIMEOUT)
    pg = dist.ProcessGroup(store, 0, 1)
    torch_private.dress_group(pg, mesh, "7", "a probe")
    torch_private.install_default_group(pg, store, 1)
    yield pg, mesh, store
    torch_private.uninstall_default_group(pg)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(2, 3), nn.Linear(3, 1), nn.BatchNorm1d(3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.norm(self.first(rows)))
        return out


def stepped(ddp: DistributedDataParallel, times: int) -> DistributedDataParallel:
    for _ in range(times):
        ddp(torch.ones(4, 2)).sum().backward()
    return ddp


def test_a_group_is_made_and_reduces(group: Made) -> None:
    pg, _, _ = group
    rows = torch.ones(3)
    dist.all_reduce(rows)
    assert dist.get_world_size() == 1 and rows.tolist() == [1, 1, 1]
    assert (pg.group_name, pg.group_desc) == ("7", "a probe")
    assert torch_private.backend_of(pg, torch.device("cpu")) is not None
    assert torch_private.backend_of(pg, torch.device("meta")) is None


def test_gloo_says_where_it_listens_under_the_key_we_look_at() -> None:
    store = dist.HashStore()

    def meet(rank: int) -> dist.ProcessGroupGloo:
        return torch_private.gloo_mesh(store, rank, 2, torch_private.gloo_device("127.0.0.1"), TIMEOUT, TIMEOUT)

    with ThreadPoolExecutor(2) as ranks:
        meshes = list(ranks.map(meet, (0, 1)))
    assert [mesh.size() for mesh in meshes] == [2, 2]
    assert all(store.check([torch_private.key_of_gloo_rank(rank)]) for rank in (0, 1))
    assert not store.check([torch_private.key_of_gloo_rank(2)])


def test_torch_knows_the_group_and_its_subgroups_until_it_is_uninstalled(group: Made) -> None:
    pg, _, _ = group
    assert torch_private.is_registered(pg) and not torch_private.is_registered(object())
    assert torch_private.subgroups_of(pg) == []
    assert dist.distributed_c10d.get_group_rank(pg, 0) == 0
    subgroup = dist.new_group([0], backend="gloo")
    assert torch_private.subgroups_of(pg) == [subgroup]
    assert torch_private.uninstall_default_group(pg) == [subgroup]
    assert not dist.is_initialized() and not torch_private.is_registered(pg)


def test_the_way_by_hand_registers_what_torchs_own_function_does(group: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    pg, _, store = group
    world = distributed_c10d._world

    def registries() -> list[dict[object, object]]:
        return [
            dict(world.pg_map),
            dict(world.pg_names),
            dict(world.pg_backend_config),
            {one: dict(ranks) for one, ranks in world.pg_group_ranks.items()},
            {tag: list(groups) for tag, groups in world.tags_to_pg.items()},
            dict(world.pg_to_tag),
        ]

    by_torch = registries()
    torch_private.uninstall_default_group(pg)
    monkeypatch.delattr(distributed_c10d, "_register_pg_in_world", raising=False)
    torch_private.install_default_group(pg, store, 1)
    assert registries() == by_torch
    dist.all_reduce(torch.ones(1))


def test_a_backward_pass_has_a_number_and_calls_back_before_its_end() -> None:
    seen: list[object] = []

    def hook(gradient: torch.Tensor) -> None:
        seen.append(torch_private.current_backward())
        torch_private.before_backward_ends(lambda: seen.append("the end"))

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(hook)
    assert torch_private.current_backward() == -1
    leaf.sum().backward()
    assert isinstance(seen[0], int) and seen[0] >= 0 and seen[1:] == ["the end"]


def test_a_tensor_counts_its_changes() -> None:
    tensor = torch.ones(2)
    before = torch_private.version_of(tensor)
    tensor.add_(1)
    assert torch_private.version_of(tensor) == before + 1


def test_a_wrapper_lays_out_its_buckets_after_its_first_iteration(group: Made) -> None:
    ddp = stepped(DistributedDataParallel(Net()), 1)
    assert not torch_private.is_laid_out(ddp)
    before = [id(one) for bucket in torch_private.buckets_of(ddp) for one in bucket.parameters()]
    assert torch_private.lay_out_if_due(ddp) and torch_private.is_laid_out(ddp)
    after = [id(one) for bucket in torch_private.buckets_of(ddp) for one in bucket.parameters()]
    assert sorted(before) == sorted(after) and len(after) == 6
    assert not torch_private.lay_out_if_due(ddp)


def test_a_new_reducer_is_laid_out_as_its_parameters_come(group: Made) -> None:
    ddp = stepped(DistributedDataParallel(Net()), 2)
    parameters, sparse = torch_private.parameters_of(ddp)
    assert len(parameters) == 6 and not any(sparse)
    order = [parameters[index] for index in (3, 0, 5, 1, 4, 2)]
    torch_private.unhook_reducer(ddp)
    torch_private.new_reducer(ddp, order, list(sparse))
    assert not torch_private.is_laid_out(ddp)
    assert torch_private.lay_out_as_given(ddp) and torch_private.is_laid_out(ddp)
    laid_out = [id(one) for bucket in torch_private.buckets_of(ddp) for one in bucket.parameters()]
    assert laid_out == [id(one) for one in order]
    stepped(ddp, 1)
    assert all(one.grad is not None for one in ddp.module.parameters())


def test_a_static_graph_is_learned_between_its_first_iterations(group: Made) -> None:
    ddp = DistributedDataParallel(Net(), static_graph=True)
    assert not torch_private.is_learning(ddp)
    stepped(ddp, 1)
    assert torch_private.is_learning(ddp)
    stepped(ddp, 2)
    assert not torch_private.is_learning(ddp)


def test_what_a_wrapper_is_asked_for(group: Made) -> None:
    pg, _, _ = group
    ddp = DistributedDataParallel(Net())
    assert not torch_private.reduces_past_reducer(ddp) and not torch_private.uses_python_reducer(ddp)
    torch_private.give_reducer_group(ddp, pg)
    stepped(ddp, 1)
    torch_private.make_buffers_rank_0s(ddp)
