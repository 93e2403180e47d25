"""Handle requests to stop a follower, such as SIGINT, and ask before Ctrl-C ends a job.

A signal that arrives early is stored and wakes the next poll. The first Ctrl-C on a terminal only asks for
confirmation, because the job may have run for days; a second one ends the job. Single keys are read from the terminal
only while the question is shown.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Container, Sequence
from enum import Enum
from typing import Any

CTRL_C = "Ctrl-C"
_BY_SIGNAL = {signal.SIGINT: CTRL_C}
_ALWAYS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Receives SIGINT, SIGTERM and ``more`` as a pollable object, and restores the earlier handlers on exit."""

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
        # The interpreter did not write a signal that arrived after the handlers but before the descriptor were set.
        # Blocking signals for that moment would not help, because another thread may receive the signal.
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so it is readable anyway
            os.write(self._writable, b"\0")

    def fileno(self) -> int:
        """Return a descriptor that is readable after a signal."""
        return self._readable

    def take(self) -> list[str]:
        """Return who requested a stop since the last call, one entry per request."""
        with contextlib.suppress(BlockingIOError):  # no more signals
            os.read(self._readable, 4096)
        taken, self.caught = self.caught, []
        return [_BY_SIGNAL.get(one, one.name) for number in taken if (one := signal.Signals(number))]


ASK_S = 3.0
TEXT = f"Ctrl-C again within {ASK_S:g} s ends the job; d detaches and leaves it running; any other key continues"
TEXT_OF_STARTER = f"Ctrl-C again within {ASK_S:g} s ends the job; any other key continues (DIE_WITH_ME=1)"


class InterruptAnswer(Enum):
    """The outcome of the question."""

    ASKED = "asked"
    END = "end"
    LEAVE = "leave"
    GO_ON = "go on"


class Question:
    """Decides what Ctrl-C does. ``now`` is in monotonic seconds.

    ``may_leave`` is true if the job can run without this process.
    """

    def __init__(self, *, may_leave: bool = True) -> None:
        self._may_leave = may_leave
        self._until: float | None = None

    def interrupted(self, now: float) -> InterruptAnswer:
        """Handle Ctrl-C: the first one shows the question, and a second one confirms it."""
        if self._until is not None and now < self._until:
            self._until = None
            return InterruptAnswer.END
        self._until = now + ASK_S
        return InterruptAnswer.ASKED

    def pressed(self, keys: bytes) -> InterruptAnswer | None:
        """Return the answer that these keys mean, or None if there are no keys."""
        if self._until is None or not keys:
            return None
        self._until = None
        return InterruptAnswer.LEAVE if self._may_leave and keys[:1] in (b"d", b"D") else InterruptAnswer.GO_ON

    def passed(self, now: float) -> InterruptAnswer | None:
        """Withdraw the question when its time is over."""
        if self._until is None or now < self._until:
            return None
        self._until = None
        return InterruptAnswer.GO_ON

    def wake_at(self) -> float | None:
        """Return when ``passed`` must be called next."""
        return self._until


class Keys:
    """Reads single keys from this process's terminal."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    @staticmethod
    def can_ask() -> bool:
        """Return whether a user can answer.

        Input and output must be a terminal, and this process must be in the foreground.
        """
        try:
            is_person = sys.stdin.isatty() and sys.stdout.isatty()
            return is_person and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
        except (OSError, ValueError, AttributeError):
            return False

    def fileno(self) -> int:
        """Return a descriptor that is readable when a key was pressed."""
        return sys.stdin.fileno()

    def begin(self) -> None:
        """Start delivering single keys without showing them, and discard keys pressed earlier."""
        if self._before is None:
            with contextlib.suppress(OSError, termios.error):
                self._before = termios.tcgetattr(self.fileno())
                tty.setcbreak(self.fileno(), termios.TCSADRAIN)
                while select.select([self.fileno()], [], [], 0.0)[0] and self.read():
                    pass  # tcflush would also drop a Ctrl-C that the terminal has not turned into a signal yet

    def end(self) -> None:
        """Restore the terminal."""
        if self._before is not None:
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self.fileno(), termios.TCSADRAIN, self._before)
            self._before = None

    def read(self) -> bytes:
        """Return the keys that were pressed, at most a few."""
        try:
            return os.read(self.fileno(), 16)
        except OSError:
            return b""


class Asking:
    """Shows the question on this process's terminal, and polls for the answer.

    Args:
        poll: the poll object to register with.
        say: shows a line.
        may_leave: whether the job can run without this process.
    """

    def __init__(self, poll: select.poll, say: Callable[[str], object], *, may_leave: bool = True) -> None:
        self._poll, self._say = poll, say
        self._text = TEXT if may_leave else TEXT_OF_STARTER
        self._question, self._keys = Question(may_leave=may_leave), Keys()

    def asks(self, now: float) -> bool:
        """Handle Ctrl-C. Return True if the question is shown, and False if the job must end now."""
        if not self._keys.can_ask() or self._question.interrupted(now) is not InterruptAnswer.ASKED:
            return False
        self._keys.begin()
        self._poll.register(self._keys.fileno(), select.POLLIN)
        self._say(self._text)
        return True

    def answer(self, ready: Container[int], now: float) -> InterruptAnswer | None:
        """Return the answer once it is known; ``ready`` contains the descriptors that can be read."""
        if self._question.wake_at() is None:
            return None
        keys = self._keys.read() if self._keys.fileno() in ready else b""
        answer = self._question.pressed(keys) or self._question.passed(now)
        if answer is not None:
            self.end()
        if answer is InterruptAnswer.GO_ON:
            self._say("the job continues")
        return answer

    def end(self) -> None:
        """Withdraw the question and restore the terminal."""
        with contextlib.suppress(KeyError, OSError, ValueError, AttributeError):
            self._poll.unregister(self._keys.fileno())
        self._keys.end()

    def wake_at(self) -> float | None:
        """Return when ``answer`` must be called even if no key was pressed, or None."""
        return self._question.wake_at()
