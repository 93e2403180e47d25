"""Copies of a state that is compared: what they are of, how many there are, and that a changed one is none."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from samebits.core.point import Point
from samebits.training.checkpoint import rollback_copies
from samebits.training.checkpoint.rollback_copies import MOST, RollbackCopies, RollbackCopy, bytes_in
from samebits.training.state.compared import digest_of, parts_of
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.torch_state import TorchState


def made() -> TorchState:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(net.parameters())
    step(net, optimizer)
    return TorchState(net, optimizer, sampler=ElasticSampler(range(8)), epoch=1)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()


def keep(states: RollbackCopies, state: TorchState, number: int) -> RollbackCopy:
    kept = states.keep(Point(number, 1), state.contents(), {"model": [1, 2]}, state.compared())
    kept.shared = digest_of(parts_of(kept.named))
    return kept


def points(states: RollbackCopies) -> list[int]:
    return [one.point.step for one in states._kept]


def test_the_copy_has_the_digest_of_what_was_copied_and_stays_as_it_was() -> None:
    state, states = made(), RollbackCopies()
    kept = keep(states, state, 50)
    was = digest_of(parts_of(state.compared()))
    assert kept.shared == was
    step(state.model, state.optimizer)
    assert digest_of(parts_of(state.compared())) != was and digest_of(parts_of(kept.named)) == was and kept.is_sound()


def test_a_state_that_becomes_the_copy_is_what_it_was() -> None:
    state, states = made(), RollbackCopies()
    kept = keep(states, state, 50)
    weights = [one.clone() for one in state.model.state_dict().values()]
    step(state.model, state.optimizer)
    state.load(dict(kept.contents), own=True)
    assert all(map(torch.equal, weights, state.model.state_dict().values()))
    assert digest_of(parts_of(state.compared())) == kept.shared


@pytest.mark.parametrize("what", ["weight", "moment", "exp_avg_sq"])
def test_a_copy_in_which_a_bit_has_changed_is_none(what: str) -> None:
    state, states = made(), RollbackCopies()
    keep(states, state, 40)
    kept = keep(states, state, 50)
    values: Any = kept.contents["shared"]["values"]
    moments = next(iter(values["optimizer"]["state"].values()))
    target = {"weight": values["model"]["0.weight"], "moment": moments["exp_avg"]}.get(what, moments["exp_avg_sq"])
    target.view(torch.int32)[0, 0] ^= 1
    back = states.go_back(Point(60, 1))
    assert back is not None and back.point == Point(40, 1), "the one before it"


def test_what_is_known_to_be_everybodys_is_never_displaced_by_what_is_not() -> None:
    state, states = made(), RollbackCopies()
    for number in (50, 100, 150, 200, 250):
        keep(states, state, number)
        states.found_equal(None)
    assert points(states)[:2] == [50, 100] and points(states)[-1] == 250 and len(points(states)) == MOST
    states.found_equal(Point(250, 1))
    assert points(states) == [250]
    states.found_equal(Point(250, 2))
    assert points(states) == [250], "of another line"


def test_going_back_takes_the_newest_that_is_not_too_new() -> None:
    state, states = made(), RollbackCopies()
    for number in (50, 100, 150):
        keep(states, state, number)
    back = states.go_back(Point(120, 1))
    assert back is not None and back.point.step == 100 and points(states) == [50, 100]
    again = states.go_back(Point(100, 1))
    assert again is back, "it may be needed again"
    assert states.go_back(Point(49, 1)) is None


def test_a_generation_that_begins_before_it_forgets_it() -> None:
    state, states = made(), RollbackCopies()
    for number in (50, 100):
        keep(states, state, number)
    states.begin(Point(70, 1))
    assert points(states) == [50]


def test_what_was_not_hashed_yet_is_not_gone_back_to() -> None:
    state, states = made(), RollbackCopies()
    states.keep(Point(50, 1), state.contents(), {}, state.compared())
    assert states.go_back(Point(60, 1)) is None


def test_memory_is_used_again() -> None:
    state, states = made(), RollbackCopies()
    for number in (50, 100):
        keep(states, state, number)
    first = states._kept[0].contents["shared"]["values"]["model"]["0.weight"].data_ptr()
    states.found_equal(Point(100, 1))
    gc.collect()
    third = keep(states, state, 150)
    assert third.contents["shared"]["values"]["model"]["0.weight"].data_ptr() == first


def test_a_copy_takes_a_quarter_of_the_memory_at_most_of_all_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    state, states = made(), RollbackCopies()
    size_bytes = bytes_in(state.contents())
    assert size_bytes >= 4 * 3 * (3 * 2 + 2 + 2 + 2)
    monkeypatch.setattr(rollback_copies, "available_bytes", lambda: 4 * 2 * size_bytes)
    assert states.has_room(state.contents(), 2) and not states.has_room(state.contents(), 3)
    for number in range(MOST):
        keep(states, state, number)
    assert states.has_room(state.contents(), 3), "its memory is there already"
