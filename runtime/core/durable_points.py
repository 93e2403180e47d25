"""Restore points that every member holds on disk: until one is there, nobody may delete what came before it.

Here lives who has reported which point, and the decision that one is committed. Never here: which point a generation
resumes (``restore``), what a rank deletes. The one idea: each report is the whole truth of its sender, so it may be
lost, doubled or late, and a point is counted where reports change, never by asking everybody again.
"""

from __future__ import annotations

from collections import Counter

from runtime.core.ledger import Ledger
from runtime.core.messages import CommittedPoint, SavedPoints
from runtime.core.point import Point
from runtime.core.records import GenerationCommitted, PointCommitted
from runtime.core.state import Seat, is_on_line


class DurablePoints:
    """Whose disk holds what, of the members of the last generation."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counted: GenerationCommitted | None = None  # for whose members the holders are counted
        self._incarnations: dict[str, int] = {}  # of them
        self._held: dict[str, tuple[int, frozenset[Point]]] = {}  # node → incarnation, what it reported last
        self._holders: Counter[Point] = Counter()  # how many of them hold each

    def take(self, seat: Seat, message: SavedPoints) -> None:
        """A member says what it holds; with its first word in this term it may not know yet which point all do."""
        committed = self._ledger.state.generation
        if committed is None:
            return
        self._count_for(committed)
        if self._incarnations.get(seat.node) != seat.incarnation:
            return
        is_first = seat.node not in self._held
        _, before = self._held.get(seat.node, (0, frozenset()))
        now = frozenset([point for point in message.points if point in before or is_on_line(point, committed)])
        self._held[seat.node] = (seat.incarnation, now)
        holders = self._holders
        for point in before - now:
            holders[point] -= 1
        for point in now - before:
            holders[point] += 1
        known = self._ledger.state.committed_point
        newer = now if known is None else [point for point in now if point > known]
        everywhere = max([point for point in newer if holders[point] == len(committed.members)], default=None)
        if everywhere is not None:
            self._ledger.write(PointCommitted(everywhere))
            for member in self._ledger.live_seats():
                self._tell(member, everywhere)
        elif known is not None and is_first:
            self._tell(seat, known)

    def _tell(self, seat: Seat, point: Point) -> None:
        state = self._ledger.state
        self._ledger.tell(seat.node, CommittedPoint(state.job, state.term, state.generation_number, point))

    def _count_for(self, committed: GenerationCommitted) -> None:
        """Count anew where the members have changed: what those who stay have reported stays true."""
        if committed is self._counted:
            return
        self._counted, self._incarnations = committed, dict(committed.members)
        self._held = {
            node: (incarnation, frozenset(point for point in points if is_on_line(point, committed)))
            for node, (incarnation, points) in self._held.items()
            if self._incarnations.get(node) == incarnation
        }
        self._holders = Counter(point for _, points in self._held.values() for point in points)
