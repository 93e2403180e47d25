"""The books several checkers need: who holds which seat, when it was last heard, and what the scheduler can know of it.

Kept from the events handed to the core and from its records, in the world's true time, apart from the core's own books.
A scheduler that dies forgets what was not durable, and so does the witness: what was accepted in the same group commit
as a record that never reached the disk counts as never accepted (DESIGN S3: *durably* admitted).
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runtime.core.messages import Leave, Register
from runtime.core.ready import Ready
from runtime.core.records import (
    JobFinished,
    JobInterrupted,
    Record,
    SeatGranted,
    SeatLeft,
    SeatLost,
    SeatResumed,
    SeatRetired,
    TermStarted,
)
from runtime.core.scheduler import Closed, Event, Received, SchedulerCore, Stalled

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(slots=True)
class Holder:
    """One admitted incarnation. Times are the world's."""

    node: str
    session: str
    incarnation: int
    slot: int | None
    accepted_at: float  # its last accepted message
    closed_at: float | None = None  # the first close that was observed since
    known_since: tuple[int, float] | None = None  # (boot, time): the journal proves that it was quiet from then on
    is_heard: bool = False  # in this life of the scheduler
    is_lost: bool = False
    has_left: bool = False
    is_gone: bool = False  # it said so, or it was seen dead

    @property
    def quiet_since(self) -> float:
        """The last accepted message or observed close, whichever is later."""
        return self.accepted_at if self.closed_at is None else max(self.accepted_at, self.closed_at)


class Witness:
    """Watches before every checker."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.holders: dict[str, Holder] = {}
        self.replaced: list[tuple[Holder | None, SeatGranted]] = []  # by the last step: who held it, who holds it
        self.loaded_at = 0.0
        self.stalled_at = 0.0  # when the scheduler last said that it stood still
        self.is_ending = False
        self._settled: dict[str, Holder] = {}
        self._unsynced = 0
        world.watch_loaded.append(self._loaded)
        world.watch_decided.append(self._decided)
        world.watch_durable.append(self._durable)

    def accepts(self, event: Event) -> Holder | None:
        """The holder whose live word this event is; None where it is nobody's, or a dead or replaced process's."""
        if not isinstance(event, Received):
            return None
        message = event.message
        node = message.node if isinstance(message, Register) else message.sender.node
        holder = self.holders.get(node)
        if holder is None or holder.slot is None or holder.has_left or holder.is_gone:
            return None
        if isinstance(message, Register):
            return holder if message.session == holder.session and not self.is_ending else None
        sender = message.sender
        same = (sender.session, sender.incarnation) == (holder.session, holder.incarnation)
        return holder if same and sender.job == "job" else None

    def holder_of_session(self, session: str) -> Holder | None:
        """The present holder with this session."""
        return next((holder for holder in self.holders.values() if holder.session == session), None)

    def quiet_known_since(self, holder: Holder) -> float:
        """From when on this life of the scheduler can know that the holder was quiet."""
        if holder.is_heard:
            return holder.quiet_since
        if holder.known_since is not None and holder.known_since[0] == self.world.host.boots:
            return holder.known_since[1]
        return self.loaded_at

    def _loaded(self, core: SchedulerCore) -> None:
        """A new life knows what is on disk."""
        self.loaded_at = self.stalled_at = self.world.now
        self.is_ending = False
        self._unsynced = 0
        self.holders = {node: replace(holder, is_heard=False, is_gone=False) for node, holder in self._settled.items()}

    def _decided(self, event: Event | None, ready: Ready) -> None:
        now = self.world.now
        touched = self._note(event, now) if event is not None else None
        self.replaced = [*self._applied(ready.records, now)] if ready.records else []
        self._unsynced += len(ready.records)
        if not self._unsynced and touched is not None:
            self._settled[touched.node] = copy(touched)

    def _note(self, event: Event, now: float) -> Holder | None:
        """Take the event into account; whom it concerns."""
        if isinstance(event, Stalled):
            self.stalled_at = now
            return None
        if isinstance(event, Closed):
            holder = self.holder_of_session(event.session)
            if holder is None or holder.slot is None or holder.has_left:
                return None
            holder.is_gone = holder.is_gone or event.gone
            if holder.is_heard and holder.closed_at is None:
                holder.closed_at = now
            return holder
        holder = self.accepts(event)
        if holder is not None:
            holder.accepted_at, holder.closed_at = now, None
            holder.is_heard, holder.known_since = True, None
            assert isinstance(event, Received)
            holder.is_gone = isinstance(event.message, Leave)
        return holder

    def _applied(self, records: list[Record], now: float) -> Iterator[tuple[Holder | None, SeatGranted]]:
        for record in records:
            match record:
                case SeatGranted():
                    yield self.holders.get(record.node), record
                    self.holders[record.node] = Holder(
                        record.node, record.session, record.incarnation, record.slot, now, is_heard=True
                    )
                case SeatLost():
                    holder = self.holders[record.node]
                    holder.is_lost = True
                    holder.known_since = (self.world.host.boots, self.quiet_known_since(holder))
                case SeatResumed():
                    self.holders[record.node].is_lost = False
                case SeatLeft():
                    self.holders[record.node].has_left = True
                case SeatRetired():
                    self.holders[record.node].slot = None
                case TermStarted():
                    for holder in self.holders.values():
                        if holder.known_since is None or holder.known_since[0] != self.world.host.boots:
                            holder.known_since = (self.world.host.boots, self.loaded_at)
                case JobInterrupted() | JobFinished():
                    self.is_ending = True

    def _durable(self, records: list[Record]) -> None:
        self._unsynced -= len(records)
        if self._unsynced <= 0:
            self._unsynced = 0
            self._settle()
        else:  # the scheduler died in its fsync: of this batch only the records on disk have happened
            self._take_prefix(records)

    def _settle(self) -> None:
        self._settled = {node: copy(holder) for node, holder in self.holders.items()}

    def _take_prefix(self, records: list[Record]) -> None:
        staged, self.holders = self.holders, {node: copy(holder) for node, holder in self._settled.items()}
        for _ in self._applied(records, self.world.now):
            pass
        for record in records:
            if isinstance(record, SeatResumed):
                holder, heard = self.holders[record.node], staged[record.node]
                holder.accepted_at, holder.closed_at, holder.known_since = heard.accepted_at, heard.closed_at, None
            elif isinstance(record, SeatLost):
                since = record.since + self.world.host.booted_at
                holder = self.holders[record.node]
                holder.accepted_at, holder.known_since = since, (self.world.host.boots, since)
        self._settle()
