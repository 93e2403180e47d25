"""Read the stacks of another process's threads, even while it sleeps, waits or holds the GIL.

Python's fault handler writes all stacks from a signal handler in C, so the process need not run any Python. It writes
to memory that belongs to that process and that only its user can open, so no file is left behind. The signal would end
a process that does not handle it, so it is sent only if the kernel reports a handler.
"""

from __future__ import annotations

import enum
import faulthandler
import fcntl
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from samebits.store import process_identity
from samebits.store.process_identity import ProcessIdentity

_NAME = "samebits-stacks"
_SIGNAL = signal.SIGRTMIN + 11
ANSWER_S = 2.0
"""How long to wait for an answer, which normally takes milliseconds."""
_POLL_S = 0.005
_QUIET_S = 0.05  # without another byte: the answer is complete
MOST_BYTES = 1 << 20

_STDERR = 2  # independent of sys.stderr

_channel: int | None = None


class NoStackReason(enum.Enum):
    """The reason for a missing answer."""

    GONE = "the process is gone"
    NO_CHANNEL = "it has no channel for stack requests, or belongs to another user"
    STOPPED = "it is stopped (SIGSTOP, or a debugger): kill -CONT lets it run"
    NO_ANSWER = "it did not answer: the kernel holds it, most likely in a wait for a disk or a network folder"


@dataclass(frozen=True, slots=True)
class StackDump:
    """The stacks of one process, as written by Python's fault handler, or why there are none."""

    text: str = ""
    silence: NoStackReason | None = None


def report_crashes() -> None:
    """Make a crash in compiled code write the Python stacks of all threads to the log.

    If the fault handler is already enabled, it is not changed.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(file=_STDERR, all_threads=True)


def open_channel() -> bool:
    """Let other processes read this process's stacks, and return whether that is possible."""
    global _channel
    if _channel is not None or not hasattr(os, "memfd_create"):
        return _channel is not None
    try:
        _channel = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        fcntl.fcntl(_channel, fcntl.F_SETFL, os.O_APPEND)  # the asking process truncates it first
        faulthandler.register(_SIGNAL, file=_channel, all_threads=True)
    except (OSError, RuntimeError):  # no descriptor, or a sandbox: only reading stacks is affected
        return False
    return True


def ask(identity: ProcessIdentity) -> StackDump:
    """Return the stacks of a process of this user on this host. Takes at most ``ANSWER_S`` seconds."""
    try:
        process = os.pidfd_open(identity.pid)
    except OSError:
        return StackDump(silence=NoStackReason.GONE)
    try:
        if not identity.is_alive():
            return StackDump(silence=NoStackReason.GONE)
        memory = _open_memory(identity.pid)
        if memory is None:
            return StackDump(silence=NoStackReason.NO_CHANNEL)
        try:
            if _state(identity.pid) in ("T", "t"):
                return StackDump(silence=NoStackReason.STOPPED)
            os.truncate(memory, 0)
            signal.pidfd_send_signal(process, _SIGNAL)
            text = _answer(memory)
        finally:
            os.close(memory)
        return StackDump(text) if text else StackDump(silence=NoStackReason.NO_ANSWER)
    except ProcessLookupError:
        return StackDump(silence=NoStackReason.GONE)
    finally:
        os.close(process)


def _open_memory(pid: int) -> int | None:
    """Open the memory for the stacks, or return None if there is none or the signal is not handled."""
    try:
        return process_identity.find_memory(pid, _NAME, os.O_RDWR) if _expects_signal(pid) else None
    except OSError:
        return None


def _expects_signal(pid: int) -> bool:
    """Return whether the process handles the signal (proc(5), SigCgt)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (_SIGNAL - 1) & 1)
    return False


def _state(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return stat[stat.rindex(b")") + 2 :][:1].decode()


def _answer(memory: int) -> str:
    """Return the text in the memory once no more text arrives."""
    began = grown_at = time.monotonic()
    size = 0
    while (now := time.monotonic()) - began < ANSWER_S and not (size and now - grown_at >= _QUIET_S):
        time.sleep(_POLL_S)
        found = os.fstat(memory).st_size
        if found != size:
            size, grown_at = found, time.monotonic()
    return os.pread(memory, min(size, MOST_BYTES), 0).decode(errors="replace")
