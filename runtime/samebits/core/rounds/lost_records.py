"""A journal that ends too early, at a record's end: nothing in the file tells, but its job's workers know of more.

Here is found out, from what workers say, that records are gone, and said; and the next generation's number, so that
none is ever given twice. Nothing is brought back: what the journal does not know of is left behind. The one idea:
generations and incarnations only rise, and whoever was told one the journal does not have was told it by a scheduler
whose record is lost ("save, then speak").
"""

from __future__ import annotations

from collections.abc import Iterable

from samebits.core.messages import Holdings, Register
from samebits.core.state import JobState

MOST = 2**40
"""Generations and incarnations: no job has lived so long."""
_WHAT = (
    "the journal's last records are gone (its file was cut at a record's end, or an older one was put back); what it "
    "does not know of is left behind"
)
_MEND = (
    "Fix: while these workers live, end the scheduler, move the file `journal` out of RECOVERY_PATH and start the "
    "scheduler again: a majority of them brings the job back"
)


def told_more(message: Register, state: JobState) -> str:
    """What is to be said of a worker of this job that was told more than the journal holds; empty where it was not."""
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
    """A number that no generation ever had, as far as those who join know, and what is to be said of it, if anything.

    A point of a generation that the journal does not know would pass for one of the next generation's, were its number
    given again, and each rank may hold another one.
    """
    held = {point.generation for one in joined for point in (*one.points, *(copy.point for copy in one.copies))}
    held |= {one.live.generation for one in joined if one.live is not None}
    newest = max((number for number in held if number < MOST), default=0)
    if newest < state.next_generation:
        return state.next_generation, ""
    return newest + 1, f"there are points of generation {newest}, and the journal ends before it: {_WHAT}"
