"""What a job does about a loss: the first strategy of the cause's row that it can follow, and its words.

The choice lives here; the rows are ``causes.table``'s, and each strategy is carried out where it was before (a spare is
promoted in ``world``, a process started again by ``restarts``). The one idea: what can be done depends on what is at
hand at that moment, so the sentence says what is done here, not what is best anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from samebits.core.causes.table import Retry, Row, Strategy

ENDS_AT_THE_SECOND = "the same twice at one step ends the job"


@dataclass(frozen=True, slots=True)
class Means:
    """What a job has at hand when it loses a member. ``shrinks_after_s``: None where its world cannot be smaller."""

    goes_on: bool = True  # ENABLE_RECOVERY
    spare: str = ""  # where the one is that would take over; empty: none is at hand
    has_launcher: bool = False  # that starts another process in its place
    shrinks_after_s: float | None = None


def chosen(row: Row, means: Means) -> tuple[Strategy, str]:
    """The first of the row's strategies that this job can follow, and what that means, for a sentence."""
    if not means.goes_on:
        return Strategy.STOP, "the job ends (ENABLE_RECOVERY=0)"
    for strategy in row.strategies:
        match strategy:
            case Strategy.SPARE if means.spare:
                return strategy, f"a spare {means.spare} takes over"
            case Strategy.RESTART | Strategy.ROLL_BACK if row.retry is Retry.ONCE and means.has_launcher:
                return strategy, ENDS_AT_THE_SECOND
            case Strategy.RESTART if means.has_launcher:
                return strategy, "another process is to take its place"
            case Strategy.SHRINK if means.shrinks_after_s is not None:
                return strategy, f"the others go on without it after {means.shrinks_after_s:g} s (SHRINK_GRACE)"
            case Strategy.STOP if row.retry is not Retry.ONCE:
                return strategy, "trying again cannot help: the job ends"
            case Strategy.WAIT:
                return strategy, "the others wait for it"
    return Strategy.WAIT, "the others wait for it"


def judged(row: Row, means: Means) -> str:
    """``node; a spare on its host takes over``: what a first cause says behind its words."""
    return f"{row.cause.value}; {chosen(row, means)[1]}"
