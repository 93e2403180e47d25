"""The works that a breakable group gives out: they obey its breaker, and say when they are over.

Here lives waiting for gloo's own works, in slices, aside, or by a thread that can be abandoned; why it must be so is
said in ``breakable_group``. Never here: launching.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samebits.training.group.breaker import Breaker, join_at_exit, run_aside, run_breakable
from samebits.training.group.recorder import Recorder
from samebits.training.main_thread_time import main_thread

__all__ = ["Collective", "InFlight", "Pairwise", "await_this_thread_at_exit", "wait_in_slices"]

T = TypeVar("T")

# How long a send or receive that gloo has forgotten can keep a thread once the breaker is thrown: at every sixth loss
# some survivor waits for one. A slice that ends early costs 0.2 ms, so the first is as long as most collectives take.
_FIRST_SLICE, _LONGEST_SLICE = timedelta(milliseconds=10), timedelta(milliseconds=100)
NO_TIMEOUT = timedelta(0)  # torch's kNoTimeout: wait until it is done
_MAIN_THREAD = threading.main_thread().ident


class InFlight:
    """gloo's own works that may still run; whoever knows that one has ended says so.

    Args:
        recorder: is told of every end.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers: dict[dist.Work, int | None] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, work: dist.Work, number: int | None = None) -> None:
        """It was launched, under this number of the recorder's."""
        self._numbers[work] = number

    def ended(self, work: dist.Work) -> None:
        """It is over, however often that is said."""
        self._recorder.over(self._numbers.pop(work, None))

    def unfinished(self) -> list[dist.Work]:
        """Those that still run."""
        return [work for work in list(self._numbers) if not work.is_completed()]

    def let_go(self) -> None:
        """Of those that have ended, though nobody has waited for them."""
        for work in list(self._numbers):
            if work.is_completed():
                self.ended(work)

    def clear(self) -> None:
        """Of all."""
        self._numbers.clear()


def await_this_thread_at_exit() -> None:
    """A thread of torch's own must not be left in gloo when the interpreter goes."""
    if threading.get_ident() != _MAIN_THREAD:
        join_at_exit()


def wait_in_slices(work: dist.Work, breaker: Breaker, launched: InFlight, timeout: timedelta) -> None:
    """Until gloo's work is over; raises where it failed, ``timeout`` (0: none) has passed or the group was broken."""
    await_this_thread_at_exit()
    began_s = time.perf_counter()
    try:
        _wait_through(work, breaker, launched, timeout)
    finally:
        main_thread.waited_for_others(began_s)


def _wait_through(work: dist.Work, breaker: Breaker, launched: InFlight, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds() if timeout else None
    part = min(_FIRST_SLICE, timeout) if timeout else _FIRST_SLICE
    while True:
        try:
            work.wait(part)
            launched.ended(work)
            return
        except RuntimeError as error:
            if _is_the_scripts(error):
                raise
            breaker.check()
            if work.is_completed():
                launched.ended(work)
                work.wait()
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise
            part = min(2 * part, _LONGEST_SLICE)


def _is_the_scripts(error: RuntimeError) -> bool:
    """Whether the script raised it while this thread waited: in a signal handler, or into this thread from another.

    What torch raises has a text and comes straight out of the call; a handler has a frame of its own.
    """
    traceback = error.__traceback__
    return not error.args or (traceback is not None and traceback.tb_next is not None)


class _DelegatingWork(dist.Work):
    """What both kinds of works pass on to gloo's own."""

    def __init__(self, inner: dist.Work, breaker: Breaker) -> None:
        super().__init__()
        self._inner = inner
        self._breaker = breaker

    def is_completed(self) -> bool:
        return self._breaker.broken or self._inner.is_completed()

    def is_success(self) -> bool:
        return not self._breaker.broken and self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def synchronize(self) -> None:
        self._inner.synchronize()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    def _source_rank(self) -> int:
        return self._inner._source_rank()


class Collective(_DelegatingWork):
    """A collective that one of gloo's own threads runs; it is in ``launched`` until it is known to have ended."""

    def __init__(self, inner: dist.Work, breaker: Breaker, launched: InFlight) -> None:
        super().__init__(inner, breaker)
        self._launched = launched

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Until it is done, ``timeout`` passes or the group is broken: errors as torch's, or GenerationEndedError."""
        wait_in_slices(self._inner, self._breaker, self._launched, timeout)
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that is completed with the work, or failed by the breaker: for DDP, for ``then``.

        A thread of ours waits for the work and completes it. gloo's own thread must not call back into Python: nobody
        can wait for it at the process's end, and one that asks for an interpreter that is torn down aborts the process.
        """
        ours: torch.futures.Future[Any] = torch.futures.Future()
        # A Python future keeps a set exception where only Python sees it; a chained one carries it into C++ as well.
        chained = ours.then(_value_of)
        self._breaker.watch(ours)
        run_aside(functools.partial(self._complete, ours), "samebits-future")
        return chained

    def _complete(self, ours: torch.futures.Future[Any]) -> None:
        try:
            wait_in_slices(self._inner, self._breaker, self._launched, NO_TIMEOUT)
            value = self._inner.result()
        except Exception as error:
            if self._breaker.release(ours):
                ours.set_exception(error)
        else:
            if self._breaker.release(ours):
                ours.set_result(value)


class Pairwise(_DelegatingWork):
    """A send or receive: gloo lets it be awaited once only, and a wait that times out there closes every connection.

    ``ended`` is called once it is over.
    """

    def __init__(self, inner: dist.Work, breaker: Breaker, timeout: timedelta, ended: Callable[[], None]) -> None:
        super().__init__(inner, breaker)
        self._timeout = timeout
        self._ended = ended
        self._lock = threading.Lock()
        self._done = False

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """As torch's own; GenerationEndedError when the group is broken meanwhile."""
        with self._lock:
            if not self._done:
                limit, began_s = timeout or self._timeout, time.perf_counter()
                try:
                    run_breakable(self._breaker, lambda: self._inner.wait(limit), "samebits-pairwise")
                finally:
                    main_thread.waited_for_others(began_s)
                self._done = True
                self._ended()
        return True

    def is_completed(self) -> bool:
        """As torch's own."""
        return self._done or super().is_completed()


def _value_of(future: torch.futures.Future[T]) -> T:
    return future.value()
