"""Types of the cause table: classes, strategies, observations and rows.

Unknown facts are left out of an observation, and a row tests only the conditions that it sets.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from samebits.core.hangs import Hang


class CauseClass(enum.Enum):
    """The domain of a cause."""

    NODE = "node"
    NETWORK = "network"
    STORAGE = "storage"
    SOFTWARE = "software"
    DATA = "data"
    DEVICE = "device"
    UNKNOWN = "cause unknown"

    @property
    def in_messages(self) -> str:
        """Return the text in parentheses after a cause, such as ``node fault``."""
        return self.value if self is CauseClass.UNKNOWN else f"{self.value} fault"


class Retry(enum.Enum):
    """Whether a retry can help."""

    YES = "it may help every time"
    ONCE = "it helps, or does the same again: then the job ends"
    NO = "it cannot help"
    OVER = "the job is over, according to the scheduler"


class Remedy(enum.Enum):
    """Remedy for a cause."""

    WAIT = "wait"
    SPARE = "spare"
    RESTART = "restart"
    SHRINK = "shrink"
    ROLL_BACK = "roll back"
    DRAIN = "drain"
    STOP = "stop"


class Signal(enum.IntEnum):
    """Signals whose number hints at why a process was killed, with their Linux numbers (signal(7))."""

    HUP = 1
    INT = 2
    ILL = 4
    ABRT = 6
    BUS = 7
    FPE = 8
    SEGV = 11
    TERM = 15


class LossDetection(enum.Enum):
    """How the scheduler noticed a loss that the process itself did not report."""

    GONE = "its process is gone"
    CLOSED = "its connection closed and stayed closed"
    SILENT = "silent for NODE_TIMEOUT"
    UNEQUAL = "differs from"


@dataclass(frozen=True, slots=True)
class Observation:
    """The known facts about one death or hang; unknown ones keep their defaults.

    Attributes:
        status: exit status; None: a signal ended it, or unknown.
        error: type and shortened text of the exception in its log or last message.
        is_failure: an exception of the script ended it.
        is_out_of_memory: the kernel killed it for lack of memory.
    """

    status: int | None = None
    signal: int | None = None
    error: str = ""
    is_failure: bool = False
    is_out_of_memory: bool = False
    hang: Hang | None = None
    notice: LossDetection | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of cause. It matches if all conditions that are set hold; without conditions it matches everything.

    Attributes:
        fault: name of the fault.
        strategies: remedies, of which the first possible one is applied.
        fix: advice for a person.
        statuses, signals, hangs, notices: any of these.
        texts: any of these is part of the error, ignoring case.
        is_failure, is_out_of_memory: None: either.
        avoids_host: the host or device is at fault, so a successor should run on another host.
    """

    fault: str
    cause: CauseClass
    retry: Retry
    strategies: tuple[Remedy, ...]
    fix: str
    statuses: frozenset[int] = frozenset()
    signals: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    hangs: frozenset[Hang] = frozenset()
    notices: frozenset[LossDetection] = frozenset()
    is_failure: bool | None = None
    is_out_of_memory: bool | None = None
    avoids_host: bool = False

    def fits(self, seen: Observation) -> bool:
        """Return whether the row fits the observation."""
        error = seen.error.casefold()
        return (
            (not self.statuses or seen.status in self.statuses)
            and (not self.signals or seen.signal in self.signals or _signal_of(seen.status) in self.signals)
            and (not self.texts or any(text.casefold() in error for text in self.texts))
            and (not self.hangs or seen.hang in self.hangs)
            and (not self.notices or seen.notice in self.notices)
            and self.is_failure in (None, seen.is_failure)
            and self.is_out_of_memory in (None, seen.is_out_of_memory)
        )


def _signal_of(status: int | None) -> int | None:
    """Return the signal that a shell's exit status stands for, or None."""
    return status - 128 if status is not None and status > 128 else None
