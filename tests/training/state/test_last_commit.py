"""The last commit in memory is restored completely, whatever has changed since, or reported missing."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from samebits.core.point import Point
from samebits.errors import GenerationEndedError, UsageError
from samebits.training.process import context
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Commits, Net, backward, bits_of, small_state, train_one_step


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 1)


def steps_and_commits(state: TorchState, steps: int, every: int = 1, first: int = 0) -> None:
    for number in range(first, first + steps):
        train_one_step(state, number)
        if (number + 1) % every == 0:
            state.commit()


def test_failed_backward_pass_leaves_the_last_commit_without_a_copy() -> None:
    state = small_state(epoch=0)
    Commits(state)
    steps_and_commits(state, 3)
    committed = bits_of(state)
    assert state.optimizer is not None
    state.optimizer.zero_grad()
    backward(state, 9)  # batch statistics and gradients have changed
    state.epoch = 5
    assert bits_of(state) != committed
    assert state.recall() == Point(3, 1)
    assert (bits_of(state), state.epoch) == (committed, 0)
    assert all(parameter.grad is None for parameter in state.weights())


def test_all_reduce_failing_between_step_and_commit_leaves_this_rank_behind() -> None:
    state = small_state()
    session = Commits(state)
    steps_and_commits(state, 2)
    train_one_step(state, 2)
    session.lost = True
    with pytest.raises(GenerationEndedError):
        state.check_host_updates()
    assert state.recall() is None  # another rank's copy must be used
    with pytest.raises(UsageError, match="copy_commits"):
        state.restore()


def test_with_copies_an_all_reduce_failing_before_the_commit_is_undone() -> None:
    state = small_state(copy_commits=True)
    Commits(state)
    steps_and_commits(state, 2)
    committed = bits_of(state)
    train_one_step(state, 2)
    assert state.recall() == Point(2, 1)
    assert (bits_of(state), state.completed_steps, state.uncommitted_steps) == (committed, 2, 0)
    train_one_step(state, 2)
    assert state.recall() == Point(2, 1), "the same commit must be available twice"
    assert bits_of(state) == committed


def test_training_after_a_recall_computes_what_the_undisturbed_state_does() -> None:
    undisturbed, disturbed = small_state(copy_commits=True), small_state(copy_commits=True)
    for state in (undisturbed, disturbed):
        Commits(state)
        steps_and_commits(state, 2)
    train_one_step(disturbed, 7)
    disturbed.restore()
    for state in (undisturbed, disturbed):
        steps_and_commits(state, 3, first=2)
    assert bits_of(disturbed) == bits_of(undisturbed)


def test_commits_every_ten_steps_are_copied_from_the_second_on() -> None:
    state = small_state()
    Commits(state)
    train_one_step(state)
    assert state.recall() is None  # nothing has shown yet that copies are needed
    state = small_state()
    Commits(state)
    steps_and_commits(state, 10, every=10)
    committed = bits_of(state)
    steps_and_commits(state, 7, every=10, first=10)
    assert state.recall() == Point(10, 1)
    assert bits_of(state) == committed


def test_copies_reuse_one_buffer() -> None:
    state = small_state(copy_commits=True)
    Commits(state)
    places = []
    for number in range(4):
        train_one_step(state, number)
        state.commit()
        newest = state._last_commit._newest
        assert newest is not None
        places.append(newest["model"]["first.weight"].data_ptr())
    assert len(set(places)) == 1


def test_commit_that_was_copied_only_in_part_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    state = small_state(copy_commits=True)
    Commits(state)
    for number in range(2):
        train_one_step(state, number)
        state.commit()

    def interrupted(_handler: object) -> NoReturn:
        raise KeyboardInterrupt

    train_one_step(state, 2)
    with monkeypatch.context() as patched:
        patched.setattr(type(state.handlers["optimizer"]), "contents", interrupted)
        with pytest.raises(KeyboardInterrupt):
            state._last_commit.remember(Point(3, 1))
    assert state._last_commit.recall() is None and state._last_commit.copy is None
    state._last_commit.remember(Point(3, 1))
    assert state._last_commit.recall() == Point(3, 1)


def test_parameter_changed_by_hand_is_noticed() -> None:
    state = small_state()
    Commits(state)
    steps_and_commits(state, 1)
    with torch.no_grad():
        state.weights()[0].mul_(0.5)
    assert state.recall() is None
    state.commit()
    halved = bits_of(state)
    assert state.recall() == Point(1, 1)
    assert bits_of(state) == halved


def test_every_commit_is_copied_without_an_optimizer() -> None:
    """Without an optimizer, nothing signals that weights have changed, so every commit is copied."""
    model = Net()
    state = TorchState(model)
    Commits(state)
    before = [one.clone() for one in model.state_dict().values()]
    model.first.weight.data.add_(1.0)
    state.commit()
    model.first.weight.data.add_(1.0)
    assert state.recall() == Point(1, 1)
    assert torch.equal(model.first.weight, before[0] + 1.0)


@pytest.mark.parametrize("copies", [False, True])
def test_mutable_attributes_are_restored(copies: bool) -> None:
    state = small_state(history=[1], best={"loss": 1.0}, mean=torch.zeros(2), copy_commits=copies)
    Commits(state)
    state.history.append(2)
    state.best["loss"] = 0.5
    state.mean += 1
    state.commit()
    for _ in range(2):
        state.history.append(3)
        state.best["step"] = 7
        state.mean += 1
        state.restore()
        assert (state.history, state.best, state.mean.tolist()) == ([1, 2], {"loss": 0.5}, [1.0, 1.0])


@pytest.mark.parametrize("copies", [False, True])
def test_learning_rate_is_restored_with_its_schedule(copies: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    state = TorchState(model, optimizer, schedule=schedule, copy_commits=copies)
    Commits(state)
    optimizer.step()
    schedule.step()
    state.commit()
    schedule.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    state.restore()
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], schedule.last_epoch, schedule.get_last_lr()) == (0.5, 0, 1, [0.5])


def test_attributes_are_restored_to_the_commit_even_if_tensors_were_copied_later() -> None:
    """An optimizer with a closure is noticed at its first step. Only then are weights copied; the rest was before."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    state = TorchState(model, torch.optim.LBFGS(model.parameters(), max_iter=2), batch=0)
    Commits(state)
    committed = [one.detach().clone() for one in model.parameters()]
    state.batch = 1

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    state.optimizer.step(closure)  # type: ignore[union-attr]
    assert state.recall() == Point(0, 1)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), committed, strict=True))
    assert state.batch == 0


