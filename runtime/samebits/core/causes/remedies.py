"""Choose the remedy for a loss: the first strategy of the cause's row that the job can follow.

The rows are in ``causes.table``. The choice depends on the means at hand at that moment, so the sentence states what is
done now, not what would be best.
"""

from __future__ import annotations

from dataclasses import dataclass

from samebits.core.causes.table import Retry, Row, Strategy

ENDS_AT_THE_SECOND = "the same twice at one step ends the job"


@dataclass(frozen=True, slots=True)
class Means:
    """The job's means at a loss. ``shrinks_after_s``: None if its world cannot shrink."""

    goes_on: bool = True  # ENABLE_RECOVERY
    spare: str = ""  # location of the spare that would take over; "": none
    has_launcher: bool = False  # which starts replacements
    shrinks_after_s: float | None = None


def chosen(row: Row, means: Means) -> tuple[Strategy, str]:
    """Return the row's first feasible strategy, and a description of it."""
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
                return strategy, f"the others continue without it after {means.shrinks_after_s:g} s (shrink in GRACE)"
            case Strategy.STOP if row.retry is not Retry.ONCE:
                return strategy, "trying again cannot help: the job ends"
            case Strategy.WAIT:
                return strategy, "the others wait for it"
    return Strategy.WAIT, "the others wait for it"


def judged(row: Row, means: Means) -> str:
    """Return class and remedy as shown after a first cause: ``node; a spare on its host takes over``."""
    return f"{row.cause.value}; {chosen(row, means)[1]}"
