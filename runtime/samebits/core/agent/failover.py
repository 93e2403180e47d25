"""Decide whether a worker leaves the scheduler at its current address for another one.

Each term is claimed only once, so of two schedulers of one job the one with the higher term is right. A scheduler that
sends only messages of earlier terms than the worker knows counts as absent, even if its connection is open.
"""

from __future__ import annotations

from dataclasses import dataclass

from samebits.core.messages import Finished, FromScheduler, KeyAnswer, Pending, Refusal, Refused, Status

_STRANGERS = (Refusal.OTHER_JOB, Refusal.OTHER_SETTINGS, Refusal.PROTOCOL)


@dataclass(frozen=True, slots=True)
class TryNextAddress:
    """Notice: try the scheduler's next address, because this scheduler is wrong or silent."""

    text: str
    is_refusal: bool = False  # the scheduler belongs to another job


class SchedulerFailover:
    """Judges the scheduler at the other end of one connection.

    Args:
        patience_s: how long the scheduler may be silent. None: there is no other address.
    """

    def __init__(self, patience_s: float | None) -> None:
        self.has_choice = patience_s is not None
        self._patience_s = patience_s or 0.0
        self._heard_at = 0.0

    def opened(self, now: float) -> None:
        """Start the timer for a new connection. A scheduler that rebuilds its journal may answer late."""
        self._heard_at = now + self._patience_s

    def heard(self, message: FromScheduler, now: float) -> None:
        """Record a valid message. After a refusal, no message is expected until the retry."""
        wait_s = max(0.0, message.retry_after_s) if isinstance(message, Refused) else 0.0
        self._heard_at = now + wait_s

    def objection(self, message: FromScheduler, job: str, term: int) -> TryNextAddress | None:
        """Return why the sender is the wrong scheduler, or None if it may be the right one.

        Args:
            job: the worker's job; "" if it has none yet.
            term: the highest that the worker knows.
        """
        if not self.has_choice or isinstance(message, Status | Finished):
            return None
        said = "" if isinstance(message, Pending | KeyAnswer) else message.job
        if isinstance(message, Refused) and message.refusal in _STRANGERS:
            is_other = message.job != job if job else message.refusal is Refusal.OTHER_JOB
            return TryNextAddress(message.text, is_refusal=True) if is_other else None
        if job and said and said != job:
            return TryNextAddress(
                f"the scheduler there runs job {said}, but this worker belongs to job {job}", is_refusal=True
            )
        if 0 < message.term < term:
            return TryNextAddress(
                f"the scheduler there has term {message.term}, but a scheduler with term {term} has replaced it"
            )
        return None

    def is_doubtful(self, now: float) -> bool:
        """Return whether the scheduler has been silent long enough to ask it for a sign of life."""
        return self.has_choice and now >= self._heard_at + self._patience_s / 2

    def is_over(self, now: float) -> bool:
        """Return whether the scheduler has been silent long enough to try another one."""
        return self.has_choice and now >= self._heard_at + self._patience_s

    def wake_at(self, now: float) -> float | None:
        """Return when ``is_doubtful`` or ``is_over`` changes next, or None if there is no other address."""
        if not self.has_choice:
            return None
        return self._heard_at + (self._patience_s if self.is_doubtful(now) else self._patience_s / 2)
