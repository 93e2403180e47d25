"""SIGTERM to a worker: it finishes its step, leaves the job on purpose, and ends with status 143.

Here live the signal's handler and what it means at which moment. Never here: what a step is, or what the scheduler is
told. The one idea: inside a generation a worker owes the others its step, so there the signal is only remembered, and
obeyed at the next commit; where it merely waits it leaves at once; outside ``elastic.run`` the signal does what it did
before.
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
STATUS = 128 + signal.SIGTERM  # what a shell shows of a process that SIGTERM has ended


class Stage(enum.Enum):
    """What this process is at."""

    OUTSIDE = enum.auto()  # of elastic.run
    WAITING = enum.auto()  # in the rendezvous
    TRAINING = enum.auto()  # in a generation, or on the way into one or out of it


class Departure:
    """Whether this process was asked to leave, and the leaving.

    A handler that the script has set before ``samebits.init()`` is called too: at the moment the process leaves, or,
    outside ``elastic.run``, as if this one were not there. One that is set later takes this one's place.
    """

    def __init__(self) -> None:
        self.stage = Stage.OUTSIDE
        self.has_left = False
        self._was_asked = False
        self._pid = os.getpid()
        self._before: object = signal.SIG_DFL

    def install(self) -> None:
        """From now on SIGTERM comes here; not where it was ignored already, nor outside the main thread."""
        before = signal.getsignal(signal.SIGTERM)
        if before is not signal.SIG_IGN and threading.current_thread() is threading.main_thread():
            self._before = before
            signal.signal(signal.SIGTERM, self._take)

    def let_go_in_child(self) -> None:
        """A forked child is not asked to leave: the signal does there what it did before this one was installed.

        A handler of Python's is run between two lines of Python, so one that is left in place would keep a child alive
        that hangs in a library.
        """
        if signal.getsignal(signal.SIGTERM) == self._take:
            before: Any = self._before
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Inside this there is no step to finish."""
        self.stage = Stage.WAITING
        self.obey()
        try:
            yield
        finally:
            self.stage = Stage.TRAINING

    def obey(self) -> None:
        """Leave, if that was asked for: this process owes nobody a step now."""
        if self._was_asked:
            self._leave()

    def obey_behind(self, error: Exception) -> None:
        """Leave if the error only follows from the request to leave.

        A container's end sends SIGTERM to all of its processes, the loaders' workers among them; the loader's error may
        be raised before this process's own signal is.
        """
        if type(error) is not RuntimeError or not _LOADER_ENDED.match(str(error)):
            return
        deadline = time.monotonic() + _ASKED_WITHIN_S
        while not self._was_asked and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self.obey()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.has_left and os.getpid() == self._pid:
            return  # asked by two, it is on its way: a second signal must not cut its leaving short
        if self.stage is Stage.OUTSIDE or os.getpid() != self._pid:  # the script's own handler may hand it on
            self._as_before(number, frame)
        elif self.stage is Stage.WAITING:
            self._leave()
        else:
            self._was_asked = True  # nothing is said here: the main thread may be in the middle of a line

    def _leave(self) -> None:
        self._was_asked, self.stage, self.has_left = False, Stage.OUTSIDE, True
        log.say("asked to leave (SIGTERM): this worker leaves the job with its last commit done")
        if callable(self._before):
            self._before(signal.SIGTERM, None)
        sys.exit(STATUS)

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
