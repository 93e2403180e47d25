"""Rollback copies: their content, their number, and that a changed copy is not used."""

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


def test_copy_has_the_digest_of_the_original_and_stays_unchanged() -> None:
    state, states = made(), RollbackCopies()
    kept = keep(states, state, 50)
    was = digest_of(parts_of(state.compared()))
    assert kept.shared == was
    step(state.model, state.optimizer)
    assert digest_of(parts_of(state.compared())) != was and digest_of(parts_of(kept.named)) == was and kept.is_sound()


def test_state_restored_from_the_copy_is_unchanged() -> None:
    state, states = made(), RollbackCopies()
    kept = keep(states, state, 50)
    weights = [one.clone() for one in state.model.state_dict().values()]
    step(state.model, state.optimizer)
    state.load(dict(kept.contents), own=True)
    assert all(map(torch.equal, weights, state.model.state_dict().values()))
    assert digest_of(parts_of(state.compared())) == kept.shared


@pytest.mark.parametrize("what", ["weight", "moment", "exp_avg_sq"])
def test_copy_with_a_changed_bit_is_not_used(what: str) -> None:
    state, states = made(), RollbackCopies()
    keep(states, state, 40)
    kept = keep(states, state, 50)
    values: Any = kept.contents["shared"]["values"]
    moments = next(iter(values["optimizer"]["state"].values()))
    target = {"weight": values["model"]["0.weight"], "moment": moments["exp_avg"]}.get(what, moments["exp_avg_sq"])
    target.view(torch.int32)[0, 0] ^= 1
    back = states.go_back(Point(60, 1))
    assert back is not None and back.point == Point(40, 1), "the one before it"


def test_common_copy_is_never_displaced_by_an_unconfirmed_one() -> None:
    state, states = made(), RollbackCopies()
    for number in (50, 100, 150, 200, 250):
        keep(states, state, number)
        states.found_equal(None)
    assert points(states)[:2] == [50, 100] and points(states)[-1] == 250 and len(points(states)) == MOST
    states.found_equal(Point(250, 1))
    assert points(states) == [250]
    states.found_equal(Point(250, 2))
    assert points(states) == [250], "of another line"


def test_rollback_uses_the_newest_copy_that_is_not_too_new() -> None:
    state, states = made(), RollbackCopies()
    for number in (50, 100, 150):
        keep(states, state, number)
    back = states.go_back(Point(120, 1))
    assert back is not None and back.point.step == 100 and points(states) == [50, 100]
    again = states.go_back(Point(100, 1))
    assert again is back, "it may be needed again"
    assert states.go_back(Point(49, 1)) is None


def test_generation_that_starts_earlier_discards_later_copies() -> None:
    state, states = made(), RollbackCopies()
    for number in (50, 100):
        keep(states, state, number)
    states.begin(Point(70, 1))
    assert points(states) == [50]


def test_unhashed_copy_is_not_used() -> None:
    state, states = made(), RollbackCopies()
    states.keep(Point(50, 1), state.contents(), {}, state.compared())
    assert states.go_back(Point(60, 1)) is None


def test_memory_is_reused() -> None:
    state, states = made(), RollbackCopies()
    for number in (50, 100):
        keep(states, state, number)
    first = states._kept[0].contents["shared"]["values"]["model"]["0.weight"].data_ptr()
    states.found_equal(Point(100, 1))
    gc.collect()
    third = keep(states, state, 150)
    assert third.contents["shared"]["values"]["model"]["0.weight"].data_ptr() == first


def test_copies_use_at_most_a_quarter_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    state, states = made(), RollbackCopies()
    size_bytes = bytes_in(state.contents())
    assert size_bytes >= 4 * 3 * (3 * 2 + 2 + 2 + 2)
    monkeypatch.setattr(rollback_copies, "available_bytes", lambda: 4 * 2 * size_bytes)
    assert states.has_room(state.contents(), 2) and not states.has_room(state.contents(), 3)
    for number in range(MOST):
        keep(states, state, number)
    assert states.has_room(state.contents(), 3), "its memory is there already"
