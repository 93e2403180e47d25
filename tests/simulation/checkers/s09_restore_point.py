"""S9: a generation starts from the greatest permitted point, from sources that hold it.

If a point was committed and none is left, no generation starts.

A commit that a member finds in its host's memory counts as a point of its own. A copy that it keeps for a slot counts
as a point of that slot's rank, whose own parts come back with it. Of a sharded state each part comes from a rank that
holds the same one, and a point counts only if every part of it is held. Every part has a member.
Disks need not be asked where a member remembers a commit of the last generation, or what that started from: its peers
cannot have come further without it. Anything older in a memory may have been overtaken, so then every disk counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from samebits.core.end_kinds import EndKind
from samebits.core.messages import Copy, GenerationStarted, Holdings
from samebits.core.point import Point
from samebits.core.records import GenerationCommitted
from samebits.core.scheduler import SchedulerEvent
from samebits.core.values import replace
from tests.simulation.checkers.base import Checker
from tests.simulation.checkers.line import is_kept


class RestorePoint(Checker):
    """Makes its own choice, from what every member brought into the round."""

    name = "S9"

    def begin_job(self) -> None:
        self._sources: dict[int, dict[int, int]] = {}  # generation → rank → whose copy it loads

    def watch(self) -> None:
        self.world.when_recorded[GenerationCommitted].append(self._committed)
        self.world.when_said[GenerationStarted].append(self._said)

    def _committed(self, event: SchedulerEvent | None, record: GenerationCommitted) -> None:
        line = self.world.witness.line
        kept = line.kept()
        joins = [self._credible(join) for join in line.joins_of(record) if join is not None]
        on_line = [{point for point in _held(join) if is_kept(point, kept)} for join in joins]
        copies = [copy for join in joins for copy in join.copies if is_kept(copy.point, kept)]
        if missing := _all_parts(joins) - set(_parts(joins, record.slots)):
            self.violated(f"{record}: no member holds the parts {sorted(missing)}")
        expected = _greatest(joins, on_line, copies, record.slots)
        if expected is None and any(on_line):
            self.violated(f"{record}: of no point every part is held, {on_line} and copies {copies}")
        asked_all = all(join.looked for join in joins) or not line.committed
        if not asked_all and not self._suffices(joins, on_line, record.slots):
            self.violated(f"{record}: memories {[join.live for join in joins]} do not tell; not every disk was asked")
        known = self.world.witness.disk.committed_point
        if known is not None and known.step > 0 and (record.restore is None or record.restore.step == 0):
            self.violated(f"{record}: it trains again from the beginning, though every disk held {known}")
        if record.restore != expected:
            self.violated(f"{record}: the members hold {on_line} and copies {copies}; expected {expected}")

    def _credible(self, join: Holdings) -> Holdings:
        """If the ranks of the last generation differed, only points common before that."""
        disk = self.world.witness.disk
        last = self.world.witness.line.committed[-1:]
        if not any(
            one.kind is EndKind.UNEQUAL and last and one.generation == last[0].generation for one in disk.interruptions
        ):
            return join
        equal = disk.committed_point or Point(-1, 0)
        points = tuple(point for point in join.points if point <= equal)
        live = join.live if join.live is not None and join.live <= equal else None
        copies = tuple(copy for copy in join.copies if copy.point <= equal)
        kept = tuple(one for one in join.kept if one.point <= equal)
        return replace(join, points=points, live=live, copies=copies, kept=kept)

    def _suffices(self, joins: list[Holdings], on_line: list[set[Point]], slots: tuple[int, ...]) -> bool:
        """Return whether memories hold the furthest possible point with the own parts of all."""
        last = self.world.witness.line.committed[-1]
        remembered = [join.live for join in joins if join.live is not None]
        newest = max(remembered, key=lambda point: (point.step, point.generation), default=None)
        if newest is None or (newest.generation != last.generation and newest != last.restore):
            return False
        parts = _parts(joins, slots)
        remembered_parts = {
            part
            for part, join in zip(parts, joins, strict=True)
            if newest in {join.live, *(one.point for one in join.kept)}
        }
        return remembered_parts == set(parts) and all(
            newest in points for join, points in zip(joins, on_line, strict=True) if join.own_parts
        )

    def _said(self, session: str, message: GenerationStarted) -> None:
        line = self.world.witness.line
        record = line.of(message.generation)
        assert record is not None, "S7: what is sent is durable"
        if message.restore is not None:
            self._judge_source(record, message, message.restore)
        sources = self._sources.setdefault(message.generation, {})
        sources[message.rank] = message.source
        for rank in (*message.serves, *(loan.rank for loan in message.lends)):
            if sources.get(rank, message.rank) != message.rank:
                self.violated(f"{message}: rank {rank} is to load from rank {sources[rank]}")

    def _judge_source(self, record: GenerationCommitted, message: GenerationStarted, restore: Point) -> None:
        joins = self.world.witness.line.joins_of(record)
        source, own = joins[message.source], joins[message.rank]
        assert source is not None and own is not None, "a generation starts only on members that joined its round"
        if message.serves and restore not in _held(own):
            self.violated(f"{message}: it serves what it does not hold, {own}")
        parts = _parts([join for join in joins if join is not None], record.slots)
        is_whole = restore.step == 0 and restore in own.points
        for rank in message.serves:
            if parts[rank] != parts[message.rank] and not is_whole:
                self.violated(f"{message}: it serves rank {rank}, which holds another part")
        for loan in message.lends:
            if parts[record.slots.index(loan.slot) if loan.slot in record.slots else loan.rank] != parts[loan.rank]:
                self.violated(f"{message}: it lends rank {loan.rank} another part's point")
            if Copy(loan.slot, restore) not in own.copies:
                self.violated(f"{message}: it lends what it does not keep, {own}")
            has_own_copy = any(Copy(record.slots[loan.rank], restore) in join.copies for join in joins if join)
            if has_own_copy and loan.slot != record.slots[loan.rank]:
                self.violated(f"{message}: rank {loan.rank} is lent another slot's point, and there is its own")
        if restore in _held(source):
            return
        if not any(copy.point == restore for copy in source.copies):
            self.violated(f"{message}: its source brought {source}")


def _held(join: Holdings) -> set[Point]:
    return {*join.points, *(one.point for one in join.kept), *([join.live] if join.live is not None else [])}


def _all_parts(joins: list[Holdings]) -> set[tuple[int, ...]]:
    """Return the parts that the members of a full world hold."""
    sharding = joins[0].sharding
    slots = range(1 if sharding is None else math.prod(sharding.sizes))
    return set(_parts([joins[0]] * len(slots), slots))


def _parts(joins: list[Holdings], slots: Sequence[int]) -> list[tuple[int, ...]]:
    """Return each rank's part of the state: its slot's coordinate in the mesh without the dimensions that replicate."""
    parts = []
    for slot, join in zip(slots, joins, strict=True):
        part, below = [], 1
        if join.sharding is not None:
            for size, replicates in zip(join.sharding.sizes[::-1], join.sharding.replicates[::-1], strict=True):
                part += [] if replicates else [slot // below % size]
                below *= size
        parts.append(tuple(part))
    return parts


def _greatest(
    joins: list[Holdings], on_line: list[set[Point]], copies: list[Copy], slots: tuple[int, ...]
) -> Point | None:
    """Return the most advanced; if members need their own parts, the most advanced that those all hold, or others for
    them.
    """
    parts = _parts(joins, slots)
    part_of_slot = dict(zip(slots, parts, strict=True))
    everything = {
        point
        for point in set().union(*on_line, {copy.point for copy in copies})
        if (point.step == 0 and any(point in join.points for join in joins))
        or {part for part, points in zip(parts, on_line, strict=True) if point in points}
        | {part_of_slot.get(copy.slot, ()) for copy in copies if copy.point == point}
        >= set(parts)
    }
    of_slots = [
        points | {copy.point for copy in copies if copy.slot == slot}
        for slot, points in zip(slots, on_line, strict=True)
    ]
    needing = [points for join, points in zip(joins, of_slots, strict=True) if join.own_parts]
    common = everything.intersection(*needing) if needing else everything
    return max(common or everything, key=lambda point: (point.step, point.generation), default=None)
