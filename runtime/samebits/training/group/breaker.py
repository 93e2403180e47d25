"""The switch that ends every wait in one process group, and calls that can be left while they run.

Here live the :class:`Breaker` and the helper threads for calls into torch that nothing can interrupt. Never here:
process groups, sockets, what happens after a break. The one idea: a thread never waits for gloo itself, only for
something that both gloo and the breaker can complete; whoever comes first does.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from samebits.errors import GenerationEndedError

__all__ = [
    "EXIT_GRACE_S",
    "Breaker",
    "begin_breakable",
    "expect_no_end",
    "join_at_exit",
    "leave_with",
    "run_aside",
    "run_breakable",
]

T = TypeVar("T")

EXIT_GRACE_S = 5.0  # freeing a mesh takes some 10 ms; a thread that is stuck in gloo is not worth more
_LAST_WORDS_S = 0.0005  # nobody tells when a thread of the system is gone


class Failable(Protocol):
    """Anything with a waiter behind it: a ``torch.futures.Future`` or a ``concurrent.futures.Future``."""

    def set_exception(self, exception: Any, /) -> None: ...


def _nothing() -> None:
    """Nobody has to know of it."""


class Breaker:
    """The switch of one group: thrown once, from any thread, it fails everything that is waited for.

    Args:
        name: the group in the error's sentence, e.g. ``generation 7``.

    Attributes:
        before_launch: called before every collective that is launched in the group or a subgroup; gloo's alone.
    """

    __slots__ = ("_lock", "_reason", "_waiting", "before_launch", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.before_launch: Callable[[], object] = _nothing
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._waiting: set[Failable] = set()

    @property
    def broken(self) -> bool:
        """Whether it was thrown."""
        return self._reason is not None

    def throw(self, reason: str) -> bool:
        """Fail every watched waiter; True for the one call that did it."""
        with self._lock:
            if self._reason is not None:
                return False
            self._reason = reason
            waiting, self._waiting = self._waiting, set()
        for waiter in waiting:
            waiter.set_exception(self._error())
        return True

    def check(self) -> None:
        """Raise GenerationEndedError if the group is broken."""
        if self._reason is not None:
            raise self._error()

    def watch(self, waiter: Failable) -> None:
        """From now on ``throw`` fails this waiter; raises at once where it has been thrown already."""
        with self._lock:
            if self._reason is None:
                self._waiting.add(waiter)
                return
        raise self._error()

    def release(self, waiter: Failable) -> bool:
        """Stop watching; True if the waiter is still the caller's to complete."""
        with self._lock:
            if waiter not in self._waiting:
                return False
            self._waiting.discard(waiter)
            return True

    def _error(self) -> GenerationEndedError:
        return GenerationEndedError(f"the process group of {self.name} was broken: {self._reason}")


def run_breakable(breaker: Breaker, call: Callable[[], T], thread_name: str) -> T:
    """Run a call that cannot be interrupted in a helper thread, and return or raise what it does.

    When the breaker is thrown meanwhile this raises GenerationEndedError and leaves the thread behind; what the call
    still returns is then freed in that thread.
    """
    outcome = begin_breakable(breaker, call, thread_name)
    try:
        return outcome.result()
    finally:
        breaker.release(outcome)
        del outcome  # as in _deliver: an error's traceback must not lead back to the error


def begin_breakable(breaker: Breaker, call: Callable[[], T], thread_name: str) -> concurrent.futures.Future[T]:
    """Begin what :func:`run_breakable` does; the future has its outcome, or GenerationEndedError once it is broken."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    breaker.watch(outcome)
    try:
        run_aside(functools.partial(_deliver, breaker, outcome, call), thread_name)
    except BaseException:
        breaker.release(outcome)
        raise
    return outcome


def _deliver(breaker: Breaker, outcome: concurrent.futures.Future[T], call: Callable[[], T]) -> None:
    try:
        result = call()
    except BaseException as error:
        if breaker.release(outcome):
            outcome.set_exception(error)
    else:
        if breaker.release(outcome):
            outcome.set_result(result)
    finally:
        del outcome, call


_aside: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def run_aside(body: Callable[[], None], thread_name: str) -> None:
    """Run torch's code in a thread that the process does not wait for at its end, except for a moment.

    That moment matters: a daemon thread that comes out of C++ while the interpreter is torn down ends the process with
    SIGABRT, and with it the exit status of a job that had finished.
    """
    thread = threading.Thread(target=body, name=thread_name, daemon=True)
    _aside.add(thread)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 starts none while it ends
        _aside.discard(thread)
        body()


def join_at_exit() -> None:
    """The calling thread is inside torch's code as well: a script's own thread, where it is not the main one."""
    thread = threading.current_thread()
    if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread):
        _aside.add(thread)


_stuck: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def expect_no_end() -> None:
    """What the calling thread waits for may take half an hour: the process's end waits for it no longer."""
    thread = threading.current_thread()
    _stuck.add(thread)
    _aside.discard(thread)


_exit_status: list[int] = []


def leave_with(status: int) -> None:
    """The process's exit status is decided: where a thread is stuck at the end, leave with it all the same."""
    _exit_status[:] = [status]


def _is_running(thread: threading.Thread) -> bool:
    """Also one that Python counts as ended and that still frees what C++ keeps for it, for which it needs Python."""
    return thread.is_alive() or Path(f"/proc/self/task/{thread.native_id}").exists()


@atexit.register
def _let_threads_end() -> None:
    deadline = time.monotonic() + EXIT_GRACE_S
    while running := [thread for thread in _aside if _is_running(thread)]:
        if time.monotonic() >= deadline:
            break
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
        time.sleep(_LAST_WORDS_S)
    if _exit_status and any(thread.is_alive() for thread in (*_aside, *_stuck)):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status[0])  # whatever it comes out of, it must not meet an interpreter that is torn down
