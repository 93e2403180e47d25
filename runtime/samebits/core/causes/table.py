"""The cause table, which maps how a process ended or hangs to a class, a retry rule and a remedy.

Every decision and text about a cause (restart, end of the job, message, documentation) uses the same row, so they
cannot contradict each other. The first matching row is used; a user's own rows (``service.cause_file``) come first.

Only failures that the program or its data repeat at the same step end a job (``Retry.ONCE``). After external causes (a
kill, node, network, disk, device or preemption), restarts are tried forever, at growing intervals.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from samebits import errors
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


def _codes(*kinds: type[errors.SameBitsError]) -> frozenset[int]:
    return frozenset(kind.exit_code for kind in kinds)


_FROM_OUTSIDE = (Remedy.SPARE, Remedy.RESTART, Remedy.SHRINK, Remedy.WAIT)
_TRIED_ONCE_MORE = (Remedy.RESTART, Remedy.STOP)
_BACK = (Remedy.ROLL_BACK, Remedy.STOP)
_STOP, _WAIT = (Remedy.STOP,), (Remedy.WAIT,)
_ANY_SIGNAL = frozenset(range(1, 128))

_ENDED = Row(
    "the job ended, and this process with it",
    *(CauseClass.SOFTWARE, Retry.OVER, _STOP, "see the first cause, which explains why the job ended"),
    statuses=_codes(
        errors.FormationTimeoutError,
        errors.JobFailedError,
        errors.JobInterruptedError,
        errors.JobStoppedError,
        errors.ScriptFailedError,
        errors.UntrainedError,
        errors.UnequalError,
        errors.PointsLostError,
    ),
)
_WRONG = Row(
    "a setting, a secret or a folder is wrong, or this machine computes differently",
    *(CauseClass.SOFTWARE, Retry.NO, _STOP, "the message names the actual and the expected value"),
    statuses=_codes(
        errors.SettingsError,
        errors.RefusedError,
        errors.NumericsError,
        errors.ForeignFolderError,
        errors.UsageError,
        errors.LayoutError,
        errors.SecretError,
        errors.DivergenceError,
        errors.HiddenStateError,
    ),
)
_TORN_OUT = Row(
    "it lost its seat, its scheduler or its group, or did not leave a collective",
    *(CauseClass.NETWORK, Retry.YES, _FROM_OUTSIDE, "nothing; if it recurs, check the network between the hosts"),
    statuses=_codes(
        errors.FencedError,
        errors.DuplicateNodeError,
        errors.SchedulerUnreachableError,
        errors.LockedError,
        errors.StuckError,
        errors.AbortHungError,
        errors.ProtocolError,
        errors.CommunicationError,
        errors.SchedulerLeftError,
    ),
)
_UNFIT = Row(
    "its host or device did not pass a check",
    *(CauseClass.NODE, Retry.YES, _FROM_OUTSIDE, "start it on another host, or have the named part checked"),
    statuses=_codes(errors.PreflightError, errors.DeviceLostError),
    avoids_host=True,
)
_TAKEN_OVER = Row(
    "another scheduler has taken over the job",
    *(CauseClass.SOFTWARE, Retry.OVER, _STOP, "nothing: the job continues with the scheduler named in the message"),
    statuses=_codes(errors.SupersededError),
)
_OUT_OF_MEMORY = Row(
    "the kernel killed it for lack of memory",
    *(CauseClass.NODE, Retry.YES, _FROM_OUTSIDE),
    "raise the memory limit, or start fewer workers or loader processes on this host",
    is_out_of_memory=True,
    avoids_host=True,
)
_LOADER_KILLED = Row(
    "a DataLoader's worker process was killed",
    *(CauseClass.NODE, Retry.YES, _FROM_OUTSIDE),
    "raise the memory limit or the size of /dev/shm, or use fewer loader processes",
    texts=("is killed by signal", "DataLoader worker (pid(s)"),
    avoids_host=True,
)
_CRASHED = Row(
    "it crashed in compiled code",
    *(
        CauseClass.SOFTWARE,
        Retry.YES,
        _FROM_OUTSIDE,
        "check the line named in its log; update the library",
    ),
    signals=frozenset({Signal.SEGV, Signal.ABRT, Signal.ILL, Signal.FPE, Signal.BUS}),
)
_PREEMPTED = Row(
    "it was asked to leave, by a preemption, a scale-down or a person",
    *(CauseClass.NODE, Retry.YES, _FROM_OUTSIDE, "nothing; it has finished its step and left"),
    signals=frozenset({Signal.TERM, Signal.INT, Signal.HUP}),
)
_INTERRUPTED = Row(
    "it was interrupted (SIGINT), by a person or a launcher",
    *(CauseClass.NODE, Retry.YES, _FROM_OUTSIDE, "nothing; if it recurs, find out what sends the signal"),
    texts=("KeyboardInterrupt",),
)
_KILLED = Row(
    "it was killed by a signal",
    *(CauseClass.NODE, Retry.YES, _FROM_OUTSIDE, "nothing; if it recurs, find out what sends the signal"),
    signals=_ANY_SIGNAL,
)
_DEVICE = Row(
    "an accelerator failed",
    *(CauseClass.DEVICE, Retry.YES, (Remedy.SPARE, Remedy.DRAIN, Remedy.RESTART, Remedy.WAIT)),
    "take the device out of service; the driver's log (dmesg, nvidia-smi -q, npu-smi info) names it",
    texts=(
        "uncorrectable ECC error",
        "uncorrectable NVLink error",
        "fallen off the bus",
        "hardware stack error",
        "device(s) is/are busy or unavailable",
        *("UCE ERROR", "HBM MULTI BIT ECC ERROR", "SUSPECT MEM ERROR"),  # torch_npu's, like those in the next two rows
    ),
    avoids_host=True,
)
_DEVICE_FULL = Row(
    "an accelerator's memory is full",
    *(CauseClass.SOFTWARE, Retry.ONCE, _TRIED_ONCE_MORE),
    "reduce the batch size, or run fewer processes on the device; the message shows what fills its memory",
    texts=("OutOfMemoryError", "CUDA out of memory", "NPU out of memory"),
)
_HOST_FULL = Row(
    "no memory was left on its host or within its memory limit",
    *(CauseClass.NODE, Retry.YES, _FROM_OUTSIDE),
    "raise the memory limit, or start fewer workers or loader processes on this host",
    texts=("MemoryError", "can't allocate memory", "Cannot allocate memory"),
    avoids_host=True,
)
_DEVICE_STOPPED = Row(
    "its device was stopped to end a collective that could not end",
    *(CauseClass.NETWORK, Retry.YES, _FROM_OUTSIDE, "nothing: SameBits stops the device when a group is broken"),
    texts=("FORCE STOP",),
)
_STORAGE = Row(
    "a disk or network folder failed or is full",
    *(
        CauseClass.STORAGE,
        Retry.YES,
        (Remedy.RESTART, Remedy.WAIT),
        "free some space, or repair the disk named in the message",
    ),
    texts=(
        "No space left on device",
        "Disk quota exceeded",
        "Input/output error",
        "Stale file handle",
        "Read-only file system",
    ),
)
_DESCRIPTORS = Row(
    "its process had too many files open",
    *(CauseClass.NODE, Retry.YES, (Remedy.RESTART, Remedy.WAIT)),
    "raise the limit on open files (`ulimit -n`), or close the files that the script opens",
    texts=("Too many open files",),
)
_OTHER_SIZE = Row(
    "the ranks called different collectives, or passed tensors of different sizes",
    *(CauseClass.SOFTWARE, Retry.ONCE, _TRIED_ONCE_MORE),
    "call the same collectives with tensors of the same size on every rank; check the named line",
    texts=("a collective received", "op.preamble.length <= op.nbytes"),
)
_NETWORK = Row(
    "a connection broke",
    *(CauseClass.NETWORK, Retry.YES, _FROM_OUTSIDE, "check the network between the hosts named in the message"),
    texts=(
        "Connection reset by peer",
        "Connection closed by peer",
        "Network is unreachable",
        "No route to host",
        "Temporary failure in name resolution",
        "DistNetworkError",
        "ncclRemoteError",
        *("SUSPECT REMOTE ERROR", "HCCS LINK ERROR", "UB LINK ERROR", "HCCL OP RETRY FAILED"),
    ),
)
_NOT_FINITE = Row(
    "a loss or gradient is not finite",
    *(CauseClass.DATA, Retry.ONCE, _BACK, "check the samples and the learning rate of the named step"),
    texts=("loss is nan", "loss is inf", "nan loss", "loss=nan", "non-finite", "FloatingPointError"),
)
_BAD_DATA = Row(
    "a sample cannot be read",
    *(CauseClass.DATA, Retry.ONCE, _TRIED_ONCE_MORE, "repair or skip the sample; the traceback names the line"),
    texts=("UnidentifiedImageError", "BadZipFile", "zlib.error", "UnicodeDecodeError", "JSONDecodeError", "corrupt"),
)
WRONG_GRADIENT = Row(
    "a rank computed a wrong gradient twice: the state may contain the error",
    *(CauseClass.DATA, Retry.NO, _STOP, "test the named devices, and continue on other devices from the named point"),
    texts=("UnequalError: step",),
    is_failure=True,
)
_SCRIPT = Row(
    "the script failed",
    *(CauseClass.SOFTWARE, Retry.ONCE, _TRIED_ONCE_MORE, "correct the script; the message names the line"),
    is_failure=True,
)
_LEFT_EARLY = Row(
    "it exited with a status of its own",
    *(CauseClass.SOFTWARE, Retry.ONCE, _TRIED_ONCE_MORE, "check the end of its log"),
    statuses=frozenset(range(256)),
)
_STUCK = Row(
    "its main thread is stuck: it is sleeping, or waiting for a lock or another program",
    *(CauseClass.SOFTWARE, Retry.YES, _FROM_OUTSIDE),
    "check the named line; before a long pause, call samebits.expect_pause(seconds)",
    hangs=frozenset({Hang.STUCK}),
)
_BUSY = Row(
    "it is computing while the others wait for it",
    *(CauseClass.SOFTWARE, Retry.YES, _FROM_OUTSIDE),
    "check the named line; before an evaluation on one rank, call samebits.expect_pause(seconds)",
    hangs=frozenset({Hang.BUSY}),
)
_LOADING = Row(
    "its data does not arrive",
    *(CauseClass.STORAGE, Retry.YES, _FROM_OUTSIDE, "check the dataset's storage and the named line"),
    hangs=frozenset({Hang.LOADING}),
)
_SAVING = Row(
    "its commit does not finish",
    *(CauseClass.STORAGE, Retry.YES, _WAIT, "check the disk of CHECKPOINT_PATH"),
    hangs=frozenset({Hang.SAVING}),
)
_COMPILING = Row(
    "it has been compiling for too long",
    *(CauseClass.SOFTWARE, Retry.YES, _FROM_OUTSIDE, "set COMPILE_CACHE_PATH, or compile smaller parts"),
    hangs=frozenset({Hang.COMPILING}),
)
_APART = Row(
    "the ranks are in different collectives",
    *(CauseClass.SOFTWARE, Retry.YES, (Remedy.ROLL_BACK,)),
    "call the same collectives in the same order on every rank; look for one inside an `if`",
    hangs=frozenset({Hang.APART}),
)
_LINK = Row(
    "all ranks wait in the same collective",
    *(CauseClass.NETWORK, Retry.YES, (Remedy.ROLL_BACK,), "check the network between the hosts"),
    hangs=frozenset({Hang.LINK}),
)
_NOBODY_WAITS = Row(
    "no rank makes progress, and none waits for another",
    *(CauseClass.UNKNOWN, Retry.YES, _WAIT, "before all ranks pause, call samebits.expect_pause(seconds)"),
    hangs=frozenset({Hang.NOBODY_WAITS}),
)
_STOPPED = Row(
    "its process is stopped",
    *(CauseClass.NODE, Retry.YES, _FROM_OUTSIDE, "resume it with kill -CONT <pid>"),
    hangs=frozenset({Hang.STOPPED}),
)
_TRACED = Row(
    "a debugger holds its process",
    *(CauseClass.NODE, Retry.YES, _WAIT, "let the debugger continue, or detach it"),
    hangs=frozenset({Hang.TRACED}),
)
_LOCKED = Row(
    "its code holds Python's lock",
    *(CauseClass.SOFTWARE, Retry.YES, _FROM_OUTSIDE),
    "release the lock in the named call: ctypes.CDLL instead of PyDLL, Py_BEGIN_ALLOW_THREADS in C",
    hangs=frozenset({Hang.LOCKED}),
)
_DISK = Row(
    "its process is waiting in the kernel",
    *(CauseClass.STORAGE, Retry.YES, _WAIT, "check its disks and network folders; as root, see /proc/<pid>/stack"),
    hangs=frozenset({Hang.DISK}),
)
_CUT_OFF = Row(
    "it is cut off from the scheduler",
    *(CauseClass.NETWORK, Retry.YES, _FROM_OUTSIDE, "check the network between its host and SCHED_HOST"),
    hangs=frozenset({Hang.CUT_OFF}),
)
_GONE = Row(
    "its process is gone without a message",
    *(CauseClass.NODE, Retry.YES, _FROM_OUTSIDE, "nothing; `samebits logs` and dmesg may show what killed it"),
    notices=frozenset({LossDetection.GONE}),
)
_CLOSED = Row(
    "its connection is gone, and its process is not visible",
    *(CauseClass.UNKNOWN, Retry.YES, _FROM_OUTSIDE, "check its host and the network to it"),
    notices=frozenset({LossDetection.CLOSED}),
)
_UNEQUAL = Row(
    "a rank's weights or moments were silently corrupted",
    *(CauseClass.DEVICE, Retry.YES, (Remedy.ROLL_BACK, Remedy.DRAIN)),
    "test the memory of the named host or device: memtester, nvidia-smi -q -d ECC, npu-smi info -t ecc",
    notices=frozenset({LossDetection.UNEQUAL}),
    avoids_host=True,
)
_SILENT = Row(
    "it is silent, and its process is not visible",
    *(CauseClass.UNKNOWN, Retry.YES, _FROM_OUTSIDE, "check its host and the network to it"),
    notices=frozenset({LossDetection.SILENT}),
)
UNKNOWN = Row(
    "the cause of its end is unknown",
    *(CauseClass.UNKNOWN, Retry.YES, _FROM_OUTSIDE, "check the end of its log"),
)

TABLE: tuple[Row, ...] = (
    *(_ENDED, _WRONG, _TORN_OUT, _UNFIT, _TAKEN_OVER),
    *(
        _OUT_OF_MEMORY,
        _LOADER_KILLED,
        _DEVICE,
        _DEVICE_FULL,
        _HOST_FULL,
        _STORAGE,
        _DESCRIPTORS,
        _OTHER_SIZE,
        _NETWORK,
        _DEVICE_STOPPED,
    ),
    *(_CRASHED, _PREEMPTED, _KILLED),
    *(_INTERRUPTED, _NOT_FINITE, _BAD_DATA, WRONG_GRADIENT, _SCRIPT, _LEFT_EARLY),
    *(_STUCK, _BUSY, _LOADING, _SAVING, _COMPILING, _APART, _LINK, _NOBODY_WAITS),
    *(_STOPPED, _TRACED, _LOCKED, _DISK, _CUT_OFF),
    *(_GONE, _CLOSED, _SILENT, _UNEQUAL, UNKNOWN),
)
"""Rows in order of precedence: the first that fits is used."""


@dataclass(frozen=True, slots=True)
class CauseTable:
    """The rows in use: first the user's (``own``), then ``TABLE``."""

    own: tuple[Row, ...] = ()

    def of(self, seen: Observation) -> Row:
        """Return the first row that matches the observation."""
        return next((row for row in (*self.own, *TABLE) if row.fits(seen)), UNKNOWN)

    def strategy_for(self, hang: Hang) -> Remedy:
        """Return the remedy for a hang."""
        return self.of(Observation(hang=hang)).strategies[0]