class Replaces(nn.Module):
    """Its forward pass replaces its buffer by a tensor of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach().sum().reshape(1)])
        return x * self.weight


def test_buffer_replaced_by_a_forward_pass_is_restored() -> None:
    model = Replaces()
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Commits(state)
    model(torch.ones(2))
    state.restore()
    assert model.seen.tolist() == [0.0]
    model(torch.ones(2))
    state.commit()
    model(torch.ones(2))
    state.restore()
    assert model.seen.tolist() == [0.0, 2.0]


def test_buffers_moved_after_the_state_was_made_are_restored() -> None:
    state = small_state()
    assert state.model is not None
    state.model.double()
    state.model.float()  # every buffer is another tensor now
    Commits(state)
    committed = bits_of(state)
    backward(state)
    state.restore()
    assert bits_of(state) == committed


def test_data_position_is_restored() -> None:
    state = small_state()
    Commits(state)
    assert isinstance(state.sampler, ElasticSampler)
    state.sampler.record_batch(0, 4)
    state.commit()
    state.sampler.record_batch(1, 4)
    state.sampler.set_epoch(1)
    state.restore()
    assert state.sampler.state_dict() == {"seed": 0, "epoch": 0, "consumed": 4}


@pytest.mark.parametrize("kept", ["saved", "per_step"])
def test_random_numbers_are_repeated(kept: str) -> None:
    state = small_state(rng=kept, seed=3)
    Commits(state)
    steps_and_commits(state, 2)
    first: Any = torch.rand(3)
    state.restore()
    assert torch.equal(torch.rand(3), first)


def test_numbers_restored_by_hand_are_not_restored_again_an_epoch_later() -> None:
    state = small_state()
    Commits(state)
    assert state.sampler is not None
    state.sampler.record_batch(0, 4)
    state.commit()
    state.restore()
    steps_and_commits(state, 1)
    drawn = torch.rand(3)
    list(state.sampler)  # in the middle of the epoch
    assert not torch.equal(torch.rand(3), drawn)


def test_forgotten_commit_is_not_served() -> None:
    state = small_state(copy_commits=True)
    Commits(state)
    state.forget()
    assert state.recall() is None


# ---- restoring a copied commit


def test_restoring_a_copy_keeps_every_tensor_in_place() -> None:
    state = small_state(copy_commits=True)
    Commits(state)
    steps_and_commits(state, 2)
    committed, places = bits_of(state), places_of(state)
    for _ in range(2):
        train_one_step(state, 7)
        state.restore()
        assert (bits_of(state), places_of(state)) == (committed, places)


def places_of(state: TorchState) -> list[int]:
    assert state.model is not None and state.optimizer is not None
    moments = [one for by_name in state.optimizer.state.values() for one in by_name.values()]
    return [one.data_ptr() for one in (*state.model.parameters(), *moments)]


def test_moments_created_after_the_commit_are_removed() -> None:
    state = small_state(copy_commits=True)
    Commits(state)
    train_one_step(state)
    state.restore()
    assert state.optimizer is not None
    assert not state.optimizer.state


class Expands(torch.optim.SGD):
    """Keeps one number as a tensor of its parameter's shape whose elements share memory."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                count = self.state[parameter].get("count", torch.zeros(()))
                self.state[parameter]["count"] = (count.flatten()[:1] + 1).expand(parameter.shape)


def test_moments_with_overlapping_elements_are_restored() -> None:
    model = nn.Linear(3, 2)
    optimizer = Expands(model.parameters(), lr=0.1)
    state = TorchState(model, optimizer, copy_commits=True)
    Commits(state)
    optimizer.step()
    state.commit()
    optimizer.step()
    state.restore()
    assert optimizer.state[model.weight]["count"].tolist() == [[1.0] * 3] * 2


class KeepsMore(torch.optim.SGD):
    """Has a state of its own beside torch's."""

    phase = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "phase": self.phase}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.phase = state_dict["phase"]
        super().load_state_dict({name: one for name, one in state_dict.items() if name != "phase"})


def test_optimizer_with_additional_state_gets_it_back() -> None:
    model = nn.Linear(2, 2)
    optimizer = KeepsMore(model.parameters(), lr=0.1)
    state = TorchState(model, optimizer, copy_commits=True)
    Commits(state)
    optimizer.phase = 1
    optimizer.step()
    state.commit()
    optimizer.phase = 2
    optimizer.step()
    state.restore()
    assert optimizer.phase == 1


class KeepsWhatItIsGiven(nn.Module):
    """Adopts the given tensor instead of copying it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        self.weight.data = state_dict[f"{prefix}weight"]


def test_module_that_adopts_tensors_does_not_get_the_copy_itself() -> None:
    model = KeepsWhatItIsGiven()
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), copy_commits=True)
    Commits(state)
    for _ in range(2):
        with torch.no_grad():
            model.weight.add_(1.0)
        state.restore()
        assert model.weight.tolist() == [1.0, 1.0]
