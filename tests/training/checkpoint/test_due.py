"""When a rank saves: equal on every rank, through losses and newcomers, and as often as requested."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.core.messages import GenerationStarted, RoundId
from samebits.training.checkpoint.save_schedule import Due, FixedSteps, Timed, due_by
from samebits.training.state.checkpoint_config import CheckpointConfig


def place_of(rank: int, world_size: int, generation: int) -> GenerationStarted:
    return GenerationStarted(
        job="job-1",
        term=1,
        incarnation=1,
        generation=generation,
        round=RoundId(1, generation),
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        restore=None,
        source=rank,
        serves=(),
        text="",
        slot=rank,
    )


class World:
    """Ranks with separate clocks that meet in a simulated ``agree``."""

    def __init__(self, ranks: int, seconds: float | None = 10.0) -> None:
        self.now_s = [1000.0 * rank for rank in range(ranks)]
        self.said: list[str] = []
        self._seconds = seconds
        self._told: tuple[int, int] | None = None
        self.callers: list[int] = []
        self.deaf: set[int] = set()
        self.step = 0
        self.generation = 0
        self.ranks = [self.new(rank) for rank in range(ranks)]

    def new(self, rank: int) -> Timed:
        def agree(numbers: tuple[int, int]) -> tuple[int, int]:
            if rank == 0:
                self._told = numbers
            self.callers.append(rank)
            if rank in self.deaf:
                raise ConnectionError("a member was lost")
            assert self._told is not None
            return self._told

        return Timed(self._seconds, agree, clock=lambda: self.now_s[rank], say=self.said.append)

    def begin(self) -> None:
        self.generation += 1
        for rank, due in enumerate(self.ranks):
            due.begins(self.step, place_of(rank, len(self.ranks), self.generation))

    def pass_s(self, seconds: float) -> None:
        self.now_s = [now_s + seconds for now_s in self.now_s]

    def commit(self, took_s: float, *, save_s: float = 0.0, slowed_s: float = 0.0) -> bool:
        """Make one step of all ranks, and the save if it is due; return whether it was."""
        self.pass_s(took_s)
        self.step += 1
        self.callers.clear()
        answers = [due.is_at(self.step) for due in self.ranks]
        assert len(set(answers)) == 1, f"at step {self.step} the ranks disagree: {answers}"
        assert self.callers in ([], list(range(len(self.ranks)))), f"only {self.callers} met at step {self.step}"
        if answers[0]:
            for rank, due in enumerate(self.ranks):
                with due.saving():
                    self.now_s[rank] += save_s
        return answers[0]

    def saves(self, steps: int, took_s: float, save_s: float = 0.0) -> list[int]:
        return [self.step for _ in range(steps) if self.commit(took_s, save_s=save_s)]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (CheckpointConfig(), FixedSteps),
        (CheckpointConfig(save_checkpoint_seconds=3), Timed),
        (CheckpointConfig(save_checkpoint_steps="auto"), Timed),
    ],
)
def test_config_selects_the_schedule(config: CheckpointConfig, kind: type[Due]) -> None:
    assert type(due_by(config, lambda numbers: numbers)) is kind


def test_step_schedule_needs_no_communication_and_allows_several_steps_per_commit() -> None:
    due = due_by(CheckpointConfig(10), never)
    due.begins(0, place_of(0, 2, 1))
    assert [step for step in range(1, 31) if due.is_at(step)] == [10, 20, 30]
    assert not due.is_at(30)
    assert [due.is_at(step) for step in (38, 45, 52)] == [False, True, True]
    due.begins(20, place_of(0, 2, 2))
    assert [step for step in range(21, 41) if due.is_at(step)] == [30, 40]
    assert due.contents() == {}


def never(_numbers: tuple[int, int]) -> tuple[int, int]:
    raise AssertionError("fixed steps need no agreement")


def test_point_every_so_many_seconds_of_training() -> None:
    world = World(3, seconds=10.0)
    world.begin()
    assert world.saves(100, 0.5, save_s=2.0) == [20, 40, 60, 80, 100]
    assert world.said == ["saves every 20 steps (10 s, save_checkpoint_seconds): a step takes 0.5 s"]


def test_slower_steps_are_noticed_on_the_way() -> None:
    world = World(2, seconds=100.0)
    world.begin()
    assert world.saves(1000, 0.1) == [1000]
    before_s = world.now_s[0]
    while not world.commit(0.4):
        pass
    assert world.now_s[0] - before_s == pytest.approx(200.0), "half way at the old speed, 500 steps"
    assert world.saves(1000, 0.4)[-1] - world.step > -250, "and the new speed is known"


def test_ranks_meet_rarely() -> None:
    world = World(2, seconds=1000.0)
    world.begin()
    met = 0
    for _ in range(10_000):
        world.commit(0.1)
        met += bool(world.callers)
    assert met < 40


@given(data=st.data(), ranks=st.integers(1, 5))
def test_no_loss_makes_the_ranks_disagree(data: Any, ranks: int) -> None:
    world = World(ranks, seconds=data.draw(st.sampled_from([0.5, 3.0, None])))
    world.begin()
    for _ in range(data.draw(st.integers(1, 12))):
        world.saves(data.draw(st.integers(0, 30)), data.draw(st.floats(0.001, 2.0)))
        world.deaf = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
        lose_in_a_commit(world)
        taken = world.ranks[data.draw(st.integers(0, ranks - 1))].contents()
        for rank in data.draw(st.sets(st.integers(0, ranks - 1))):  # newcomers, possibly including rank 0
            world.ranks[rank] = world.new(rank)
            world.ranks[rank].become(taken)
        world.step = max(0, world.step - data.draw(st.sampled_from([0, 1, 7])))
        world.begin()


def lose_in_a_commit(world: World) -> None:
    """Let some ranks hear rank 0's decision while others lose the group first."""
    world.pass_s(0.5)
    world.step += 1
    for due in world.ranks:
        try:
            due.is_at(world.step)
        except ConnectionError:
            continue
    world.deaf = set()


