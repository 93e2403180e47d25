"""Changes to a module between two commits are undone in a survivor as in a replacement."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from samebits.core.point import Point
from samebits.errors import GenerationEndedError, HiddenStateError
from samebits.service import log
from samebits.training.process import context
from samebits.training.state import last_commit, snapshot
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.last_commit import LastCommit
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Commits, Net, backward, bits_of, small_state, train_one_step


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 1)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(log, "warn", lines.append)
    return lines


def committed(steps: int = 2, **attributes: Any) -> tuple[TorchState, Any]:
    """Return a state two steps after its first commit, and its model."""
    state = small_state(**attributes)
    Commits(state)
    for number in range(steps):
        train_one_step(state, number)
        state.commit()
    return state, state.model


def sent(contents: Any) -> Any:
    """Return what another rank gets."""
    tree, parts = snapshot.split(contents, "state")
    return snapshot.join(tree, {part.name: part for part in parts})


# ---- weights


Swap = Callable[[Any, Any], object]


def by_data_copy(model: nn.Module, other: nn.Module) -> None:
    for one, new in zip(model.parameters(), other.parameters(), strict=True):
        one.data.copy_(new.data)


def by_data_assignment(model: nn.Module, other: nn.Module) -> None:
    for one, new in zip(model.parameters(), other.parameters(), strict=True):
        one.data = new.data


def by_exchange(model: nn.Module, other: nn.Module) -> None:
    for one, new in zip(model.parameters(), other.parameters(), strict=True):
        one.data, new.data = new.data, one.data


def by_new_parameters(model: nn.Module, other: nn.Module) -> None:
    model.load_state_dict(other.state_dict(), assign=True)


def by_other_modules(model: Any, other: Any) -> None:
    model.first, model.last = other.first, other.last


SWAPS = [by_data_copy, by_data_assignment, by_exchange, by_new_parameters, by_other_modules]


@pytest.mark.parametrize("copies", [False, True], ids=["live", "copied"])
@pytest.mark.parametrize("swap", SWAPS)
def test_swapped_weights_return_to_the_last_commit(swap: Swap, copies: bool) -> None:
    torch.manual_seed(3)
    average = Net()
    state, model = committed(average=average, copy_commits=copies)
    before, of_average = bits_of(state), copy.deepcopy(average.state_dict())
    parameters = [id(one) for one in model.parameters()]
    for _ in range(2):  # a second loss at the same commit
        swap(model, average)
        assert bits_of(state) != before
        assert state.recall() == Point(2, 1)
        assert bits_of(state) == before
        assert [id(one) for one in model.parameters()] == parameters
        assert all(torch.equal(one, of_average[name]) for name, one in average.state_dict().items())
    train_one_step(state, 2)
    assert not any(
        torch.equal(one, other) for one, other in zip(model.parameters(), average.parameters(), strict=True)
    ), "the two still share memory"
    assert all(torch.equal(one, of_average[name]) for name, one in average.state_dict().items())


def test_alias_from_before_the_commit_may_be_written_to_after_it() -> None:
    state = small_state()
    assert state.model is not None
    aliases: list[torch.Tensor] = []
    Commits(state)
    aliases += [one.data for one in state.model.parameters()]
    train_one_step(state, 0)
    state.commit()
    before = bits_of(state)
    torch._foreach_zero_(aliases)
    assert state.recall() == Point(1, 1)
    assert bits_of(state) == before


def test_weights_swapped_before_the_commit_share_no_memory_with_the_average() -> None:
    state, model = committed(average=Net())
    point = sent(state.contents())
    train_one_step(state, 2)
    by_data_assignment(model, state.average)
    assert state.recall() is None, "another rank's or a saved point must be used"
    state.load(point, own=True)
    assert all(
        one.data_ptr() != other.data_ptr()
        for one, other in zip(model.parameters(), state.average.parameters(), strict=True)
    )


def test_weights_moved_without_a_trace_are_not_taken_for_the_commits() -> None:
    state, model = committed()
    other = nn.Parameter(torch.zeros_like(model.last.bias))
    for _ in range(model.last.bias._version):  # the sum of all versions stays the same
        with torch.no_grad():
            other.add_(1)
    torch.utils.swap_tensors(model.last.bias, other)
    assert state.recall() is None


def test_untouched_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = committed()

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a weight was copied")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", refuse)
        train_one_step(state, 2)
        state.commit()
    assert state.recall() == Point(3, 1)


def test_weight_given_other_memory_is_reported_once(warned: list[str]) -> None:
    state, model = committed(average=Net())
    by_data_assignment(model, state.average)
    by_data_assignment(model, state.average)
    (line,) = [one for one in warned if "another tensor's memory" in one]
    assert line.startswith("test_between_commits.py:")


def nothing(_model: Any) -> None: ...


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.last.weight.mul_(0.5)


def through_data(model: Any) -> None:
    model.last.weight.data.clamp_(-0.1, 0.1)


def by_other_memory(model: Any) -> None:
    model.last.weight.data = torch.zeros(2, 4)


def swapped_in_place_and_back(model: Any) -> None:
    kept = [one.detach().clone() for one in model.parameters()]
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
        for one, old in zip(model.parameters(), kept, strict=True):
            one.copy_(old)


def swapped_through_data_and_back(model: Any) -> None:
    kept = [one.data.clone() for one in model.parameters()]
    for one in model.parameters():
        one.data.zero_()
    for one, old in zip(model.parameters(), kept, strict=True):
        one.data.copy_(old)


def train_with(
    ahead: Callable[[Any], object], after: Callable[[Any], object], *, every: int = 1, steps: int = 30
) -> None:
    state = small_state()
    Commits(state)
    for number in range(steps):
        if number % every == 0:
            ahead(state.model)
        train_one_step(state, number)
        state.commit()
        if (number + 1) % every == 0:
            after(state.model)
    state.finish()


@pytest.mark.parametrize("change", [in_place, through_data, by_other_memory])
@pytest.mark.parametrize(("every", "steps"), [(1, 1), (1, 3), (7, 30)], ids=["last", "each", "now and then"])
def test_weights_changed_after_the_commit_end_the_job(change: Callable[[Any], object], every: int, steps: int) -> None:
    with pytest.raises(HiddenStateError) as raised:
        train_with(nothing, change, every=every, steps=steps)
    line = inspect.getsource(train_with).splitlines().index("            after(state.model)")
    place = f"test_between_commits.py:{train_with.__code__.co_firstlineno + line}"
    assert str(raised.value).startswith(f"{place}: a weight changed after state.commit(), in the same loop: ")


@pytest.mark.parametrize("change", [nothing, in_place, through_data])
@pytest.mark.parametrize("swap", [nothing, swapped_in_place_and_back, swapped_through_data_and_back])
@pytest.mark.parametrize("every", [1, 7])
def test_weights_changed_in_the_turn_of_a_step_or_swapped_and_back_do_not(
    change: Callable[[Any], object], swap: Callable[[Any], object], every: int, warned: list[str]
) -> None:
    train_with(change, swap, every=every)
    assert not warned
    assert sys.gettrace() is None


def test_a_change_between_two_commits_of_one_turn_does_not() -> None:
    state = small_state(phase=0)
    Commits(state)
    for number in range(6):
        if state.phase == 0:
            train_one_step(state, number)
            state.phase = 1
            state.commit()
        if state.phase == 1:
            in_place(state.model)
            through_data(state.model)
            train_one_step(state, number)
            state.phase = 0
            state.commit()
    state.finish()


def commits_in_a_function(state: TorchState, number: int) -> None:
    train_one_step(state, number)
    state.commit()
    in_place(state.model)  # after


def test_a_change_after_a_commit_in_a_function_that_a_loop_calls_ends_the_job() -> None:
    state = small_state()
    Commits(state)
    with pytest.raises(HiddenStateError, match=r"^test_between_commits\.py:\d+: a weight changed"):
        for number in range(3):
            commits_in_a_function(state, number)


def evaluates_until_a_peer_is_lost(state: TorchState) -> None:
    for number in range(3):
        train_one_step(state, number)
        state.commit()
        if number == 1:
            in_place(state.model)
            raise GenerationEndedError("a member was lost")


def test_a_change_whose_reversal_a_lost_peer_cuts_off_does_not() -> None:
    state = small_state()
    Commits(state)
    kept = sent(state.contents())
    with pytest.raises(GenerationEndedError):
        evaluates_until_a_peer_is_lost(state)
    assert sys.gettrace() is None
    assert state.recall() is None
    state.load(kept, own=True)
    state.begin(Point(0, 2))
    train_one_step(state)
    state.commit()
    state.finish()


def test_a_change_after_the_loop_does_not() -> None:
    state = small_state()
    Commits(state)
    for number in range(3):
        train_one_step(state, number)
        state.commit()
        print(number)
    in_place(state.model)
    through_data(state.model)
    state.finish()


def test_a_loop_that_ends_with_its_commit_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LastCommit, "digest", lambda _: pytest.fail("the weights are read"))
    state = small_state()
    Commits(state)
    while state.completed_steps < 3:
        train_one_step(state)
        state.commit()
    for number in range(3):
        train_one_step(state, number)
        state.commit()


def test_without_recovery_no_loop_is_followed() -> None:
    state = small_state()
    Commits(state).recovers = False
    for number in range(3):
        train_one_step(state, number)
        state.commit()
        in_place(state.model)


# ---- what stands for a commit on disk


def with_much(*, momentum: float = 0.0, **options: Any) -> TorchState:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    state = TorchState(
        model,
        optimizer,
        sampler=ElasticSampler(range(32)),
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1),
        best=1.0,
        history=[1],
        **options,
    )
    Commits(state)
    train_one_step(state)
    state.commit()
    return state


ENDS: dict[str, Callable[[Any], object]] = {
    "weights": lambda state: in_place(state.model),
    "weights through data": lambda state: through_data(state.model),
    "a number": lambda state: setattr(state, "best", 0.5),
    "a list": lambda state: state.history.append(2),
    "a schedule": lambda state: state.schedule.step(),
    "a rate": lambda state: state.optimizer.param_groups[0].update(lr=0.2),
    "a buffer": lambda state: state.model.norm.running_mean.add_(1),
    "a mode": lambda state: state.model.eval(),
    "a flag": lambda state: state.model.last.weight.requires_grad_(False),
    "a sampler": lambda state: state.sampler.record_batch(0, 4),
    "random numbers": lambda state: torch.rand(1),
}


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("what", ["nothing", *ENDS])
def test_only_a_state_that_is_unchanged_stands_for_its_last_commit(what: str, copies: bool) -> None:
    state = with_much(copy_commits=copies)
    assert state.holds_commit
    if what != "nothing":
        ENDS[what](state)
    assert state.holds_commit == (what == "nothing")


# ---- values that change after the commit, in its loop

LOST: dict[str, tuple[Callable[[Any], object], str]] = {
    "a number": (ENDS["a number"], "state.best"),
    "a list": (ENDS["a list"], "state.history"),
    "a schedule": (ENDS["a schedule"], "state.schedule"),
    "a rate": (ENDS["a rate"], "a setting in the param_groups of state.optimizer"),
    "a buffer": (ENDS["a buffer"], "a buffer of state.model"),
    "a mode": (ENDS["a mode"], "train() or eval() of state.model"),
    "a flag": (ENDS["a flag"], "requires_grad of state.model"),
    "a sampler": (ENDS["a sampler"], "state.sampler"),
    "a moment in place": (lambda state: moment_of(state).zero_(), "a moment of state.optimizer"),
    "a new moment": (lambda state: set_moment(state), "a moment of state.optimizer"),
    "all moments": (lambda state: state.optimizer.state.clear(), "a moment of state.optimizer"),
    "a part": (lambda state: setattr(state.model, "last", nn.Linear(4, 2)), "a part of state.model"),
    "a tensor": (lambda state: state.table.add_(1), "state.table"),
    "an array": (lambda state: state.array.__setitem__(0, 5), "state.array"),
}


def moment_of(state: TorchState) -> torch.Tensor:
    assert state.optimizer is not None and state.model is not None
    moment: torch.Tensor = state.optimizer.state[state.model.last.weight]["momentum_buffer"]
    return moment


def set_moment(state: TorchState) -> None:
    assert state.optimizer is not None and state.model is not None
    state.optimizer.state[state.model.last.weight]["momentum_buffer"] = torch.zeros(2, 4)


def with_all() -> TorchState:
    return with_much(momentum=0.9, table=torch.zeros(2), array=np.zeros(2))


def loop(
    state: TorchState,
    after: Callable[[Any], object] | None,
    *,
    ahead: Callable[[Any], object] = nothing,
    at: int = 3,
    steps: int = 6,
) -> None:
    for number in range(steps):
        ahead(state)
        train_one_step(state, number)
        state.commit()
        if after is not None and number == at:
            after(state)
    state.finish()


def maybe(change: Callable[[Any], object], at: int) -> Callable[[Any], object]:
    """Hide the moment of a change in a function that the loop calls at every step."""
    calls = iter(range(at + 1))
    return lambda state: change(state) if next(calls, None) == at else None


def always(state: TorchState, after: Callable[[Any], object], steps: int = 6) -> None:
    for number in range(steps):
        train_one_step(state, number)
        state.commit()
        after(state)
    state.finish()


@pytest.mark.parametrize("at", [0, 4], ids=["first", "later"])
@pytest.mark.parametrize("what", LOST)
def test_a_value_changed_after_the_commit_ends_the_job_at_the_next_step(what: str, at: int) -> None:
    state, (change, name) = with_all(), LOST[what]
    with pytest.raises(HiddenStateError) as raised:
        loop(state, change, at=at)
    line = inspect.getsource(loop).splitlines().index("            after(state)") + loop.__code__.co_firstlineno
    assert str(raised.value).startswith(f"test_between_commits.py:{line}: ")
    assert name in str(raised.value).partition(" changed after state.commit()")[0]
    assert state.completed_steps == 1 + at + 1


@pytest.mark.parametrize("what", [*LOST, "weights", "weights through data"])
def test_a_change_that_a_called_function_makes_seldom_ends_the_job_at_the_next_step(what: str) -> None:
    state = with_all()
    change = LOST[what][0] if what in LOST else ENDS[what]
    with pytest.raises(HiddenStateError, match=r"^test_between_commits\.py:\d+: "):
        always(state, maybe(change, 4))
    assert state.completed_steps == 1 + 5


def written_twice(model: Any) -> None:
    """Change each weight by two writes, as often as a swap and its reversal write to it."""
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(0.5)
            one.add_(0.1)


@pytest.mark.parametrize("swap", [nothing, swapped_in_place_and_back], ids=["alone", "beside a swap"])
def test_a_line_that_writes_twice_to_each_weight_seldom_and_late_ends_the_job(
    swap: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writes look like a swap, and between them more commits pass than are compared after the first."""
    monkeypatch.setattr(last_commit, "_LOOKED_AT", 2)
    state, calls = with_all(), itertools.count()

    def after(state: Any) -> None:
        number = next(calls)
        if number % 20 == 5:
            swap(state.model)
        if number >= 30 and number % 10 == 0:
            written_twice(state.model)

    with pytest.raises(HiddenStateError, match="a weight changed after"):
        always(state, after, steps=120)
    assert state.completed_steps > 31, "the first such write looks like a swap"


