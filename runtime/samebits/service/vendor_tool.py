"""A vendor's tool, asked in a process of its own: what it prints, within bounds of time and size.

Never here: what the text means. The one idea: a driver that hangs holds whoever asks it in the kernel, where not even
SIGKILL ends it. So a worker asks no driver itself, and a tool that does not end is left, and asked again when it has.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
from pathlib import Path

from samebits.service import clock
from samebits.store.child_processes import end_group

TIMEOUT_S = 10.0
MOST_BYTES = 1 << 20
_ENDS_IN_S = 1.0
_PART = 1 << 16


class VendorTool:
    """One program, asked by one thread.

    Args:
        name: found in PATH at each question.
        timeout_s: how long an answer may take.
    """

    def __init__(self, name: str, timeout_s: float | None = None) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._left: subprocess.Popen[bytes] | None = None  # killed, and not gone yet

    def ask(self, *arguments: str) -> str | None:
        """What it prints; None where it is not there, fails, hangs or prints without end."""
        path = shutil.which(self._name)
        if path is None or (self._left is not None and self._left.poll() is None):
            return None
        self._left = None
        try:
            process = subprocess.Popen(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=Path("/"),
                start_new_session=True,
            )
        except OSError:
            return None
        assert process.stdout is not None
        with process.stdout as pipe:
            text = _all_of(pipe.fileno(), clock.now_s() + (self._timeout_s or TIMEOUT_S))
        end_group(process, 0.0 if text is None else _ENDS_IN_S)
        try:
            status = process.wait(_ENDS_IN_S)
        except subprocess.TimeoutExpired:
            self._left = process
            return None
        return text.decode(errors="replace") if text is not None and status == 0 else None


def _all_of(pipe: int, until_s: float) -> bytes | None:
    """All that is written to the pipe; None where that takes too long, or is too much."""
    parts: list[bytes] = []
    size = 0
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while (left_s := until_s - clock.now_s()) > 0 and size <= MOST_BYTES:
        if not poll.poll(1000 * left_s):
            continue
        part = os.read(pipe, _PART)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    return None
