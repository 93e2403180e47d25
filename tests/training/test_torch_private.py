"""Each private torch interface that SameBits uses exists and does what ``torch_private`` says."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d, pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.pipelining import schedules
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel

from samebits.training import torch_private

TIMEOUT = timedelta(seconds=30)
Made = tuple[dist.ProcessGroup, dist.ProcessGroupGloo, dist.Store]


@pytest.fixture
def group() -> Iterator[Made]:
    """Return a group of one, made as ours are and registered as torch's default."""
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


def test_launches_on_torchs_own_groups_are_reported_before_they_happen(
    group: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in (*torch_private.COLLECTIVES, *torch_private.PAIRWISE) if hasattr(dist.ProcessGroup, name)]
    assert {"allreduce", "broadcast", "barrier", "send", "recv", "_allgather_base"} <= set(names)
    for name in names:
        monkeypatch.setattr(dist.ProcessGroup, name, getattr(dist.ProcessGroup, name))  # put back afterwards
    told: list[int] = []
    torch_private.before_launches(lambda: told.append(1))
    torch_private.before_launches(lambda: told.append(2))  # it is installed already
    rows = torch.ones(3)
    dist.all_reduce(rows)
    dist.barrier()
    assert (told, rows.tolist()) == ([1, 1], [1, 1, 1])


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_torchruns_agent_logs_how_a_worker_ended(tmp_path: Path) -> None:
    failures = torch_private.WorkerFailures()
    specs = DefaultLogsSpecs(log_dir=str(tmp_path))
    workers = start_processes("killed", _killed, {0: ()}, {0: {}}, logs_specs=specs)
    ended = workers.wait(timeout=60)
    assert ended is not None and ended.failures
    pid = ended.failures[0].pid
    assert failures.take() == f"local rank 0 (pid {pid}) was killed by signal 9" and failures.take() == ""


def test_group_is_made_and_reduces(group: Made) -> None:
    pg, _, _ = group
    rows = torch.ones(3)
    dist.all_reduce(rows)
    assert dist.get_world_size() == 1 and rows.tolist() == [1, 1, 1]
    assert (pg.group_name, pg.group_desc) == ("7", "a probe")
    assert torch_private.backend_of(pg, torch.device("cpu")) is not None
    assert torch_private.backend_of(pg, torch.device("meta")) is None


def test_gloo_publishes_its_address_under_the_expected_key() -> None:
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


def registries() -> list[dict[Any, Any]]:
    world = distributed_c10d._world
    return [
        dict(world.pg_map),
        dict(world.pg_names),
        dict(world.pg_backend_config),
        {one: dict(ranks) for one, ranks in world.pg_group_ranks.items()},
        {tag: list(groups) for tag, groups in world.tags_to_pg.items()},
        dict(world.pg_to_tag),
    ]


