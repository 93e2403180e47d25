"""What a state's points do in one process: a restore point that breaks off half-way, and memory that is prepared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from runtime.core.point import Point
from runtime.errors import CheckpointError, GenerationEndedError
from runtime.training.checkpoint.state_points import StatePoints
from runtime.training.group import transfer
from runtime.training.state.torch_state import TorchState


@pytest.mark.parametrize("error", [CheckpointError("a piece is not what was sent"), GenerationEndedError("lost")])
def test_a_commit_that_was_half_overwritten_cannot_be_served(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model = nn.Linear(3, 2)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), rng="per_step")
    state.remember(Point(3, 1))
    assert state.recall() == Point(3, 1)
    process: Any = SimpleNamespace(
        admitted=SimpleNamespace(job="a-job"),
        device=torch.device("cpu"),
        agent=SimpleNamespace(report_digests=lambda digests: None),
    )
    points = StatePoints(process, state)
    points.generation = SimpleNamespace(source=0, rank=1)  # type: ignore[assignment]

    def broken_off(*_: object) -> None:
        model.weight.detach().numpy()[0] = float("nan")  # torch does not see it
        raise error

    monkeypatch.setattr(transfer, "receive", broken_off)
    with pytest.raises(GenerationEndedError):
        points.obtain(Point(4, 1), Point(3, 1), None)  # type: ignore[arg-type]
    assert state.recall() is None


def test_memory_is_prepared_once_a_few_commits_after_the_folder_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the first: in a process that has just joined, others wait for that."""
    model = nn.Linear(3, 2)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), rng="per_step")
    process: Any = SimpleNamespace(
        admitted=SimpleNamespace(job="a-job"),
        device=torch.device("cpu"),
        agent=SimpleNamespace(report_digests=lambda digests: None),
    )
    points = StatePoints(process, state)
    points.generation = SimpleNamespace(generation=1, rank=1, world_size=2)  # type: ignore[assignment]
    prepared: list[Point] = []

    def folder(slot: int) -> Any:
        return SimpleNamespace(
            slot=slot,
            settle=lambda: None,
            release=lambda: None,
            header=lambda point, rank, world_size: point,
            prepare=lambda point, tensors, tree, layouts: prepared.append(point),
        )

    monkeypatch.setattr(points, "_open", folder)
    points.take_slot(1)
    for step in range(1, 6):
        points.leave_out(step)
    assert prepared == [Point(2, 1)]
    points.take_slot(1)
    points.leave_out(6)
    points.take_slot(0)
    for step in (7, 8, 9):
        points.leave_out(step)
    assert prepared == [Point(2, 1), Point(8, 1)]
