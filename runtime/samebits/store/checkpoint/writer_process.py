"""The process that hashes a rank's sealed slots and writes them to disk, beside its trainer.

``writer`` starts it and describes the messages. A companion may process each hashed slot further (``service`` sends
copies to other hosts); no save waits for it.

Every sealed slot is written. The process has its own process group, so Ctrl-C does not reach it, and it ignores
termination signals. When its trainer is gone, it writes the sealed slots before it exits, and holds the folder's lock
until then. It deletes no points after the trainer's death, because the next trainer may already have offered them to
other ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgpack

from samebits.core.point import Point
from samebits.errors import StoreError
from samebits.printable import printable
from samebits.store.checkpoint import memory_buffer, memory_room
from samebits.store.checkpoint.memory_buffer import BufferStage, MemoryBuffer
from samebits.store.checkpoint.point_format import PointHeader
from samebits.store.checkpoint.point_store import Location, PointStore, is_remote, open_point_store
from samebits.store.checkpoint.pruning import Pruned, Pruning
from samebits.store.checkpoint.writer import MAX_MESSAGE_BYTES, MAX_POINTS, MAX_TEXT_BYTES, pruning_in, words_in
from samebits.store.process_identity import ProcessIdentity

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Companion(Protocol):
    """Processes hashed slots further in its own thread. No method may block."""

    def brief(self, words: bytes) -> None:
        """Receive the trainer's message for the companion."""

    def hashed(self, name: str, sequence: int) -> None:
        """Process a slot that has been hashed."""

    def close(self) -> None:
        """Stop, because the trainer is gone or has finished."""


Tell = Callable[[str, int, str], None]
"""Sends the trainer a message: "copied" or "uncopied", a sequence, and a problem."""


@dataclass(frozen=True, slots=True)
class Task:
    """The trainer's first message.

    Attributes:
        root: the job's checkpoint folder.
        job_name: see ``Writer``.
        room: the folder of the rank's slots.
        room_descriptor: that folder, open and locked.
    """

    root: Location
    job_name: str
    room: Path
    room_descriptor: int


