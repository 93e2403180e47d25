"""Bit flips in the small world are always named and repaired, and broken builds are noticed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from samebits.core.ledger import Trust, Witnesses
from samebits.core.messages import ReportEnvelope
from samebits.core.point import Point
from samebits.core.records import Record, RolledBack
from samebits.core.reports import Digests
from samebits.core.rounds.rendezvous import Rendezvous
from samebits.core.scheduler import SchedulerCore
from samebits.core.state import JobState, Seat
from samebits.core.values import replace
from samebits.core.watch import consistency
from samebits.core.watch.consistency import ConsistencyJudge
from samebits.core.watch.equality import Equality, RankDifference
from tests.simulation.consistency_world import ConsistencyWorld, Plan, drawn, drawn_with_shards, hunt

SEEDS = 60


def test_every_flip_is_found_in_time_named_and_repaired() -> None:
    flips = 0
    for seed in range(SEEDS // 2):
        world = ConsistencyWorld(seed, drawn(seed))
        world.run()
        flips += len(world.flipped)
        assert 1 <= len([one for one in world.journal if isinstance(one, RolledBack)]) <= len(world.plan.flips)
    assert flips > SEEDS // 2


def test_kill_after_a_flip_costs_only_steps() -> None:
    for seed in range(SEEDS // 2):
        plan = Plan(3 + seed % 3, ((seed % 3, 2 + seed % 37),), dies_behind_flip=True)
        ConsistencyWorld(seed, plan).run()


@pytest.mark.thorough
def test_thousands_of_worlds() -> None:
    for seed in range(10_000, 12_000):
        ConsistencyWorld(seed, drawn(seed)).run()


def test_two_against_two_roll_back_without_a_suspect() -> None:
    for seed in range(20):
        world = ConsistencyWorld(seed, Plan(4, ((1, 10), (3, 10))))
        world.run()
        (record,) = [one for one in world.journal if isinstance(one, RolledBack)]
        assert record.step == 14 and not record.suspects


def test_every_flip_in_a_shard_is_found_and_repaired() -> None:
    named = 0
    for seed in range(SEEDS // 2):
        world = ConsistencyWorld(seed, drawn_with_shards(seed))
        world.run()
        rollbacks = [one for one in world.journal if isinstance(one, RolledBack)]
        assert bool(rollbacks) == bool(world.flipped)
        named += any(one.suspects for one in rollbacks)
    assert named > SEEDS // 12, "with three replicas"


def test_two_replicas_suffice_with_a_leader() -> None:
    for seed in range(20):
        ConsistencyWorld(seed, Plan(2, ((seed % 2, 10),), trust=Trust.LEADER)).run()


# ---- broken builds


def broken(**parts: Any) -> type[SchedulerCore]:
    """Return a scheduler with one of its parts replaced: by attribute, a class that takes the ledger."""

    class Changed(SchedulerCore):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            for name, kind in parts.items():
                setattr(self, name, kind(self._ledger))

    return Changed


class _ComparesTheFirstTwo(Equality):
    """Believes the third rank."""

    def _is_equal(self, key: Any) -> bool:
        values = [told[key].shared for teller, told in sorted(self._told.items())[:2] if key in told]
        return len(self._told) == len(self._rank_of) and len(set(values)) == 1


class _IgnoresShards(Equality):
    """Compares only what all ranks hold."""

    def take(self, seat: Seat, body: Digests, said: ReportEnvelope) -> None:
        super().take(seat, Digests(tuple(replace(one, held=b"") for one in body.digests)), said)


class _NeverAnswers(Equality):
    """Finds differences and forgets them."""

    def difference(self) -> RankDifference | None:
        self._differs = None
        return None


class _HearsTheOldLine(Equality):
    """Accepts reports as usual while all roll back."""

    def take(self, seat: Seat, body: Digests, said: ReportEnvelope) -> None:
        state = self._ledger.state
        back, state.rolled_back = state.rolled_back, None
        super().take(seat, body, said)
        state.rolled_back = back


class _GoesBackToTheNewest(ConsistencyJudge):
    """Rolls all back to the point just before the difference, whether or not it was found equal."""

    def judge(self, found: RankDifference, hidden_state: str = "") -> str:
        near = Point(found.step - 1, found.one.point.generation)
        return super().judge(RankDifference(found.judgement, found.one, found.other, found.values, near), hidden_state)


MUTANTS: Mapping[str, type[SchedulerCore]] = {
    "only two ranks are compared": broken(_equality=_ComparesTheFirstTwo),
    "a difference is found and forgotten": broken(_equality=_NeverAnswers),
    "what is told of the line that is left counts": broken(_equality=_HearsTheOldLine),
    "all go back to a point that nobody has compared": broken(_consistency=_GoesBackToTheNewest),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_build_is_noticed(name: str) -> None:
    assert hunt(MUTANTS[name], range(SEEDS)) is not None


def test_build_that_ignores_shards_is_noticed() -> None:
    assert hunt(broken(_equality=_IgnoresShards), range(SEEDS), drawn_with_shards) is not None


def _without_going_back(records: Iterable[Record]) -> JobState:
    state = JobState()
    for record in records:
        if not isinstance(record, RolledBack):
            state.apply(record)
    return state


@pytest.mark.parametrize(
    ("name", "where", "what"),
    [
        ("everybody joins with what is newest", Rendezvous, {"begin_again": lambda self, reason: None}),
        ("a scheduler that starts again has forgotten it", JobState, {"replay": _without_going_back}),
        ("the minority is believed", consistency, {"_believed": lambda judgement, *_: judgement.groups[-1]}),
        (
            "who took another's state is a witness",
            Witnesses,
            {"origins": lambda self, members, since: dict(enumerate(members))},
        ),
        ("what came after is not left out", Equality, {"_equal_before": lambda self, key, **_: key[0]}),
    ],
)
def test_broken_part_is_noticed(
    name: str, where: object, what: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for attribute, value in what.items():
        monkeypatch.setattr(where, attribute, value)
    assert hunt(SchedulerCore, range(SEEDS)) is not None, name
