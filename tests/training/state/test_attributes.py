"""Plain attributes of modules and optimizers that change during training belong to a commit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from samebits.service import log
from samebits.training.process import context
from samebits.training.run.retaken_steps import _digests_of
from samebits.training.state import snapshot
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Commits, Net, small_state, train_one_step


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 1)


class Annealed(Net):
    """A model with attributes of several kinds; ``rank`` differs between processes and never changes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.temperature: Any = 2.0
        self.window = (0, 8)
        self.name: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature *= 0.9
        self.window = (self.window[0] + 1, 8)
        vars(self)["calls"] = vars(self).get("calls", 0) + 1
        return super().forward(x) / self.temperature


class Counting(torch.optim.SGD):
    """An optimizer whose rate depends on the number of its steps, which only an attribute holds."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        return super().step(closure)


def annealed(rank: int = 0) -> TorchState:
    torch.manual_seed(0)
    model = Annealed(rank)
    state = TorchState(model, Counting(model.parameters(), lr=0.1))
    Commits(state)
    return state


def values(state: TorchState) -> dict[str, Any]:
    names = ("temperature", "window", "name", "calls")
    return {name: vars(state.model)[name] for name in names if name in vars(state.model)} | {
        "steps": state.optimizer.steps
    }


def sent(state: TorchState) -> Any:
    tree, parts = snapshot.split(state.contents(), "state")
    return snapshot.join(tree, {part.name: part for part in parts})


@pytest.mark.parametrize("commits", [0, 2])
@pytest.mark.parametrize("stepped", [False, True], ids=["backward only", "step"])
def test_survivor_returns_to_the_values_of_the_commit(commits: int, stepped: bool) -> None:
    state = annealed()
    for number in range(commits):
        train_one_step(state, number)
        state.commit()
    before, point = values(state), sent(state)
    state.model.name = "interrupted"
    state.model(torch.randn(8, 4)).sum().backward()
    if stepped:
        state.optimizer.step()
    assert (state.recall() is None) == stepped
    if stepped:
        state.load(point, own=False)
    assert values(state) == before


def test_newcomer_gets_changed_values_and_keeps_its_own_constants() -> None:
    state, newcomer = annealed(rank=0), annealed(rank=1)
    for number in range(3):
        train_one_step(state, number)
        state.commit()
    state.model.temperature = np.float64(1.25)
    newcomer.load(sent(state), own=False)
    assert values(newcomer) == values(state)
    assert type(newcomer.model.temperature) is np.float64
    assert newcomer.model.rank == 1


def test_loading_an_earlier_point_restores_the_values_at_the_start() -> None:
    state = annealed()
    first, point = values(state), sent(state)
    train_one_step(state)
    state.commit()
    state.load(point, own=False)
    assert values(state) == first


def test_change_after_the_commit_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "warn", lines.append)
    state = annealed()
    for number in range(3):
        train_one_step(state, number)
        state.commit()
        state.model.temperature *= 0.5
    [line] = lines
    assert "test_attributes.py:" in line
    assert "temperature of state.model changed after this commit" in line


def test_plain_attribute_does_not_make_a_retaken_step_different() -> None:
    state = small_state()
    before = _digests_of(state)
    vars(state.model)["began"] = 1.5
    assert _digests_of(state) == before


def test_attribute_that_takes_the_place_of_another_is_restored() -> None:
    state = annealed()
    vars(state.model)["first"] = 1.0
    state.commit()
    del vars(state.model)["first"]
    vars(state.model)["second"] = 2.0
    state.commit()
    state.model.second = 3.0
    assert state.recall() is not None
    assert state.model.second == 2.0


class Rotary(Net):
    """A model with a table that is computed again for another length, as in a rotary embedding."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.table = torch.arange(float(length)) if length else None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if len(x) != self.length:
            self.length = len(x)
            self.table = torch.arange(float(len(x)))
        assert self.table is not None
        return super().forward(x + self.table[: len(x), None])


def rotary(length: int) -> TorchState:
    torch.manual_seed(0)
    model = Rotary(length)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Commits(state)
    return state


def step_over(state: TorchState, length: int) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(length, 4)).sum().backward()
    state.optimizer.step()


@pytest.mark.parametrize("length", [0, 2], ids=["filled by the first step", "filled at the start"])
def test_number_that_describes_a_tensor_is_not_sent_without_it(length: int) -> None:
    state, newcomer = rotary(length), rotary(length)
    for number in (5, 5, 7, 7):
        step_over(state, number)
        state.commit()
    newcomer.load(sent(state), own=False)
    assert (newcomer.model.length, newcomer.model.calls) == (length, 4)
    step_over(newcomer, 7)
    newcomer.commit()
    assert newcomer.model.calls == 5


@pytest.mark.parametrize("stepped", [False, True], ids=["backward only", "step"])
@pytest.mark.parametrize(("commits", "length"), [(0, 0), (2, 0), (3, 0), (2, 2), (3, 2)])
def test_survivor_keeps_a_number_together_with_its_tensor(commits: int, length: int, stepped: bool) -> None:
    state = rotary(length)
    for _ in range(commits):
        step_over(state, 5)
        state.commit()
    point, calls = sent(state), state.model.calls
    state.model(torch.ones(7, 4)).sum().backward()
    if stepped:
        state.optimizer.step()
        state.load(point, own=False)
    else:
        assert state.recall() is not None
    assert (0 if state.model.table is None else len(state.model.table)) == state.model.length
    assert state.model.calls == calls


def test_numbers_beside_tensors_of_different_ranks_do_not_differ() -> None:
    first, second = rotary(2), rotary(2)
    for state, length in ((first, 5), (second, 2)):
        step_over(state, 2)
        state.commit()
        step_over(state, length)
        state.commit()
    assert sent(first)["shared"]["unlisted"] == sent(second)["shared"]["unlisted"]


class Annealing(Annealed):
    """A model that keeps a feature map of each forward pass, as for an auxiliary loss."""

    features: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features = x.detach() * self.temperature
        return super().forward(x)


class Clipping(Counting):
    """An optimizer that keeps the last norm of its gradients in an attribute."""

    last_norm: torch.Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        [group] = self.param_groups
        self.last_norm = torch.stack([one.grad.norm() for one in group["params"]]).norm()
        return super().step(closure)


def test_number_beside_a_tensor_that_every_step_replaces_belongs_to_a_commit() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Annealing(0)
        states.append(TorchState(model, Clipping(model.parameters(), lr=0.1)))
        Commits(states[-1])
    state, newcomer = states
    for number in range(4):
        train_one_step(state, number)
        state.commit()
    newcomer.load(sent(state), own=False)
    assert values(newcomer) == values(state)
    before = values(state)
    state.model(torch.randn(8, 4)).sum().backward()
    assert state.recall() is not None
    assert values(state) == before
