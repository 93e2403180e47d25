"""A restore point that breaks off half-way: what it was read into is nobody's commit any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from runtime.core.point import Point
from runtime.errors import CheckpointError, GenerationEndedError
from runtime.training import transfer
from runtime.training.checkpoint.state_points import StatePoints
from runtime.training.state import TorchState


@pytest.mark.parametrize("error", [CheckpointError("a piece is not what was sent"), GenerationEndedError("lost")])
def test_a_commit_that_was_half_overwritten_cannot_be_served(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model = nn.Linear(3, 2)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), rng="per_step")
    state.remember(Point(3, 1))
    assert state.recall() == Point(3, 1)
    process: Any = SimpleNamespace(admitted=SimpleNamespace(job="a-job"), device=torch.device("cpu"))
    points = StatePoints(process, state)
    points.place = SimpleNamespace(source=0, rank=1)  # type: ignore[assignment]

    def broken_off(*_: object) -> None:
        model.weight.detach().numpy()[0] = float("nan")  # torch does not see it
        raise error

    monkeypatch.setattr(transfer, "receive", broken_off)
    with pytest.raises(GenerationEndedError):
        points.obtain(Point(4, 1), Point(3, 1), None)  # type: ignore[arg-type]
    assert state.recall() is None
