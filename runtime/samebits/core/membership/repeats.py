"""Recognise repeated heartbeats, which renew a lease and have no other effect.

A repeated message causes no transition (invariant S17), so it need not be handled in full until something else happens.
That matters with ten thousand heartbeats per second. Any other event, from any sender, clears the stored heartbeats, so
they are never older than the last change.
"""

from __future__ import annotations

from samebits.core.ledger import Ledger, Liveness
from samebits.core.messages import Activity, Heartbeat

MOST_A_SEAT = 2


class Repeats:
    """The last heartbeat of each session whose heartbeat had no effect."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._said: dict[str, tuple[Heartbeat, Liveness, int]] = {}
        self._era = 0  # entries of earlier eras are invalid

    def take(self, session: str, message: object) -> bool:
        """Renew the sender's lease if the message is a repetition. During training the step may differ."""
        known = self._said.get(session)
        if known is None or known[2] != self._era:
            return False
        before, presence, _ = known
        if message is not before:
            if not isinstance(message, Heartbeat) or not is_repeated(message, before):
                return False
            presence.step = message.step
        presence.hear(self._ledger.now, self._ledger.policy)
        return True

    def remember(self, session: str, message: Heartbeat, presence: Liveness) -> None:
        """Store an accepted heartbeat that had no effect."""
        self._said[session] = (message, presence, self._era)

    def forget(self) -> None:
        """Invalidate all entries. Removing ten thousand of them would delay the handling of a loss."""
        self._era += 1
        if len(self._said) > MOST_A_SEAT * len(self._ledger.state.seats):
            self._said.clear()  # drop sessions that have ended


def is_repeated(message: Heartbeat, before: Heartbeat) -> bool:
    """Return whether a heartbeat only renews the lease after an earlier one. During training the step may differ."""
    return (
        message.activity is before.activity
        and (message.step == before.step or message.activity is Activity.TRAINING)
        and message.generation == before.generation
        and message.term == before.term
        and message.round == before.round
        and message.sender == before.sender
    )
