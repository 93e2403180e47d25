"""Whether what died of a job is started again, and when: the restart budget of each of its places.

Decisions on deaths, one after the other; watching and starting are ``ops.supervising``'s. The one idea: a place is what
is counted, not a process, a node id or a supervisor: whoever started the one that died, and whatever it was called, its
death counts for the place. What comes from outside (a kill, a host, a network) is tried again for ever, ever more
slowly where it does not stop; what the program itself does the same way twice is not tried a third time.
"""

from __future__ import annotations

import enum
import re
from collections import deque
from dataclasses import dataclass, field

from samebits.core.causes.table import DEFAULT, CauseTable, Observation, Retry

NO_WORKER_LEFT = "no worker is left"
"""How the cause begins for which a scheduler gives a job up whose workers are all gone."""
WINDOW_S = 3600.0
"""MAX_RESTARTS bounds the deaths of a place over any stretch of this length."""
FREE = 3
"""Deaths that cost no wait while they are remembered: a worker that is killed twice in a minute is back at once."""
FORGOTTEN_BY_HALF_S = 10.0
"""A place's deaths weigh half as much after this time."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0  # under 2 × NODE_TIMEOUT, after which a job without a worker is given up
SAME_ERRORS, SAME_ERROR_WITHIN_S = 10, 60.0
"""So often in a row a place may meet one error of its program's own, each so soon after the last, at whatever step: the
others may make steps without it."""
_USAGE_STATUS = 2
_USAGE_ERROR = re.compile(r"^(?:\S+: error|Error): ")  # as the last line of a log
OWN_ERROR_WAIT_S = 1.0
"""What its own program ended: the others may meet the same error a moment later, and then the job's end is decided."""


class Backoff:
    """When to try again what keeps failing: each wait is twice the last one, up to LONGEST_WAIT_S."""

    def __init__(self) -> None:
        self._failures = 0

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt failed."""
        return self._failures > 0

    def failed(self, now: float) -> float:
        """Take a failure into account; return the time of the next attempt."""
        self._failures += 1
        return now + min(FIRST_WAIT_S * float(2 ** min(self._failures - 1, 10)), LONGEST_WAIT_S)

    def succeeded(self) -> None:
        """Forget the failures."""
        self._failures = 0


class Sort(enum.Enum):
    """What kind of cause ended a process, by what trying again does about it."""

    OUTSIDE = "it comes from outside, and trying again may help however often"
    OWN = "the program's own: trying again helps, or does the same again"
    HOPELESS = "trying again cannot help"
    ARGUMENTS = "the script refused its arguments, and refuses them at every start"
    ENDED = "the job is over, as the scheduler has told it"


_SORTS = {Retry.YES: Sort.OUTSIDE, Retry.ONCE: Sort.OWN, Retry.NO: Sort.HOPELESS, Retry.OVER: Sort.ENDED}


def sort_of(seen: Observation, table: CauseTable = DEFAULT) -> Sort:
    """Return the kind of cause: by the table of causes, but for a script that refused its arguments."""
    if seen.status is not None and is_usage_error(seen.status, seen.error):
        return Sort.ARGUMENTS
    return _SORTS[table.of(seen).retry]


def is_usage_error(status: int, error: str) -> bool:
    """Return whether a process has ended as argparse and click end one whose arguments are wrong."""
    return status == _USAGE_STATUS and _USAGE_ERROR.search(error) is not None


@dataclass(frozen=True, slots=True)
class Loss:
    """One death of a place's process. ``essence`` tells two errors apart; ``step`` is the one it was at."""

    sort: Sort
    essence: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True)
class Again:
    """The place is to have a process again, at this moment."""

    at: float


@dataclass(frozen=True, slots=True)
class Never:
    """The place gets no process any more, and why; ``ends_job``: nor does any other."""

    why: str
    ends_job: bool = True


@dataclass(slots=True)
class _Place:
    deaths: deque[float] = field(default_factory=deque)  # of the last WINDOW_S
    weight: float = 0.0  # of those remembered, at the last one
    last_at: float = 0.0
    own: tuple[str, int] | None = None  # the last error of its program's own
    alike: int = 0  # in a row, each soon after the one before


class Restarts:
    """The budget of every place of one job on this machine.

    Args:
        most: MAX_RESTARTS: of one place, within WINDOW_S.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[str, _Place] = {}

    def died(self, place: str, loss: Loss, now: float) -> Again | Never:
        """A process of this place has died at ``now`` (monotonic seconds, never falling)."""
        if loss.sort is Sort.ENDED:
            return Never("the job is over", ends_job=False)
        if loss.sort is Sort.HOPELESS:
            return Never("trying again cannot help")
        if loss.sort is Sort.ARGUMENTS:
            return Never("every start with these arguments fails alike")
        known = self._places.setdefault(place, _Place())
        if loss.sort is Sort.OWN:
            own = (loss.essence, loss.step)
            if known.own == own:
                at = f" at step {loss.step}" if loss.step else ""  # a plain job's steps are not known
                return Never(f"twice{at} with the same error: trying again does not help")
            is_alike = known.own is not None and known.own[0] == loss.essence
            known.alike = known.alike + 1 if is_alike and now - known.last_at <= SAME_ERROR_WITHIN_S else 1
            if known.alike >= SAME_ERRORS:
                return Never(f"{known.alike} times in a row with the same error: trying again does not help")
            known.own = own
        while known.deaths and now - known.deaths[0] >= WINDOW_S:
            known.deaths.popleft()
        known.deaths.append(now)
        if len(known.deaths) > self._most:
            return Never(f"{len(known.deaths)} deaths within {WINDOW_S / 60:g} minutes (MAX_RESTARTS={self._most})")
        known.weight = known.weight * float(0.5 ** ((now - known.last_at) / FORGOTTEN_BY_HALF_S)) + 1.0
        known.last_at = now
        return Again(now + self._wait_s(known.weight, loss.sort))

    def _wait_s(self, weight: float, sort: Sort) -> float:
        least = OWN_ERROR_WAIT_S if sort is Sort.OWN else 0.0
        if weight <= FREE:
            return least
        return min(max(least, FIRST_WAIT_S * float(2.0 ** min(weight - FREE, 64.0))), LONGEST_WAIT_S)