class WriterProcess:
    """The process's main loop.

    Args:
        link: to the trainer; preserves message boundaries.
        trainer: this process exits after the trainer does. The trainer's death is detected even if a child of the
            trainer keeps its end of ``link`` open.
        task: what to write.
        accompanied_by: creates the companion; None for no companion.
    """

    def __init__(
        self,
        link: socket.socket,
        trainer: ProcessIdentity,
        task: Task,
        *,
        accompanied_by: Callable[[Tell], Companion] | None = None,
    ) -> None:
        self._link = link
        self._trainer = trainer
        self._task = task
        self._store: PointStore[Any] | None = None
        self._companion = None if accompanied_by is None else accompanied_by(self._tell)
        self._finished: set[int] = set()  # sequences
        self._was_there: frozenset[Point] | None = None  # points in an object store before this process's first save

    def run(self) -> None:
        """Serve until the trainer is gone and all slots that it sealed are written."""
        link, poll = self._link, select.poll()
        poll.register(link, select.POLLIN)
        with _watched(self._trainer) as watched:
            if watched is not None:
                poll.register(watched, select.POLLIN)
            while True:
                poll.poll()
                try:
                    message = link.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    if self._trainer.is_alive():
                        continue
                    break
                except ConnectionResetError:
                    continue  # the trainer exited with unread messages; those that it sent follow
                if not message:
                    break
                self._take(msgpack.unpackb(message))
        if self._companion is not None:
            self._companion.close()
        self._finish_what_is_sealed()

    def _take(self, message: list[Any]) -> None:
        match message:
            case ["brief", words]:
                if self._companion is not None:
                    self._companion.brief(words)
            case ["save", name, sequence]:
                self._finish(str(name), int(sequence))
            case ["prune", *pruning]:
                self._prune(pruning_in(pruning))

    def _finish_what_is_sealed(self) -> None:
        """Write slots that the trainer sealed but, because it was killed, did not submit."""
        for name in memory_room.NAMES:
            header = MemoryBuffer(self._task.room / name, self._task.room_descriptor).header()
            if header is not None and header.stage is BufferStage.SEALED and header.sequence not in self._finished:
                self._finish(name, header.sequence)

    def _finish(self, name: str, sequence: int) -> None:
        self._finished.add(sequence)

        def on_hashed() -> None:
            self._tell("hashed", sequence)
            if self._companion is not None:
                self._companion.hashed(name, sequence)

        task = self._task
        try:
            with memory_buffer.hashed(task.room / name, task.room_descriptor, on_hashed) as point:
                header = point.header
                place = self._store_of(header)
                if self._was_there is None:
                    is_asked = is_remote(task.root)  # the trainer knows the points of a local folder
                    self._was_there = frozenset(found.point for found in place.scan()) if is_asked else frozenset()
                place.write_prepared(header, point.manifest_data, [point.data])
        except StoreError as error:
            self._tell("failed", sequence, str(error))
        else:
            self._tell("durable", sequence)

    def _store_of(self, header: PointHeader) -> PointStore[Any]:
        if self._store is None:
            # A local folder was claimed before it was locked.
            task = self._task
            self._store = open_point_store(task.root, header.slot, job=header.job, job_name=task.job_name, claims=False)
        return self._store

    def _prune(self, asked: Pruning) -> None:
        assert self._store is not None, "it is asked for after a save"
        if not self._trainer.is_alive():
            return
        told = asked.retention.told | (self._was_there or frozenset())  # other ranks may rely on those too
        retention = dataclasses.replace(asked.retention, told=told)
        try:
            pruned = self._store.prune(dataclasses.replace(asked, retention=retention))
        except StoreError as error:
            pruned = Pruned(problem=str(error))
        for point, reason in pruned.damaged.items():
            self._tell("damaged", 0, reason, [point])
        self._tell("pruned", 0, pruned.problem, list(pruned.gone)[:MAX_POINTS])

    def _tell(self, what: str, sequence: int, text: str = "", points: Sequence[Point] = ()) -> None:
        text = printable(text).encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the trainer is gone
            self._link.send(msgpack.packb((what, sequence, text, points)))


@contextlib.contextmanager
def _watched(trainer: ProcessIdentity) -> Iterator[int | None]:
    """Yield a descriptor that becomes readable when the trainer dies, or None."""
    try:
        descriptor = os.pidfd_open(trainer.pid)
    except (AttributeError, OSError):  # unsupported, or already gone; the link shows it as well
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def main(accompanied_by: Callable[[argparse.Namespace, Task, Tell], Companion] | None = None) -> NoReturn:
    """Run the writer in this process, then exit; :mod:`writer` starts it.

    Args:
        accompanied_by: creates the companion from the command line and the task.
    """
    parser = argparse.ArgumentParser(description="Writes one rank's checkpoints; started by its trainer.")
    parser.add_argument("--link", type=int, required=True)
    parser.add_argument("--trainer", nargs=2, type=int, required=True, metavar=("PID", "STARTED_AT"))
    parser.add_argument("--listener", type=int, help="a descriptor, for the companion")
    given = parser.parse_args()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=given.link) as link:
        task = _task_from(link)
        if task is not None:
            companion = None if accompanied_by is None else functools.partial(accompanied_by, given, task)
            WriterProcess(link, ProcessIdentity(*given.trainer), task, accompanied_by=companion).run()
    # Skip the interpreter's shutdown, which would occupy a core for half the duration of a recovery.
    os._exit(0)


def _task_from(link: socket.socket) -> Task | None:
    """Receive the first message; None if the trainer is gone or never had anything to write."""
    first, descriptors, *_ = socket.recv_fds(link, MAX_MESSAGE_BYTES, 2)
    if not first:
        return None
    root, job_name, room = words_in(first)
    room_descriptor, _lock = descriptors  # keeping this descriptor open keeps the lock
    return Task(root if "://" in root else Path(root), job_name, Path(room), room_descriptor)


if __name__ == "__main__":
    main()
