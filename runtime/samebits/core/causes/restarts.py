"""Decide whether and when to restart a dead process.

Deaths are counted for each place in the job, not for each process, node ID or supervisor. After an external cause (a
kill, a host, a network), restarts are tried forever, at growing intervals. If the program fails twice in the same way,
it is not tried a third time.
"""

from __future__ import annotations

import enum
import re
from collections import deque
from dataclasses import dataclass, field

from samebits.core.causes.table import DEFAULT, CauseTable, Observation, Retry

NO_WORKER_LEFT = "no worker is left"
"""Beginning of the cause when a scheduler gives up a job without workers."""
WINDOW_S = 3600.0
"""MAX_RESTARTS limits the deaths of a place in any period of this length."""
FREE = 3
"""Remembered deaths that cost no wait: a worker killed twice in a minute is restarted at once."""
FORGOTTEN_BY_HALF_S = 10.0
"""Seconds after which a place's deaths have half their weight."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0  # below 2 × NODE_TIMEOUT, after which a job without workers is given up
SAME_ERRORS, SAME_ERROR_WITHIN_S = 10, 60.0
"""Most repetitions of one program error in a place, and the longest time between two, in seconds.

Repetitions count at any step, because the other places may complete steps meanwhile.
"""
_USAGE_STATUS = 2
_USAGE_ERROR = re.compile(r"^(?:\S+: error|Error): ")  # at the last line of a log
OWN_ERROR_WAIT_S = 1.0
"""Seconds to wait after a program error: if the other places meet it too, the job ends instead."""


class Backoff:
    """Computes retry times. Each wait is twice the previous one, up to LONGEST_WAIT_S seconds."""

    def __init__(self) -> None:
        self._failures = 0

    @property
    def has_failed(self) -> bool:
        """Return whether the last attempt failed."""
        return self._failures > 0

    def failed(self, now: float) -> float:
        """Count a failure, and return the time of the next attempt."""
        self._failures += 1
        return now + min(FIRST_WAIT_S * float(2 ** min(self._failures - 1, 10)), LONGEST_WAIT_S)

    def succeeded(self) -> None:
        """Forget the failures."""
        self._failures = 0


class Sort(enum.Enum):
    """Kinds of causes of a process's end, by what a retry would do."""

    OUTSIDE = "an external cause: a retry may help every time"
    OWN = "the program's own: a retry helps, or fails in the same way"
    HOPELESS = "trying again cannot help"
    ARGUMENTS = "the script refused its arguments, and refuses them at every start"
    ENDED = "the job is over, according to the scheduler"


_SORTS = {Retry.YES: Sort.OUTSIDE, Retry.ONCE: Sort.OWN, Retry.NO: Sort.HOPELESS, Retry.OVER: Sort.ENDED}


def sort_of(seen: Observation, table: CauseTable = DEFAULT) -> Sort:
    """Return the kind of cause from the cause table, or that the script rejected its arguments."""
    if seen.status is not None and is_usage_error(seen.status, seen.error):
        return Sort.ARGUMENTS
    return _SORTS[table.of(seen).retry]


def is_usage_error(status: int, error: str) -> bool:
    """Return whether argparse or click ended the process because of wrong arguments."""
    return status == _USAGE_STATUS and _USAGE_ERROR.search(error) is not None


@dataclass(frozen=True, slots=True)
class Loss:
    """One death of the process at a place in the job.

    Attributes:
        sort: the effect of a retry.
        essence: identifies the error.
        step: where it died; 0: unknown, so the same error counts at any step.
    """

    sort: Sort
    essence: str = ""
    step: int = 0


def loss_of(seen: Observation, step: int, table: CauseTable = DEFAULT) -> Loss:
    """Describe a process's death for the decision on a restart; ``step`` is the last one that it reported.

    A crash in compiled code sends no final message, so its step is unknown: the last heartbeat may belong to an earlier
    step.
    """
    known = step if seen.signal is None else 0
    return Loss(sort_of(seen, table), f"{seen.error} {seen.status}", known)


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Restart the place's process at this time."""

    at: float


@dataclass(frozen=True, slots=True)
class Never:
    """Decision: do not restart the process at this place or, with ``ends_job``, any process."""

    why: str
    ends_job: bool = True


@dataclass(slots=True)
class _Place:
    deaths: deque[float] = field(default_factory=deque)  # within the last WINDOW_S
    weight: float = 0.0  # of the remembered deaths, at the time of the last
    last_at: float = 0.0
    own: tuple[str, int] | None = None  # its program's last error and step
    alike: int = 0  # repetitions in a row, each soon after the last


class Restarts:
    """The restarts of all places of one job on this machine.

    Args:
        most: deaths of one place within WINDOW_S (MAX_RESTARTS).
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[str, _Place] = {}

    def died(self, place: str, loss: Loss, now: float) -> RestartAt | Never:
        """Decide on a restart after a death at ``now``, in seconds of a monotonic clock."""
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
                at = f" at step {loss.step}" if loss.step else ""  # the steps of a plain job are unknown
                return Never(f"it failed twice{at} with the same error, so trying again does not help")
            is_alike = known.own is not None and known.own[0] == loss.essence
            known.alike = known.alike + 1 if is_alike and now - known.last_at <= SAME_ERROR_WITHIN_S else 1
            if known.alike >= SAME_ERRORS:
                return Never(
                    f"it failed {known.alike} times in a row with the same error, so trying again does not help"
                )
            known.own = own
        while known.deaths and now - known.deaths[0] >= WINDOW_S:
            known.deaths.popleft()
        known.deaths.append(now)
        if len(known.deaths) > self._most:
            return Never(f"{len(known.deaths)} deaths within {WINDOW_S / 60:g} minutes (MAX_RESTARTS={self._most})")
        known.weight = known.weight * float(0.5 ** ((now - known.last_at) / FORGOTTEN_BY_HALF_S)) + 1.0
        known.last_at = now
        return RestartAt(now + self._wait_s(known.weight, loss.sort))

    def _wait_s(self, weight: float, sort: Sort) -> float:
        least = OWN_ERROR_WAIT_S if sort is Sort.OWN else 0.0
        if weight <= FREE:
            return least
        return min(max(least, FIRST_WAIT_S * float(2.0 ** min(weight - FREE, 64.0))), LONGEST_WAIT_S)
