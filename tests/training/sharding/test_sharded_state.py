"""A TorchState with a sharded model: its points hold and restore exactly this rank's pieces."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from samebits.core.messages import Sharding
from samebits.core.point import Point
from samebits.errors import CheckpointError, UsageError
from samebits.training.process import context
from samebits.training.state import snapshot
from samebits.training.state.local_sgd import LocalSGD
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Commits
from tests.training.sharding.worlds import RANKS, locals_of, loss_of, sharded_state, train_one_step, wholes_of, world

FIXED = SimpleNamespace(enable_recovery=True, min_worker_num=RANKS, max_worker_num=RANKS)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 1)
    monkeypatch.setattr(context, "current", lambda _: SimpleNamespace(settings=FIXED))
    with world():
        yield


def through_a_point(state: TorchState) -> dict[str, Any]:
    """Return the state's contents as restored from a point of this rank."""
    tree, parts = snapshot.split(state.contents(), "state")
    copied = {part.name: type(part)(part.name, part.dtype, part.shape, bytearray(part.data)) for part in parts}
    contents: dict[str, Any] = snapshot.join(tree, copied)
    return contents


def entered(state: TorchState) -> TorchState:
    state.enter_group()
    return state


def pieces_of(state: TorchState) -> list[torch.Tensor]:
    """Return this rank's weights, and Adam's first moments if there are any."""
    moments = [values["exp_avg"]._local_tensor.clone() for values in state.optimizer.state.values()]
    return locals_of(state.model) + moments


