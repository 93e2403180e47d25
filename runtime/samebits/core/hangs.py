"""Kinds of hangs, and how to classify a process that sends nothing.

Such a process may be stopped, hold the GIL, wait in the kernel, or be cut off from the network. Two facts that are
visible from outside distinguish these cases: the process state in the kernel, and the time since the process's control
thread last ran. ``service.process_state`` reads them, and ``causes.table`` has the remedies.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Hang(enum.Enum):
    """Kinds of hangs, of a single rank or of all ranks."""

    STUCK = "is stuck in the script's code"
    BUSY = "computes"
    LOADING = "waits for data"
    SAVING = "commits"
    COMPILING = "compiles"
    SILENT = "does not respond"
    STOPPED = "is stopped (SIGSTOP)"
    TRACED = "is held by a debugger"
    LOCKED = "runs no Python: something in it holds Python's lock (the GIL)"
    DISK = "waits in the kernel, most likely for a disk or a network folder"
    CUT_OFF = "runs, but its messages do not arrive: the network between it and the scheduler is down"
    APART = "is in another collective"
    LINK = "all wait in the same collective"
    NOBODY_WAITS = "no rank waits for another"


OF_SILENCE, OF_CLOSED = "silent for", "its connection closed"
"""How the reason of a loss begins if the process itself has reported nothing."""

SILENT_KINDS = frozenset({Hang.SILENT, Hang.STOPPED, Hang.TRACED, Hang.LOCKED, Hang.DISK, Hang.CUT_OFF})
"""Kinds in which the process itself sends nothing."""


class Doing(enum.Enum):
    """State of a process's main thread as the kernel reports it (proc(5))."""

    RUNS = "runs, or sleeps until something comes"
    STOPPED = "was stopped by a signal"
    TRACED = "was stopped by a debugger"
    DISK = "is in a wait that no signal ends"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a process, observed on its host.

    Attributes:
        quiet_s: seconds since its control thread last ran Python; None if unknown.
    """

    doing: Doing
    quiet_s: float | None = None


def classify_hang(process_state: ProcessState | None, silent_s: float) -> Hang:
    """Return the kind of hang of a process that has sent nothing for ``silent_s``."""
    if process_state is None:
        return Hang.SILENT
    if process_state.doing is Doing.STOPPED:
        return Hang.STOPPED
    if process_state.doing is Doing.TRACED:
        return Hang.TRACED
    if process_state.quiet_s is not None and process_state.quiet_s < silent_s / 2:
        return Hang.CUT_OFF
    if process_state.doing is Doing.DISK:
        return Hang.DISK
    return Hang.SILENT if process_state.quiet_s is None else Hang.LOCKED


def fix_of(hang: Hang, pid: int) -> str:
    """Return a command or advice that ends this hang; "" if none is known."""
    return {
        Hang.STOPPED: f"kill -CONT {pid}",
        Hang.TRACED: f"let the debugger continue or detach from pid {pid}",
        Hang.LOCKED: f"samebits stack names the line; make that call release Python's lock, or kill -9 {pid}",
        Hang.DISK: f"check the disks and network folders that pid {pid} uses",
        Hang.CUT_OFF: f"check the network between pid {pid} and the scheduler",
    }.get(hang, "")
