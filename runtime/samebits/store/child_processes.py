"""Tie a child process to its parent's lifetime, and end a command's process group.

The kernel watches the thread that forked, not the process (prctl(2), PR_SET_PDEATHSIG), so this works only for a child
forked by the parent's main thread.

A child that another library starts cannot make this request to the kernel. For such children, a small process watches
the parent and kills the children that it leaves behind.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent exits.

    If ``parent`` has already exited, the signal ``by`` is sent at once. On systems other than Linux, this does nothing.
    """
    if not hasattr(_libc, "prctl"):
        return
    _libc.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent:  # the parent exited before prctl took effect
        os.kill(os.getpid(), by)


# The child requests the signal, checks whether its parent died before that, then executes the program.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or os._exit(137); os.execvp(sys.argv[2], sys.argv[2:])"
)


def tied(words: Sequence[str]) -> list[str]:
    """Return a command that runs ``words`` and that the kernel kills when this process exits.

    Start it from the main thread.
    """
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *words]


def end_group(command: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for a command to exit, then kill the rest of its process group.

    The caller reaps the command afterwards. Until it is reaped, no other group can get its id, so the signal cannot
    reach an unrelated group.

    Returns:
        Whether the command exited within the timeout.
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


_WATCH = """
import contextlib, os, select, signal, sys, time
parent, mark, found = int(sys.argv[1]), sys.argv[2].encode(), True
select.select([parent], [], [])
while found:  # again, for what a process has forked meanwhile
    found = False
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]:
        with contextlib.suppress(OSError):  # it is gone, or another user's
            process = os.pidfd_open(pid)
            with os.fdopen(process, closefd=True), open(f"/proc/{pid}/environ", "rb") as environment:
                if mark in environment.read().split(b"\\0"):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    found = True
    time.sleep(0.05 * found)
"""


def kill_left_behind(name: str, value: str) -> Callable[[], None]:
    """Kill all processes with this environment variable once this process is killed.

    A normal exit of the interpreter cancels this, because this process then had time to end its children itself.

    Returns:
        A function that cancels this.
    """
    this = os.pidfd_open(os.getpid())
    words = [sys.executable, "-I", "-S", "-c", _WATCH, str(this), f"{name}={value}"]
    watch = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[this], start_new_session=True)
    os.close(this)

    def undo() -> None:
        atexit.unregister(undo)
        watch.kill()
        watch.wait()

    atexit.register(undo)
    return undo
