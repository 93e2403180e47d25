"""Detect a journal that has lost its last records, which only the job's workers can reveal.

A journal that was cut at the end of a record looks intact. But generations and incarnations only increase, and a worker
learns a number only after it is durable. A worker that knows a higher number than the journal therefore proves that
records are missing. They are not restored, but the next generation gets an unused number.
"""

from __future__ import annotations

from collections.abc import Iterable

from samebits.core.messages import Holdings, Register
from samebits.core.state import JobState

MOST = 2**40
"""Upper limit for generations and incarnations that a job can reach."""
_WHAT = (
    "the journal's last records are gone (its file was cut at a record's end, or an older one was put back); what it "
    "does not know of is left behind"
)
_MEND = (
    "Fix: while these workers live, end the scheduler, move the file `journal` out of RECOVERY_PATH and start the "
    "scheduler again: a majority of them brings the job back"
)


def told_more(message: Register, state: JobState) -> str:
    """Return a warning if a worker knows of more than the journal contains, otherwise ""."""
    if not message.job or message.job != state.job:
        return ""
    seat, standing = state.seats.get(message.node), message.standing
    if standing is not None and state.generation_number < standing.generation < MOST:
        knows, holds = f"generation {standing.generation}", f"generation {state.generation_number}"
    elif seat is not None and seat.incarnation < message.incarnation < MOST:
        knows, holds = f"its incarnation {message.incarnation}", f"incarnation {seat.incarnation} of it"
    else:
        return ""
    return f"worker {message.node} ({message.process}) knows of {knows}, and the journal of {holds}: {_WHAT}. {_MEND}"


def next_generation(state: JobState, joined: Iterable[Holdings]) -> tuple[int, str]:
    """Return an unused generation number, and a warning if the journal lacks generations.

    If a number were reused, points of a generation missing from the journal could be mistaken for points of the new
    one, and ranks could load different points.
    """
    held = {point.generation for one in joined for point in (*one.points, *(copy.point for copy in one.copies))}
    held |= {kept.point.generation for one in joined for kept in one.kept}
    held |= {one.live.generation for one in joined if one.live is not None}
    newest = max((number for number in held if number < MOST), default=0)
    if newest < state.next_generation:
        return state.next_generation, ""
    return newest + 1, f"there are points of generation {newest}, and the journal ends before it: {_WHAT}"
