"""Data loops that the state does not follow are reported in their first steps; impossible records are refused.

Data that the state follows, or that a script tracks itself, is not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from samebits.errors import UsageError
from samebits.service import log
from samebits.training import torch_private
from samebits.training.process import context
from samebits.training.run import elastic_run
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.script.loop_habits import last_batch
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Commits

DATA = TensorDataset(torch.arange(24.0).reshape(24, 1))


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    lines: list[str] = []
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 2)
    monkeypatch.setattr(log, "warn", lines.append)
    torch_private.follow_batches(elastic_run._took_batch)
    yield lines
    last_batch.look(at_it=False)


def state_for(**attributes: Any) -> TorchState:
    model = nn.Linear(1, 1)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), rng="per_step", epoch=0, **attributes)
    Commits(state)
    return state


def step(state: TorchState, inputs: torch.Tensor) -> None:
    state.optimizer.zero_grad()
    state.model(inputs).sum().backward()
    state.optimizer.step()


def shuffles() -> None:
    state, loader = state_for(), DataLoader(DATA, 4, shuffle=True)
    for (inputs,) in loader:
        step(state, inputs)
        state.commit()


def divides_by_itself() -> None:
    state = state_for()
    for (inputs,) in DataLoader(DATA, 4, sampler=DistributedSampler(DATA, num_replicas=2, rank=0)):
        step(state, inputs)
        state.commit()


def forgets_the_sampler() -> None:
    state, sampler = state_for(), ElasticSampler(DATA)
    for batch, (inputs,) in enumerate(DataLoader(DATA, 4, sampler=sampler)):
        step(state, inputs)
        sampler.record_batch(batch, 4)
        state.commit()


def forgets_to_record() -> None:
    sampler = ElasticSampler(DATA)
    state = state_for(sampler=sampler)
    for (inputs,) in DataLoader(DATA, 4, sampler=sampler):
        step(state, inputs)
        state.commit()


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        (shuffles, "come from a RandomSampler, whose position is not part of the state"),
        (divides_by_itself, "come from a DistributedSampler, whose position is not part of the state"),
        (forgets_the_sampler, "the sampler of this loader is not part of the state"),
        (forgets_to_record, "the sampler is not told which samples are done"),
    ],
)
def test_data_that_the_state_does_not_follow_is_reported_once_with_its_line(
    loop: Callable[[], None], told: str, said: list[str]
) -> None:
    loop()
    assert len(said) == 1
    assert said[0].startswith("test_data_habits.py:") and told in said[0] and "Fix: " in said[0]


def records() -> None:
    sampler = ElasticSampler(DATA)
    state = state_for(sampler=sampler)
    evaluation = DataLoader(DATA, 4, shuffle=True)
    for batch, (inputs,) in enumerate(DataLoader(DATA, 4, sampler=sampler)):
        step(state, inputs)
        with torch.no_grad():
            for _ in evaluation:
                pass
        sampler.record_batch(batch, 4)
        state.commit()
    sampler.set_epoch(1)


def counts_batches() -> None:
    state = state_for(batch=0)
    loader = DataLoader(DATA, 4, sampler=RandomSampler(DATA, generator=torch.Generator().manual_seed(1)))
    for (inputs,) in islice(loader, state.batch, None):
        step(state, inputs)
        state.batch += 1
        state.commit()


def skips_by_the_step() -> None:
    state = state_for()
    for (inputs,) in islice(DataLoader(DATA, 4), state.completed_steps, None):
        step(state, inputs)
        state.commit()


def needs_no_loader() -> None:
    state = state_for()
    for _ in range(5):
        step(state, torch.ones(4, 1))
        state.commit()


@pytest.mark.parametrize("loop", [records, counts_batches, skips_by_the_step, needs_no_loader])
def test_saved_position_is_not_reported(loop: Callable[[], None], said: list[str]) -> None:
    loop()
    assert said == []


@pytest.mark.parametrize("workers", [0, 2])
def test_global_batch_size_is_refused_where_it_is_recorded(workers: int) -> None:
    sampler = ElasticSampler(DATA)  # 12 samples per rank
    loader = DataLoader(DATA, 2, sampler=sampler, num_workers=workers, generator=torch.Generator())
    with pytest.raises(UsageError, match=r"test_data_habits\.py:\d+: record_batch\(.*rank's loader has yielded"):
        for batch, _ in enumerate(loader):
            sampler.record_batch(batch, 4)


def test_number_that_does_not_restart_is_refused() -> None:
    sampler = ElasticSampler(DATA)
    next(iter(DataLoader(DATA, 4, sampler=sampler)))
    with pytest.raises(UsageError, match=r"record_batch\(3, 4\) records 16 samples"):
        sampler.record_batch(3, 4)


def test_unrecorded_samples_are_reported_at_the_end_of_their_epoch(said: list[str]) -> None:
    sampler = ElasticSampler(DATA)
    sampler.is_guarded = True
    for batch, _ in enumerate(DataLoader(DATA, 4, sampler=sampler)):
        sampler.record_batch(batch, 2)
    sampler.set_epoch(1)
    (line,) = said
    assert "of the 12 samples that this rank got in epoch 0, record_batch() recorded 6" in line


def test_length_of_a_loader_is_known_in_a_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts compute the number of steps before training, and an error in a spare ends the job."""

    def in_a_spare() -> int:
        raise UsageError("a spare has no rank")

    monkeypatch.setattr(context, "get_rank", in_a_spare)
    sampler = ElasticSampler(DATA)
    assert len(DataLoader(DATA, batch_size=5, sampler=sampler)) == 3
    sampler.place = (1, 4)
    assert len(sampler) == 6
    with pytest.raises(UsageError, match="a spare has no rank"):
        sampler.place = None
        iter(sampler)
