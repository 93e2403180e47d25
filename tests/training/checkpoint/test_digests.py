"""Digests: when a rank's state is compared, and which parts count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samebits.core.point import Point
from samebits.core.reports import FINAL, MAX_DIGESTS, Digest, PartKind
from samebits.service import log
from samebits.training.checkpoint.digests import DUE, FIRST_COMMITS, StateDigests
from samebits.training.checkpoint.rollback_copies import RollbackCopies
from samebits.training.state.base_state import State
from samebits.training.state.compared import digest_of, parts_of
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.local_sgd import LocalSGD
from samebits.training.state.object_state import ObjectState
from samebits.training.state.torch_state import TorchState


class Net(nn.Module):
    """A weight, batch statistics, and a parameter that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.extra = nn.Parameter(torch.zeros(2))


def made(**more: Any) -> TorchState:
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.Adam([net.linear.weight])
    net.linear.weight.grad = torch.ones(2, 2)
    optimizer.step()
    return TorchState(net, optimizer, sampler=ElasticSampler(range(8)), rng="per_step", epoch=1, **more)


def digest(state: State) -> bytes:
    return digest_of(parts_of(state.compared() or ()))


def loose(state: State) -> bytes:
    return digest_of(parts_of(state.loose()))


def test_every_part_has_its_name_and_kind() -> None:
    found = {part.name: part.kind for part in parts_of(made().compared())}
    assert found == {
        "completed_steps": PartKind.STEPS,
        "sampler": PartKind.SAMPLER,
        "lr of group 0 of optimizer": PartKind.SETTING,
        "settings of group 0 of optimizer": PartKind.SETTING,
        "model.linear.weight": PartKind.TRAINED,
        "model.extra": PartKind.UNTRAINED,
        "step of model.linear.weight": PartKind.TRAINED,
        "exp_avg of model.linear.weight": PartKind.TRAINED,
        "exp_avg_sq of model.linear.weight": PartKind.TRAINED,
    }
    assert [part.name for part in parts_of(made().loose())] == [
        "model.norm.running_mean",
        "model.norm.running_var",
        "model.norm.num_batches_tracked",
        "epoch",
    ]


@torch.no_grad()
@pytest.mark.parametrize("what", ["weight", "extra", "moment", "position", "epoch of the sampler"])
def test_parts_that_must_be_equal_change_the_digest(what: str) -> None:
    state, other = made(), made()
    assert digest(state) == digest(other) and loose(state) == loose(other)
    if what == "weight":
        other.model.linear.weight.mul_(1 + 1e-6)
    elif what == "extra":
        other.model.extra.add_(1)
    elif what == "moment":
        other.optimizer.state[other.model.linear.weight]["exp_avg"].add_(1)
    elif what == "position":
        other.sampler.consumed = 4
    else:
        other.sampler.epoch = 1
    assert digest(state) != digest(other) and loose(state) == loose(other)


@torch.no_grad()
def test_parts_that_may_differ_change_only_the_other_digest() -> None:
    state, other = made(), made()
    other.model.norm.running_mean.add_(1)
    assert digest(state) == digest(other) and loose(state) != loose(other)
    other = made()
    other.epoch = 2
    assert digest(state) == digest(other) and loose(state) != loose(other)


def test_unsavable_value_is_left_out_here_and_refused_by_the_commit() -> None:
    state = made(odd=1)
    state.odd = object()
    assert "odd" not in [part.name for part in parts_of(state.loose())]


def test_local_sgd_compares_parameters_and_the_count_of_averages() -> None:
    net = Net()
    state = LocalSGD(TorchState(net, torch.optim.Adam(net.parameters()), rng="per_step"), sync_every=4)
    names = [part.name for part in parts_of(state.compared())]
    assert names == ["averages", "model.extra", "model.linear.weight"]
    assert state.loose() == []


def test_state_without_a_model_compares_steps_and_samplers() -> None:
    names = [part.name for part in parts_of(ObjectState(data=ElasticSampler(range(8)), best=1.0).compared())]
    assert names == ["completed_steps", "data"]


