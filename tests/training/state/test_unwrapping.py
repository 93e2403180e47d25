"""Wrappers as used by Accelerate and Lightning Fabric: the state follows the wrapped object.

The frameworks themselves are tested in ``tests/foreign/frameworks``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from samebits.core.point import Point
from samebits.errors import UsageError
from samebits.training.process import context
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Commits


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 1)


class OfAccelerate(torch.optim.Optimizer):
    """A subclass whose constructor is never called and which forwards everything."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class OfFabric:
    """Becomes an optimizer only by also taking the class of the wrapped one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("FabricSGD", (OfFabric, type(optimizer)), {})

    optimizer = property(lambda self: self._optimizer)

    def step(self) -> None:
        self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class ModuleOfFabric(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = module
        self._original_module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward_module(x)


@pytest.mark.parametrize("wrap", [OfAccelerate, OfFabric, lambda one: OfAccelerate(OfAccelerate(one))])
def test_steps_of_a_wrapped_optimizer_are_counted_and_undone(
    wrap: Callable[[torch.optim.Optimizer], Any],
) -> None:
    layer = nn.Linear(3, 2)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = ModuleOfFabric(layer), wrap(inner)
    state = TorchState(model, optimizer, copy_commits=True)
    commits = Commits(state)
    assert state.model is model and state.optimizer is optimizer
    for step in (1, 2):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        inner.zero_grad()
        state.commit()
        assert state.completed_steps == step
    del commits
    before = [one.clone() for one in layer.parameters()]
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before[0])
    assert state.recall() == Point(2, 1)
    assert all(torch.equal(one, other) for one, other in zip(layer.parameters(), before, strict=True))


def test_points_use_the_names_of_the_wrapped_object() -> None:
    layer = nn.Linear(3, 2)
    state = TorchState(ModuleOfFabric(layer), OfAccelerate(torch.optim.SGD(layer.parameters(), lr=0.1)))
    values = state.contents()["shared"]["values"]
    assert set(values["model"]) == {"weight", "bias"}
    assert set(values["optimizer"]) == {"state", "param_groups"}


class WithMoreOfItsOwn(torch.optim.Optimizer):
    """Like Lookahead, it keeps slow weights beside the optimizer it drives."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def test_optimizer_with_its_own_state_is_not_a_wrapper() -> None:
    layer = nn.Linear(3, 2)
    optimizer = WithMoreOfItsOwn(torch.optim.SGD(layer.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"TorchState\(…, inner_optimizer=optimizer\.optimizer\)"):
        TorchState(layer, optimizer)
    state = TorchState(layer, optimizer, inner_optimizer=optimizer.optimizer)
    assert state.handlers["optimizer"].value is optimizer


def test_unsupported_wrapper_is_refused_in_a_sentence() -> None:
    optimizer = torch.optim.SGD.__new__(torch.optim.SGD)
    with pytest.raises(UsageError, match=r"a state cannot follow a SGD.* Fix: pass the inner optimizer to the state"):
        TorchState(optimizer=optimizer)


def test_optimizer_that_exposes_its_state_elsewhere_is_refused_in_a_sentence(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        layer = nn.Linear(3, 2)
        optimizer = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(
            UsageError, match=r"a ZeroRedundancyOptimizer keeps .* Fix: shard the model with fully_shard"
        ):
            TorchState(layer, optimizer)
    finally:
        dist.destroy_process_group()
