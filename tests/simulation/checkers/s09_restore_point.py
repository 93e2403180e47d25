"""S9: a generation starts from the greatest point that DESIGN section 6 allows, from sources that hold it.

Disks need not be asked where a member remembers a commit of the last generation, or what that started from: its peers
cannot have come further without it. Anything older in a memory may have been overtaken, so then every disk counts.
"""

from __future__ import annotations

from runtime.core.messages import GenerationStarted, Join
from runtime.core.point import Point
from runtime.core.records import GenerationCommitted
from runtime.core.scheduler import Event
from tests.simulation.checkers.base import Checker
from tests.simulation.checkers.line import is_kept


class RestorePoint(Checker):
    """Chooses for itself, from what every member brought into the round."""

    name = "S9"

    def begin_job(self) -> None:
        self._sources: dict[int, dict[int, int]] = {}  # generation → rank → whose copy it loads

    def watch(self) -> None:
        self.world.when_recorded[GenerationCommitted].append(self._committed)
        self.world.when_said[GenerationStarted].append(self._said)

    def _committed(self, event: Event | None, record: GenerationCommitted) -> None:
        line = self.world.witness.line
        kept = line.kept()
        joins = [join for join in line.joins_of(record) if join is not None]
        on_line = [{point for point in _held(join) if is_kept(point, kept)} for join in joins]
        expected = _greatest(joins, on_line)
        if not all(join.looked for join in joins) and line.committed and not self._suffices(joins, on_line):
            self.violated(f"{record}: memories {[join.live for join in joins]} do not tell; not every disk was asked")
        if record.restore != expected:
            self.violated(f"{record}: the members hold {on_line}; expected {expected}")

    def _suffices(self, joins: list[Join], on_line: list[set[Point]]) -> bool:
        """Whether what is remembered is as far as anybody can have come, and everybody's own parts are there."""
        last = self.world.witness.line.committed[-1]
        remembered = [join.live for join in joins if join.live is not None]
        newest = max(remembered, key=lambda point: (point.step, point.generation), default=None)
        if newest is None or (newest.generation != last.generation and newest != last.restore):
            return False
        return all(newest in points for join, points in zip(joins, on_line, strict=True) if join.own_parts)

    def _said(self, session: str, message: GenerationStarted) -> None:
        line = self.world.witness.line
        record = line.committed[message.generation - 1]
        node, incarnation = record.members[message.source]
        if message.restore is not None:
            source = line.join_of(record.round, node, incarnation)
            if source is None or message.restore not in _held(source):
                self.violated(f"{message}: its source brought {source}")
        sources = self._sources.setdefault(message.generation, {})
        sources[message.rank] = message.source
        for rank in message.serves:
            if sources.get(rank, message.rank) != message.rank:
                self.violated(f"{message}: rank {rank} was told to load from rank {sources[rank]}")


def _held(join: Join) -> set[Point]:
    return {*join.points, *([join.live] if join.live is not None else [])}


def _greatest(joins: list[Join], on_line: list[set[Point]]) -> Point | None:
    """The most advanced; where members need their own parts, the most advanced that those all hold."""
    everything = set().union(*on_line)
    needing = [points for join, points in zip(joins, on_line, strict=True) if join.own_parts]
    common = everything.intersection(*needing) if needing else everything
    return max(common or everything, key=lambda point: (point.step, point.generation), default=None)
