"""State, ObjectState, TorchState and user-defined subclasses; and faults of Horovod's states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

from samebits.core.point import Point
from samebits.errors import HostsUpdatedInterrupt, UsageError
from samebits.training import elastic
from samebits.training.process import context
from samebits.training.state import base_state, snapshot
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Commits, backward, bits_of, small_state, train_one_step


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 1)
    monkeypatch.setattr(base_state, "_newest_holder", lambda: 2)


class Counter(elastic.State):
    """A state as in Horovod's documentation, with the four methods and nothing else."""

    def __init__(self, value: int) -> None:
        super().__init__(None, None)
        self.value = value
        self.calls: list[str] = []
        self._saved = value

    def save(self) -> None:
        self.calls.append("save")
        self._saved = copy.deepcopy(self.value)

    def restore(self) -> None:
        self.calls.append("restore")
        self.value = self._saved

    def sync(self) -> None:
        self.calls.append(f"sync from {base_state.source_of_sync()}")

    def reset(self) -> None:
        self.calls.append("reset")


def test_users_subclass_is_synced_saved_committed_and_restored() -> None:
    state = Counter(1)
    session = Commits(state)
    assert state.calls == ["sync from 2", "save"]
    state.value = 2
    state.commit()
    assert (session.count, state.completed_steps) == (1, 1)
    state.value = 3
    assert state.recall() == Point(1, 1)
    assert state.value == 2
    assert state.calls == ["sync from 2", "save", "save", "restore"]


def test_no_rank_is_the_source_outside_a_start() -> None:
    state = Counter(1)
    Commits(state)
    state.sync()
    assert state.calls[-1] == "sync from None"


