"""States without a job: a session that remembers every commit, and small models to train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samebits.core.point import Point
from samebits.errors import GenerationEndedError
from samebits.training.state.base_state import State
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.torch_state import TorchState


class Commits:
    """A session that remembers every commit, as the running one does."""

    recovers = True

    def __init__(self, state: State, *, point: Point | None = None, rank: int = 0) -> None:
        self.count = 0
        self.lost = False
        self._state = state
        state.bind(self, rank)
        state.begin(point or Point(0, 1))

    def before_step(self) -> None:
        """Do nothing: there is one rank."""

    def save(self) -> None:
        self.count += 1
        self._state.remember(Point(self._state.completed_steps, 1))

    def flush(self) -> None:
        """Write nothing."""

    def check(self) -> None:
        if self.lost:
            raise GenerationEndedError("a member was lost")

    def sync(self) -> None:
        """Do nothing: there is one rank."""


class Net(nn.Module):
    """Two layers and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)).relu())
        return result


def small_state(**attributes: Any) -> TorchState:
    torch.manual_seed(0)
    model = Net()
    return TorchState(model, torch.optim.Adam(model.parameters()), sampler=ElasticSampler(range(32)), **attributes)


def backward(state: TorchState, number: int = 0) -> None:
    """Use the same data for the same number."""
    assert state.model is not None
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    state.model(x).square().sum().backward()


def train_one_step(state: TorchState, number: int = 0) -> None:
    assert state.optimizer is not None
    state.optimizer.zero_grad()
    backward(state, number)
    state.optimizer.step()


def bits_of(state: TorchState) -> list[bytes]:
    """Return everything a step depends on: weights, buffers, moments."""
    assert state.model is not None and state.optimizer is not None
    moments = [
        one
        for _, values in sorted(state.optimizer.state_dict()["state"].items())
        for _, one in sorted(values.items())
        if isinstance(one, torch.Tensor)
    ]
    return [one.detach().contiguous().numpy().tobytes() for one in [*state.model.state_dict().values(), *moments]]