def test_manual_registration_equals_torchs_own_function(group: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    pg, _, store = group
    by_torch = registries()
    torch_private.uninstall_default_group(pg)
    monkeypatch.delattr(distributed_c10d, "_register_pg_in_world", raising=False)
    torch_private.install_default_group(pg, store, 1)
    assert registries() == by_torch
    dist.all_reduce(torch.ones(1))


class MakesItsOwn(dist.ProcessGroup):
    """A default group that is asked for its subgroups."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self.asked: list[object] = []
        self.made: dist.ProcessGroup | None = None

    def new_group(self, ranks: list[int], **options: object) -> dist.ProcessGroup | None:
        self.asked.append((ranks, options))
        return self.made


def subgroup_of(store: dist.Store) -> dist.ProcessGroup:
    made = dist.ProcessGroup(store, 0, 1)
    mesh = torch_private.gloo_mesh(store, 0, 1, torch_private.gloo_device("127.0.0.1"), TIMEOUT, TIMEOUT)
    torch_private.dress_group(made, mesh, "8", "undefined")
    return made


@pytest.fixture
def asked(group: Made) -> Iterator[MakesItsOwn]:
    pg, mesh, store = group
    torch_private.uninstall_default_group(pg)
    own = MakesItsOwn(pg)
    torch_private.dress_group(own, mesh, "7", "a probe")
    torch_private.install_default_group(own, store, 1)
    yield own
    torch_private.uninstall_default_group(own)


def test_default_group_that_makes_its_subgroups_is_asked_for_them(asked: MakesItsOwn, group: Made) -> None:
    asked.made = subgroup_of(dist.PrefixStore("sub", group[2]))
    assert dist.new_group([0], timeout=TIMEOUT, group_desc="mine") is asked.made
    ((ranks, options),) = asked.asked  # type: ignore[misc]
    assert ranks == [0] and options["timeout"] == TIMEOUT and options["group_desc"] == "mine"  # type: ignore[has-type]
    assert torch_private.subgroups_of(asked) == [asked.made]
    assert dist.get_process_group_ranks(asked.made) == [0]
    assert distributed_c10d._world.tags_to_pg[""] == [asked]
    asked.made = None
    assert dist.new_group([0]) is dist.GroupMember.NON_GROUP_MEMBER


def test_subgroup_of_older_versions_is_requested_and_registered_like_torchs(asked: MakesItsOwn, group: Made) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("torch made the group")

    helper = torch_private.asks_default_group(never)
    assert torch_private.asks_default_group(helper) is helper
    options = {"backend_options": None, "timeout": TIMEOUT, "pg_tag": None, "device_id": None, "group_desc": "mine"}
    made = asked.made = subgroup_of(dist.PrefixStore("sub", group[2]))
    assert helper(1, 0, [0], "gloo", group[2], "9", **options)[0] is made
    by_hand = registries()
    asked.made = subgroup_of(dist.PrefixStore("other", group[2]))
    by_torch = dist.new_group([0])
    assert by_torch is asked.made
    for one, other in zip(by_hand, registries(), strict=True):
        assert other.keys() - one.keys() <= {by_torch, f"ptd:{distributed_c10d._world.pg_names[by_torch]}"}
        kinds = [type(entries.get(made)) for entries in (one, other)]
        assert kinds == [type(other.get(by_torch))] * 2
    with pytest.raises(AssertionError, match="torch made"):
        helper(1, 0, [], "gloo", group[2], "10", **options)


def test_backward_pass_has_a_number_and_calls_back_before_its_end() -> None:
    seen: list[object] = []

    def hook(gradient: torch.Tensor) -> None:
        seen.append(torch_private.current_backward())
        torch_private.before_backward_ends(lambda: seen.append("the end"))

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(hook)
    assert torch_private.current_backward() == -1
    leaf.sum().backward()
    assert isinstance(seen[0], int) and seen[0] >= 0 and seen[1:] == ["the end"]


def test_tensor_counts_its_changes() -> None:
    tensor = torch.ones(2)
    before = torch_private.version_of(tensor)
    tensor.add_(1)
    assert torch_private.version_of(tensor) == before + 1


@pytest.fixture
def unwatched() -> Iterator[None]:
    """Restore torch's original ``nn.Parameter``."""
    watched = vars(nn.Parameter).get("data")
    kind: Any = nn.Parameter
    if watched is not None:
        del kind.data
    yield
    del kind.data
    if watched is not None:
        kind.data = watched


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("compiled", [False, True])
def test_access_to_data_is_seen_and_changes_no_version(compiled: bool) -> None:
    seen: list[tuple[str, torch.Tensor]] = []
    parameter, other = nn.Parameter(torch.zeros(2)), torch.ones(2)
    torch_private.watch_data(
        parameter, lambda one, _: seen.append(("read", one)), lambda one: seen.append(("assigned", one))
    )

    def scaled(rows: torch.Tensor) -> torch.Tensor:
        return rows * parameter.data.sum() + parameter

    before = torch_private.version_of(parameter)
    parameter.data.copy_(other)
    parameter.data = other
    assert [(what, one is parameter) for what, one in seen] == [("read", True), ("assigned", True)]
    assert torch_private.version_of(parameter) == before and parameter.data_ptr() == other.data_ptr()
    function = torch.compile(scaled, backend="aot_eager", fullgraph=True) if compiled else scaled
    assert torch.equal(function(torch.ones(2)), torch.full((2,), 3.0))
    del seen[:]
    torch_private.give_data(parameter, torch_private.data_of(parameter))
    assert not seen


def test_weak_reference_shows_whether_its_tensor_is_alive() -> None:
    tensor = torch.zeros(3)
    reference, view = weakref.ref(tensor), tensor[1:]
    del tensor
    assert torch_private.is_alive(reference), "its view keeps it"
    assert torch_private.is_alive(reference)
    del view
    assert not torch_private.is_alive(reference)


def test_wrapper_arranges_its_buckets_after_its_first_iteration(group: Made) -> None:
    ddp = stepped(DistributedDataParallel(Net()), 1)
    assert not torch_private.is_laid_out(ddp)
    before = [id(one) for bucket in torch_private.buckets_of(ddp) for one in bucket.parameters()]
    assert torch_private.lay_out_if_due(ddp) and torch_private.is_laid_out(ddp)
    after = [id(one) for bucket in torch_private.buckets_of(ddp) for one in bucket.parameters()]
    assert sorted(before) == sorted(after) and len(after) == 6
    assert not torch_private.lay_out_if_due(ddp)


def test_new_reducer_arranges_parameters_in_order_of_arrival(group: Made) -> None:
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


def test_static_graph_is_learned_between_its_first_iterations(group: Made) -> None:
    ddp = DistributedDataParallel(Net(), static_graph=True)
    assert not torch_private.is_learning(ddp)
    stepped(ddp, 1)
    assert torch_private.is_learning(ddp)
    stepped(ddp, 2)
    assert not torch_private.is_learning(ddp)


def test_wrapper_attributes_are_available(group: Made) -> None:
    pg, _, _ = group
    ddp = DistributedDataParallel(Net())
    assert not torch_private.reduces_past_reducer(ddp) and not torch_private.uses_python_reducer(ddp)
    assert not torch_private.ends_by_hand(ddp)
    torch_private.give_reducer_group(ddp, pg)
    stepped(ddp, 1)
    torch_private.make_buffers_rank_0s(ddp)


def test_stages_and_schedules_are_reported_before_they_are_built_and_start_over_in_place(group: Made) -> None:
    told: list[tuple[object, list[str]]] = []
    assert torch_private.uses_pipelines()
    torch_private.follow_pipelines(lambda built, given: told.append((built, sorted(given))))
    stage = pipelining.PipelineStage(nn.Linear(2, 2), 0, 2, torch.device("cpu"), group=group[0])
    schedule = pipelining.ScheduleGPipe(stage, n_microbatches=2)
    last = pipelining.PipelineStage(nn.Linear(2, 2), 1, 2, torch.device("cpu"), group=group[0])
    several = pipelining.ScheduleInterleaved1F1B([stage, last], 2)
    names = ["device", "group", "num_stages", "stage_index", "submodule"]
    assert told == [
        (stage, names),
        (schedule, ["n_microbatches", "stage"]),
        (last, names),
        (several, ["n_microbatches", "stages"]),
    ]
    fresh = {one: set(vars(one)) for one in (stage, last, schedule, several)}
    stage.fwd_cache[0] = ()
    schedule._stage_forward_initialized = True
    several.fwd_recv_ops[0, 0] = []
    several.register_custom_function(schedules.FORWARD, print)
    other = dist.ProcessGroup(group[2], 0, 1)
    dist.distributed_c10d._world.pg_group_ranks[other] = {0: 0}
    for one in (stage, last, schedule, several):
        torch_private.renew_pipelined(one, other)
        assert set(vars(one)) == fresh[one]
    assert stage.group is other and not stage.fwd_cache and schedule._stage is stage
    assert not schedule._stage_forward_initialized and not several.fwd_recv_ops
    assert several._comp_type_to_function_map == {schedules.FORWARD: print}
    del dist.distributed_c10d._world.pg_group_ranks[other]


def test_each_context_parallel_is_reported_before_it_divides_a_sequence() -> None:
    def refuse(mesh: DeviceMesh) -> None:
        raise ValueError(f"refused with {mesh.size()} ranks")

    torch_private.follow_context_parallel(print)
    torch_private.follow_context_parallel(refuse)
    mesh: Any = SimpleNamespace(size=lambda: 2)
    refused = pytest.raises(ValueError, match="refused with 2 ranks")
    with refused, context_parallel(mesh, buffers=[sequences := torch.arange(8.0)], buffer_seq_dims=[0]):
        raise AssertionError("was not reported")
    assert sequences.shape == (8,)


def test_group_connects_for_a_device_and_is_aborted(group: Made) -> None:
    pg, _, _ = group
    torch_private.connect_device(pg, torch.device("cpu", 0))
    bound: Any = pg
    assert bound.bound_device_id == torch.device("cpu", 0)
    torch_private.abort_group(pg, torch.device("cpu"))


@pytest.mark.parametrize(
    ("plugins", "name"),
    [
        ({}, "nccl"),  # before torch 2.14
        ({"NCCL": "first", "NCCL-LEGACY": "first"}, "nccl"),  # torch 2.14
        ({"NCCL": "second", "NCCL-LEGACY": "first"}, "nccl-legacy"),  # torch 2.15, or TORCH_DIST_USE_NCCL2=1 before
    ],
)
def test_torchs_first_nccl_backend_is_found_by_what_creates_it(
    monkeypatch: pytest.MonkeyPatch, plugins: dict[str, str], name: str
) -> None:
    registered = {key: SimpleNamespace(creator_fn=one) for key, one in plugins.items()}
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, *map(str.lower, plugins)])

    def register(wanted: str) -> None:
        if wanted.upper() in registered:
            dist.Backend._plugins[wanted.upper()] = registered[wanted.upper()]

    monkeypatch.setattr(dist.Backend, "_ensure_backend_registered", register, raising=False)
    monkeypatch.setattr(dist, "is_backend_available", lambda one: register(one) or one.upper() in registered)
    assert torch_private.first_nccl() == name


