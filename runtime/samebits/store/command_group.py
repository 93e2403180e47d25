"""The end of a command that a user or vendor provides: it ends with every process that it started.

Such a command is asked every few seconds for days, so one child left behind each time would fill the machine. It runs
in a session of its own (``start_new_session``); children that move to another session are not found.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess


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
