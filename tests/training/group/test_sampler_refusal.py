"""torch's sampler between ``samebits.init()`` and ``elastic.run``: refused if it would ask the group of one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from samebits.errors import UsageError
from samebits.training.group.group import Group, form_alone

CPU = torch.device("cpu")
DATA: Any = range(10)
TORCHS_OWN: Any = DistributedSampler.__init__


class Own(DistributedSampler[int]):
    def __init__(self, data: Any, word: str) -> None:
        super().__init__(data, shuffle=False)
        self.word = word


@pytest.fixture
def early() -> Iterator[Group]:
    """Return the group of one in the phase in which a script's collectives are refused."""
    group = form_alone(CPU, alone=lambda: "after")
    yield group
    group.drop()


@pytest.mark.parametrize(
    "build",
    [
        lambda: DistributedSampler(DATA),
        lambda: DistributedSampler(DATA, shuffle=False),
        lambda: DistributedSampler(DATA, 2),
        lambda: DistributedSampler(DATA, rank=0),
        lambda: DistributedSampler(dataset=DATA),
        lambda: Own(DATA, "word"),
    ],
)
def test_sampler_that_asks_the_group_of_one_is_refused(early: Group, build: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"after samebits.elastic.run .* inside the function that elastic\.run calls, or use samebits",
    ):
        build()


def test_sampler_with_explicit_rank_and_world_size_is_torchs_own(early: Group) -> None:
    sampler = DistributedSampler(DATA, 2, 1, False, seed=3, drop_last=True)
    assert (list(sampler), sampler.seed, sampler.drop_last) == ([1, 3, 5, 7, 9], 3, True)
    named: DistributedSampler[int] = DistributedSampler(dataset=DATA, rank=0, num_replicas=5, shuffle=False)
    assert list(named) == [0, 5]
    assert list(inspect.signature(DistributedSampler).parameters)[:3] == ["dataset", "num_replicas", "rank"]


@pytest.mark.parametrize("end", [Group.step_aside, Group.drop])
def test_refusal_ends_with_the_group(early: Group, end: Any) -> None:
    assert DistributedSampler.__init__ is not TORCHS_OWN
    end(early)
    assert DistributedSampler.__init__ is TORCHS_OWN
    following = form_alone(CPU)
    try:
        assert Own(DATA, "word").num_replicas == 1
    finally:
        following.drop()


def test_constructor_wrapped_by_other_code_meanwhile_is_kept(early: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing: Any = DistributedSampler.__init__
    seen = []

    def theirs(sampler: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(args)
        refusing(sampler, *args, **kwargs)

    monkeypatch.setattr(DistributedSampler, "__init__", theirs)
    early.drop()
    following = form_alone(CPU)
    try:
        assert DistributedSampler(DATA).num_replicas == 1
    finally:
        following.drop()
        monkeypatch.undo()
        DistributedSampler.__init__ = TORCHS_OWN  # type: ignore[method-assign]
    assert seen == [(DATA,)]


def test_group_of_one_that_refuses_nothing_leaves_torch_alone() -> None:
    group = form_alone(CPU)
    try:
        assert DistributedSampler.__init__ is TORCHS_OWN
        assert DistributedSampler(DATA).num_replicas == 1
    finally:
        group.drop()