def test_swaps_are_hashed_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_commit, "_LOOKED_AT", 2)
    state, calls, hashed = with_all(), itertools.count(), []
    digest = last_commit.LastCommit.digest
    monkeypatch.setattr(last_commit.LastCommit, "digest", lambda self: hashed.append(len(hashed)) or digest(self))

    def after(state: Any) -> None:
        if (number := next(calls)) >= 30 and number % 10 == 0:
            swapped_in_place_and_back(state.model)

    always(state, after, steps=400)
    assert len(hashed) < 24, f"{len(hashed)} hashes for 37 swaps"


def test_a_late_change_after_a_saved_commit_ends_the_job_at_the_next_step() -> None:
    """A recovery would restore the saved commit without the change."""
    state, calls = with_all(), itertools.count()
    session = Commits(state)
    save = session.save

    def save_all() -> None:
        save()
        state.was_saved()

    session.save = save_all  # type: ignore[method-assign]
    with pytest.raises(HiddenStateError, match="a weight changed after"):
        for number in range(60):
            train_one_step(state, number)
            state.commit()
            if_due(next(calls) == 30, state.model)
    assert state.completed_steps == 1 + 31


def if_due(is_due: bool, model: Any) -> None:
    if is_due:
        written_twice(model)


@pytest.mark.parametrize("what", [one for one in LOST if one != "a mode"])
def test_a_value_changed_after_the_last_commit_of_the_loop_ends_the_job(what: str) -> None:
    with pytest.raises(HiddenStateError):
        loop(with_all(), LOST[what][0], at=5)


