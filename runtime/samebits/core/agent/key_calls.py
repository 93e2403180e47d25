"""A worker's calls to the scheduler's keys: numbered, said again until they are answered; pure.

Here lives what must be true of a caller so that each change is done once (``core.keys.key_store``): numbers rise, a
call keeps its number, and ``floor`` never passes a call that may still be said. The one idea: a call is lost like any
message, so it is said again, at once on every new connection and then at longer and longer intervals.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from samebits.core.agent.events import KeyAsk
from samebits.core.keys.key_records import MAX_KEPT_ANSWERS
from samebits.core.messages import Credential, KeyCall

SAY_AGAIN_S = 2.0
SAY_AGAIN_MOST_S = 32.0
MAX_OPEN_CALLS = 64
"""Of one process: so many threads may have one under way."""


@dataclass(slots=True)
class _Open:
    """A call that is not answered."""

    ticket: int
    ask: KeyAsk
    pause_s: float = SAY_AGAIN_S
    say_at: float = 0.0


class KeyCalls:
    """The calls of one session. A ticket is the caller's own name for a call."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[int, _Open] = {}  # by number, rising
        self._held: deque[_Open] = deque()  # changes that wait until an older one is answered; in order

    @property
    def say_at(self) -> float | None:
        """When :meth:`due` is worth asking; None where nothing is under way."""
        return min((one.say_at for one in self._open.values()), default=None)

    def begin(self, ticket: int, ask: KeyAsk, now: float) -> None:
        """Number a call; it is due at once."""
        self._held.append(_Open(ticket, ask, say_at=now))
        self._number_held()

    def due(self, sender: Credential, now: float, term: int = 0) -> list[KeyCall]:
        """What is to be said now, to the scheduler of this term."""
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
        """A new connection stands: nothing said before may have arrived."""
        for one in self._open.values():
            one.say_at, one.pause_s = now, SAY_AGAIN_S

    def answered(self, number: int) -> int | None:
        """The ticket of the call; None where it is not open any more."""
        one = self._open.pop(number, None)
        self._number_held()
        return None if one is None else one.ticket

    def give_up(self, ticket: int) -> None:
        """Nobody waits for this call any more. Whether a change was done, or will be yet, is not known."""
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