class Custom(State):
    """A user-defined state."""

    def __init__(self, shared: dict[str, Any] | None) -> None:
        super().__init__()
        self.shared = shared

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def sync(self) -> None: ...

    def shared_values(self) -> dict[str, Any] | None:
        return self.shared


def test_custom_state_compares_what_it_marks_as_shared() -> None:
    one, other = Custom({"table": {"rows": [torch.zeros(2)]}}), Custom({"table": {"rows": [torch.ones(2)]}})
    assert digest(one) != digest(other)
    assert digest(one) == digest(Custom({"table": {"rows": [torch.zeros(2)]}}))


class Told:
    """Collects reports."""

    def __init__(self) -> None:
        self.last: tuple[Digest, ...] = ()

    def report_digests(self, digests: tuple[Digest, ...]) -> None:
        self.last = digests


def test_first_commits_every_save_and_the_end_are_reported() -> None:
    told = Told()
    digests = StateDigests(told, made())  # type: ignore[arg-type]
    digests.begin()
    for step in range(1, 40):
        digests.committed(Point(step, 1), step, averages=True, is_save=step % 3 == 0)
    steps = [one.point.step for one in told.last]
    assert sorted(steps) == [1, 2, 3, *range(39 - 3 * (MAX_DIGESTS - FIRST_COMMITS - DUE - 2), 40, 3)]
    final = digests.through(Point(39, 1), averages=False)
    assert len(final) == MAX_DIGESTS - DUE and (final[-1].commits, final[-1].averages) == (FINAL, False)
    digests.begin()
    digests.committed(Point(40, 2), 40, averages=True, is_save=False)
    assert Point(1, 1) not in [one.point for one in told.last], "the first commits are a generation's"


def test_copy_is_hashed_during_the_next_step_and_reported_in_order() -> None:
    told, state, states, seconds = Told(), made(), RollbackCopies(), list[float]()
    digests = StateDigests(told, state, seconds.append)  # type: ignore[arg-type]
    digests.begin()
    expected = {}
    for step in range(10, 10 * (DUE + 4), 10):
        state.model.linear.weight.data += 1
        expected[step] = digest(state)
        digests.settle()  # its memory may be reused by the next one
        kept = states.keep(Point(step, 1), state.contents(), {}, state.compared() or ())
        digests.committed(Point(step, 1), step, averages=True, is_save=step % 20 == 0, is_due=True, kept=kept)
        state.model.linear.weight.data += 1  # as the next step does while it is hashed
    final = digests.through(Point(step, 1), averages=True)
    assert len(seconds) == len(expected) and all(second >= 0 for second in seconds)
    assert [one.point.step for one in final if one.is_kept] == sorted(expected, key=lambda one: (one % 20 != 0, one))
    assert all(one.shared == expected[one.point.step] for one in final if one.is_kept)
    assert all(bool(one.loose) == (one.point.step % 20 == 0 or one.point.step <= 30) for one in final if one.is_kept)


def test_change_after_the_last_commit_changes_only_the_end() -> None:
    """The script advances the epoch there, and the end saves that commit once more."""
    sampler = ElasticSampler(range(8))
    told = Told()
    digests = StateDigests(told, ObjectState(sampler=sampler))  # type: ignore[arg-type]
    digests.begin()
    for is_save in (True, False):
        digests.committed(Point(1, 1), 1, averages=True, is_save=is_save)
    before = told.last
    sampler.set_epoch(1)
    digests.committed(Point(1, 1), 1, averages=True, is_save=True)
    assert told.last == before
    *others, final = digests.through(Point(1, 1), averages=True)
    assert tuple(others) == before and final.shared != before[0].shared


def test_lack_of_comparisons_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "say", lines.append)
    for shared, expected in ((None, 1), ({}, 0)):
        lines.clear()
        digests = StateDigests(Told(), Custom(shared))  # type: ignore[arg-type]
        for _ in range(2):
            digests.begin()
        assert len(lines) == expected
