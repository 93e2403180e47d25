"""The scheduler's durable state, rebuilt by replaying the journal.

Only ``JobState.apply`` changes it, both for a new record and for one that is read after a crash. A restarted scheduler
therefore knows exactly what its predecessor has written.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from samebits.core.end_kinds import EndKind
from samebits.core.messages import Pairs, Process
from samebits.core.point import Cut, Point
from samebits.core.records import (
    CauseFound,
    GenerationCommitted,
    JobCreated,
    JobFinished,
    JobInterrupted,
    JobRebuilt,
    PointCommitted,
    RebuiltSeat,
    Record,
    ReplacementShown,
    RolledBack,
    SeatGranted,
    SeatLeft,
    SeatLost,
    SeatQuiet,
    SeatResumed,
    SeatRetired,
    SlotGiven,
    SpareAdmitted,
    StopPlanned,
    TermStarted,
    TrainingFinished,
)
from samebits.core.replacement_names import number_of, root_of

KEPT_CUTS = 256
KEPT_INTERRUPTIONS = 2
KEPT_CAUSES = 4
_NO_SLOT = -1  # only in a snapshot: a node whose seat was retired


@dataclass(frozen=True, slots=True)
class BootTime:
    """A time on one host's boot clock; comparable only within the same boot."""

    boot_id: str
    at: float


class SeatState(enum.Enum):
    """State of a seat. It is ``HELD`` until its lease ends, even if its process is dead."""

    HELD = "held"
    LOST = "lost"
    LEFT = "left"


@dataclass(slots=True)
class Seat:
    """The durable facts about an admitted node."""

    node: str
    slot: int | None  # None: a spare, or retired; the node keeps its incarnation count
    incarnation: int
    session: str
    process: Process
    state: SeatState = SeatState.HELD
    reason: str = ""  # of its loss
    status: int = 0  # not 0: its script exited with this status
    quiet_since: BootTime | None = None  # no message was accepted after this time; its cool-down starts here
    is_spare: bool = False

    @property
    def is_held(self) -> bool:
        """Return whether the holder has neither been lost nor left."""
        return self.state is SeatState.HELD

    @property
    def is_lost(self) -> bool:
        """Return whether the holder's lease has ended and the holder has not returned."""
        return self.state is SeatState.LOST

    @property
    def has_left(self) -> bool:
        """Return whether the holder has left the job on purpose."""
        return self.state is SeatState.LEFT

    @property
    def is_retired(self) -> bool:
        """Return whether the node lost its slot or spare place for good."""
        return self.slot is None and not self.is_spare

    @property
    def title(self) -> str:
        """Return the node's name in messages: ``worker 2`` or ``spare 2``."""
        return f"{'spare' if self.is_spare else 'worker'} {self.node}"


