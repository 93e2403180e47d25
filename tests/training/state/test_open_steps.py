"""Gradient accumulation windows and several optimizers: when a commit waits, and what counts as a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samebits.core.point import Point
from samebits.training.process import context
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Commits, backward, bits_of, small_state, train_one_step


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 1)


def step_of(state: TorchState, *, to_none: bool = True) -> None:
    assert state.optimizer is not None
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=to_none)


@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zero"])
def test_commit_inside_a_window_waits_for_its_optimizer_step(to_none: bool) -> None:
    state = small_state(micro=0)
    session = Commits(state)
    for number in range(12):
        backward(state, number)
        state.micro += 1
        if number % 4 == 3:
            step_of(state, to_none=to_none)
        state.commit()
        assert session.count == (number + 1) // 4, f"after micro-batch {number}"
    assert (state.completed_steps, state.micro) == (3, 12)


@pytest.mark.parametrize("killed_after", [0, 1, 2, 3])
def test_loss_in_any_micro_batch_restarts_the_window_and_changes_no_bit(killed_after: int) -> None:
    def train(state: TorchState, until: int) -> None:
        while state.micro < until:
            backward(state, state.micro)
            state.micro += 1
            if state.micro % 4 == 0:
                step_of(state)
            state.commit()

    undisturbed, disturbed = small_state(micro=0), small_state(micro=0)
    for state in (undisturbed, disturbed):
        Commits(state)
    train(undisturbed, 12)
    train(disturbed, 4 + killed_after)
    assert disturbed.recall() == Point(1, 1)
    assert disturbed.micro == 4
    train(disturbed, 12)
    assert bits_of(disturbed) == bits_of(undisturbed)


def test_commit_just_before_the_step_means_the_step() -> None:
    state = small_state(batch=0)
    session = Commits(state)
    backward(state)
    state.batch = 1
    state.commit()
    assert session.count == 0
    step_of(state)
    assert (session.count, state.completed_steps, state.uncommitted_steps) == (1, 1, 0)
    state.batch = 9
    assert state.recall() == Point(1, 1)
    assert state.batch == 1


def test_waiting_commit_is_dropped_if_more_is_accumulated() -> None:
    """If it were kept, its data position would be in the middle of the window."""
    state = small_state()
    session = Commits(state)
    backward(state)
    state.commit()
    backward(state)
    step_of(state)
    assert session.count == 0
    state.commit()
    assert session.count == 1


@pytest.mark.parametrize("to_none", [True, False])
def test_two_commits_with_gradients_cleared_in_between_are_two(to_none: bool) -> None:
    """Gradients of zeros, as at the end of an epoch, do not wait for a step."""
    state = small_state()
    session = Commits(state)
    train_one_step(state)
    state.commit()
    assert state.optimizer is not None
    state.optimizer.zero_grad(set_to_none=to_none)
    state.commit()
    assert session.count == 2


def test_uncleared_gradients_of_the_committed_step_wait_for_nothing() -> None:
    state = small_state()
    session = Commits(state)
    train_one_step(state)
    state.commit()
    state.commit()
    assert session.count == 2


def test_new_gradient_is_never_taken_for_the_old_one() -> None:
    """A freed gradient's memory, and so its identity, is soon reused."""
    state = small_state()
    assert state.model is not None
    state.model.eval()  # a pass after the commit must change no buffer
    session = Commits(state)
    for number in range(50):
        train_one_step(state, number)
        state.commit()
        assert state.optimizer is not None
        state.optimizer.zero_grad()
        backward(state, number)
        state.commit()
        assert session.count == number + 1
        state.optimizer.zero_grad()


