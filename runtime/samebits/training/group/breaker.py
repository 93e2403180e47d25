"""End every wait in one process group at once, and abandon calls while they run.

A thread never waits inside gloo. It waits for an object that both gloo and the breaker can complete.
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
from typing import Any, NoReturn, Protocol, TypeVar

from samebits.errors import GenerationEndedError

__all__ = [
    "EXIT_GRACE_S",
    "Breaker",
    "begin_breakable",
    "end_process",
    "expect_no_end",
    "join_at_exit",
    "leave_with",
    "run_aside",
    "run_breakable",
]

T = TypeVar("T")

EXIT_GRACE_S = 5.0  # freeing a mesh takes about 10 ms; a thread stuck in gloo is not worth a longer wait
_LAST_WORDS_S = 0.0005  # polling interval, since the exit of an operating-system thread cannot be awaited


class Failable(Protocol):
    """Anything that a thread can wait for: a ``torch.futures.Future`` or a ``concurrent.futures.Future``."""

    def set_exception(self, exception: Any, /) -> None: ...


def _nothing(_group: object) -> None:
    """Ignore a launch."""


class Breaker:
    """Ends all waits of one group. It is thrown once, from any thread.

    Args:
        name: the group's name in error messages, e.g. ``generation 7``.

    Attributes:
        before_launch: called with the group before every collective of the group or a subgroup; gloo only.
    """

    __slots__ = ("_lock", "_reason", "_waiting", "before_launch", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.before_launch: Callable[[object], object] = _nothing
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._waiting: set[Failable] = set()

    @property
    def broken(self) -> bool:
        """Whether the breaker was thrown."""
        return self._reason is not None

    def throw(self, reason: str) -> bool:
        """Make every registered waiter fail. Return True only for the first call."""
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
        """Register a waiter that ``throw`` makes fail. If the breaker was already thrown, raise at once."""
        with self._lock:
            if self._reason is None:
                self._waiting.add(waiter)
                return
        raise self._error()

    def release(self, waiter: Failable) -> bool:
        """Unregister a waiter. Return True if the caller still has to complete it."""
        with self._lock:
            if waiter not in self._waiting:
                return False
            self._waiting.discard(waiter)
            return True

    def _error(self) -> GenerationEndedError:
        return GenerationEndedError(f"the process group of {self.name} was broken: {self._reason}")


def run_breakable(breaker: Breaker, call: Callable[[], T], thread_name: str) -> T:
    """Run an uninterruptible call in a helper thread, and return or raise its outcome.

    If the breaker is thrown meanwhile, this raises GenerationEndedError and leaves the thread behind; the call's result
    is then freed in that thread.
    """
    outcome = begin_breakable(breaker, call, thread_name)
    try:
        return outcome.result()
    finally:
        breaker.release(outcome)
        del outcome  # as in _deliver: an error's traceback must not lead back to the error


def begin_breakable(breaker: Breaker, call: Callable[[], T], thread_name: str) -> concurrent.futures.Future[T]:
    """Start a call as :func:`run_breakable` does; the future gets its result, or GenerationEndedError after a throw."""
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
    """Run code of torch in a thread that the process joins only briefly when it exits.

    Without that, a daemon thread that returns from C++ while the interpreter shuts down would abort the process with
    SIGABRT, and a finished job would lose its exit status.
    """
    thread = threading.Thread(target=body, name=thread_name, daemon=True)
    _aside.add(thread)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 starts no threads during shutdown
        _aside.discard(thread)
        body()


def join_at_exit() -> None:
    """Make the process join the calling thread at exit, because this thread of the script is inside torch's code."""
    thread = threading.current_thread()
    if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread):
        _aside.add(thread)


_stuck: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def expect_no_end() -> None:
    """Do not join the calling thread at exit, because its call may take half an hour."""
    thread = threading.current_thread()
    _stuck.add(thread)
    _aside.discard(thread)


_exit_status: list[int] = []


def leave_with(status: int) -> None:
    """Set the exit status of the process, which is used even if a thread is stuck at the end."""
    _exit_status[:] = [status]


def end_process(status: int) -> NoReturn:
    """End the process now without exit handlers, with the status from :func:`leave_with` or else ``status``."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_exit_status[0] if _exit_status else status)


def _is_running(thread: threading.Thread) -> bool:
    """Return whether a thread is running, or has ended in Python but is still freeing C++ objects."""
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
        end_process(_exit_status[0])  # a thread that returns later must not meet an interpreter that is torn down