def require_same(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(some) == len(others) > 0
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def trained(steps: int = 2) -> TorchState:
    """Return the full state after some steps."""
    state = sharded_state(rng="per_step", epoch=3)
    for number in range(steps):
        train_one_step(state, number)
    return state


def test_state_before_a_group_exists_is_shared_and_whole() -> None:
    contents = trained().contents()
    assert contents["own"] == {"shards": {}}
    assert contents["shared"]["values"]["model"]["0.weight"].shape == (7, 4)
    assert type(contents["shared"]["values"]["optimizer"]["state"][0]["exp_avg"]) is torch.Tensor


def test_all_ranks_start_with_rank_0s_values() -> None:
    first, other = trained(), sharded_state(seed=5, rng="per_step", epoch=0)
    other.load(through_a_point(first), own=False)
    require_same(wholes_of(other), wholes_of(first))
    assert other.epoch == 3


def test_error_within_a_forward_pass_is_not_replaced_by_one_about_the_mesh() -> None:
    def fail(*_: object) -> None:
        raise ValueError("the script's own error")

    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    state = TorchState(model, torch.optim.SGD(model.parameters(), 0.1), rng="per_step")
    model[1].register_forward_hook(fail)
    with pytest.raises(ValueError, match="the script's own error"):
        try:
            loss_of(model)
        finally:
            assert not any(isinstance(one, DTensor) for one in model.parameters()), "FSDP2 shards them again"
            state.bind(None, 0)  # as elastic.run does whatever has ended training


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_rank_gets_its_own_pieces_back(rank: int) -> None:
    state, fresh = trained(), sharded_state(seed=5, rng="per_step", epoch=0)
    with world(rank, RANKS):
        entered(state)
        expected = pieces_of(state)
        contents = through_a_point(state)
        assert len(contents["own"]["shards"]) == 6 + 12
        entered(fresh).load(contents, own=True)
        require_same(pieces_of(fresh), expected)
        assert (fresh.epoch, fresh.completed_steps) == (3, state.completed_steps)
        for one in fresh.model.parameters():
            one.grad = torch.zeros_like(one)
        fresh.optimizer.step()


@pytest.mark.parametrize("has_hook", [False, True])
def test_pieces_are_copied_without_a_dispatcher_unless_a_module_converts_what_it_loads(has_hook: bool) -> None:
    state, fresh = trained(), sharded_state(seed=5, rng="per_step", epoch=0)
    converted: list[str] = []
    if has_hook:
        fresh.model[0].register_load_state_dict_pre_hook(lambda _, given, prefix, *__: converted.extend(given))
    with world(1, RANKS):
        expected, contents = pieces_of(entered(state)), through_a_point(state)
        parameters = list(entered(fresh).model.parameters())
        versions = [one._version for one in parameters]
        fresh.load(contents, own=True)
        require_same(pieces_of(fresh), expected)
        assert ([one._version for one in parameters] == versions) is not has_hook  # DTensor's copy_() counts
    assert ("0.weight" in converted) is has_hook


def test_pieces_are_read_into_their_existing_memory() -> None:
    state = trained()
    with world(1, RANKS):
        entered(state)
        saved = {part.name for part in snapshot.split(state.contents(), "state")[1]}
        _, live = snapshot.take_apart(state.live_contents(), "state")
        targets = snapshot.in_place(live)
        shards = {name for name in saved if name.startswith("state.own.shards.")}
        assert shards <= targets.keys() and len(shards) == 18
        places = {one._local_tensor.data_ptr() for one in state.model.parameters()}
        assert places <= {tensor.data_ptr() for name, tensor in live if name in shards}


def test_sharded_state_names_its_shards_even_while_it_is_whole() -> None:
    assert sharded_state(rng="per_step").sharding(3) == Sharding((3,), (False,))  # nobody else holds its part


def test_only_parts_equal_on_all_ranks_are_compared() -> None:
    state = trained()
    assert state.weights() == []
    with world(1, RANKS):
        entered(state)
        assert [tuple(one.shape) for one in state.shards().values()] == [(3,), (3, 4), (2,), (2, 7), (1,), (1, 5)]


def test_pieces_changed_through_data_return_to_the_last_commit() -> None:
    state = trained()
    with world(1, RANKS):
        entered(state)
        Commits(state)
        expected = pieces_of(state)
        for one in state.model.parameters():
            one.data.zero_()
        assert not any(one.any() for one in locals_of(state.model))
        assert state.recall() is not None
        require_same(pieces_of(state), expected)


def test_point_of_another_rank_is_refused() -> None:
    other, state = trained(), trained()
    with world(0, RANKS):
        contents = through_a_point(entered(other))
    with world(1, RANKS):
        before = pieces_of(entered(state))
        with pytest.raises(
            CheckpointError, match=r"0\.weight: the restore point holds \[0:3.* this rank's part is \[3:6"
        ):
            state.load(contents, own=False)
        with pytest.raises(
            CheckpointError, match=r"state\.model\.0\.weight: no remaining point holds this rank's part"
        ):
            state.load({**contents, "own": {}}, own=False)
        require_same(pieces_of(state), before)


def test_interrupted_step_is_not_part_of_the_last_commit() -> None:
    state = sharded_state(rng="per_step")
    Commits(state)
    train_one_step(state)
    state.commit()
    expected = wholes_of(state)
    loss_of(state.model, 1)  # unsharded and never resumed from
    assert state.recall() == Point(1, 1)
    require_same(wholes_of(state), expected)
    assert all(type(one).__name__ == "DTensor" for one in state.model.parameters())


def test_commit_inside_an_accumulation_window_waits_for_its_end() -> None:
    """FSDP2 keeps unreduced gradients itself, outside the parameters."""
    state = sharded_state(rng="per_step")
    commits = Commits(state)
    for number in range(4):
        is_last = number == 3
        state.model.set_requires_gradient_sync(is_last)
        loss_of(state.model, number).backward()
        if is_last:
            state.optimizer.step()
            state.optimizer.zero_grad()
        state.commit()
        assert commits.count == int(is_last)


def test_several_steps_between_commits_are_copied_and_undone() -> None:
    state = sharded_state(rng="per_step", copy_commits=True)
    Commits(state)
    train_one_step(state)
    state.commit()
    expected = wholes_of(state)
    train_one_step(state, 1)
    train_one_step(state, 2)
    state.restore()
    require_same(wholes_of(state), expected)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_elastic_world_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    state = sharded_state()
    elastic = SimpleNamespace(enable_recovery=True, min_worker_num=2, max_worker_num=4)
    monkeypatch.setattr(context, "current", lambda _: SimpleNamespace(settings=elastic))
    with pytest.raises(UsageError, match="MIN_WORKER_NUM=2 and MAX_WORKER_NUM=4: the state is sharded"):
        state.bind(SimpleNamespace(), 0)  # type: ignore[arg-type]
    state.bind(None, 0)


def test_users_own_sharded_tensor_is_refused() -> None:
    state = sharded_state()
    other = TorchState(state.model, mean=next(state.model.parameters()).detach())
    with pytest.raises(UsageError, match=r"state\.mean is a DTensor that belongs to no module"):
        other.enter_group()


def test_local_sgd_needs_a_whole_model() -> None:
    with pytest.raises(UsageError, match="needs a whole model"):
        LocalSGD(sharded_state(rng="per_step"), sync_every=4)
