"""S9, S10: a generation starts from the greatest point its members can have, on the line the job has kept.

The line is walked back through the generations as they were committed; the records' own ``line`` is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.core.messages import FromScheduler, GenerationStarted, Join, RoundId
from runtime.core.point import Point
from runtime.core.ready import Ready
from runtime.core.records import GenerationCommitted, Record
from runtime.core.scheduler import Event, Received
from tests.simulation.checkers.base import Checker


class Restore(Checker):
    """Remembers what every member brought into a round, and chooses for itself."""

    def watch(self) -> None:
        self._brought: dict[tuple[RoundId, str, int], Join] = {}
        self._committed: list[GenerationCommitted] = []
        self._sources: dict[int, dict[int, int]] = {}
        self.world.watch_decided.append(self._decided)
        self.world.watch_durable.append(self._durable)
        self.world.watch_said.append(self._said)

    def _durable(self, records: list[Record]) -> None:
        self._committed += [record for record in records if isinstance(record, GenerationCommitted)]

    def _kept(self) -> Iterator[tuple[int, int | None]]:
        """(generation, its last step that was kept; None: all) of the line that the newest generation continues."""
        last_step: int | None = None
        generation = len(self._committed)
        while generation > 0:
            yield generation, last_step
            start = self._committed[generation - 1].restore
            if start is None:
                return
            generation, last_step = start.generation, start.step

    def _decided(self, event: Event | None, ready: Ready) -> None:
        if isinstance(event, Received) and isinstance(event.message, Join):
            sender = event.message.sender
            if self.world.witness.accepts(event) is not None:
                self._brought[event.message.round, sender.node, sender.incarnation] = event.message
        for record in ready.records:
            if isinstance(record, GenerationCommitted):
                self._judge(record)

    def _judge(self, record: GenerationCommitted) -> None:
        brought = []
        for node, incarnation in record.members:
            join = self._brought.get((record.round, node, incarnation))
            if join is None:
                self.violated("S8", f"{record}: {node} never joined this round")
            brought.append(join)
        kept = dict(self._kept())
        on_line = [{point for point in join.points if _is_kept(point, kept)} for join in brought]
        if record.restore is not None and not any(record.restore in points for points in on_line):
            name = "S10" if any(record.restore in join.points for join in brought) else "S9"
            self.violated(name, f"{record}: kept was {kept}, on it the members hold {on_line}")
        expected = self._expected(brought, on_line)
        if record.restore != expected:
            self.violated("S9", f"{record}: the members hold {on_line}; expected {expected}")

    @staticmethod
    def _expected(brought: list[Join], on_line: list[set[Point]]) -> Point | None:
        """Section 6: the most advanced; where members need their own parts, the most advanced that those all hold."""
        everything = set().union(*on_line)
        needing = [points for join, points in zip(brought, on_line, strict=True) if join.own_parts]
        common = everything.intersection(*needing) if needing else everything
        return max(common or everything, key=lambda point: (point.step, point.generation), default=None)

    def _said(self, session: str, message: FromScheduler) -> None:
        if not isinstance(message, GenerationStarted):
            return
        record = self._committed[message.generation - 1]
        node, incarnation = record.members[message.source]
        if message.restore is not None:
            source = self._brought[record.round, node, incarnation]
            if message.restore not in source.points:
                self.violated("S9", f"{message}: its source holds {source.points}")
        sources = self._sources.setdefault(message.generation, {})
        sources[message.rank] = message.source
        for rank in message.serves:
            if sources.get(rank, message.rank) != message.rank:
                self.violated("S9", f"{message}: rank {rank} was told to load from rank {sources[rank]}")


def _is_kept(point: Point, kept: dict[int, int | None]) -> bool:
    if point.generation not in kept:
        return False
    last_step = kept[point.generation]
    return last_step is None or point.step <= last_step