@pytest.mark.parametrize("what", LOST)
def test_a_value_changed_in_the_turn_of_a_step_or_after_the_loop_does_not(what: str) -> None:
    state = with_all()
    loop(state, None)
    LOST[what][0](state)  # after the loop: a recovery repeats it
    state.finish()
    for change in (LOST[what][0], nothing):
        for number in range(3):
            if number == 2:
                change(state)
            backward(state, number)
            state.optimizer.step()
            state.commit()
            print(number)
    state.finish()


def commits_inside_a_block(state: TorchState) -> None:
    while True:
        with torch.enable_grad():
            train_one_step(state)
            state.commit()
        if state.completed_steps == 4:
            state.best = 0.5


def breaks_after_its_commit(state: TorchState) -> None:
    for number in range(6):
        try:
            train_one_step(state, number)
            state.commit()
            if number == 3:
                break
        except ValueError:
            continue
    state.best = 0.5


def test_the_rest_of_a_turn_begins_inside_a_block_and_ends_at_a_break() -> None:
    with pytest.raises(HiddenStateError, match=r"state\.best changed"):
        commits_inside_a_block(with_all())
    state = with_all()
    breaks_after_its_commit(state)
    state.finish()


def evaluates_and_returns(state: Any) -> None:
    state.model.eval()
    state.best, kept = -1.0, state.best
    state.best = kept
    state.optimizer.param_groups[0]["lr"] *= 1.0
    state.table.add_(1)
    state.table.sub_(1)


