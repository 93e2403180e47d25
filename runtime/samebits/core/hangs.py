"""What holds a process up: the kinds of it, and how those from whom no word comes are told apart.

Here live the kinds, what somebody on a process's host can see of it, and the words for both. Never here: how it is
looked at (``service.sights``), or what is done about it (``causes.table``). The one idea: a process that says nothing
may be stopped, hold Python's lock, wait in the kernel or be cut off, and which of them it is shows from outside: in the
state that the kernel gives it, and in the moment at which its control thread last ran.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Hang(enum.Enum):
    """What holds a rank, or all of them."""

    STUCK = "stands still in the script's code"
    BUSY = "computes"
    LOADING = "waits for data"
    SAVING = "commits"
    COMPILING = "compiles"
    SILENT = "is not heard of"
    STOPPED = "is stopped (SIGSTOP)"
    TRACED = "is held by a debugger"
    LOCKED = "runs no Python: something in it holds Python's lock (the GIL)"
    DISK = "waits in the kernel, most likely for a disk or a network folder"
    CUT_OFF = "runs, but none of its messages arrives: the network between it and the scheduler is cut"
    APART = "is in another collective"
    LINK = "all wait in the same collective"
    NOBODY_WAITS = "nobody waits for another"


SILENT_KINDS = frozenset({Hang.SILENT, Hang.STOPPED, Hang.TRACED, Hang.LOCKED, Hang.DISK, Hang.CUT_OFF})
"""Those whose process says nothing itself."""


class Doing(enum.Enum):
    """What the kernel says of a process (proc(5), the state of its first thread)."""

    RUNS = "runs, or sleeps until something comes"
    STOPPED = "was stopped by a signal"
    TRACED = "was stopped by a debugger"
    DISK = "is in a wait that no signal ends"


@dataclass(frozen=True, slots=True)
class Sight:
    """What is seen of a process by whoever is on its host. ``quiet_s``: since its control thread last ran Python."""

    doing: Doing
    quiet_s: float | None = None


def told_apart(sight: Sight | None, silent_s: float) -> Hang:
    """What holds a process that has not been heard of for ``silent_s``, as far as it was seen."""
    if sight is None:
        return Hang.SILENT
    if sight.doing is Doing.STOPPED:
        return Hang.STOPPED
    if sight.doing is Doing.TRACED:
        return Hang.TRACED
    if sight.quiet_s is not None and sight.quiet_s < silent_s / 2:
        return Hang.CUT_OFF
    if sight.doing is Doing.DISK:
        return Hang.DISK
    return Hang.SILENT if sight.quiet_s is None else Hang.LOCKED


def fix_of(hang: Hang, pid: int, scheduler: str = "the scheduler") -> str:
    """What a person can do about a silent process; empty where nothing is known."""
    return {
        Hang.STOPPED: f"kill -CONT {pid}",
        Hang.TRACED: f"let the debugger go on or detach from pid {pid}",
        Hang.LOCKED: f"samebits stack names the line; call it so that it lets Python's lock go, or kill -9 {pid}",
        Hang.DISK: f"look at the disks and network folders that pid {pid} uses",
        Hang.CUT_OFF: f"look at the network between pid {pid} and {scheduler}",
    }.get(hang, "")
