"""Exact points at which a process of the probe ends itself: once, and not again in its replacement.

A kill is requested as ``RANK:POINT`` or ``RANK:POINT:NUMBER``, and with another end than kill -9 as
``RANK:POINT:NUMBER:WAY`` (:class:`Way`). Most points are calls in the probe itself; those inside the runtime (while it
saves, forms a group, restores) are reached by wrapping one of its functions. A file created exclusively just before
the kill records it, so that the replacement finds it. Ranks that are to die at the same point wait there for each
other's marks; otherwise the loss of the first may end the generation before the last of them gets there.

=================  =========================================================================  ================
point              the process dies                                                           NUMBER
=================  =========================================================================  ================
forming            having published its address and learned the others', not yet connected    generation
receiving          connected, before it takes over what another rank or a disk gave it        generation
restoring          holding the restore point, before it is known that all do                  generation
reset              in a reset callback: the new group stands, nothing is restored yet        the step it left
backward           in the middle of the backward pass, some gradients reduced, some not       the step
stepped            after the optimizer's step, before the commit                              the step
saving             a checkpoint is written but not renamed into place                         its step
saved              the checkpoint has its name and has not been reported                      its step
committed          after the commit                                                           the step
function_returned  the training function is about to return, ``elastic.run`` has not          –
train_returned     ``elastic.run`` has returned, the process has not ended                    –
=================  =========================================================================  ================
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import samebits
from samebits.core.point import Point
from samebits.service.agent import Agent
from samebits.store import durable
from samebits.store.checkpoint import SaveOutcome, Writer, folder

POLL_S = 0.002
TOGETHER_WITHIN_S = 60.0


class Way(StrEnum):
    """How a process ends or stops running."""

    KILL = "kill"
    EXCEPTION = "exception"
    EXIT = "exit"
    TERM = "term"
    STOP = "stop"


SIGNALS = {Way.KILL: signal.SIGKILL, Way.TERM: signal.SIGTERM, Way.STOP: signal.SIGSTOP}


def go(way: Way) -> None:
    """Do that to this process."""
    if way is Way.EXCEPTION:
        raise ValueError("the probe was told to fail here")
    if way is Way.EXIT:
        sys.exit(1)
    os.kill(os.getpid(), SIGNALS[way])


def mark_of(marks: Path, name: str) -> Path:
    """Return the file that records this kill."""
    return marks / f"killed-{name}"


class KillPoints:
    """The kills that have yet to happen."""

    def __init__(self, wanted: Sequence[str], marks: Path) -> None:
        self._wanted: dict[str, Way] = {}
        for kill in wanted:
            name, _, way = kill.rpartition(":")
            if way in set(Way):
                self._wanted[name] = Way(way)
            else:
                self._wanted[kill] = Way.KILL
        self._marks = marks
        self._generation = 0

    def here(self, point: str, number: int | None = None) -> None:
        """Die here if that was requested and has not happened yet."""
        if not self._wanted or samebits.is_spare():
            return
        rank = samebits.get_rank()
        for name in (f"{rank}:{point}", f"{rank}:{point}:{number}"):
            if name in self._wanted and self._is_first(name):
                self._wait_for_those_who_go_here(name)
                go(self._wanted[name])

    def _wait_for_those_who_go_here(self, name: str) -> None:
        here = name.partition(":")[2]
        marks = [mark_of(self._marks, other) for other in self._wanted if other.partition(":")[2] == here]
        deadline = time.monotonic() + TOGETHER_WITHIN_S
        while not all(mark.exists() for mark in marks):
            assert time.monotonic() < deadline, f"not all of {[mark.name for mark in marks]} have got there"
            time.sleep(POLL_S)

    def _is_first(self, name: str) -> bool:
        try:
            os.close(os.open(mark_of(self._marks, name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def install(self) -> None:
        """Hook the points inside the runtime."""
        if not self._wanted:
            return
        self._wrap_formation()
        self._wrap_restoring()
        self._wrap_saving()

    def _wrap_formation(self) -> None:
        inner = Agent.address_map

        def address_map(agent: Agent, generation: int) -> Any:
            blobs = inner(agent, generation)
            self._generation = generation
            self.here("forming", generation)
            return blobs

        Agent.address_map = address_map  # type: ignore[method-assign, assignment]

    def _wrap_restoring(self) -> None:
        inner_load, inner_begin = samebits.elastic.TorchState.load, samebits.elastic.TorchState.begin

        def load(state: Any, contents: dict[str, Any], *, own: bool) -> None:
            self.here("receiving", self._generation)
            inner_load(state, contents, own=own)

        def begin(state: Any, point: Point) -> None:
            self.here("restoring", self._generation)
            inner_begin(state, point)

        samebits.elastic.TorchState.load = load  # type: ignore[method-assign, assignment]
        samebits.elastic.TorchState.begin = begin  # type: ignore[method-assign, assignment]

    def _wrap_saving(self) -> None:
        inner = durable.publish

        def publish(temporary: Path, path: Path) -> None:
            point = folder.parse_point_name(path.name)
            if point is not None:
                self.here("saving", point.step)
            inner(temporary, path)
            if point is not None:
                self.here("saved", point.step)

        durable.publish = publish
        inner_submit, inner_outcome = Writer.submit, Writer.outcome

        def submit(writer: Writer, name: str, sequence: int, point: Point) -> None:
            inner_submit(writer, name, sequence, point)
            self.here("saving", point.step)

        def outcome(writer: Writer, *, wait: bool) -> SaveOutcome | None:
            found = inner_outcome(writer, wait=wait)
            if found is not None and found.problem is None:
                self.here("saved", found.point.step)
            return found

        Writer.submit = submit  # type: ignore[method-assign]
        Writer.outcome = outcome  # type: ignore[method-assign]
