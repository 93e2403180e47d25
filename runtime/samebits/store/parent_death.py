"""A process that ends with its parent: the kernel's promise (prctl(2), PR_SET_PDEATHSIG), and the moment before it.

The kernel looks at the thread that has forked, so only where that was the main one is its end the process's.
"""

from __future__ import annotations

import ctypes
import os
import signal

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
