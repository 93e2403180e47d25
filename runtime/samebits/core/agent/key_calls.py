"""A worker's calls of ``samebits.kv``, which are numbered and repeated until they are answered. Pure.

Each change is made exactly once (``core.keys.key_store``), because numbers increase, a call keeps its number, and
``floor`` never exceeds the number of a call that may still be sent. A call can be lost like any message, so it is
repeated at once on a new connection, then at growing intervals.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from samebits.core.agent.agent_events import KeyAsk
from samebits.core.keys.key_store import MAX_KEPT_ANSWERS
from samebits.core.messages import Credential, KeyCall

SAY_AGAIN_S = 2.0
SAY_AGAIN_MOST_S = 32.0
MAX_OPEN_CALLS = 64
"""Calls of one process that may be open at a time, in different threads."""


@dataclass(slots=True)
class _Open:
    """An unanswered call."""

    ticket: int
    ask: KeyAsk
    pause_s: float = SAY_AGAIN_S
    say_at: float = 0.0


class KeyCalls:
    """The open calls of one session. A ticket is the caller's own ID of a call."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[int, _Open] = {}  # by number, ascending
        self._held: deque[_Open] = deque()  # changes that wait for an answer to an older one, in order

    @property
    def say_at(self) -> float | None:
        """Return when :meth:`due` has calls to send, or None."""
        return min((one.say_at for one in self._open.values()), default=None)

    def begin(self, ticket: int, ask: KeyAsk, now: float) -> None:
        """Assign a number to a call, which is then due at once."""
        self._held.append(_Open(ticket, ask, say_at=now))
        self._number_held()

    def due(self, sender: Credential, now: float, term: int = 0) -> list[KeyCall]:
        """Return the calls to send now, to the scheduler of this term."""
        floor, calls = self._floor(), []
        for number, one in self._open.items():
            if one.say_at <= now:
                one.say_at, one.pause_s = now + one.pause_s, min(2 * one.pause_s, SAY_AGAIN_MOST_S)
                ask = one.ask
                calls.append(
                    KeyCall(
                        *(sender, number, floor, ask.op, ask.key, ask.value, ask.version, ask.amount, ask.is_durable),
                        term=term,
                    )
                )
        return calls

    def say_all_again(self, now: float) -> None:
        """Make all calls due again on a new connection, because earlier ones may not have arrived."""
        for one in self._open.values():
            one.say_at, one.pause_s = now, SAY_AGAIN_S

    def answered(self, number: int) -> int | None:
        """Return the ticket of an answered call, or None if the call is no longer open."""
        one = self._open.pop(number, None)
        self._number_held()
        return None if one is None else one.ticket

    def give_up(self, ticket: int) -> None:
        """Drop a call. Its change may or may not be made."""
        self._held = deque(one for one in self._held if one.ticket != ticket)
        self._open = {number: one for number, one in self._open.items() if one.ticket != ticket}
        self._number_held()

    def _floor(self) -> int:
        changes = (number for number, one in self._open.items() if one.ask.changes)
        return next(changes, self._last + 1)

    def _number_held(self) -> None:
        while self._held and self._last + 1 < self._floor() + MAX_KEPT_ANSWERS:
            self._last += 1
            self._open[self._last] = self._held.popleft()
