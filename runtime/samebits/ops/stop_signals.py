"""Who asks a follower to stop: SIGINT, SIGTERM and what else was named, as something to poll on.

The handlers and the pipe they write to live here; what is made of a request is the follower's. The one idea: a signal
that comes while nobody listens yet is kept back, and wakes whoever listens then.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

CTRL_C = "Ctrl-C"
_BY_SIGNAL = {signal.SIGINT: CTRL_C}
_ALWAYS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """SIGINT, SIGTERM and ``more`` as something to poll on; the earlier handlers are back at the end."""

    def __init__(self, more: Sequence[signal.Signals] = ()) -> None:
        self.caught: list[int] = []
        self._numbers = (*_ALWAYS, *more)

    def __enter__(self) -> Signals:
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = {number: signal.signal(number, self._catch) for number in self._numbers}
        self._wakeup_before = signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._readable)
        os.close(self._writable)

    def _catch(self, number: int, _: object) -> None:
        self.caught.append(number)
        # One that came between handler and descriptor was not written by the interpreter. Blocking it for that moment
        # would not do: another thread may take it.
        with contextlib.suppress(BlockingIOError):  # full: it is readable as it is
            os.write(self._writable, b"\0")

    def fileno(self) -> int:
        """Readable after a signal."""
        return self._readable

    def take(self) -> list[str]:
        """Who asked to stop since the last call."""
        with contextlib.suppress(BlockingIOError):  # nothing came
            os.read(self._readable, 4096)
        taken, self.caught = self.caught, []
        return [_BY_SIGNAL.get(one, one.name) for number in taken if (one := signal.Signals(number))]