def test_step_skipped_by_a_gradient_scaler_does_not_count_and_its_commit_waits() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    state = TorchState(model, optimizer, scaler=scaler, batch=0)
    session = Commits(state)

    def train(value: float) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        state.batch += 1
        state.commit()

    train(1.0)
    assert (session.count, state.completed_steps, scaler.get_scale()) == (1, 1, 8.0)
    train(float("inf"))
    assert (session.count, state.completed_steps, scaler.get_scale()) == (1, 1, 4.0)
    assert state.recall() == Point(1, 1)
    assert (state.batch, scaler.get_scale()) == (1, 8.0)  # the batch is retried and skipped again
    train(float("inf"))
    train(1.0)
    assert (session.count, state.completed_steps, state.batch) == (2, 2, 3)


# ---- several optimizers


class Pair:
    """Two modules with an optimizer each in one state."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.first = torch.optim.Adam(self.one.parameters())
        self.second = torch.optim.Adam(self.two.parameters())
        self.state = TorchState(self.one, self.first, other=self.two, second=self.second)
        self.session = Commits(self.state)

    def clear(self) -> None:
        self.first.zero_grad()
        self.second.zero_grad()

    def bits(self) -> list[bytes]:
        return [one.detach().numpy().tobytes() for one in (*self.one.parameters(), *self.two.parameters())]


def test_two_optimizers_after_one_backward_pass_are_one_step_without_a_copy() -> None:
    pair = Pair()
    for _ in range(3):
        pair.clear()
        pair.two(pair.one(torch.ones(2, 3))).square().sum().backward()
        pair.first.step()
        pair.second.step()
        pair.state.commit()
    assert (pair.state.completed_steps, pair.session.count) == (3, 3)
    assert pair.state._last_commit._newest is None
    assert pair.state.recall() == Point(3, 1)


def test_backward_pass_between_two_optimizers_makes_every_commit_a_copy() -> None:
    """A peer may be lost in it after one of them has stepped."""
    pair = Pair()

    def train() -> None:
        pair.clear()
        pair.one(torch.ones(2, 3)).square().sum().backward()
        pair.first.step()
        pair.two(pair.one(torch.ones(2, 3))).square().sum().backward()
        pair.second.step()

    train()
    pair.state.commit()
    committed = pair.bits()
    train()
    assert pair.state.recall() == Point(1, 1)
    assert pair.bits() == committed


def test_any_optimizers_step_makes_a_rank_dirty_and_a_commit_a_step() -> None:
    pair = Pair()
    for count in (1, 2, 3):
        pair.clear()
        pair.two(torch.ones(2, 3)).sum().backward()
        pair.second.step()
        assert pair.state.recall() is None
        pair.state.commit()
        assert (pair.state.completed_steps, pair.session.count) == (count, count)


def test_gradients_of_all_modules_are_cleared_after_a_loss() -> None:
    pair = Pair()
    pair.two(pair.one(torch.ones(2, 3))).sum().backward()
    assert pair.state.recall() == Point(0, 1)
    assert all(one.grad is None for one in (*pair.one.parameters(), *pair.two.parameters()))


def test_weights_of_all_modules_are_compared_after_a_recovery() -> None:
    pair = Pair()
    assert [id(one) for one in pair.state.weights()] == [
        id(one) for one in (pair.one.bias, pair.one.weight, pair.two.bias, pair.two.weight)
    ]


class Derived(torch.optim.SGD):
    """An optimizer whose step calls its base class's; torch calls the hooks for both once an SGD has been created."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("not now")
        return super().step(closure)


def test_step_that_calls_the_base_classs_step_counts_once_even_after_a_failed_one() -> None:
    torch.optim.SGD([torch.zeros(1)])
    model = nn.Linear(4, 2)
    optimizer = Derived(model.parameters(), lr=0.1)
    state = TorchState(model, optimizer)
    Commits(state)
    for number in range(3):
        backward(state, number)
        optimizer.fails = True
        with pytest.raises(RuntimeError, match="not now"):
            optimizer.step()
        optimizer.fails = False
        optimizer.step()
        state.commit()
        assert state.completed_steps == number + 1