def test_values_that_are_set_back_before_the_next_step_do_not() -> None:
    loop(with_all(), evaluates_and_returns, ahead=lambda state: state.model.train())
    always(with_all(), lambda state: evaluates_and_returns(state) or state.model.train())


def test_a_survivor_whose_moments_were_edited_takes_the_commit_from_elsewhere() -> None:
    for change, _ in (LOST["a moment in place"], LOST["a new moment"], LOST["all moments"]):
        state = with_all()
        loop(state, None)
        kept = sent(state.contents())
        assert state.holds_commit
        change(state)
        assert not state.holds_commit
        assert state.recall() is None
        state.load(kept, own=True)
        state.begin(Point(7, 2))
        assert state.recall() == Point(7, 2)


# ---- modes, flags, hooks


class Merging(nn.Linear):
    """Like LoRA's layers: weights are merged for evaluation and separated for training."""

    is_merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.is_merged:
            self.weight.data += -1.0 if mode else 1.0
            self.is_merged = not mode
        return self


def evaluates(model: Any) -> None:
    model.eval()
    model.first.requires_grad_(False)
    model.register_forward_hook(lambda *_: None)
    model.norm.register_full_backward_hook(lambda *_: None)


def described(model: nn.Module) -> Any:
    hooks = [(*one._forward_hooks, *one._forward_pre_hooks, *one._backward_hooks) for one in model.modules()]
    return (
        [one.training for one in model.modules()],
        {name: one.requires_grad for name, one in model.named_parameters()},
        hooks,
    )


