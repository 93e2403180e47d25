"""S24: a departed worker holds no rank until it is readmitted, and one asked to leave does so at its next commit."""

from __future__ import annotations

from samebits.core.messages import Depart, GenerationStarted
from samebits.core.records import GenerationCommitted, SeatGranted, SeatLeft, SeatResumed, SlotGiven, SpareAdmitted
from samebits.core.scheduler import SchedulerCore, SchedulerEvent
from tests.simulation.checkers.base import Checker
from tests.simulation.group import Group
from tests.simulation.worker import Worker

MOST_ASKED = 2


class Drained(Checker):
    """Remembers which incarnations have left, and which processes were asked to."""

    name = "S24"

    def begin_job(self) -> None:
        self._left: dict[str, int] = {}  # node → the incarnation that has left and was not followed by another
        self._left_for_sure: dict[str, int] = {}  # the same according to the disk
        self._asked: dict[str, int] = {}  # session → its number of commits when it was asked

    def watch(self) -> None:
        recorded = self.world.when_recorded
        recorded[SeatLeft].append(self._leaves)
        recorded[SeatGranted].append(self._admitted)
        recorded[SpareAdmitted].append(self._admitted)
        recorded[SeatResumed].append(self._returns)
        recorded[SlotGiven].append(self._given)
        recorded[GenerationCommitted].append(self._formed)
        durable = self.world.when_durable
        durable[SeatLeft].append(self._leaves_for_sure)
        durable[SeatGranted].append(self._admitted_for_sure)
        durable[SpareAdmitted].append(self._admitted_for_sure)
        self.world.watch_loaded.append(self._loaded)
        self.world.when_answered[GenerationStarted].append(self._started)
        self.world.when_delivered[Depart].append(self._hears)
        self.world.watch_trained.append(self._trained)

    def _leaves(self, event: SchedulerEvent | None, record: SeatLeft) -> None:
        self._left[record.node] = record.incarnation

    def _admitted(self, event: SchedulerEvent | None, record: SeatGranted | SpareAdmitted) -> None:
        self._left.pop(record.node, None)

    def _leaves_for_sure(self, record: SeatLeft) -> None:
        self._left_for_sure[record.node] = record.incarnation

    def _admitted_for_sure(self, record: SeatGranted | SpareAdmitted) -> None:
        self._left_for_sure.pop(record.node, None)

    def _loaded(self, core: SchedulerCore) -> None:
        self._left = dict(self._left_for_sure)

    def _returns(self, event: SchedulerEvent | None, record: SeatResumed) -> None:
        if self._left.get(record.node) == record.incarnation:
            self.violated(f"{record}: it has left")

    def _given(self, event: SchedulerEvent | None, record: SlotGiven) -> None:
        if record.node in self._left:
            self.violated(f"{record}: it has left")

    def _formed(self, event: SchedulerEvent | None, record: GenerationCommitted) -> None:
        there = [node for node, incarnation in record.members if self._left.get(node) == incarnation]
        if there:
            self.violated(f"{there} have left and hold ranks in {record}")

    def _started(self, session: str, message: GenerationStarted) -> None:
        holder = self.world.witness.holder_of_session(session)
        if holder is not None and self._left.get(holder.node) == holder.incarnation:
            self.violated(f"{session} has left and gets {message}")

    def _hears(self, worker: Worker, message: Depart) -> None:
        if message.job == worker.agent.job and message.incarnation == worker.agent.incarnation:
            self._asked.setdefault(worker.session, worker.commits)

    def _trained(self, group: Group) -> None:
        if not self._asked:
            return
        for member in group.members.values():
            asked_at = self._asked.get(member.session)
            if asked_at is not None and member.commits >= asked_at + MOST_ASKED:
                self.violated(f"{member} was asked to leave, and has made {member.commits - asked_at} commits since")