class _First:
    """What ``dir(ProcessGroupNCCL)`` has of torch 2.14.1+cu130 among the methods that SameBits uses."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name not in ("_group_start", "_group_end", "abort", "_get_sequence_number_for_group"):
            raise AttributeError(name)
        return lambda *_: self.calls.append(name) or 7


class _Second(_First):
    """The same interfaces of ``ProcessGroupNCCL2`` and ``ProcessGroupNCCLLazy``."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("_group_"):
            raise AttributeError(name)
        return super().__getattr__(name)


class _OneBracket(_First):
    def __getattr__(self, name: str) -> Callable[..., object]:
        if name == "_group_end":
            raise AttributeError(name)
        return super().__getattr__(name)


class _Hccl(_Second):
    def abort_hccl_comm(self, reason: str) -> None:
        self.calls.append("abort_hccl_comm")


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize(
    ("kind", "device_type", "abort", "launched", "is_named"),
    [
        (_First, "cuda", ["abort"], 7, False),
        (_Second, "cuda", ["abort"], None, True),
        (_OneBracket, "cuda", ["abort"], None, True),
        (_Hccl, "npu", ["abort_hccl_comm"], None, False),
        (_Second, "trial", ["abort"], 7, False),  # another package's
    ],
)
def test_backend_is_used_as_its_methods_allow(
    kind: type[_First], device_type: str, abort: list[str], launched: int | None, is_named: bool, is_wrapped: bool
) -> None:
    backend, device = kind(), SimpleNamespace(type=device_type)
    seen = SimpleNamespace(wrapped_pg=backend, _get_sequence_number_for_group=lambda: 7) if is_wrapped else backend
    group: Any = SimpleNamespace(_get_backend=lambda _: seen, abort=lambda: backend.calls.append("abort"))
    torch_private.abort_group(group, device)
    assert backend.calls == abort
    assert torch_private.launched([group], device) == launched
    assert torch_private.leaves_pairs_open(group, device) is is_named


def test_torchs_own_devices_are_not_packages() -> None:
    assert {torch_private.registered_backend(kind) for kind in ("cpu", "cuda", "xpu", "mps", "privateuseone")} == {None}
