"""Turn data from the scheduler's socket into events for its core, and reject invalid data.

These checks need no knowledge of the job: is the data a message, may a process of the job send it, and does the sender
use its own identity? Nothing reaches the core without passing ``event_of``.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from samebits.core.messages import (
    FromWorker,
    OperatorDecision,
    ProcessEnded,
    ProcessSeen,
    Refusal,
    Refused,
    Register,
    StatusQuery,
)
from samebits.core.ready import Note, Ready
from samebits.core.scheduler import FromAnyProcess, Received, SchedulerEvent
from samebits.net.server import Arrived, Garbled, Rejected
from samebits.service import clock
from samebits.service.scheduling.followers import Followers
from samebits.service.scheduling.unknown_peers import UnknownPeers, implausible

MOST_DECISIONS, DECISIONS_S = 64, 10.0
"""Limit for decisions per period, so that no peer can flood the history."""
MOST_ENDS = 256
"""The same limit for reports on ended or observed processes."""


InboundEvent = Received | FromAnyProcess
"""Events for the core that arrive over the socket."""


class MessageServer(Protocol):
    """The part of a server that this module uses."""

    def send(self, peer: str, message: object) -> object:
        """Send, or drop the message if the peer is gone."""

    def address_of(self, peer: str) -> str:
        """Return the address of the peer's connection."""


class Inbound:
    """Checks and sorts the data that arrives at one server.

    Args:
        line: the server.
        followers: receives status queries.
        strangers: counts rejected peers.
    """

    def __init__(self, line: MessageServer, followers: Followers, strangers: UnknownPeers) -> None:
        self._line = line
        self._followers = followers
        self._strangers = strangers
        self._decided_at: deque[float] = deque()
        self._ended_at: deque[float] = deque()

    def event_of(self, incoming: Arrived | Garbled | Rejected) -> InboundEvent | None:
        """Return the event for the core, or None if there is none."""
        match incoming:
            case Rejected(address, why):
                self._strangers.rejected(address, why)
                return None
            case Garbled():
                self._garbled(incoming)
                return None
            case Arrived(peer, StatusQuery(follow)):
                self._followers.ask(peer, follow=follow)
                return None
            case Arrived(peer, message):
                event = _event_in(peer, message)
                if isinstance(event, str):
                    self._strangers.garbled(self._line.address_of(peer), event)
                    return None
                if isinstance(event, OperatorDecision) and _is_too_often(self._decided_at, MOST_DECISIONS):
                    return None  # the requester repeats a drain
                is_about_process = isinstance(event, ProcessEnded | ProcessSeen)
                return None if is_about_process and _is_too_often(self._ended_at, MOST_ENDS) else event

    def _garbled(self, garbled: Garbled) -> None:
        self._strangers.garbled(garbled.address, garbled.problem)
        if garbled.other_protocol:
            self._line.send(garbled.peer, Refused(garbled.peer, Refusal.PROTOCOL, 0.0, garbled.problem))

    def worth_saying(self, event: SchedulerEvent, ready: Ready, now: float) -> list[Note]:
        """Return the notes about an event that should be logged.

        If many registrations are refused, only some of their notes are returned.
        """
        is_register = isinstance(event, Received) and isinstance(event.message, Register)
        if not is_register or ready.records or not ready.notes:
            return ready.notes
        assert isinstance(event, Received)
        return self._strangers.refused(self._line.address_of(event.session), ready.notes, now)


def _is_too_often(before: deque[float], most: int) -> bool:
    """Return whether the limit is reached; if not, count this occurrence."""
    now = clock.now_s()
    while before and now - before[0] >= DECISIONS_S:
        before.popleft()
    if len(before) >= most:
        return True
    before.append(now)
    return False


def _event_in(peer: str, message: object) -> InboundEvent | str:
    """Return the event that a message stands for, or a text with the reason why there is none."""
    problem = implausible(message)
    if problem is not None:
        return problem
    if isinstance(message, FromAnyProcess):
        return message
    if not isinstance(message, FromWorker):
        return f"{type(message).__name__} is not a worker's message"
    session = message.session if isinstance(message, Register) else message.sender.session
    return Received(peer, message) if session == peer else "it speaks for another session"
