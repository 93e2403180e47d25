"""Pipeline stages in a TorchState: each rank keeps its own, and what torch's objects keep is renewed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from samebits.core.messages import Sharding
from samebits.errors import CheckpointError, UsageError
from samebits.training.group import meshes
from samebits.training.process import context
from samebits.training.sharding import filling
from samebits.training.sharding.whole import whole
from samebits.training.state import snapshot
from samebits.training.state.data.global_batch import GlobalBatch
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.torch_state import TorchState
from tests.training.sharding.worlds import alone, world

RANKS, STAGES = 2, 4
DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = SimpleNamespace(enable_recovery=True, min_worker_num=RANKS, max_worker_num=RANKS)
    monkeypatch.setattr(context, "current", lambda _: SimpleNamespace(settings=fixed))


def built(count: int = STAGES, device: str = "cpu", **more: Any) -> tuple[TorchState, Any]:
    """Return what a script builds before its process has a rank, and its mesh."""
    with alone():
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
        torch.manual_seed(1)
        with torch.device(device):
            parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(count))
        state = TorchState(parts, torch.optim.Adam(parts.parameters()), pipeline=mesh["pp"], rng="per_step", **more)
    return state, mesh


def enter(state: TorchState) -> None:
    """Begin a generation, whose group stands."""
    meshes.form_all()
    state.enter_group()


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_rank_keeps_its_own_stages_and_the_initial_weights_of_the_whole_model(rank: int, device: str) -> None:
    state, _ = built(device=device)
    whole, _ = built(device=device)
    filling.fill(
        whole.model, [whole.model], DEVICE, whole._sharded.drawn_from if device == "meta" else torch.get_rng_state()
    )
    parameters = list(state.model.parameters())
    with world(rank, RANKS):
        enter(state)
        assert all(map(lambda one, other: one is other, parameters, state.model.parameters()))
        own = [index for index, part in enumerate(state.model) if not part.weight.is_meta]
        assert own == [rank, rank + RANKS]
        assert state.sharding(RANKS) == Sharding((RANKS,), (False,)) and not state.weights()
        if device == "meta":
            assert all(torch.equal(state.model[index].weight, whole.model[index].weight) for index in own)


def test_a_rank_gets_its_own_stages_back_and_an_initial_point_has_all() -> None:
    initial, _ = built()
    tree, parts = snapshot.split(initial.contents(), "state")
    contents = snapshot.join(tree, {one.name: one for one in parts})
    state, _ = built()
    with world(1, RANKS):
        enter(state)
        before = state.model[3].weight.detach().clone()
        with torch.no_grad():
            state.model[3].weight.zero_()
        state.load(contents, own=False)
        assert torch.equal(state.model[3].weight, before) and state.model[2].weight.is_meta
        mine = snapshot.join(*_through(state.contents()))
        with torch.no_grad():
            state.model[3].weight.zero_()
        state.load(mine, own=True)
        assert torch.equal(state.model[3].weight, before)


def _through(contents: Any) -> tuple[Any, Any]:
    tree, parts = snapshot.split(contents, "state")
    return tree, {part.name: type(part)(part.name, part.dtype, part.shape, bytearray(part.data)) for part in parts}


def test_the_points_of_all_stages_make_the_whole_state() -> None:
    contents, expected = [], {}
    for rank in range(RANKS):
        state, _ = built()
        with world(rank, RANKS):
            enter(state)
            for index in (rank, rank + RANKS):
                for one in state.model[index].parameters():
                    one.grad = torch.full_like(one, index + 1.0)
            state.optimizer.step()
            expected |= {f"{i}.weight": state.model[i].weight.detach().clone() for i in (rank, rank + RANKS)}
            contents.append(snapshot.join(*_through(state.contents())))
    trees, owns = [one["shared"]["values"] for one in contents], [one["own"]["shards"] for one in contents]
    found = whole(trees, owns)
    assert all(torch.equal(found["model"][name], weight) for name, weight in expected.items())
    assert list(found["optimizer"]["state"]) == list(range(2 * STAGES))
    assert found["optimizer"]["state"][6]["exp_avg"].unique().tolist() == pytest.approx([0.4])
    with pytest.raises(CheckpointError, match=r"state\.model\.1\.weight"):
        whole(trees[:1], owns[:1])


def test_a_kept_stage_and_schedule_are_the_same_objects_without_remains_in_the_next_generation() -> None:
    state, mesh = built()
    with world(0, RANKS):
        enter(state)
        first = mesh.get_group("pp")
        stages = [pipelining.PipelineStage(state.model[i], i, STAGES, DEVICE, group=first) for i in (0, 2)]
        schedule = pipelining.ScheduleInterleaved1F1B(stages, 2, loss_fn=nn.functional.mse_loss)
        stages[1].fwd_cache[0] = stages[1].bwd_cache[1] = ()
        schedule._internal_losses.append(torch.ones(()))
        schedule.fwd_recv_ops[0, 0] = []
        schedule._stages_forward_initialized = True
    with world(0, RANKS):
        enter(state)
        assert all(one.group is mesh.get_group("pp") is not first for one in stages)
        assert not stages[1].fwd_cache and not stages[1].bwd_cache and schedule._stages is stages
        assert not schedule._internal_losses and not schedule.fwd_recv_ops
        assert not schedule._stages_forward_initialized


def _schedule(kind: str, *more: Any) -> Callable[[Any, Any], object]:
    def build(state: Any, mesh: Any) -> object:
        group = mesh.get_group("pp")
        stages = [pipelining.PipelineStage(state.model[i], i, STAGES, DEVICE, group=group) for i in (0, 2)]
        return getattr(pipelining, kind)(stages, 4, *more, loss_fn=nn.functional.mse_loss)

    return build


def _stage(index: int = 0, part: int = 0, count: int = STAGES, **more: Any) -> Callable[[Any, Any], object]:
    def build(state: Any, mesh: Any) -> object:
        stage = pipelining.PipelineStage(state.model[part], index, count, DEVICE, **more)
        return pipelining.ScheduleGPipe(stage, 2)

    return build


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (_schedule("ScheduleLoopedBFS"), "the schedule ScheduleLoopedBFS is not supported. Fix: use one of"),
        (_schedule("ScheduleInterleavedZeroBubble"), "the schedule ScheduleInterleavedZeroBubble is not supported"),
        (_stage(1, 1), "stage 1 of 4 does not belong to this rank, which trains parts 0, 2 of the 4"),
        (_stage(0, 2), "stage 0 of 4 does not belong to this rank"),
        (_stage(0, 0, 2), "stage 0 of 2 does not belong to this rank"),
    ],
)
def test_other_stages_and_schedules_are_refused_before_they_are_built(build: Any, found: str) -> None:
    state, mesh = built()
    with world(0, RANKS):
        enter(state)
        with pytest.raises(UsageError, match=found) as raised:
            build(state, mesh)
        assert "Fix: " in str(raised.value) and "\n" not in str(raised.value)


def test_a_stage_over_another_group_is_refused() -> None:
    with alone():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
        parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(STAGES))
        state = TorchState(parts, torch.optim.Adam(parts.parameters()), pipeline=mesh["pp"])
    with world(2, 4):
        enter(state)
        assert state.sharding(4) == Sharding((2, 2), (False, True))
        with pytest.raises(UsageError, match=r'group other than that of the dimension "pp". Fix: .*get_group\("pp"\)'):
            _stage(1, 1)(state, mesh)


def test_arguments_that_make_no_pipeline_are_refused() -> None:
    with alone():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))

        def state(model: nn.Module, pipeline: Any = mesh["pp"]) -> None:
            TorchState(model, torch.optim.Adam(model.parameters()), pipeline=pipeline)

        three = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        with pytest.raises(UsageError, match=r"model is a Linear. Fix: .*nn.ModuleList"):
            state(nn.Linear(3, 3))
        with pytest.raises(UsageError, match=r"needs one named mesh dimension. Fix: pipeline=mesh"):
            state(three, mesh)
        with pytest.raises(UsageError, match=r'3 stages cannot be spread evenly over the 2 ranks along "pp"'):
            state(three)
        shared = nn.ModuleList([three[0], nn.Sequential(three[0])])
        with pytest.raises(UsageError, match=r"state.model.1.0.weight is the same parameter as state.model.0.weight"):
            state(shared)
        with pytest.raises(UsageError, match=r"state.model.0 is in DistributedDataParallel"):
            state(nn.ModuleList([DistributedDataParallel(three[0]), three[1]]))
        with pytest.raises(UsageError, match=r"state.model.1.0 \(BatchNorm1d\) keeps running statistics.*Fix: "):
            state(nn.ModuleList([three[0], nn.Sequential(nn.BatchNorm1d(3))]))


def test_stages_of_a_state_without_a_pipeline_and_before_its_function_are_refused() -> None:
    with alone(), pytest.raises(UsageError, match=r"PipelineStage\(…\) before samebits.elastic.run.*Fix: "):
        pipelining.PipelineStage(nn.Linear(3, 3), 0, 2, DEVICE)
    model = nn.Linear(3, 3)
    state = TorchState(model, torch.optim.Adam(model.parameters()))
    with world(0, RANKS):
        assert dist.is_initialized()
        state.enter_group()
        with pytest.raises(UsageError, match=r"but the state has no pipeline.*Fix: TorchState\(nn.ModuleList"):
            pipelining.PipelineStage(model, 0, 2, DEVICE)


def test_gradients_of_stages_are_not_summed_over_all_ranks() -> None:
    state, _ = built()
    with world(0, RANKS):
        batches = GlobalBatch(ElasticSampler(range(8)), state.model.parameters(), size=4, micro=2)
        enter(state)
        with pytest.raises(UsageError, match=r"the given parameters are sharded .*a pipeline.*Fix: "):
            iter(batches)
