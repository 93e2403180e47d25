"""Builds that let ranks differ; one decision each."""

from __future__ import annotations

from typing import Any

from samebits.core.point import Point
from samebits.core.rounds.durable_points import DurablePoints
from samebits.core.scheduler import SchedulerCore
from samebits.core.watch.equality import Equality, Key
from tests.simulation.mutants.mutant import Mutant


def _with_equality(kind: type[Equality]) -> type[SchedulerCore]:
    class Changed(SchedulerCore):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self._equality = kind(self._ledger)
            self._durable_points = DurablePoints(self._ledger, self._equality)

    return Changed


class _IgnoresTheEnd(Equality):
    """A finished worker counts, whatever its digest."""

    @property
    def is_final_equal(self) -> bool:
        return True


class _AsksOneself(Equality):
    """A digest is compared with the same rank's own."""

    def _is_equal(self, key: Key) -> bool:
        tally = self._tallies.get(key)
        return tally is not None and tally.tellers == len(self._rank_of)


class _HeldIsEnough(Equality):
    """A point that all hold counts as common, whatever its content."""

    def is_equal(self, point: Point) -> bool:
        return True


ODD = {"has_odd_rank": True, "world_size": 3, "min_world_size": 3, "max_world_size": 3}

MUTANTS = (
    Mutant("digests are ignored at the end", frozenset({"S21"}), 300, _with_equality(_IgnoresTheEnd), changes=ODD),
    Mutant("ranks are compared with themselves", frozenset({"S21"}), 50, _with_equality(_AsksOneself), changes=ODD),
    Mutant("a point counts although ranks differ", frozenset({"S21"}), 50, _with_equality(_HeldIsEnough), changes=ODD),
)
