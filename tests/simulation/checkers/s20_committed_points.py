"""S20: a point is committed when every member's disk holds it, and while it is the newest such it is never deleted.

So whatever dies next, all members have one complete point in common. A member whose folder was lost has none, and one
whose process was replaced by another node's has another disk: they count again from the next committed point on.
"""

from __future__ import annotations

from samebits.core.messages import CommittedPoint
from samebits.core.point import Point
from samebits.core.records import GenerationCommitted, PointCommitted
from samebits.core.scheduler import SchedulerEvent
from tests.simulation.checkers.base import Checker
from tests.simulation.checkpoints import Checkpoints


class CommittedPoints(Checker):
    """Examines the disks themselves."""

    name = "S20"

    def begin_job(self) -> None:
        self._members: dict[str, int] = {}  # of the last durable generation
        self._durable: Point | None = None  # the newest
        self._ever: set[Point] = set()
        self._holders: set[str] = set()  # the nodes whose disks were to hold it when it was committed

    def watch(self) -> None:
        self.world.when_recorded[PointCommitted].append(self._committed)
        self.world.when_said[CommittedPoint].append(self._said)
        self.world.when_durable[GenerationCommitted].append(self._began)
        self.world.when_durable[PointCommitted].append(self._became_durable)
        self.world.watch_saved.append(self._look)

    def _committed(self, event: SchedulerEvent | None, record: PointCommitted) -> None:
        for node in self.world.witness.line.members:
            if not self._disk(node).was_saved(record.point):
                self.violated(f"{record}: node {node} never saved it")

    def _began(self, record: GenerationCommitted) -> None:
        self._members = dict(record.members)
        if self._durable is not None and (record.restore is None or record.restore < self._durable):
            self._durable = None  # a folder was lost, and with it the common point

    def _became_durable(self, record: PointCommitted) -> None:
        self._durable, self._holders = record.point, {*self._members}
        self._ever.add(record.point)
        for node in self._holders:
            self._look(node)

    def _said(self, session: str, message: CommittedPoint) -> None:
        if message.point not in self._ever:
            self.violated(f"{message}: the journal does not have it")

    def _look(self, node: str) -> None:
        if self._durable is None or node not in self._holders:
            return
        disk = self._disk(node)
        if not disk.was_lost and not disk.holds(self._durable):
            self.violated(f"node {node} holds {disk.held()} and no longer the committed {self._durable}")

    def _disk(self, node: str) -> Checkpoints:
        return self.world.checkpoints_of(self.world.witness.job, node)
