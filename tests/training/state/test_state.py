"""TorchState: what it holds, counts, returns and restores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.core.point import Point
from samebits.errors import CheckpointError, UsageError
from samebits.store.checkpoint import PointHeader, read, scan, write_point
from samebits.training.process import context
from samebits.training.state import snapshot
from samebits.training.state.checkpoint_config import CheckpointConfig
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Commits


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 1)


def small_state(**attributes: Any) -> TorchState:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    return TorchState(model, torch.optim.Adam(model.parameters()), sampler=ElasticSampler(range(32)), **attributes)


def train_one_step(state: TorchState) -> None:
    assert state.model is not None and state.optimizer is not None
    state.optimizer.zero_grad()
    state.model(torch.rand(8, 4)).square().sum().backward()
    state.optimizer.step()


def contents_of(state: TorchState) -> dict[str, Any]:
    tree, parts = snapshot.split(state.contents(), "state")
    copied = {part.name: type(part)(part.name, part.dtype, part.shape, bytearray(part.data)) for part in parts}
    joined = snapshot.join(tree, copied)
    assert isinstance(joined, dict)
    return joined


def test_everything_is_restored_together() -> None:
    state = small_state(epoch=0, history=[1])
    state.scheduler = None
    assert state.sampler is not None
    train_one_step(state)
    contents, weights = contents_of(state), [tensor.clone() for tensor in state.weights()]
    train_one_step(state)
    state.epoch, state.history = 7, [1, 2]
    state.sampler.record_batch(0, 4)

    state.load(contents, own=True)
    assert all(torch.equal(now, then) for now, then in zip(state.weights(), weights, strict=True))
    assert (state.epoch, state.history, state.sampler.consumed, state.completed_steps) == (0, [1], 0, 1)


def test_objects_with_a_state_dict_are_saved_by_it() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    state = TorchState(model, optimizer, schedule=schedule)
    contents = contents_of(state)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    state.load(contents, own=True)
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 1.0)


def test_saved_generators_repeat_their_draws_and_per_step_ones_need_no_saving() -> None:
    saved = small_state()
    contents = contents_of(saved)
    first = torch.rand(3)
    saved.load(contents, own=True)
    assert torch.equal(torch.rand(3), first)

    derived = small_state(rng="per_step", seed=5)
    assert contents_of(derived)["own"] == {}
    derived.begin(Point(0, 1))
    first = torch.rand(3)
    derived.begin(Point(0, 1))
    assert torch.equal(torch.rand(3), first)


def test_iterating_the_data_again_after_a_recovery_does_not_shift_the_random_numbers() -> None:
    state = small_state()
    assert state.sampler is not None
    state.sampler.record_batch(0, 4)
    contents = contents_of(state)
    undisturbed = torch.rand(3)
    state.load(contents, own=True)
    torch.rand(1)  # what a DataLoader draws when it is iterated
    list(state.sampler)
    assert torch.equal(torch.rand(3), undisturbed)


def test_steps_are_counted_by_the_optimizer_and_commits_name_the_rest() -> None:
    state = small_state()
    commits = Commits(state)
    train_one_step(state)
    train_one_step(state)
    assert (state.completed_steps, state.uncommitted_steps) == (2, 2)
    state.commit()
    assert (state.uncommitted_steps, commits.count) == (0, 1)


@pytest.mark.parametrize("call", [TorchState.commit, TorchState.flush])
def test_call_outside_elastic_run_says_where_it_belongs(call: Callable[[TorchState], None]) -> None:
    with pytest.raises(UsageError, match=rf"state\.{call.__name__}\(\) was called outside samebits\.elastic\.run"):
        call(small_state())


def test_point_of_another_program_is_refused_with_both_lists() -> None:
    contents = contents_of(small_state(epoch=0))
    with pytest.raises(CheckpointError, match=r"\['epoch', 'model', 'optimizer', 'sampler'\].*\['batch', "):
        small_state(batch=0).load(contents, own=True)


@pytest.mark.parametrize("name", ["commit", "model", "load"])
def test_names_of_the_state_itself_are_refused_as_attributes(name: str) -> None:
    with pytest.raises((UsageError, TypeError)):
        TorchState(**{name: 1}, **({"model": None} if name == "model" else {}))


@pytest.mark.parametrize(
    "wrong", [{"save_checkpoint_steps": 0}, {"keep_checkpoint_max": 1}], ids=["no interval", "one kept"]
)
def test_checkpoint_config_that_cannot_keep_its_promise_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        CheckpointConfig(**wrong)


def test_unknown_rng_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="per_step"):
        TorchState(rng="often")


def test_point_is_loaded_into_existing_weights_and_moments(tmp_path: Path) -> None:
    state = small_state(history=[1], mean=torch.ones(2))
    Commits(state)
    for parameter in state.weights():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state.commit()
    tree, parts = snapshot.split(state.contents(), "state")
    write_point(tmp_path, PointHeader("job", Point(1, 1), 1, 0, 0, "0"), parts, tree, {})
    moments = [one for by_name in state.optimizer.state.values() for one in by_name.values()]
    live = [*state.model.state_dict().values(), *moments]
    saved, places = [one.clone() for one in live], [one.data_ptr() for one in live]
    with torch.no_grad():
        for one in live:
            one.zero_()
    state.history, state.mean = [], torch.zeros(2)

    _, tensors = snapshot.take_apart(state.live_contents(), "state")
    (found,) = scan(tmp_path / "0", "job")
    point = read(found, snapshot.in_place(tensors))
    state.load(snapshot.join(point.tree, point.tensors, dict(tensors)), own=True)

    now = [one for by_name in state.optimizer.state.values() for one in by_name.values()]
    assert [one.data_ptr() for one in (*state.model.state_dict().values(), *now)] == places
    assert all(torch.equal(one, then) for one, then in zip(live, saved, strict=True))
    assert len(tensors) == len(live)
    assert (state.history, state.mean.tolist()) == ([1], [1.0, 1.0])
