"""Tie a child process to its parent's lifetime, and end a command's process group.

The kernel watches the thread that forked, not the process (prctl(2), PR_SET_PDEATHSIG), so the tie to the parent
process holds only for a child forked by the parent's main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess

__all__ = ["die_with"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Send this process ``by`` when its parent ends, or at once if ``parent`` has already ended.

    Does nothing on systems other than Linux.
    """
    if not hasattr(_libc, "prctl"):
        return
    _libc.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os.kill(os.getpid(), by)


def end_group(command: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for a command to exit, then kill the rest of its process group.

    The caller reaps the command afterwards. Until it is reaped, no other group can get its id, so the signal cannot
    reach an unrelated group.

    Returns:
        Whether the command exited by itself within the time.
    """
    if command.returncode is not None:
        return True
    descriptor = os.pidfd_open(command.pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        has_ended = bool(poll.poll(max(0.0, timeout_s) * 1000))
    finally:
        os.close(descriptor)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # a setuid command cannot be signalled
        os.killpg(command.pid, signal.SIGKILL)
    return has_ended
