"""Whether the scheduler at the present address is the one to listen to, where there may be another one.

Here live what speaks against it and how long it may be silent; which address comes next is the connection's to say. The
one idea: a term is claimed once, so of two schedulers of one job the higher term is right, and a scheduler that says
nothing of the worker's own term or a later one is as good as none, however well its connection stands.
"""

from __future__ import annotations

from dataclasses import dataclass

from samebits.core.messages import Finished, FromScheduler, KeyAnswer, Pending, Refusal, Refused, Status

_STRANGERS = (Refusal.OTHER_JOB, Refusal.OTHER_SETTINGS, Refusal.PROTOCOL)


@dataclass(frozen=True, slots=True)
class LookElsewhere:
    """The scheduler at the present address is not the one, or says nothing: try the next one."""

    text: str
    is_refusal: bool = False  # it is another job's, and says so


class Elsewhere:
    """What one connection has been worth.

    Args:
        patience_s: how long the scheduler may say nothing; None: there is nobody else, and any patience is right.
    """

    def __init__(self, patience_s: float | None) -> None:
        self.has_choice = patience_s is not None
        self._patience_s = patience_s or 0.0
        self._heard_at = 0.0

    def opened(self, now: float) -> None:
        """A connection stands. Its first word may take twice as long: a scheduler that has lost its journal waits."""
        self._heard_at = now + self._patience_s

    def heard(self, message: FromScheduler, now: float) -> None:
        """It has said something against which nothing speaks; who is told to wait does not expect another word."""
        wait_s = max(0.0, message.retry_after_s) if isinstance(message, Refused) else 0.0
        self._heard_at = now + wait_s

    def objection(self, message: FromScheduler, job: str, term: int) -> LookElsewhere | None:
        """Why whoever says this is not to be listened to; None where nothing speaks against it.

        Args:
            job: the worker's; empty where it has none yet.
            term: the highest that the worker knows of.
        """
        if not self.has_choice or isinstance(message, Status | Finished):
            return None
        said = "" if isinstance(message, Pending | KeyAnswer) else message.job
        if isinstance(message, Refused) and message.refusal in _STRANGERS:
            is_other = message.job != job if job else message.refusal is Refusal.OTHER_JOB
            return LookElsewhere(message.text, is_refusal=True) if is_other else None
        if job and said and said != job:
            return LookElsewhere(
                f"the scheduler there runs job {said}, and this worker belongs to job {job}", is_refusal=True
            )
        if 0 < message.term < term:
            return LookElsewhere(
                f"the scheduler there is of term {message.term}, and term {term} has begun: it was replaced"
            )
        return None

    def is_doubtful(self, now: float) -> bool:
        """Whether it has said nothing for so long that it is asked for a word."""
        return self.has_choice and now >= self._heard_at + self._patience_s / 2

    def is_over(self, now: float) -> bool:
        """Whether it has said nothing for so long that another one is looked for."""
        return self.has_choice and now >= self._heard_at + self._patience_s

    def wake_at(self, now: float) -> float | None:
        """When one of the two answers changes."""
        if not self.has_choice:
            return None
        return self._heard_at + (self._patience_s if self.is_doubtful(now) else self._patience_s / 2)
