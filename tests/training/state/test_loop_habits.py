"""Loops that would change bits after a loss are reported with file and line; correct ones are not."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samebits.errors import HiddenStateError
from samebits.service import log
from samebits.training.process import context
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.script.loop_habits import OutsideCounters
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Commits

Loop = Callable[[TorchState], None]


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 1)
    monkeypatch.setattr(log, "warn", lines.append)
    return lines


def state_for(**attributes: Any) -> TorchState:
    model = nn.Linear(3, 2)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), rng="per_step", **attributes)
    Commits(state)
    return state


def train_on(state: TorchState, batch: torch.Tensor) -> None:
    state.model(batch).sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def prefetches(state: TorchState) -> None:
    batch = torch.randn(4, 3)
    for _ in range(6):
        state.optimizer.zero_grad()
        state.model(batch).sum().backward()
        batch = torch.randn(4, 3)
        state.optimizer.step()
        state.commit()


def prefetches_pairs(state: TorchState) -> None:
    pair = (torch.randn(4, 3), torch.zeros(4))
    for _ in range(6):
        following = (torch.randn(4, 3), torch.zeros(4))
        train_on(state, pair[0])
        pair = following
        state.commit()


def takes_in_time(state: TorchState) -> None:
    for _ in range(6):
        batch = torch.randn(4, 3)
        train_on(state, batch)
        state.commit()


def takes_the_same_always(state: TorchState) -> None:
    whole = torch.randn(4, 3)
    for _ in range(6):
        train_on(state, whole)
        state.commit()


def iterates(state: TorchState) -> None:
    for batch in iter(list(torch.randn(6, 4, 3))):
        train_on(state, batch)
        state.commit()


@pytest.mark.parametrize("loop", [prefetches, prefetches_pairs])
def test_batch_fetched_one_step_ahead_is_reported_once(loop: Loop, said: list[str]) -> None:
    loop(state_for())
    assert len(said) == 1
    assert said[0].startswith("test_loop_habits.py:")
    assert "this batch was taken before the last commit" in said[0]


@pytest.mark.parametrize("loop", [takes_in_time, takes_the_same_always, iterates])
def test_batch_of_its_own_step_is_not_reported(loop: Loop, said: list[str]) -> None:
    state = state_for()
    loop(state)
    assert said == []
    assert not state.model._forward_pre_hooks, "the check is over after the first steps"


def counts_by_the_loop(state: TorchState) -> None:
    for state.epoch in range(state.epoch, 2):  # noqa: B020 - the habit
        for state.batch in range(state.batch, 3):  # noqa: B020 - the habit
            train_on(state, torch.ones(4, 3))
            state.commit()
        state.batch = 0


def counts_before_the_commit(state: TorchState) -> None:
    for state.epoch in range(state.epoch, 2):  # noqa: B020 - the habit
        while state.batch < 3:
            train_on(state, torch.ones(4, 3))
            state.batch += 1
            state.commit()
        state.batch = 0


def test_commit_that_names_the_step_just_taken_is_reported(said: list[str]) -> None:
    counts_by_the_loop(state_for(epoch=0, batch=0))
    line = counts_by_the_loop.__code__.co_firstlineno + 4
    assert len(said) == 1
    assert said[0].startswith(f"test_loop_habits.py:{line}: state.batch is the loop's own variable")


def steps_a_schedule_late(state: TorchState) -> None:
    schedule = state.schedule
    while state.epoch < 2:
        for number in range(6):
            train_on(state, torch.ones(4, 3))
            state.commit()
            if number % 3 == 0:
                schedule.step()  # late: schedule.step()
        state.epoch += 1


def averages_late(state: TorchState) -> None:
    for _ in range(3):
        train_on(state, torch.ones(4, 3))
        state.commit()
        state.average.update_parameters(state.model)  # late: state.average.update_parameters()


def counts_late(state: TorchState) -> None:
    while state.epoch < 3:
        train_on(state, torch.ones(4, 3))
        state.commit()
        state.epoch += 1  # late: state.epoch = …


def keeps_the_best_late(state: TorchState) -> None:
    for _ in range(3):
        with torch.enable_grad():
            train_on(state, torch.ones(4, 3))
        state.commit()
        loss = state.model(torch.ones(4, 3)).sum().item()
        state.best = min(state.best, loss)  # late: state.best = …


def lists_late(state: TorchState) -> None:
    for _ in range(3):
        train_on(state, torch.ones(4, 3))
        state.commit()
        state.history.append(1)  # late: state.history.append()


LATE = [steps_a_schedule_late, averages_late, counts_late, keeps_the_best_late, lists_late]


def place_and_text_of(loop: Loop) -> tuple[str, str]:
    """Return where a loop changes its state late, and how."""
    lines = inspect.getsource(loop).splitlines()
    number, text = next((at, line.partition("late: ")[2]) for at, line in enumerate(lines) if "late: " in line)
    return f"test_loop_habits.py:{loop.__code__.co_firstlineno + number}", text


@pytest.mark.parametrize("loop", LATE)
def test_change_after_the_commit_in_its_loop_ends_the_job(loop: Loop, said: list[str]) -> None:
    with pytest.raises(HiddenStateError) as raised:
        loop(state_with_much())
    assert str(raised.value).startswith(f"{place_and_text_of(loop)[0]}: ")
    assert said == []


def test_change_after_the_commit_that_did_not_happen_yet_is_reported_ahead(said: list[str]) -> None:
    state = state_with_much()
    for number in range(6):
        train_on(state, torch.ones(4, 3))
        state.commit()
        if number == 100:
            state.best = 0.0
    [told] = said
    assert "state.best = … comes after the commit of line " in told
    assert "exit code 95 at the step after it" in told


def changes_in_time(state: TorchState) -> None:
    schedule = state.schedule
    while state.epoch < 2:
        for _ in range(3):
            schedule.step()
            train_on(state, torch.ones(4, 3))
            state.history.append(1)
            state.average.update_parameters(state.model)
            state.commit()
            print(schedule.get_last_lr(), state.best, state.completed_steps)
        state.epoch += 1
        schedule.step()
        state.best = 0.0


def test_change_before_the_commit_or_after_its_loop_is_not_reported(said: list[str]) -> None:
    changes_in_time(state_with_much())
    assert said == []


def state_with_much() -> TorchState:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(
        model,
        optimizer,
        sampler=ElasticSampler(range(8)),
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1),
        average=torch.optim.swa_utils.AveragedModel(model),
        epoch=0,
        best=9.0,
        history=[],
        rng="per_step",
    )
    Commits(state)
    return state


def epochs_around_batches(state: TorchState) -> None:
    for state.epoch in range(state.epoch, 2):  # noqa: B020 - the habit
        for _ in range(3):
            train_on(state, torch.ones(4, 3))
            state.commit()


@pytest.mark.parametrize("loop", [counts_before_the_commit, epochs_around_batches])
def test_correct_counter_is_not_reported(loop: Loop, said: list[str]) -> None:
    loop(state_for(epoch=0, batch=0))
    assert said == []


def test_counter_beside_a_tracking_sampler_is_not_reported(said: list[str]) -> None:
    sampler = ElasticSampler(range(8))
    state = state_for(epoch=0, batch=0, sampler=sampler)
    list(sampler)
    sampler.record_batch(0, 2)
    counts_by_the_loop(state)
    assert said == []


def test_sampler_without_records_does_not_track_the_position(said: list[str]) -> None:
    counts_by_the_loop(state_for(epoch=0, batch=0, sampler=ElasticSampler(range(8))))
    assert len(said) == 1


seen = 0
UNCHANGED = 7


def counts_outside() -> Iterator[Callable[[], None]]:
    def by_global() -> None:
        global seen
        seen += UNCHANGED

    total = 0.0

    def by_closure() -> None:
        nonlocal total
        total += 0.5

    yield by_global
    yield by_closure


@pytest.mark.parametrize("function", list(counts_outside()), ids=["global", "closure"])
def test_counter_outside_the_state_is_reported_when_training_restarts(
    function: Callable[[], None], said: list[str]
) -> None:
    counters = OutsideCounters(function)
    counters.begin()
    function()
    assert said == []
    counters.begin()
    assert len(said) == 1
    assert "a variable outside the state is not restored" in said[0]
    assert said[0].startswith(f"test_loop_habits.py:{function.__code__.co_firstlineno}: ")
    counters.begin()
    assert len(said) == 1, "nothing has changed since"


LOOP = """
import torch

def loop(state):
    for _ in range(6):
        {clear}
        state.model(torch.randn(4, 3)).square().sum().backward()
        state.optimizer.step()
        state.commit()
"""


@pytest.mark.parametrize(
    "clear",
    [
        "state.optimizer.zero_grad(set_to_none=False)",
        "state.optimizer.zero_grad()",
        "state.model.requires_grad_()  # zero_grad()",
    ],
)
def test_uncleared_gradients_are_reported_once(clear: str, said: list[str], tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(LOOP.format(clear=clear))
    script = importlib.util.spec_from_file_location("a_script_of_a_loop", file)
    assert script is not None and script.loader is not None
    module = importlib.util.module_from_spec(script)
    script.loader.exec_module(module)
    module.loop(state_for())
    told = [line for line in said if "clears the gradients" in line]
    assert len(told) == ("requires_grad" in clear)
    assert all(line.startswith("train.py:9: ") and "Fix: call optimizer.zero_grad()" in line for line in told)
