"""Timestamps of events in a measured process, sent to the measuring process.

The module has the line that a process writes, the channel that carries it, and probes that write a line whenever a
given method of the product is called. ``CLOCK_MONOTONIC`` is one clock for all processes of a host (clock_gettime(2)),
and a line shorter than PIPE_BUF is written atomically (pipe(7)), so any number of processes may write to one FIFO and
be killed meanwhile.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

__all__ = ["CHANNEL", "WHO", "Channel", "Moment", "Notebook", "before_and_after"]

CHANNEL: Final = "BENCHMARK_MOMENTS"
"""Environment variable: the FIFO a measured process writes to."""
WHO: Final = "BENCHMARK_WHO"
"""Environment variable: the name of a measured process."""

LOOK_EVERY_S: Final = 0.05
"""Interval between two reads, in seconds; waking for every line would take the cores being measured.

The timestamps are the writers' own.
"""


@dataclass(frozen=True, slots=True)
class Moment:
    """An event in process ``pid`` of ``who``, at ``at_s`` on the host's monotonic clock.

    ``cpu_s`` is the CPU time of all its threads by then, which is more reliable on a busy machine. ``text`` is
    additional information, such as a hash.
    """

    name: str
    who: str
    pid: int
    at_s: float
    cpu_s: float
    step: int | None = None
    text: str | None = None


class Notebook:
    """The writing end, in a measured process."""

    def __init__(self, channel: Path, who: str) -> None:
        self._descriptor = os.open(channel, os.O_WRONLY | os.O_CLOEXEC)
        self._who = who
        self._pid = os.getpid()

    @classmethod
    def from_environment(cls) -> Notebook:
        """Open the channel given by the environment (:data:`CHANNEL`, :data:`WHO`)."""
        return cls(Path(os.environ[CHANNEL]), os.environ[WHO])

    def note(self, name: str, step: int | None = None, text: str | None = None) -> None:
        """Record an event now."""
        # A Moment's fields in order: reading them by name would take as long as a phase of a recovery.
        moment = (name, self._who, self._pid, time.monotonic(), time.process_time(), step, text)
        os.write(self._descriptor, json.dumps(moment).encode() + b"\n")


def before_and_after(
    owner: type | ModuleType, method: str, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    """Wrap ``owner.method`` so that ``before`` runs first and, when it returns, ``after``.

    The owner may also be a module, and the method a function of it. ``before`` and ``after`` get the call's arguments,
    ``self`` first if it is a method.
    """
    original = getattr(owner, method)

    @functools.wraps(original)
    def probed(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = original(*args, **kwargs)
        after(*args, **kwargs)
        return result

    setattr(owner, method, probed)


class Channel:
    """The reading end; events are kept in the order in which they arrived.

    Args:
        path: where the FIFO is created.
        watch: called at every read while waiting; raises to stop the wait.

    Attributes:
        moments: all events read.
        reached: the greatest step of each process, by pid.
    """

    def __init__(self, path: Path, watch: Callable[[], None]) -> None:
        os.mkfifo(path)
        self.path = path
        self.moments: list[Moment] = []
        self.reached: dict[int, int] = {}
        self._watch = watch
        # Also opened for writing, so that the last writer's end does not look like the end of the channel.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._partial = b""

    def close(self) -> None:
        os.close(self._descriptor)

    def wait_for(self, found: Callable[[], bool], within_s: float, what: str) -> None:
        """Read until ``found`` returns true.

        Raises:
            TimeoutError: it did not in time; the message contains ``what``.
        """
        deadline_s = time.monotonic() + within_s
        while not found():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what} did not happen within {within_s:g} s")
            time.sleep(LOOK_EVERY_S)
            self.drain()
            self._watch()

    def take(self) -> list[Moment]:
        """Return and forget the events read so far, so that searching stays fast in a long job."""
        taken, self.moments = self.moments, []
        return taken

    def drain(self) -> None:
        """Read the events that are available."""
        for moment in self._read():
            self.moments.append(moment)
            if moment.step is not None:
                self.reached[moment.pid] = max(moment.step, self.reached.get(moment.pid, 0))

    def _read(self) -> Iterator[Moment]:
        while True:
            try:
                self._partial += os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return
            *lines, self._partial = self._partial.split(b"\n")
            yield from (Moment(*json.loads(line)) for line in lines)

    def select(self, name: str, *, since_s: float = 0.0, pids: frozenset[int] | None = None) -> list[Moment]:
        """Return all events of that name after ``since_s`` in these processes."""
        return [
            moment
            for moment in self.moments
            if moment.name == name and moment.at_s > since_s and (pids is None or moment.pid in pids)
        ]
