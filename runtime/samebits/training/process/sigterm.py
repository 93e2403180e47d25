"""Handle SIGTERM in a worker: finish the step, leave the job on purpose, and exit with status 143.

Inside a generation the other ranks need this worker's step, so the signal is only recorded, and the worker leaves at
the next commit. While the worker merely waits, it leaves at once. Outside ``elastic.run`` the previous handler runs.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from samebits.service import log

_LOADER_ENDED = re.compile(
    r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (is killed by signal: Terminated|exited unexpectedly)"
)
_ASKED_WITHIN_S, _LOOK_S = 0.5, 0.02
STATUS = 128 + signal.SIGTERM  # a shell's status for a process that SIGTERM ended


class SigtermStage(enum.Enum):
    """What this process is doing, which decides how it reacts to SIGTERM."""

    OUTSIDE = enum.auto()  # outside elastic.run
    WAITING = enum.auto()  # in the rendezvous
    TRAINING = enum.auto()  # in a generation, or entering or leaving one


class Departure:
    """Records whether this process was asked to leave, and makes it leave at a suitable moment.

    A handler that the script set before ``samebits.init()`` is called too: when the process leaves, or, outside
    ``elastic.run``, in place of this handler. A handler that is set later replaces this one.
    """

    def __init__(self) -> None:
        self.stage = SigtermStage.OUTSIDE
        self.has_left = False
        self._was_asked = False
        self._pid = os.getpid()
        self._before: object = signal.SIG_DFL

    def install(self) -> None:
        """Handle SIGTERM from now on, unless it is ignored or this is not the main thread."""
        before = signal.getsignal(signal.SIGTERM)
        if before is not signal.SIG_IGN and threading.current_thread() is threading.main_thread():
            self._before = before
            signal.signal(signal.SIGTERM, self._take)

    def let_go_in_child(self) -> None:
        """Restore the previous SIGTERM handling in a forked child.

        Python runs its handlers only between bytecodes, so if this handler stayed in place, SIGTERM would not end a
        child that hangs in a library.
        """
        if signal.getsignal(signal.SIGTERM) == self._take:
            before: Any = self._before
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Context manager for a wait, during which there is no step to finish.

        The process may therefore leave at once.
        """
        self.stage = SigtermStage.WAITING
        self.obey()
        try:
            yield
        finally:
            self.stage = SigtermStage.TRAINING

    def obey(self) -> None:
        """Leave if the process was asked to. Call this where no other rank waits for this one."""
        if self._was_asked:
            self._leave()

    def obey_behind(self, error: Exception) -> None:
        """Leave if the error is only a consequence of the request to leave.

        Stopping a container sends SIGTERM to all of its processes, including a loader's workers, so the loader's error
        may be raised before this process's own signal arrives.
        """
        if type(error) is not RuntimeError or not _LOADER_ENDED.match(str(error)):
            return
        deadline = time.monotonic() + _ASKED_WITHIN_S
        while not self._was_asked and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self.obey()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.has_left and os.getpid() == self._pid:
            return  # already leaving: a second signal must not interrupt that
        if self.stage is SigtermStage.OUTSIDE or os.getpid() != self._pid:  # the script's own handler may forward it
            self._as_before(number, frame)
        elif self.stage is SigtermStage.WAITING:
            self._leave()
        else:
            self._was_asked = True  # nothing is logged here: the main thread may be in the middle of a line

    def _leave(self) -> None:
        self._was_asked, self.stage, self.has_left = False, SigtermStage.OUTSIDE, True
        log.say("received SIGTERM: this worker leaves the job after its last commit")
        if callable(self._before):
            self._before(signal.SIGTERM, None)
        sys.exit(STATUS)

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