def test_such_a_state_is_saved_on_disk_only_if_it_can_be_extracted() -> None:
    assert Counter(1).contents()["shared"]["values"] == {}
    assert Counter(1).checkpoint_config.save_checkpoint_steps > 10**12

    class Lasting(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    state = Lasting(5)
    Commits(state)
    state.commit()
    other = Lasting(0)
    other.load(state.contents(), own=False)
    assert (other.value, other.completed_steps) == (5, 1)
    assert other.checkpoint_config.save_checkpoint_steps == 100


def test_subclass_that_lacks_a_method_is_refused_when_it_is_made() -> None:
    class Half(elastic.State):
        def save(self) -> None:
            """Nothing to copy."""

    with pytest.raises(TypeError, match=r"restore.*sync"):
        Half()  # type: ignore[abstract]


class Extended(elastic.TorchState):
    """Keeps one more value itself."""

    extra = 0
    saved_extra = 0

    def save(self) -> None:
        self.saved_extra = self.extra
        super().save()

    def restore(self) -> None:
        super().restore()
        self.extra = self.saved_extra

    def sync(self) -> None:
        super().sync()
        self.extra = 100


def test_subclass_of_torch_state_may_extend_each_method() -> None:
    model = nn.Linear(2, 2)
    state = Extended(model, torch.optim.SGD(model.parameters(), lr=0.1))
    session = Commits(state)
    assert (state.extra, state.saved_extra) == (100, 100)
    for count in (1, 2):
        model(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()  # type: ignore[union-attr]
        state.extra = count
        state.commit()
        assert session.count == count, "one commit is one commit"
    state.extra = 7
    assert state.recall() == Point(2, 1)
    assert state.extra == 2


def test_subclass_is_asked_for_no_copy_inside_a_window() -> None:
    model = nn.Linear(2, 2)
    state = Extended(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Commits(state)
    model(torch.ones(1, 2)).sum().backward()
    state.extra = 3
    state.commit()
    assert state.recall() == Point(0, 1)
    assert state.extra == 100


def test_object_state_holds_values_samplers_and_objects_with_a_state_dict() -> None:
    sampler = ElasticSampler(range(8))
    state = elastic.ObjectState(epoch=0, seen=[], sampler=sampler, rng="per_step")
    session = Commits(state)
    state.epoch = 1
    state.seen.append(3)
    sampler.record_batch(0, 2)
    state.commit()
    state.epoch, state.seen = 9, []
    sampler.set_epoch(1)
    state.restore()
    assert (state.epoch, state.seen, sampler.epoch, sampler.consumed) == (1, [3], 0, 2)
    assert (session.count, state.completed_steps) == (1, 1)


@pytest.mark.parametrize("make", [lambda one: one, lambda one: torch.optim.SGD(one.parameters(), lr=0.1)])
def test_object_state_refuses_what_steps_change(make: Any) -> None:
    with pytest.raises(UsageError, match="TorchState"):
        elastic.ObjectState(thing=make(nn.Linear(1, 1)))


def test_object_cannot_be_replaced() -> None:
    state = small_state()
    model = state.model
    with pytest.raises(UsageError, match="load that object's"):
        state.model = nn.Linear(1, 1)
    assert state.model is model


def test_reset_calls_the_subclass_then_the_callbacks_in_order() -> None:
    state = Counter(1)
    state.register_reset_callbacks([lambda: state.calls.append("first"), lambda: state.calls.append("second")])
    state.register_reset_callbacks([lambda: state.calls.append("third")])
    state.on_reset()
    assert state.calls == ["reset", "first", "second", "third"]


# ---- faults of Horovod's states


def test_notice_between_two_commits_trains_no_batch_twice() -> None:
    """Horovod keeps the weights but forgets the position; here both are restored together."""

    def train(state: elastic.TorchState, until: int) -> None:
        assert state.sampler is not None
        list(state.sampler)
        while state.batch < until:
            train_one_step(state, state.batch)
            state.batch += 1
            state.sampler.record_indices([0, 0])
            if state.batch % 4 == 0:
                state.commit()

    noticed, undisturbed = small_state(batch=0), small_state(batch=0)
    for state in (noticed, undisturbed):
        Commits(state)
    train(undisturbed, 12)
    train(noticed, 6)
    assert noticed.sampler is not None
    assert noticed.recall() == Point(4, 1)  # the result of HostsUpdatedInterrupt in batch 7
    assert (noticed.batch, noticed.sampler.consumed) == (4, 8)
    train(noticed, 12)
    assert bits_of(noticed) == bits_of(undisturbed)
    assert noticed.sampler.state_dict() == undisturbed.sampler.state_dict()  # type: ignore[union-attr]


def decaying(value: float) -> elastic.TorchState:
    torch.manual_seed(int(value))
    model = nn.Linear(3, 3)
    return elastic.TorchState(
        model, torch.optim.AdamW(model.parameters(), weight_decay=0.5), rng="per_step", mark=value
    )


def sent(state: elastic.TorchState) -> Any:
    tree, parts = snapshot.split(state.contents(), "state")
    return snapshot.join(tree, {part.name: part for part in parts})


def train_alike(state: elastic.TorchState) -> None:
    assert state.model is not None and state.optimizer is not None
    state.optimizer.zero_grad()
    state.model(torch.ones(2, 3)).square().sum().backward()
    state.optimizer.step()


def test_newcomers_optimizer_is_not_stepped_so_weight_decay_cannot_diverge() -> None:
    leader, newcomer = decaying(1.0), decaying(2.0)
    Commits(leader)
    train_alike(leader)
    leader.commit()
    newcomer.load(copy.deepcopy(sent(leader)), own=False)
    Commits(newcomer, point=Point(1, 2))
    assert bits_of(newcomer) == bits_of(leader)
    for state in (leader, newcomer):
        train_alike(state)
    assert bits_of(newcomer) == bits_of(leader)


def test_a_new_generation_begins_the_reports_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Counter(1)
    Commits(state)
    begun: list[int] = []
    monkeypatch.setattr(state._reporter, "begin", lambda: begun.append(state.completed_steps))
    state.bind(None, 0)
    assert begun == []
    Commits(state)
    assert begun == [0]


@pytest.mark.parametrize(("steps", "drawn"), [(0, "as its script left them"), (1, "derived")])
def test_own_random_numbers_that_no_rank_holds_start_as_the_script_seeded_them(steps: int, drawn: str) -> None:
    leader, newcomer = elastic.ObjectState(rng="saved", mark=1), elastic.ObjectState(rng="saved", mark=2)
    torch.manual_seed(3)
    leader.bind(None, 0)
    torch.manual_seed(4)
    newcomer.bind(None, 1)
    contents = leader.contents() | {"shared": {"steps": steps, "values": {"mark": 1}}}
    expected = torch.rand(2)  # a step that was never committed drew them first
    newcomer.load(contents, own=False)
    assert newcomer.mark == 1
    assert torch.equal(torch.rand(2), expected) == (drawn == "as its script left them")


def test_newcomers_saved_copy_is_the_leaders_before_its_first_commit() -> None:
    leader, newcomer = decaying(1.0), decaying(2.0)
    newcomer._last_commit.copy_from_now_on()
    Commits(leader)
    train_alike(leader)
    leader.commit()
    newcomer.load(copy.deepcopy(sent(leader)), own=False)
    Commits(newcomer, point=Point(1, 2))
    train_alike(newcomer)
    newcomer.mark = 0.0
    newcomer.restore()
    assert bits_of(newcomer) == bits_of(leader)
    assert newcomer.mark == 1.0


def test_no_rank_skips_a_sync_because_of_its_notice() -> None:
    """In Horovod, ranks with different skip_sync values wait for each other forever; here it has no effect."""
    state = Counter(1)
    Commits(state)
    for skip in (True, False):
        notice = HostsUpdatedInterrupt("a node has come", skip_sync=skip)
        assert notice.skip_sync is skip
        state.calls.clear()
        state.recall()
        state.begin(Point(0, 2))
        assert state.calls == ["restore", "sync from 2", "save"]


def test_gradients_of_an_interrupted_step_do_not_enter_the_next() -> None:
    state = small_state()
    Commits(state)
    backward(state)
    state.begin(Point(0, 2))  # also on a rank that had nothing to recall
    assert all(one.grad is None for one in state.weights())


@pytest.mark.parametrize("kind", [list, tuple, lambda both: dict(enumerate(both))], ids=["list", "tuple", "dict"])
def test_several_models_in_one_value_are_refused_with_the_right_spelling(
    kind: Callable[[list[nn.Module]], Any],
) -> None:
    models = kind([nn.Linear(1, 1), nn.Linear(1, 1)])
    with pytest.raises(UsageError, match=r"TorchState\(model=…\): a Linear inside a .*Fix: give each its own name"):
        elastic.TorchState(models, rng="per_step")
    with pytest.raises(UsageError, match=r"TorchState\(others=…\)"):
        elastic.TorchState(nn.Linear(1, 1), others=models)


MODULE, SGD = nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (((SGD, MODULE), {}), r"TorchState\(SGD, Linear\): the optimizer comes second"),
        (((MODULE.parameters(),), {}), r"TorchState\(model=…\): expected a torch.nn.Module, found a generator"),
        (((MODULE, 0.1), {}), r"TorchState\(optimizer=…\): expected a torch.optim.Optimizer, found a float"),
        (((MODULE,), {"sampler": DistributedSampler(range(8), 2, 0)}), r"a DistributedSampler has no position"),  # type: ignore[arg-type]
    ],
)
def test_argument_of_the_wrong_kind_is_refused_with_its_line(given: tuple[Any, dict[str, Any]], told: str) -> None:
    with pytest.raises(UsageError, match=rf"test_state_classes\.py:\d+: .*{told}.*Fix: "):
        TorchState(*given[0], **given[1])