@pytest.mark.parametrize("stepped", [False, True], ids=["after the commit", "before the commit"])
def test_modes_flags_and_hooks_are_restored(stepped: bool) -> None:
    state, model = committed(0)
    model.norm.eval()
    model.last.bias.requires_grad_(False)
    kept = model.first.register_forward_pre_hook(lambda *_: None)
    train_one_step(state, 0)
    state.commit()
    before, point = described(model), sent(state.contents())
    if stepped:
        train_one_step(state, 1)
    evaluates(model)
    kept.remove()
    assert (state.recall() is None) == stepped
    if stepped:
        state.load(point, own=False)
    assert described(model) == before


def test_newcomer_gets_modes_and_flags() -> None:
    state, model = committed()
    model.norm.eval()
    model.first.requires_grad_(False)
    train_one_step(state, 2)
    state.commit()
    newcomer = small_state()
    newcomer.load(sent(state.contents()), own=False)
    assert newcomer.model is not None
    assert described(newcomer.model)[:2] == described(model)[:2]


def test_point_of_an_earlier_release_leaves_modes_and_flags_alone() -> None:
    state, model = committed()
    contents = sent(state.contents())
    del contents["shared"]["unlisted"]
    model.eval()
    state.load(contents, own=False)
    assert not model.training


def test_layer_with_merged_weights_is_separated() -> None:
    model = Merging(4, 4)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Commits(state)
    before = model.weight.detach().clone()
    model.eval()
    assert model.is_merged
    assert state.recall() is not None
    assert not model.is_merged
    assert torch.equal(model.weight, before)