@dataclass(slots=True)
class JobState:
    """Everything about the job that survives kill -9 of the scheduler. Only ``apply`` changes it."""

    job: str = ""
    name: str = ""
    settings: Pairs = ()
    term: int = 0
    boot_id: str = ""
    seats: dict[str, Seat] = field(default_factory=dict)
    by_slot: dict[int, str] = field(default_factory=dict)
    spares: dict[str, None] = field(default_factory=dict)  # neither lost nor left, in order of arrival
    generation: GenerationCommitted | None = None
    committed_point: Point | None = None  # the newest on the job's line that every member held at the time
    lost_point: Point | None = None  # the former ``committed_point``, once a generation had to start from an older one
    final: Point | None = None
    interruptions: tuple[JobInterrupted, ...] = ()
    finished: bool = False
    causes: tuple[CauseFound, ...] = ()  # of the end of the last generation
    rolled_back: RolledBack | None = None  # set from a rollback until the next generation
    stop: StopPlanned | None = None  # set from an operator's request until the job ends
    replacements: dict[str, int] = field(default_factory=dict)  # first node of a line → its highest proven number

    @classmethod
    def replay(cls, records: Iterable[Record]) -> JobState:
        """Return the state after these records."""
        state = cls()
        for record in records:
            state.apply(record)
        return state

    @property
    def generation_number(self) -> int:
        """Return the number of the last generation, or 0 before the first."""
        return self.generation.generation if self.generation else 0

    @property
    def next_generation(self) -> int:
        """Return an unused number for the next generation, even if a journal was lost."""
        line = () if self.generation is None else self.generation.line
        return 1 + max((self.generation_number, *(cut.generation for cut in line)))

    @property
    def back_to(self) -> Point | None:
        """Return the point that the last generation must roll back to, or None."""
        return None if self.rolled_back is None else self.rolled_back.to

    @property
    def known_point(self) -> Point | None:
        """Return the newest point that every rank had. Training must not start before it without a warning."""
        if self.lost_point is None or self.generation is None:
            return self.committed_point
        return self.generation.restore

    @property
    def is_in_doubt(self) -> bool:
        """Return whether the ranks of the last generation differed, so that only an earlier point is reliable."""
        number = self.generation_number
        return any(one.kind is EndKind.UNEQUAL and one.generation == number for one in self.interruptions)

    def seat_of_slot(self, slot: int) -> Seat | None:
        """Return the slot's holder, or None."""
        node = self.by_slot.get(slot)
        return self.seats[node] if node is not None else None

    def apply(self, record: Record) -> None:
        """Apply one record."""
        match record:
            case SeatGranted():  # first, because most records are of this kind
                self._grant(record)
            case JobCreated():
                self.job, self.name, self.settings = record.job, record.name, record.settings
            case JobRebuilt():
                self._rebuild(record)
            case TermStarted():
                self._start_term(record)
            case SeatResumed():
                seat = self.seats[record.node]
                seat.state, seat.reason, seat.status, seat.quiet_since = SeatState.HELD, "", 0, None
                if seat.is_spare:
                    self.spares[seat.node] = None
            case SeatLost():
                seat = self.seats[record.node]
                seat.state, seat.reason, seat.status = SeatState.LOST, record.reason, record.status
                seat.quiet_since = BootTime(self.boot_id, record.since)
                self.spares.pop(seat.node, None)
            case CauseFound() if record.generation < self.generation_number:
                pass  # details about a generation that was already replaced
            case CauseFound():
                known = self.causes if self.causes and self.causes[0].generation == record.generation else ()
                others = tuple(record if one.node == record.node else one for one in known)
                self.causes = others if record in others else (*known, record)[:KEPT_CAUSES]
            case SeatLeft():
                self.seats[record.node].state = SeatState.LEFT
                self.spares.pop(record.node, None)
            case SeatQuiet():
                self.seats[record.node].quiet_since = BootTime(record.boot_id, record.since)
            case SeatRetired():
                self.seats[record.node].slot = None
                del self.by_slot[record.slot]
            case SpareAdmitted():
                self._admit_spare(record)
            case SlotGiven():
                seat = self.seats[record.node]
                seat.slot, seat.is_spare = record.slot, False
                self.spares.pop(seat.node, None)
                self.by_slot[record.slot] = seat.node
            case ReplacementShown(node):
                self.replacements[root_of(node)] = number_of(node)
            case GenerationCommitted():
                for node in self.superseded(record):
                    del self.seats[node]
                self.generation, self.causes, self.rolled_back = record, (), None
                if self.stop is not None:
                    self.stop = StopPlanned(self.stop.by)
                if self.committed_point is not None and not is_on_line(self.committed_point, record):
                    # All copies were damaged. The next save shows which disks hold the older point.
                    self.committed_point, self.lost_point = None, self.committed_point
            case PointCommitted():
                self.committed_point, self.lost_point = record.point, None
            case RolledBack():
                self.rolled_back = record
            case TrainingFinished():
                self.final, self.stop = record.point, None
            case StopPlanned():
                self.stop = record
            case JobInterrupted():
                self.stop = None
                self.interruptions = (*self.interruptions, record)[-KEPT_INTERRUPTIONS:]
                for seat in self.seats.values():
                    seat.status = 0  # the next start may run the rest of a script again
            case JobFinished():
                self.finished = True

    def superseded(self, committed: GenerationCommitted) -> list[str]:
        """Return replacements without a seat that have been replaced themselves, which this generation drops.

        Of a node and its replacements, only the first and the last remain, however often the process was restarted.
        """
        if not self.replacements:
            return []
        members = {node for node, _ in committed.members}
        return [
            node
            for node, seat in self.seats.items()
            if "." in node
            and 0 < number_of(node) < self.replacements.get(root_of(node), 0)
            and seat.slot is None
            and node not in self.spares
            and node not in members
        ]

    def _rebuild(self, record: JobRebuilt) -> None:
        self.job, self.name, self.settings = record.job, record.name, record.settings
        self.term, self.boot_id = record.term, record.boot_id
        self.seats, self.by_slot, self.spares, self.replacements = {}, {}, {}, {}
        for grant in record.seats:
            self._grant(grant)
            if number_of(grant.node) > 0:
                self.replacements[root_of(grant.node)] = number_of(grant.node)
        self.generation = GenerationCommitted(*msgspec.structs.astuple(record.generation))
        self.committed_point, self.lost_point = None, None
        self.final, self.rolled_back, self.stop = record.final, None, None

    def _start_term(self, record: TermStarted) -> None:
        self.term, self.boot_id = record.term, record.boot_id
        for seat in self.seats.values():
            # Boot clocks of different boots cannot be compared, so such a wait restarts.
            if seat.quiet_since is None or seat.quiet_since.boot_id != record.boot_id:
                seat.quiet_since = BootTime(record.boot_id, record.at)

    def _grant(self, record: SeatGranted | RebuiltSeat) -> None:
        old = self.seats.get(record.node)
        if old is not None and old.slot is not None and old.slot != record.slot:
            del self.by_slot[old.slot]
        self.seats[record.node] = Seat(record.node, record.slot, record.incarnation, record.session, record.process)
        self.by_slot[record.slot] = record.node
        self.spares.pop(record.node, None)

    def _admit_spare(self, record: SpareAdmitted) -> None:
        old = self.seats.get(record.node)
        if old is not None and old.slot is not None:
            del self.by_slot[old.slot]
        self.seats[record.node] = Seat(
            record.node, None, record.incarnation, record.session, record.process, is_spare=True
        )
        self.spares.pop(record.node, None)
        self.spares[record.node] = None

    def snapshot(self) -> Iterator[Record]:
        """Yield the fewest records whose replay gives this state."""
        yield JobCreated(self.job, self.name, self.settings)
        yield from self.interruptions  # before the seats, whose statuses they would clear
        if self.boot_id:
            yield TermStarted(self.term, self.boot_id, 0.0)
        for seat in self.seats.values():
            yield from _seat_records(seat)
        if self.lost_point:
            yield PointCommitted(self.lost_point)  # before the generation, which marks it as lost
        if self.generation:
            yield self.generation
        for root, number in self.replacements.items():  # after the generation, which forgets superseded nodes
            yield ReplacementShown(f"{root}.{number}")
        if self.committed_point:
            yield PointCommitted(self.committed_point)
        if self.rolled_back:
            yield self.rolled_back
        if self.stop:
            yield self.stop
        if self.final:
            yield TrainingFinished(self.final)
        yield from self.causes
        if self.finished:
            yield JobFinished()


