"""Builds that break the promises about committed restore points; one decision each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from samebits.core.messages import CommittedPoint, GenerationStarted, Holdings, ReportEnvelope, Sharding
from samebits.core.point import Point
from samebits.core.ready import Ready
from samebits.core.records import PointCommitted
from samebits.core.reports import SavedPoints
from samebits.core.rounds.durable_points import DurablePoints
from samebits.core.scheduler import SchedulerCore
from samebits.core.state import Seat
from samebits.core.values import replace
from tests.simulation.mutants.mutant import Mutant


def _with_points(kind: type[DurablePoints]) -> type[SchedulerCore]:
    class Changed(SchedulerCore):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self._durable_points = kind(self._ledger, self._equality)

    return Changed


class _OneIsEnough(DurablePoints):
    """A point is committed when the first member holds it."""

    def take(self, seat: Seat, body: SavedPoints, said: ReportEnvelope) -> None:
        newest = max(body.points, default=None)
        known = self._ledger.state.committed_point
        if newest is not None and self._ledger.state.generation and (known is None or newest > known):
            self._ledger.write(PointCommitted(newest))


class _SpeaksFirst(DurablePoints):
    """The first member to report a point is notified that it is committed, before all others have it."""

    def take(self, seat: Seat, body: SavedPoints, said: ReportEnvelope) -> None:
        super().take(seat, body, said)
        for point in body.points[-1:]:
            state = self._ledger.state
            self._ledger.tell(seat.node, CommittedPoint(state.job, state.term, state.generation_number, point))


def _newest_stay(
    points: Collection[Point], keep: int, committed: Point | None, told: Collection[Point] = ()
) -> set[Point]:
    """Ignores what other members hold."""
    return set(sorted(points, reverse=True)[keep:])


def _replaces_told_ones(
    points: Collection[Point], keep: int, committed: Point | None, told: Collection[Point] = ()
) -> set[Point]:
    """The newest waiting point replaces the one before it, even if others count on that."""
    waiting = sorted((point for point in points if committed is None or point > committed), reverse=True)
    return set(waiting[1:2])


class _LendsAnothers(SchedulerCore):
    """A borrower is sent the copy of the next slot."""

    def _finish_step(self) -> Ready:
        ready = super()._finish_step()
        for index, send in enumerate(ready.sends):
            if isinstance(send.message, GenerationStarted) and send.message.lends:
                lends = tuple(replace(loan, slot=loan.slot + 1) for loan in send.message.lends)
                ready.sends[index] = send._replace(message=replace(send.message, lends=lends))
        return ready


def _any_source(
    lacking: Sequence[int], held: Sequence[Sequence[int]], initial: Sequence[int], keys: Mapping[int, Any]
) -> dict[int, int]:
    return {rank: next(one for holders in (*held, initial) for one in holders) for rank in lacking}


def _anyones(joined: Mapping[int, Holdings]) -> dict[int, frozenset[Point]]:
    kept = frozenset(kept.point for one in joined.values() for kept in one.kept)
    return dict.fromkeys(joined, kept)


SHARDED = {
    "save_every": 1,
    "world_size": 4,
    "min_world_size": 4,
    "max_world_size": 4,
    "has_own_parts": False,
    "has_memory": True,
    "sharding": Sharding((2, 2), (True, False)),
    "rates_hz": {"disk lost": 0.3},
}
NO_REPLICAS = {**SHARDED, "sharding": Sharding((4,), (False,)), "save_every": 5, "rates_hz": {"worker killed": 0.3}}
LOST_DISKS = {"save_every": 1, "world_size": 3, "has_own_parts": True, "rates_hz": {"disk lost": 0.3}}
NO_DISKS = {"save_every": 1, "saves_s": 0.01, "rates_hz": {"every disk lost": 0.1}}
AWAY = {"keep": 2, "save_every": 1, "world_size": 3, "rates_hz": {"partition": 0.2, "scheduler killed": 0.1}}

MUTANTS = (
    Mutant("a point is committed when one holds it", frozenset({"S20"}), 50, _with_points(_OneIsEnough)),
    Mutant("a point is reported as committed too early", frozenset({"S20", "S7"}), 50, _with_points(_SpeaksFirst)),
    Mutant(
        "points are deleted although others may lack newer ones",
        frozenset({"S20"}),
        300,
        patches={"tests.simulation.checkpoints.disposable": _newest_stay},
        changes=AWAY,
    ),
    Mutant(
        "a point is deleted that others rely on",
        frozenset({"S20"}),
        300,
        patches={"tests.simulation.checkpoints.disposable": _replaces_told_ones},
        changes=AWAY,
    ),
    Mutant(
        "copies are no points",
        frozenset({"S9"}),
        100,
        patches={"samebits.core.restore._copies": lambda joined, committed: {}},
        changes=LOST_DISKS,
    ),
    Mutant(
        "trains from the beginning if every point is lost",
        frozenset({"S9"}),
        100,
        patches={"samebits.core.rounds.rendezvous.lost_progress": lambda found, committed, joined: ""},
        changes=NO_DISKS,
    ),
    Mutant(
        "another part's holder serves",
        frozenset({"S9"}),
        100,
        patches={"samebits.core.restore._sources": _any_source},
        changes=SHARDED,
    ),
    Mutant(
        "a point counts although a part has no holder",
        frozenset({"S9"}),
        100,
        patches={
            "samebits.core.restore._without_holder": lambda *_: set(),
            "samebits.core.restore._sources": _any_source,
        },
        changes=SHARDED,
    ),
    Mutant(
        "commits in shared memory are no points",
        frozenset({"S9"}),
        100,
        patches={"samebits.core.restore._kept": lambda joined: dict.fromkeys(joined, frozenset())},
        changes=NO_REPLICAS,
    ),
    Mutant(
        "a commit in shared memory counts for every part",
        frozenset({"S9"}),
        100,
        patches={"samebits.core.restore._kept": _anyones},
        changes=NO_REPLICAS,
    ),
    Mutant("another slot's copy is lent", frozenset({"S9"}), 100, _LendsAnothers, changes=LOST_DISKS),
)