# ---- buffers


class Remembering(nn.Linear):
    """Keeps a mean that is not saved, and creates two buffers in its first forward pass."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("later", None)
        self.register_buffer("unsaved", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.later = x.detach().mean(0)
        self.unsaved = x.detach().mean(0, keepdim=True)
        return super().forward(x - self.mean)


def remembering() -> TorchState:
    torch.manual_seed(0)
    model = Remembering()
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), rng="per_step")
    Commits(state)
    return state


def buffers_of(state: TorchState) -> dict[str, bytes]:
    assert state.model is not None
    return {name: one.numpy().tobytes() for name, one in state.model.named_buffers()}


def test_unsaved_and_late_buffers_reach_a_newcomer_and_are_restored() -> None:
    state, newcomer = remembering(), remembering()
    train_one_step(state, 0)
    state.commit()
    expected = buffers_of(state)
    assert expected.keys() == {"mean", "later", "unsaved"}
    newcomer.load(sent(state.contents()), own=False)
    assert buffers_of(newcomer) == expected
    state.model(torch.ones(3, 4))
    assert buffers_of(state) != expected
    assert state.recall() is not None
    assert buffers_of(state) == expected


def test_buffers_made_in_the_first_forward_pass_are_removed_again() -> None:
    state = remembering()
    state.model(torch.ones(3, 4))
    assert state.recall() == Point(0, 1)
    assert buffers_of(state).keys() == {"mean"}
    assert state.model.later is None


# ---- added and removed parts


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.first, "weight", amount=0.5)


def normed(model: Any) -> None:
    parametrizations.weight_norm(model.last)


def shortened(model: Any) -> None:
    model.norm = nn.Identity()


def grown(model: Any) -> None:
    model.extra = nn.Linear(4, 4)


CHANGES: dict[Callable[[Any], None], str] = {
    pruned: "removed first.weight, added first.weight_orig, first.weight_mask",
    normed: "removed last.weight, added last.parametrizations.weight.original0, last.parametrizations.weight.original1",
    shortened: "removed norm.weight, norm.bias, norm.running_mean, norm.running_var and 1 more, added none",
    grown: "removed none, added extra.weight, extra.bias",
}


@pytest.mark.parametrize("change", CHANGES)
def test_added_or_removed_parts_are_reported_at_the_first_commit(
    change: Callable[[Any], None], warned: list[str]
) -> None:
    state, model = committed()
    assert not warned
    change(model)
    train_one_step(state, 2)
    state.commit()
    (line,) = warned
    assert CHANGES[change] in line
    train_one_step(state, 3)
    state.commit()
    assert len(warned) == 1
    assert state.recall() == Point(4, 1)


@pytest.mark.parametrize("change", CHANGES)
def test_parts_added_or_removed_after_the_commit_are_undone(change: Callable[[Any], None]) -> None:
    state, model = committed()
    before, twin = bits_of(state), copy.deepcopy(model)
    change(model)
    assert state.recall() == Point(2, 1)
    assert bits_of(state) == before
    assert type(model.last) is nn.Linear
    x = torch.ones(3, 4)
    assert torch.equal(model(x), twin(x))


def test_module_with_a_scripted_part_is_remembered_too() -> None:
    model = nn.Sequential(torch.jit.script(Net()))
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), rng="per_step")
    Commits(state)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    model(torch.randn(5, 4))
    model.eval()
    assert state.recall() == Point(0, 1)
    assert all(one.training for one in model.modules())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