def test_state_carries_all_that_the_next_rank_0_needs() -> None:
    world = World(2, seconds=10.0)
    world.begin()
    world.saves(30, 0.5)
    world.ranks[0] = world.new(0)
    world.ranks[0].become(world.ranks[1].contents())
    world.pass_s(500.0)  # a recovery is not training
    world.begin()
    assert world.saves(20, 0.5) == [40]


def test_data_of_another_schedule_changes_nothing() -> None:
    world = World(1, seconds=10.0)
    known = world.ranks[0].contents()
    world.ranks[0].become({})
    world.ranks[0].become({"watched_s": 5.0})
    assert world.ranks[0].contents() == known
    FixedSteps(5).become(known)


def test_auto_saves_soon_then_as_often_as_pays_and_explains_itself_once() -> None:
    world = World(2, seconds=None)
    world.begin()
    assert world.saves(50, 0.1, save_s=0.001) == [50], "to learn what a save costs"
    first = world.saves(20_000, 0.1, save_s=0.001)
    assert first[0] - 50 == pytest.approx(4243, rel=0.01)  # sqrt(2 · 0.001 s · 50,000 h / 2 processes) = 424 s
    assert len(world.said) == 1
    assert world.said[0].startswith("saves every 4243 steps (7.1 min): a save costs 0.001 s, a failure is expected")


def test_auto_saves_more_often_after_a_failure() -> None:
    world = World(2, seconds=None)
    world.begin()
    world.saves(100, 0.1, save_s=0.5)
    for _ in range(20):
        world.begin()
        world.saves(10, 0.1)
    before = len(world.said)
    saved = world.saves(40_000, 0.1, save_s=0.5)
    assert len(world.said) > before
    assert "20 seen in" in world.said[-1]
    assert saved


def test_cost_of_a_save_is_the_delay_of_the_steps_after_it() -> None:
    due, world = timed_alone()
    for _ in range(100):
        world.commit(0.1, save_s=0.2)
    assert due.contents()["costs_s"][-1] == pytest.approx(0.2)
    while not world.commit(0.1, save_s=0.2):
        pass
    for took_s in (0.5, 0.3, 0.1, 5.0):  # the last one comes later and is unrelated
        world.commit(took_s)
    assert due.contents()["costs_s"][-1] == pytest.approx(0.2 + 0.4 + 0.2)


def timed_alone() -> tuple[Timed, World]:
    world = World(1, seconds=2.0)
    world.begin()
    return world.ranks[0], world
