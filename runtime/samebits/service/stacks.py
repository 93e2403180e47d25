"""Where the threads of a process are, asked for from another process: also where it sleeps, waits, or holds the GIL.

Here live both ends of the channel: what a worker opens when it starts, and the question of whoever wants to know. Never
here: what the answer means. The one idea: Python's own fault handler writes all stacks from a signal handler, in C, so
the process need not come to run any Python; and it writes to memory that only that process holds and only its user can
open, so nothing lies in a folder, and nothing is left behind. The signal is one that would end a process that does not
expect it, so a process is asked only if the kernel says that it does.
"""

from __future__ import annotations

import enum
import faulthandler
import fcntl
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from samebits.store import process_identity
from samebits.store.process_identity import ProcessIdentity

_NAME = "samebits-stacks"
_SIGNAL = (signal.SIGRTMIN + 11) if sys.platform == "linux" else 0
ANSWER_S = 2.0
"""How long an answer is waited for: one that is written takes milliseconds."""
_POLL_S = 0.005
_QUIET_S = 0.05  # without another byte: the answer is whole
MOST_BYTES = 1 << 20

_channel: int | None = None


class Silence(enum.Enum):
    """Why there is no answer."""

    GONE = "the process is gone"
    NO_CHANNEL = "it opened no channel for this question, or belongs to another user"
    STOPPED = "it is stopped (SIGSTOP, or a debugger): kill -CONT lets it run"
    NO_ANSWER = "it did not answer: the kernel holds it, most likely in a wait for a disk or a network folder"


@dataclass(frozen=True, slots=True)
class Answer:
    """The stacks of one process, as Python's fault handler writes them, or why there are none."""

    text: str = ""
    silence: Silence | None = None


def open_channel() -> bool:
    """From now on this process can be asked where its threads are; whether it can."""
    global _channel
    if _channel is not None or not hasattr(os, "memfd_create"):
        return _channel is not None
    try:
        _channel = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        fcntl.fcntl(_channel, fcntl.F_SETFL, os.O_APPEND)  # whoever asks empties it first
        faulthandler.register(_SIGNAL, file=_channel, all_threads=True)
    except (OSError, RuntimeError):  # no descriptor, or a sandbox: nobody can ask, and nothing else is lost
        return False
    return True


def ask(identity: ProcessIdentity) -> Answer:
    """Where the threads of this process, of this user on this host, are. Takes at most ``ANSWER_S``."""
    try:
        process = os.pidfd_open(identity.pid)
    except OSError:
        return Answer(silence=Silence.GONE)
    try:
        if not identity.is_alive():
            return Answer(silence=Silence.GONE)
        memory = _open_memory(identity.pid)
        if memory is None:
            return Answer(silence=Silence.NO_CHANNEL)
        try:
            if _state(identity.pid) in ("T", "t"):
                return Answer(silence=Silence.STOPPED)
            os.truncate(memory, 0)
            signal.pidfd_send_signal(process, _SIGNAL)
            text = _answer(memory)
        finally:
            os.close(memory)
        return Answer(text) if text else Answer(silence=Silence.NO_ANSWER)
    except ProcessLookupError:
        return Answer(silence=Silence.GONE)
    finally:
        os.close(process)


def _open_memory(pid: int) -> int | None:
    """The channel's memory, if the process has one and expects the signal."""
    try:
        return process_identity.find_memory(pid, _NAME, os.O_RDWR) if _expects_signal(pid) else None
    except OSError:
        return None


def _expects_signal(pid: int) -> bool:
    """Whether it has a handler for it (proc(5), SigCgt); it would end a process that has none."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (_SIGNAL - 1) & 1)
    return False


def _state(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return stat[stat.rindex(b")") + 2 :][:1].decode()


def _answer(memory: int) -> str:
    """What was written, once nothing more comes."""
    began = grown_at = time.monotonic()
    size = 0
    while (now := time.monotonic()) - began < ANSWER_S and not (size and now - grown_at >= _QUIET_S):
        time.sleep(_POLL_S)
        found = os.fstat(memory).st_size
        if found != size:
            size, grown_at = found, time.monotonic()
    return os.pread(memory, min(size, MOST_BYTES), 0).decode(errors="replace")
