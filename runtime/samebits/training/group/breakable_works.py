"""Works of a breakable group, which can be interrupted and record when they end.

They wait for gloo's own works in short intervals, or in a thread that can be abandoned; ``breakable_group`` explains
why.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samebits.training.group.breaker import Breaker, join_at_exit, run_aside, run_breakable
from samebits.training.group.recorder import Recorder
from samebits.training.main_thread_time import main_thread

__all__ = [
    "Collective",
    "InFlight",
    "Pairwise",
    "ReduceScatter",
    "Several",
    "await_this_thread_at_exit",
    "wait_in_slices",
]

T = TypeVar("T")

# Limits how long a stuck send or receive holds a thread after a break; about one loss in six leaves one stuck.
# A slice that ends early costs 0.2 ms, so the first slice is as long as most collectives take.
_FIRST_SLICE, _LONGEST_SLICE = timedelta(milliseconds=10), timedelta(milliseconds=100)
NO_TIMEOUT = timedelta(0)  # torch's kNoTimeout: wait without limit
_MAIN_THREAD = threading.main_thread().ident


class InFlight:
    """gloo's own works that may still be running. Code that sees a work end reports it here.

    Args:
        recorder: notified when a work ends.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers: dict[dist.Work, int | None] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, work: dist.Work, number: int | None = None) -> None:
        """Add a launched work with its number in the recorder."""
        self._numbers[work] = number

    def ended(self, work: dist.Work) -> None:
        """Record that a work has ended; calling this again has no effect."""
        self._recorder.over(self._numbers.pop(work, None))

    def unfinished(self) -> list[dist.Work]:
        """Return the works that are still running."""
        return [work for work in list(self._numbers) if not work.is_completed()]

    def let_go(self) -> None:
        """Remove works that have ended although nothing waited for them."""
        for work in list(self._numbers):
            if work.is_completed():
                self.ended(work)

    def clear(self) -> None:
        """Remove all works."""
        self._numbers.clear()


def await_this_thread_at_exit() -> None:
    """Join this thread at exit.

    A thread of torch's must not be inside gloo while the interpreter shuts down.
    """
    if threading.get_ident() != _MAIN_THREAD:
        join_at_exit()


def wait_in_slices(work: dist.Work, breaker: Breaker, launched: InFlight, timeout: timedelta) -> None:
    """Wait in short intervals until gloo's work is done.

    Raises if the work failed, ``timeout`` (0: none) passed or the group was broken.
    """
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
    """Return whether the script raised this error while the thread waited, in a signal handler or from another thread.

    torch's errors have a text and come straight out of the call; a signal handler has a frame of its own.
    """
    traceback = error.__traceback__
    return not error.args or (traceback is not None and traceback.tb_next is not None)


class _DelegatingWork(dist.Work):
    """Common delegation to gloo's own work."""

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
    """A collective that runs in one of gloo's threads; it stays in ``launched`` until it is known to have ended."""

    def __init__(self, inner: dist.Work, breaker: Breaker, launched: InFlight) -> None:
        super().__init__(inner, breaker)
        self._launched = launched

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the work is done.

        Raises:
            GenerationEndedError: the group is broken.
            RuntimeError: torch's own, if the work fails or ``timeout`` passes.
        """
        self._finish(timeout)
        return True

    def _finish(self, timeout: timedelta) -> None:
        wait_in_slices(self._inner, self._breaker, self._launched, timeout)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future for DDP and ``then``, completed with the work or failed by the breaker.

        Our own thread waits for the work and completes the future. gloo's thread must not call back into Python: it
        cannot be joined when the process exits, and it aborts the process if it needs an interpreter that is being torn
        down.
        """
        ours: torch.futures.Future[Any] = torch.futures.Future()
        # A Python future's exception is visible only to Python; a chained future carries it into C++ too.
        chained = ours.then(_value_of)
        self._breaker.watch(ours)
        run_aside(functools.partial(self._complete, ours), "samebits-future")
        return chained

    def _complete(self, ours: torch.futures.Future[Any]) -> None:
        try:
            self._finish(NO_TIMEOUT)
            value = self.result()
        except Exception as error:
            if self._breaker.release(ours):
                ours.set_exception(error)
        else:
            if self._breaker.release(ours):
                ours.set_result(value)


class ReduceScatter(Collective):
    """A reduce-scatter made of an all-reduce; waiting for it copies this rank's part to the output.

    gloo does the same internally, with the same bits, but its own work ignores the timeout of a wait. A rank whose
    message was cut off midway would then stay in gloo until gloo's timeout.

    Args:
        inner, breaker, launched: as for :class:`Collective`, of the all-reduce.
        reduced: the complete tensor, reduced in place.
        output: this rank's part.
        rank: this process's rank in the group.
    """

    def __init__(
        self,
        inner: dist.Work,
        breaker: Breaker,
        launched: InFlight,
        reduced: torch.Tensor,
        output: torch.Tensor,
        rank: int,
    ) -> None:
        super().__init__(inner, breaker, launched)
        self._reduced: torch.Tensor | None = reduced
        self._output = output
        self._rank = rank

    def result(self) -> list[torch.Tensor]:
        """Return the output."""
        return [self._output]

    def _finish(self, timeout: timedelta) -> None:
        super()._finish(timeout)
        reduced, self._reduced = self._reduced, None
        if reduced is not None:
            count = self._output.numel()
            part = reduced.view(-1)[self._rank * count : (self._rank + 1) * count]
            with torch.no_grad():
                self._output.copy_(part.view(self._output.shape))


class Several(dist.Work):
    """The works of one call, which end together."""

    def __init__(self, works: Sequence[Collective]) -> None:
        super().__init__()
        self._works = works

    def is_completed(self) -> bool:
        """Return whether all works have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all works have succeeded."""
        return all(work.is_success() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        """Return the results in the order of the works."""
        return [one for work in self._works for one in work.result()]

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for all works of the call, as :meth:`Collective.wait` does."""
        return all(work.wait(timeout) for work in self._works)


class Pairwise(_DelegatingWork):
    """A send or receive. gloo allows only one wait for it, and a timeout there closes every connection.

    ``ended`` is called once the work is over.
    """

    def __init__(self, inner: dist.Work, breaker: Breaker, timeout: timedelta, ended: Callable[[], None]) -> None:
        super().__init__(inner, breaker)
        self._timeout = timeout
        self._ended = ended
        self._lock = threading.Lock()
        self._done = False

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait as torch does; raise GenerationEndedError if the group is broken."""
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
        """Return whether the work has ended."""
        return self._done or super().is_completed()


def _value_of(future: torch.futures.Future[T]) -> T:
    return future.value()
