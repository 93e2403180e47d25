"""LocalSGD: commits between and at averages, and losses that undo nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samebits.core.point import Point
from samebits.errors import GenerationEndedError, UsageError
from samebits.training.group import transfer
from samebits.training.process import context
from samebits.training.state import snapshot
from samebits.training.state.local_sgd import LocalSGD
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Commits


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Simulate ranks beside this one that have all stepped and contribute this sum of weights."""
    told = SimpleNamespace(count=1, steps=1, is_through=False, brings=0.0, fails=False, averages=0)

    def gather(number: int, device: Any) -> list[int]:
        return [number, *[2 * told.steps + told.is_through] * told.count]

    def all_reduce(tensor: torch.Tensor) -> None:
        if told.fails:
            raise GenerationEndedError("a member was lost")
        told.averages += 1
        tensor.add_(told.brings)

    monkeypatch.setattr(context, "_process", SimpleNamespace(generation=None, device=torch.device("cpu")))
    monkeypatch.setattr(transfer, "gather", gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return told


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))


def local(sync_every: int = 3, outer: Callable[[Any], torch.optim.Optimizer] | None = None) -> LocalSGD:
    """Return a state in which each step subtracts 1 from the weight."""
    model = One()
    inner = TorchState(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0), rng="per_step", batch=0)
    return LocalSGD(inner, sync_every, None if outer is None else outer(model.parameters()))


def step(state: LocalSGD) -> None:
    state.model.weight.grad = torch.ones(1)
    state.optimizer.step()
    state.model.mean += 4
    state.model.seen += 1
    state.batch += 1
    state.commit()


def test_ranks_train_alone_until_the_average(peers: SimpleNamespace) -> None:
    state = local()
    session = Commits(state)
    peers.brings = -5.0
    for done in (1, 2):
        step(state)
        assert (state.local_steps, state.completed_steps, peers.averages) == (done, 0, 0)
        assert state.model.weight.item() == -done
    step(state)
    assert (state.local_steps, state.completed_steps, session.count) == (0, 1, 1)
    assert state.model.weight.item() == (-3 - 5) / 2
    assert state.model.mean.item() == (12 - 5) / 2
    assert (state.model.seen.item(), state.batch) == (3, 3)


def test_attributes_belong_to_the_state(peers: SimpleNamespace) -> None:
    state = local()
    state.batch = 7
    assert state._inner.batch == 7
    with pytest.raises(AttributeError):
        _ = state.epoch


def test_peer_lost_between_averages_costs_nothing(peers: SimpleNamespace) -> None:
    state = local()
    session = Commits(state)
    for _ in range(4):
        step(state)
    session.lost = True
    with pytest.raises(GenerationEndedError):
        step(state)
    standing = (state.model.weight.item(), state.batch, state.local_steps)
    assert state.recall() == Point(1, 1)
    state.begin(Point(1, 1))  # the next generation's restore point
    assert (state.model.weight.item(), state.batch, state.local_steps) == standing
    assert state.local_steps == 2


def test_peer_lost_in_an_average_costs_nothing_either(peers: SimpleNamespace) -> None:
    state = local(outer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5))
    Commits(state)
    step(state)
    step(state)
    peers.fails = True
    with pytest.raises(GenerationEndedError):
        step(state)
    assert state.recall() == Point(0, 1)
    assert (state.model.weight.item(), state.local_steps, state.batch) == (-3.0, 3, 3)
    peers.fails = False
    state.begin(Point(0, 1))
    state.commit()  # as the function does when it is called again, or after its next step
    assert (state.completed_steps, peers.averages) == (1, 1)


def test_newcomer_starts_from_the_last_average(peers: SimpleNamespace) -> None:
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5)  # noqa: E731
    source, newcomer = local(outer=make), local(outer=make)
    Commits(source)
    for _ in range(5):
        step(source)
    assert source.model.weight.item() != source.weights()[0].item()
    tree, parts = snapshot.split(source.contents(), "state")
    newcomer.load(snapshot.join(tree, {part.name: part for part in parts}), own=False)
    newcomer.begin(Point(1, 1))
    assert newcomer.model.weight.item() == source.weights()[0].item() == newcomer.weights()[0].item()
    assert (newcomer.completed_steps, newcomer.local_steps, newcomer.batch) == (1, 0, 3)
    momenta = [one._outer.value.state_dict()["state"][0]["momentum_buffer"] for one in (source, newcomer)]  # type: ignore[union-attr]
    assert torch.equal(*momenta)


