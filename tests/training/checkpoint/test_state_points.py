"""A state's points in one process: interrupted restores and prepared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from samebits.core.point import Point
from samebits.errors import CheckpointError, GenerationEndedError
from samebits.settings_table import ConsistencySetting
from samebits.training.checkpoint import rollback_copies
from samebits.training.checkpoint.state_points import StatePoints
from samebits.training.group import transfer
from samebits.training.state.torch_state import TorchState


def process(every: int = 0) -> Any:
    return SimpleNamespace(
        admitted=SimpleNamespace(job="a-job"),
        device=torch.device("cpu"),
        agent=SimpleNamespace(report_digests=lambda digests: None, equal_point=None),
        settings=SimpleNamespace(
            enable_recovery=True, consistency=ConsistencySetting("majority", every), shard_copy_every="auto"
        ),
    )


@pytest.mark.parametrize("error", [CheckpointError("a piece is not what was sent"), GenerationEndedError("lost")])
def test_half_overwritten_commit_is_not_served(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model = nn.Linear(3, 2)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), rng="per_step")
    state.remember(Point(3, 1))
    assert state.recall() == Point(3, 1)
    points = StatePoints(process(), state)
    points.generation = SimpleNamespace(source=0, rank=1)  # type: ignore[assignment]

    def broken_off(*_: object) -> None:
        model.weight.detach().numpy()[0] = float("nan")  # torch does not see it
        raise error

    monkeypatch.setattr(transfer, "receive", broken_off)
    with pytest.raises(GenerationEndedError):
        points.obtain(Point(4, 1), Point(3, 1), None)  # type: ignore[arg-type]
    assert state.recall() is None


def test_memory_is_prepared_once_a_few_commits_after_the_folder_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is not prepared at the first commit, because other processes may wait for it."""
    model = nn.Linear(3, 2)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), rng="per_step")
    points = StatePoints(process(), state)
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


def test_state_rolls_back_to_its_copy_and_serves_it_as_that_commit() -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = TorchState(model, optimizer)  # its generators are its own
    points = StatePoints(process(every=5), state)
    points.generation = SimpleNamespace(generation=1, rank=1, world_size=2, local_world_size=2)  # type: ignore
    points.begin_comparing(Point(0, 1))
    seen = {}
    for step in range(1, 13):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        points.commits = step
        state.remember(Point(step, 1))
        points.compare(step, is_save=False)
        seen[step] = ([one.clone() for one in model.parameters()], torch.get_rng_state())
    assert points.go_back(Point(11, 1)) == Point(10, 1) == state.recall()
    weights, generator = seen[10]
    assert all(map(torch.equal, weights, model.parameters())) and points.commits == state.completed_steps == 10
    assert torch.equal(generator, torch.get_rng_state())
    assert points.go_back(Point(9, 1)) == Point(5, 1) and all(map(torch.equal, seen[5][0], model.parameters()))
    assert points.go_back(Point(0, 1)) is None and state.recall() is None, "no part of it is served"


def test_ranks_are_compared_even_without_memory_for_a_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollback_copies, "available_bytes", lambda: 1000)
    model = nn.Linear(3, 2)
    state, told = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1)), process(every=5)
    reports: list[Any] = []
    told.agent.report_digests = reports.append
    points = StatePoints(told, state)
    points.generation = SimpleNamespace(generation=1, rank=1, world_size=9, local_world_size=9)  # type: ignore
    points.begin_comparing(Point(0, 1))
    for step in range(1, 11):
        points.commits = step
        points.compare(step, is_save=False)
    assert [(one.point.step, one.is_kept) for one in reports[-1]][-2:] == [(5, False), (10, False)]
    assert points.go_back(Point(9, 1)) is None
    assert caplog.text.count("not enough memory for a copy of the state") == 1
