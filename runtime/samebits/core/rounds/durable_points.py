"""Find restore points that every member has on disk. Until then, no member may delete older ones.

Each report lists all of its sender's newest points, so reports may be lost, duplicated or late. Points are counted when
reports change. A point is committed once all members hold it with the same digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from samebits.core.ledger import Ledger
from samebits.core.messages import CommittedPoint, ReportEnvelope
from samebits.core.point import Point
from samebits.core.records import GenerationCommitted, PointCommitted
from samebits.core.reports import SavedPoints
from samebits.core.state import Seat, is_on_line
from samebits.core.watch.equality import Equality


class DurablePoints:
    """Counts which points the last generation's members have on disk."""

    def __init__(self, ledger: Ledger, equality: Equality) -> None:
        self._ledger = ledger
        self._equality = equality
        self._counted: GenerationCommitted | None = None  # the generation that the holders are counted for
        self._incarnations: dict[str, int] = {}  # of its members
        self._held: dict[str, tuple[int, frozenset[Point]]] = {}  # node → incarnation and last reported points
        self._holders: Counter[Point] = Counter()  # point → number of holders

    def take(self, seat: Seat, body: SavedPoints, said: ReportEnvelope) -> None:
        """Record a member's report. After its first report, send it the committed point."""
        committed = self._ledger.state.generation
        if committed is None:
            return
        self._count_for(committed)
        if self._incarnations.get(seat.node) != seat.incarnation:
            return
        is_first = seat.node not in self._held
        _, before = self._held.get(seat.node, (0, frozenset()))
        now = frozenset([point for point in body.points if point in before or is_on_line(point, committed)])
        self._held[seat.node] = (seat.incarnation, now)
        holders = self._holders
        for point in before - now:
            holders[point] -= 1
        for point in now - before:
            holders[point] += 1
        if not self.commit_newest(now) and is_first and (known := self._ledger.state.committed_point) is not None:
            self._tell(seat, known)

    def commit_newest(self, points: Collection[Point]) -> bool:
        """Commit the newest of these points that all members hold equally, and return whether there is one."""
        committed, known = self._ledger.state.generation, self._ledger.state.committed_point
        if committed is None or committed is not self._counted:
            return False
        everywhere = [
            point
            for point in points
            if (known is None or point > known) and self._holders[point] == len(committed.members)
        ]
        equal = next((point for point in sorted(everywhere, reverse=True) if self._equality.is_equal(point)), None)
        if equal is not None:
            self._ledger.write(PointCommitted(equal))
            for member in self._ledger.live_seats():
                self._tell(member, equal)
        return equal is not None

    def _tell(self, seat: Seat, point: Point) -> None:
        state = self._ledger.state
        self._ledger.tell(seat.node, CommittedPoint(state.job, state.term, state.generation_number, point))

    def _count_for(self, committed: GenerationCommitted) -> None:
        """Count again after the members have changed. Reports of members that remain are still valid."""
        if committed is self._counted:
            return
        self._counted, self._incarnations = committed, dict(committed.members)
        self._held = {
            node: (incarnation, frozenset(point for point in points if is_on_line(point, committed)))
            for node, (incarnation, points) in self._held.items()
            if self._incarnations.get(node) == incarnation
        }
        self._holders = Counter(point for _, points in self._held.values() for point in points)
