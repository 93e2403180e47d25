"""Books common to several checkers: the holder of each seat, when it was last heard, and what the scheduler can know.

They are kept from the events handed to the core and from its records, independently of the core's own. Times are those
of the scheduler's machine since the start of the run. A scheduler that dies forgets what was not durable, and so does
the witness: what was accepted in the same group commit as a record that never reached the disk counts as never accepted
(invariant S3: *durably* admitted).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from samebits.core.messages import FromWorker, Join, Leave, Register, ReportEnvelope
from samebits.core.point import Point
from samebits.core.ready import Ready
from samebits.core.records import (
    GenerationCommitted,
    JobCreated,
    JobFinished,
    JobInterrupted,
    JobRebuilt,
    Record,
    SeatGranted,
    SeatLeft,
    SeatLost,
    SeatResumed,
    SeatRetired,
    SlotGiven,
    SpareAdmitted,
    TermStarted,
)
from samebits.core.reports import PeerGone
from samebits.core.scheduler import Closed, Received, SchedulerCore, SchedulerEvent, SchedulerPaused
from samebits.core.state import JobState
from tests.simulation.checkers.line import Line

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(slots=True)
class Holder:
    """One admitted incarnation."""

    node: str
    session: str
    incarnation: int
    slot: int | None
    accepted_at: float  # its last accepted message
    closed_at: float | None = None  # the first close that was observed since
    known_since: tuple[int, float] | None = None  # (boot, time): the journal proves that it was silent from then on
    is_heard: bool = False  # in this start of the scheduler
    is_lost: bool = False
    has_left: bool = False
    is_gone: bool = False  # it reported its end, or was seen dead
    away_since: float | None = None  # the first close since its last accepted message, observed or not
    is_spare: bool = False
    lost_at: float = 0.0  # when it was decided

    @property
    def is_held(self) -> bool:
        """Return whether it is neither lost nor has left."""
        return not (self.is_lost or self.has_left)

    @property
    def is_retired(self) -> bool:
        """Return whether it was durably replaced."""
        return self.slot is None and not self.is_spare

    @property
    def quiet_since(self) -> float:
        """Return the last accepted message or observed close, whichever is later."""
        return self.accepted_at if self.closed_at is None else max(self.accepted_at, self.closed_at)

    def copy(self) -> Holder:
        """Return a copy of what is known of it."""
        return Holder(*_fields_of(self))


@dataclass(frozen=True, slots=True)
class LostJournal:
    """The durable content of a journal when it was deleted."""

    holders: Mapping[str, Holder]  # by node
    generations: list[GenerationCommitted]
    final: Point | None


_fields_of = attrgetter(*Holder.__slots__)  # type: ignore[attr-defined]


class Witness:
    """Observes before every checker."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.terms = self.generations = 0  # of all jobs of the run
        self.line = Line()
        self.lost_journals: dict[str, LostJournal] = {}  # by job
        self.speaker: Holder | None = None  # the holder whose live message is being processed
        self.loaded_at = 0.0
        self.stalled_at = 0.0  # when the scheduler last reported a pause of its own
        self.begin_job()
        world.when_event[Received].append(self._hears)
        world.watch_loaded.append(self._loaded)
        world.when_recorded[GenerationCommitted].append(self._formed)
        world.watch_durable.append(self._durable)

    def begin_job(self) -> None:
        """The journal is empty."""
        self.disk = JobState()  # according to the durable records
        self._unsynced = 0
        self.forget()

    def forget(self) -> None:
        """No seat is held."""
        self.job = ""
        self.holders: dict[str, Holder] = {}
        self.by_session: dict[str, Holder] = {}  # the current ones
        self.granted: list[tuple[Holder | None, SeatGranted | SpareAdmitted]] = []
        """The node's previous and current holder, for each seat granted in the last step."""
        self.lost: list[SeatLost] = []  # of the last step
        self.retired: list[Holder] = []  # of the last step, as they were
        self.is_ending = False
        self._before: dict[str, Holder] = {}  # the batch that is not durable yet
        self._is_rebuilt = False  # by a record that is not durable yet
        self.line.begin_job()

    def lose_journal(self) -> None:
        """The journal is deleted; what it held is remembered."""
        holders = self._before if self._unsynced else self.holders
        self.lost_journals[self.job] = LostJournal(holders, self.line.committed, self.disk.final)
        self.begin_job()

    def rebuilt(self, record: JobRebuilt) -> None:
        """An earlier job restarts, as at a load; the workers that reported have been heard."""
        now = self.stalled_at = self.world.host.clock  # as after a pause, no lease ends before it could be renewed
        self.job, self._is_rebuilt = record.job, True
        for seat in record.seats:
            if seat.session:
                holder = Holder(seat.node, seat.session, seat.incarnation, seat.slot, now, is_heard=True)
                self.by_session[seat.session] = holder
            else:
                holder = Holder(seat.node, "", seat.incarnation, seat.slot, accepted_at=self.loaded_at)
            self.holders[seat.node] = holder
        lost = self.lost_journals.get(record.job)
        self.line.rebuilt(record, [] if lost is None else lost.generations)

    def is_late(self, event: SchedulerEvent | None, record: SeatGranted | SpareAdmitted) -> bool:
        """Return whether an unreported process of a job whose journal was lost keeps its place."""
        if not isinstance(event, Received) or not isinstance(event.message, Register):
            return False
        said = event.message
        held = said.job in self.lost_journals and said.incarnation > 0
        return held and (said.node, said.session, said.incarnation) == (record.node, record.session, record.incarnation)

    def _hears(self, event: Received) -> None:
        self.speaker = self._speaker_of(event.message)

    def _speaker_of(self, message: FromWorker) -> Holder | None:
        """Return the holder whose live message this is; None if it is a dead, replaced or unknown process's."""
        if isinstance(message, Register):
            holder = self.by_session.get(message.session)
            is_its = (
                holder is not None
                and holder.node == message.node
                and message.incarnation in (0, holder.incarnation)
                and message.job in ("", self.job)
                and not self.is_ending
            )
        else:
            sender = message.sender
            holder = self.by_session.get(sender.session)
            is_its = holder is not None and sender.node == holder.node and sender.incarnation == holder.incarnation
            is_its = is_its and sender.job == self.job
        if holder is None or not is_its or holder.is_retired or holder.has_left or holder.is_gone:
            return None
        return holder

    def holder_of_session(self, session: str) -> Holder | None:
        """Return the current holder with this session."""
        return self.by_session.get(session)

    def quiet_known_since(self, holder: Holder) -> float:
        """Return from when on this start of the scheduler can know that the holder was silent."""
        if holder.is_heard:
            return holder.quiet_since
        if holder.known_since is not None and holder.known_since[0] == self.world.host.boots:
            return holder.known_since[1]
        return self.loaded_at

    def _loaded(self, core: SchedulerCore) -> None:
        """A new start knows what is on disk."""
        self.loaded_at = self.stalled_at = self.world.host.clock
        self.is_ending = False
        if self._is_rebuilt:
            self.world.forget_job()
        self.line.loaded()
        self.job = core.state.job
        if self._unsynced:
            self._unsynced = 0
            self.holders = self._before
            self.by_session = {holder.session: holder for holder in self.holders.values()}
        for holder in self.holders.values():
            holder.is_heard = holder.is_gone = False
            holder.away_since = None

    def decided(self, event: SchedulerEvent | None, ready: Ready) -> None:
        """Account for a step of the core before any checker does."""
        now = self.world.host.clock
        for record in ready.records:
            if isinstance(record, JobRebuilt):
                self.world.rebuilt(record)
        if not ready.records:
            if event is not None:
                self._note(event, now)
            return
        if not self._unsynced:
            self._before = {node: holder.copy() for node, holder in self.holders.items()}
        self._unsynced += len(ready.records)
        if event is not None:
            self._note(event, now)
        self.lost, self.retired = [], []
        self.granted = [*self._applied(ready.records, now)]

    def _note(self, event: SchedulerEvent, now: float) -> None:
        if isinstance(event, Received):
            holder = self.speaker
            if holder is not None:
                holder.accepted_at, holder.closed_at, holder.away_since = now, None, None
                holder.is_heard, holder.known_since = True, None
                holder.is_gone = isinstance(event.message, Leave)
                if isinstance(event.message, Join):
                    self.line.brought(event.message)
                body = event.message.body if isinstance(event.message, ReportEnvelope) else None
                if isinstance(body, PeerGone) and body.session != event.session:
                    self._closed(body.session, now, gone=True)
        elif isinstance(event, Closed):
            self._closed(event.session, now, gone=event.gone)
        elif isinstance(event, SchedulerPaused):
            self.stalled_at = now

    def _closed(self, session: str, now: float, *, gone: bool) -> None:
        holder = self.holder_of_session(session)
        if holder is not None and not holder.is_retired and not holder.has_left:
            holder.is_gone = holder.is_gone or gone
            holder.away_since = now if holder.away_since is None else holder.away_since
            if holder.is_heard and holder.closed_at is None:
                holder.closed_at = now

    def _formed(self, event: SchedulerEvent | None, record: GenerationCommitted) -> None:
        self.line.decided(record)

    def _applied(
        self, records: list[Record], now: float
    ) -> Iterator[tuple[Holder | None, SeatGranted | SpareAdmitted]]:
        boots = self.world.host.boots
        for record in records:
            match record:
                case JobCreated():
                    self.job = record.job
                case SeatGranted() | SpareAdmitted():
                    before = self.holders.get(record.node)
                    if before is not None:
                        self.by_session.pop(before.session, None)
                    yield before, record
                    slot = record.slot if isinstance(record, SeatGranted) else None
                    holder = Holder(record.node, record.session, record.incarnation, slot, now, is_heard=True)
                    holder.is_spare = slot is None
                    self.holders[record.node] = self.by_session[record.session] = holder
                case SlotGiven():
                    holder = self.holders[record.node]
                    holder.slot, holder.is_spare = record.slot, False
                case SeatLost():
                    holder = self.holders[record.node]
                    if not holder.is_lost:
                        self.lost.append(record)
                        holder.lost_at = now
                    holder.is_lost = True
                    holder.known_since = (boots, self.quiet_known_since(holder))
                case SeatResumed():
                    self.holders[record.node].is_lost = False
                case SeatLeft():
                    self.holders[record.node].has_left = True
                case SeatRetired():
                    self.retired.append(self.holders[record.node].copy())
                    self.holders[record.node].slot = None
                case TermStarted():
                    for holder in self.holders.values():
                        if holder.known_since is None or holder.known_since[0] != boots:
                            holder.known_since = (boots, self.loaded_at)
                case JobInterrupted() | JobFinished():
                    self.is_ending = True

    def _durable(self, records: list[Record]) -> None:
        self._unsynced, self._is_rebuilt = 0, False
        for record in records:
            self.disk.apply(record)
            if isinstance(record, GenerationCommitted):
                self.generations += 1
                self.line.committed.append(record)
            elif isinstance(record, TermStarted):
                self.terms += 1
