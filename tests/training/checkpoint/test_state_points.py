"""A state's points in one process: interrupted restores and prepared memory."""

from __future__ import annotations

from collections.abc import Callable
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


class Steps:
    """A state that is compared at every fifth commit, with the step's hook in place."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.state = TorchState(self.model, self.optimizer, rng="per_step")
        self.process = process(every=5)
        self.points = StatePoints(self.process, self.state)
        self.points.generation = SimpleNamespace(  # type: ignore
            generation=1, rank=1, world_size=2, local_world_size=2
        )
        self.points.begin_comparing(Point(0, 1))
        self.state.remember(Point(0, 1))
        self.weights: dict[int, list[torch.Tensor]] = {}

    def take(self, step: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Take a step and commit it."""
        self.model(torch.randn(4, 3)).sum().backward()
        meanwhile()
        self.points.finish_copy()
        self.optimizer.step()
        self.points.commits = step
        self.state.remember(Point(step, 1))
        self.points.compare(step, is_save=False)
        self.weights[step] = [one.detach().clone() for one in self.model.parameters()]

    def found_equal(self, step: int) -> None:
        self.points.digests.settle()
        self.process.agent.equal_point = Point(step, 1)

    def copies(self) -> list[int]:
        return [one.point.step for one in self.points._kept._kept]

    def places(self) -> list[int]:
        """Return the addresses of the oldest copy's weight and of its moments."""
        values: Any = self.points._kept._kept[0].contents["shared"]["values"]
        moments = values["optimizer"]["state"][0]
        return [one.data_ptr() for one in (values["model"]["weight"], moments["exp_avg"], moments["exp_avg_sq"])]

    def returns(self, to: int, at: int) -> bool:
        """Return to a step, and return whether the weights are those of step ``at``."""
        came = self.points.go_back(Point(to, 1))
        return came == Point(at, 1) and all(map(torch.equal, self.weights[at], self.model.parameters()))


def test_confirmed_copy_replaces_the_one_before_it_in_its_memory() -> None:
    run = Steps()
    for step in range(1, 6):
        run.take(step)
    run.found_equal(5)
    assert run.copies() == [1], "weights and moments are still those of the commit"
    where = run.places()
    run.take(6)
    kept = run.points._kept._kept[0]
    assert run.copies() == [5] and run.places() == where
    assert kept.is_sound() and run.points._kept._spare is None
    run.take(7)
    assert run.returns(7, at=5)


def test_copy_that_is_not_confirmed_in_time_stays_beside_the_one_before_it() -> None:
    run = Steps()
    for step in range(1, 7):
        run.take(step)
    assert run.copies() == [1, 5]
    run.found_equal(5)
    run.take(7)
    assert run.copies() == [5] and run.points._kept._spare is None, "its memory is free once it is confirmed"
    assert run.returns(7, at=5)


def test_state_returns_to_a_commit_that_is_not_copied_yet() -> None:
    run = Steps()
    for step in range(1, 6):
        run.take(step)
    assert run.returns(5, at=5) and run.returns(4, at=1)


def test_weights_written_before_the_step_are_in_no_copy() -> None:
    run = Steps()
    for step in range(1, 6):
        run.take(step)

    def write() -> None:
        with torch.no_grad():
            run.model.weight.add_(1)

    run.found_equal(5)
    run.take(6, write)
    assert run.copies() == [1], "the copy before it is not replaced"
    for step in range(7, 12):
        run.take(step, write)
    assert run.copies() == [1, 10], "from then on, weights are copied at the commit"
    assert run.returns(11, at=10)


def test_copy_that_is_not_finished_ends_with_its_generation() -> None:
    run = Steps()
    for step in range(1, 6):
        run.take(step)
    run.points.begin_comparing(Point(5, 1))
    run.take(6)
    assert run.copies() == [1]


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
