"""What is said of causes: their classes, what can be done, what can be observed, and the shape of a row.

Only values live here, and whether a row fits an observation; the rows are ``causes.table``'s. The one idea: what is not
known of a death or a hang is left out of its observation, and a row asks only for what it names.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from samebits.core.hangs import Hang


class CauseClass(enum.Enum):
    """Where a cause lies."""

    NODE = "node"
    NETWORK = "network"
    STORAGE = "storage"
    SOFTWARE = "software"
    DATA = "data"
    DEVICE = "device"
    UNKNOWN = "cause unknown"


class Retry(enum.Enum):
    """Whether trying again can help."""

    YES = "it may help, however often"
    ONCE = "it helps, or does the same again: then the job ends"
    NO = "it cannot help"
    OVER = "the job is over, as the scheduler has told it"


class Strategy(enum.Enum):
    """What is done about it."""

    WAIT = "wait"
    SPARE = "spare"
    RESTART = "restart"
    SHRINK = "shrink"
    ROLL_BACK = "roll back"
    DRAIN = "drain"
    STOP = "stop"


class Signal(enum.IntEnum):
    """Those that tell more than that a process was killed, as Linux numbers them (signal(7))."""

    HUP = 1
    INT = 2
    ILL = 4
    ABRT = 6
    BUS = 7
    FPE = 8
    SEGV = 11
    TERM = 15


class Notice(enum.Enum):
    """How a scheduler comes to know of what a process itself has not said."""

    GONE = "its process is gone"
    CLOSED = "its connection closed and stayed closed"
    SILENT = "silent for NODE_TIMEOUT"
    UNEQUAL = "differs from"


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of one death or hang; what is not known is left as it is.

    Attributes:
        status: exit status; None: a signal ended it, or nobody knows.
        error: what its log or its last words say, an exception's type and text; shortened.
        is_failure: an exception of the script's own ended it.
        is_out_of_memory: the kernel killed it for want of memory.
    """

    status: int | None = None
    signal: int | None = None
    error: str = ""
    is_failure: bool = False
    is_out_of_memory: bool = False
    hang: Hang | None = None
    notice: Notice | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of cause. Every condition that is given must hold; a row without any fits everything.

    Attributes:
        fault: what it is called.
        strategies: what is done, the first that can be.
        fix: what a person can do.
        statuses, signals, hangs, notices: any of them.
        texts: any of them is part of the error, whatever the case of its letters.
        is_failure, is_out_of_memory: None: either.
        avoids_host: it is the host's fault, or its device's: whoever takes over had better run on another.
    """

    fault: str
    cause: CauseClass
    retry: Retry
    strategies: tuple[Strategy, ...]
    fix: str
    statuses: frozenset[int] = frozenset()
    signals: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    hangs: frozenset[Hang] = frozenset()
    notices: frozenset[Notice] = frozenset()
    is_failure: bool | None = None
    is_out_of_memory: bool | None = None
    avoids_host: bool = False

    def fits(self, seen: Observation) -> bool:
        """Whether this is what was observed."""
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
    """What a shell shows of a signal."""
    return status - 128 if status is not None and status > 128 else None
