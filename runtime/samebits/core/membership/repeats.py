"""Heartbeats that say what was said before, of which ten thousand come in a second: they renew a lease and no more.

Here live those that changed nothing when they were said last, and what a repetition still does; what a heartbeat leads
to otherwise is the scheduler's. The one idea: a message that is said again adds no further transition (invariant S17),
so as long as nothing else has happened its sender need not be judged again. Whatever does happen, to whomever, forgets
all of them: what is remembered is never older than the last change.
"""

from __future__ import annotations

from samebits.core.ledger import Ledger, Presence
from samebits.core.messages import Activity, Heartbeat

MOST_A_SEAT = 2


class Repeats:
    """By session, what each said last, if it was without consequence."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._said: dict[str, tuple[Heartbeat, Presence, int]] = {}
        self._era = 0  # what was said in an earlier one is forgotten

    def take(self, session: str, message: object) -> bool:
        """Renew the sender's lease where the message is a repetition; only its step may have changed, in training."""
        known = self._said.get(session)
        if known is None or known[2] != self._era:
            return False
        before, presence, _ = known
        if message is not before:
            if not isinstance(message, Heartbeat) or not _is_repeated(message, before):
                return False
            presence.step = message.step
        presence.hear(self._ledger.now, self._ledger.policy)
        return True

    def remember(self, session: str, message: Heartbeat, presence: Presence) -> None:
        """The message was accepted from the holder of a seat and led to nothing."""
        self._said[session] = (message, presence, self._era)

    def forget(self) -> None:
        """Something has happened. Nothing is taken apart: with ten thousand, a loss would wait for that."""
        self._era += 1
        if len(self._said) > MOST_A_SEAT * len(self._ledger.state.seats):
            self._said.clear()  # sessions that are over


def _is_repeated(message: Heartbeat, before: Heartbeat) -> bool:
    return (
        message.activity is before.activity
        and (message.step == before.step or message.activity is Activity.TRAINING)
        and message.generation == before.generation
        and message.term == before.term
        and message.round == before.round
        and message.sender == before.sender
    )