DEFAULT = CauseTable()

ENDS_AT_THE_SECOND = "the same twice at one step ends the job"


@dataclass(frozen=True, slots=True)
class Means:
    """What the job can use to recover from a loss. ``shrinks_after_s`` is None if its world cannot shrink."""

    goes_on: bool = True  # ENABLE_RECOVERY
    spare: str = ""  # location of the spare that would take over; "": none
    has_launcher: bool = False  # which starts replacements
    shrinks_after_s: float | None = None


def chosen(row: Row, means: Means) -> tuple[Remedy, str]:
    """Return the first strategy of the row that is possible for this job, and a description of it.

    The description states what will be done in this job.
    """
    if not means.goes_on:
        return Remedy.STOP, "the job ends (ENABLE_RECOVERY=0)"
    for strategy in row.strategies:
        match strategy:
            case Remedy.SPARE if means.spare:
                return strategy, f"a spare {means.spare} takes its place"
            case Remedy.RESTART | Remedy.ROLL_BACK if row.retry is Retry.ONCE and means.has_launcher:
                return strategy, ENDS_AT_THE_SECOND
            case Remedy.RESTART if means.has_launcher:
                return strategy, "a new process takes its place"
            case Remedy.SHRINK if means.shrinks_after_s is not None:
                return strategy, f"the others continue without it after {means.shrinks_after_s:g} s (shrink in GRACE)"
            case Remedy.STOP if row.retry is not Retry.ONCE:
                return strategy, "trying again cannot help: the job ends"
            case Remedy.WAIT:
                return strategy, "the others wait for it"
    return Remedy.WAIT, "the others wait for it"


def judged(row: Row, means: Means) -> str:
    """Return a text with class and remedy, such as ``node fault; a spare on its host takes its place``."""
    return f"{row.cause.in_messages}; {chosen(row, means)[1]}"