def _seat_records(seat: Seat) -> Iterator[Record]:
    if seat.is_spare:
        yield SpareAdmitted(seat.node, seat.incarnation, seat.session, seat.process)
    else:
        slot = _NO_SLOT if seat.slot is None else seat.slot
        yield SeatGranted(seat.node, slot, seat.incarnation, seat.session, seat.process)
        if seat.slot is None:
            yield SeatRetired(seat.node, _NO_SLOT)
    if seat.is_lost:
        yield SeatLost(seat.node, seat.incarnation, 0.0, seat.reason, seat.status)
    if seat.quiet_since:
        yield SeatQuiet(seat.node, seat.quiet_since.boot_id, seat.quiet_since.at)
    if seat.has_left:
        yield SeatLeft(seat.node, seat.incarnation)


def next_line(committed: GenerationCommitted | None, restore: Point | None) -> tuple[Cut, ...]:
    """Return the valid points of a generation that starts from ``restore``, given the previous generation.

    If it starts from step s of generation g, it keeps the points of g up to step s, and the points of older generations
    that g kept. All other points are abandoned (invariant S10).
    """
    if committed is None:
        return ()
    if restore is None:
        return tuple(cut for cut in committed.line if cut.is_a_loss)
    kept = [cut for cut in committed.line if cut.generation < restore.generation or cut.is_a_loss]
    return (*kept, Cut(restore.generation, restore.step))[-KEPT_CUTS:]


def is_on_line(point: Point, committed: GenerationCommitted | None) -> bool:
    """Return whether the point belongs to the job's line and was not abandoned."""
    if committed is None:
        return False
    if point.generation == committed.generation:
        return True
    return any(cut.generation == point.generation and point.step <= cut.step for cut in committed.line)