def test_rank_missed_by_an_average_takes_it_from_one_that_got_it(peers: SimpleNamespace) -> None:
    ahead, behind = local(), local()
    for state in (ahead, behind):
        Commits(state)
    for _ in range(2):
        step(behind)
    for _ in range(4):
        step(ahead)
    assert behind.recall() == Point(0, 1)
    behind.forget()
    behind.load(ahead.contents(), own=False)
    behind.begin(Point(1, 1))
    assert (behind.model.weight.item(), behind.local_steps, behind.completed_steps) == (-1.5, 0, 1)


def test_average_after_a_manual_sync_is_the_received_one(peers: SimpleNamespace) -> None:
    source, other = local(), local()
    for state, brings in ((source, -5.0), (other, -50.0)):
        Commits(state)
        peers.brings = brings
        for _ in range(4):
            step(state)
    other.load(source.contents(), own=False)
    other.begin(Point(1, 1))  # the point it held another copy of
    assert other.weights()[0].item() == source.weights()[0].item() == -4.0
    other.model.weight.data.zero_()
    other.restore()
    assert other.model.weight.item() == -4.0


def test_outer_optimizer_steps_along_the_difference_of_two_averages(peers: SimpleNamespace) -> None:
    state = local(outer=lambda one: torch.optim.SGD(one, lr=0.7, momentum=0.9, nesterov=True))
    Commits(state)
    wanted = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([wanted], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(3):
        before = state.model.weight.item()
        peers.brings = before - 5.0  # the other rank has subtracted 5, this one 3
        for _ in range(3):
            step(state)
        wanted.grad = torch.tensor([4.0])
        optimizer.step()
        assert state.model.weight.item() == pytest.approx(wanted.item(), abs=1e-5)
        assert state.model.weight.grad is None


def test_rank_without_a_step_contributes_nothing_and_gets_the_average(peers: SimpleNamespace) -> None:
    state = local()
    Commits(state)
    for given in (-6.0, -8.0):
        peers.brings = given
        state.average()
        assert state.model.weight.item() == given
    assert state.completed_steps == 2


def test_end_waits_for_all_and_averages_the_rest(peers: SimpleNamespace) -> None:
    state = local()
    Commits(state)
    step(state)
    peers.is_through, peers.steps = True, 0
    state.finish()
    assert (peers.averages, state.local_steps, state.completed_steps) == (1, 0, 1)
    state.finish()
    assert peers.averages == 1  # no rank has anything left

    peers.is_through, peers.steps = False, 3
    state.begin(Point(1, 1))
    reduce = dist.all_reduce

    def last(tensor: torch.Tensor) -> None:
        reduce(tensor)
        peers.is_through, peers.steps = peers.averages == 3, 3 if peers.averages < 3 else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", last)
        state.finish()
    assert (peers.averages, state.completed_steps) == (3, 3)  # two averages of the other's, both taken part in


def test_manual_return_to_the_last_average(peers: SimpleNamespace) -> None:
    state = local()
    Commits(state)
    for _ in range(4):
        step(state)
    state.restore()
    assert (state.model.weight.item(), state.local_steps, state.batch) == (-1.5, 0, 3)


def test_micro_batches_of_a_window_draw_different_numbers_and_make_no_average(peers: SimpleNamespace) -> None:
    state = local(sync_every=2)
    Commits(state)
    step(state)
    drawn = []
    for _ in range(3):
        drawn.append(torch.rand(1).item())
        state.model.weight.grad = torch.ones(1)
        state.commit()
    assert len(set(drawn)) == 3
    assert peers.averages == 0
    state.optimizer.step()
    state.commit()
    assert peers.averages == 1


def test_unaveragable_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match="sync_every=0"):
        LocalSGD(TorchState(model, optimizer, rng="per_step"), 0)
    with pytest.raises(UsageError, match="per_step"):
        LocalSGD(TorchState(model, optimizer), 4)
    with pytest.raises(UsageError, match="outer_optimizer"):
        LocalSGD(TorchState(model, optimizer, rng="per_step"), 4, torch.optim.SGD(One().parameters(), lr=1.0))
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda self, module: nn.Module.__init__(self))
    wrapped = DistributedDataParallel(model)
    wrapped.module = model
    with pytest.raises(UsageError, match="model is in DistributedDataParallel"):
        LocalSGD(TorchState(wrapped, optimizer, rng="per_step"), 4)
