"""A process that ends with its parent: the kernel's promise (prctl(2), PR_SET_PDEATHSIG), and the moment before it.

The kernel looks at the thread that has forked, so only where that was the main one is its end the process's.
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
    """From now on this process is sent ``by`` when its parent ends; at once where that is no longer ``parent``.

    Off Linux nothing happens.
    """
    if not hasattr(_libc, "prctl"):
        return
    _libc.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent:  # it was gone before the kernel was asked
        os.kill(os.getpid(), by)


def end_group(command: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for a command to end and kill what is left of its process group; the caller then reaps the command.

    The command is not reaped before its group is signalled: until then no other group can have its number.

    Returns:
        Whether the command ended by itself within the time.
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
    with contextlib.suppress(ProcessLookupError, PermissionError):  # a command with privileges may not be signalled
        os.killpg(command.pid, signal.SIGKILL)
    return has_ended
