"""Start the checkpoint writer, hand it sealed slots, and receive the outcomes.

This is the trainer's side.

The link to ``writer_process`` is a socket that preserves message boundaries (unix(7), SOCK_SEQPACKET). Each message is
a msgpack array::

  trainer → writer    root, job name, room                    once, with descriptors of the room and of the folder's
                                                              lock; no argument, because a root may hold a password
                      "save", slot name, sequence             this slot is sealed
                      "prune", newest, retention,             call ``PointStore.prune`` now
                               verified, damaged
                      "brief", words                          for the writer's companion (``writer_process``)
  writer → trainer    "hashed", sequence, "", []              the point can be found after a crash
                      "durable", sequence, "", []             the point is on disk under its name
                      "failed", sequence, text, []            the point is not on disk; text of the StoreError
                      "damaged", 0, text, [point]             this point is damaged, for this reason, and kept
                      "pruned", 0, text, gone                 these points are deleted; text of a StoreError or ""
                      "copied", sequence, "", []              the companion has copied the slot
                      "uncopied", sequence, text, []          the companion has not copied the slot

Only one save is in progress at a time, so its outcome is a single message that is cheap to poll for. Pruning may take
as long as the disk needs. It is requested after the outcome has arrived, and no training step waits for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from samebits.core.point import Point
from samebits.errors import StoreError
from samebits.store.checkpoint.memory_room import MemoryRoom
from samebits.store.checkpoint.point_store import Location
from samebits.store.checkpoint.pruning import Pruned, Pruning, Retention
from samebits.store.process_identity import ProcessIdentity

MAX_MESSAGE_BYTES = 64 * 1024
MAX_TEXT_BYTES = 16 * 1024
MAX_POINTS = 1000  # in one list of a message

NICENESS = 10
LEAST_PRIORITY = 19  # setpriority(2)

PACKAGE_FOLDER = Path(__file__).resolve().parents[3]


def command_of(module: str) -> tuple[str, ...]:
    """Return a command that runs this module like ``python -m``, independent of sys.path."""
    program = (
        "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return sys.executable, "-P", "-c", program, str(PACKAGE_FOLDER)


def packed_task(*words: str) -> bytes:
    """Return the first message to a writer's process; paths are raw bytes, independent of the locale."""
    return bytes(msgpack.packb([os.fsencode(one) for one in words]))


def words_in(task: bytes) -> list[str]:
    """Return the words of :func:`packed_task`."""
    return [os.fsdecode(one) for one in msgpack.unpackb(task)]


COMMAND = command_of("samebits.store.checkpoint.writer_process")


@dataclass(frozen=True, slots=True)
class _Child:
    """A writer process that has no task yet, and the connection to it."""

    process: subprocess.Popen[bytes]
    link: socket.socket

    @classmethod
    def start(cls, command: tuple[str, ...], inherited: Sequence[int]) -> _Child:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise StoreError(f"the checkpoint writer cannot be started: {error}; see `ulimit -n`") from error
        trainer = ProcessIdentity.current()
        words = ("--link", str(theirs.fileno()), "--trainer", str(trainer.pid), str(trainer.started_at))
        with theirs:
            try:
                process = subprocess.Popen(
                    [*command, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *inherited),
                    process_group=0,  # keeps the terminal's Ctrl-C away; the session stays the trainer's, see nice(2)
                )
            except OSError as error:
                ours.close()
                raise StoreError(
                    f"the checkpoint writer cannot be started: {error}; see `ulimit -u`, `ulimit -n` and `free`"
                ) from error
        _make_nice(process.pid)
        return cls(process, ours)

    def dismiss(self) -> None:
        """End the process, which has no save in progress."""
        self.link.close()
        self.process.kill()
        self.process.wait()


_waiting: dict[tuple[str, ...], _Child] = {}
"""Processes started ahead of time, by command; the next writer with the same command uses one."""


def start_ahead(command: tuple[str, ...] = COMMAND, inherited: Sequence[int] = ()) -> None:
    """Start the process of the next :class:`Writer` ahead of time.

    Its imports take longer than most saves.

    Args:
        command: see :class:`Writer`.
        inherited: see :class:`Writer`.

    Raises:
        StoreError: no process can be started.
    """
    if command not in _waiting:
        _waiting[command] = _Child.start(command, inherited)


def dismiss_waiting() -> None:
    """End processes that were started ahead of time, once no writer will be needed."""
    while _waiting:
        _waiting.popitem()[1].dismiss()


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The outcome of a save: the point is durable, or ``problem`` states why not."""

    point: Point
    problem: str | None = None


def pruning_in(message: list[Any]) -> Pruning:
    """Decode a trainer's request to prune."""
    newest, (keep, committed, told), verified, damaged = message
    retention = Retention(keep, None if committed is None else Point(*committed), frozenset(_points_of(told)))
    return Pruning(Point(*newest), retention, frozenset(_points_of(verified)), frozenset(_points_of(damaged)))


def message_of(pruning: Pruning) -> list[Any]:
    """Encode a request to prune, for :func:`pruning_in`."""
    retention = pruning.retention
    known = (sorted(points, reverse=True)[:MAX_POINTS] for points in (pruning.verified, pruning.damaged))
    # Points that do not fit in the message are verified once more.
    return [pruning.newest, [retention.keep, retention.committed, list(retention.told)], *known]


def _points_of(message: list[Any]) -> list[Point]:
    """Decode the points in a message."""
    return [Point(*one) for one in message]


class Writer:
    """The writer process of one rank, started by :func:`start_ahead` or by the first save.

    Args:
        root: the job's checkpoint folder; the caller holds the lock of the rank's folder.
        room: the rank's slots.
        lock_descriptor: that lock's open file, which the process inherits.
        job_name: the job's display name; the writer claims a remote folder with it, so that no step waits for a
            network.
        command: the program to start.
        inherited: further descriptors that the process inherits.
    """

    def __init__(
        self,
        root: Location,
        room: MemoryRoom,
        lock_descriptor: int,
        *,
        job_name: str = "",
        command: tuple[str, ...] = COMMAND,
        inherited: Sequence[int] = (),
    ) -> None:
        self._root = root
        self._job_name = job_name
        self._room = room
        self._lock_descriptor = lock_descriptor
        self._command = command
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._in_hand: tuple[int, Point] | None = None
        self._is_pruning = False
        self._pruned: list[Pruned] = []  # received, but not collected yet
        self._damaged: dict[Point, str] = {}  # for the next "pruned" message
        self._inherited = tuple(inherited)
        self._brief: bytes | None = None
        self._copies: list[str] = []  # outcomes of copies: a problem, or empty
        self._submitted: tuple[int, Point] | None = None  # the last slot
        self._last_copy = (0, "")  # the last outcome of a copy, with the slot's sequence number
        _open_writers.add(self)

    @property
    def pid(self) -> int | None:
        """The process's pid; None if there is no process."""
        return None if self._process is None else self._process.pid

    @property
    def is_busy(self) -> bool:
        """Return whether a save is in progress; its outcome may not have been received yet."""
        return self._in_hand is not None

    def start(self) -> None:
        """Start the process before there is anything to write, because its companion needs it.

        Raises:
            StoreError: no process can be started.
        """
        if self._link is None:
            self._start()

    def submit(self, name: str, sequence: int, point: Point) -> None:
        """Hand a sealed slot to the writer; no other save may be in progress.

        Args:
            name: the slot's name.
            sequence: the slot's sequence number.
            point: the point in it.

        Raises:
            StoreError: no process can be started.
        """
        assert self._in_hand is None, "one save is in hand at a time"
        message = msgpack.packb(("save", name, sequence))
        if self._link is not None:
            try:
                self._link.send(message)
            except (BrokenPipeError, ConnectionResetError):
                self.close()  # the process was killed between two saves, so start another one
        if self._link is None:
            link = self._start()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # already dead; reported by outcome()
                link.send(message)
        self._in_hand = self._submitted = (sequence, point)

    def outcome(self, *, wait: bool) -> SaveOutcome | None:
        """Return the outcome of the current save; None if it is not known yet or there is no save."""
        while self._in_hand is not None:
            sequence, point = self._in_hand
            found = self._hear(wait=wait)
            if found is None:
                return None
            what, of, text = found
            if what == "died":
                return self._died(point)
            if of != sequence:
                continue
            if what == "hashed":
                continue
            self._in_hand = None
            return SaveOutcome(point, str(text) if what == "failed" else None)
        return None

    def prune(self, pruning: Pruning) -> None:
        """Request pruning after a new point became durable; do nothing without a process."""
        assert not self._is_pruning, "a save is in hand only after what was asked before"
        message = msgpack.packb(("prune", *message_of(pruning)))
        # If other ranks rely on thousands of points, nothing is pruned.
        if self._link is not None and len(message) <= MAX_MESSAGE_BYTES:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._link.send(message)
                self._is_pruning = True

    def pruned(self, *, wait: bool) -> list[Pruned]:
        """Return the results of prunings finished since the last call.

        With ``wait``, wait for a pruning in progress, unless a save is in progress.
        """
        if self._is_pruning and self._in_hand is None:
            self._hear(wait=wait)
        heard, self._pruned = self._pruned, []
        return heard

    def brief(self, words: bytes) -> None:
        """Send words to the companion of this writer process and of every later one."""
        if words != self._brief:
            self._last_copy = (0, "")  # another buddy has no copies yet
        self._brief = words
        if self._link is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead; the next process gets it
                self._link.send(msgpack.packb(("brief", words)))

    def copies(self) -> list[str]:
        """Return the outcomes of copies since the last call, in order.

        Each is a problem, or empty for success.
        """
        if self._in_hand is None:
            self._hear(wait=False)
        heard, self._copies = self._copies, []
        return heard

    def await_copy(self, point: Point, within_s: float) -> str:
        """Wait until the companion has copied this point, and return a problem, or empty for success.

        Args:
            point: the last point that was submitted; its save is no longer in progress.
            within_s: how long to wait at most.
        """
        if self._submitted is None or self._submitted[1] != point:
            return "it was not copied to memory first"
        deadline = time.monotonic() + within_s
        while self._last_copy[0] < self._submitted[0]:
            left_s = deadline - time.monotonic()
            if self._link is None or left_s <= 0 or not select.select([self._link], [], [], left_s)[0]:
                return f"no confirmation within {within_s:g} s"
            if self._hear(wait=False) is not None:  # no save is in progress, so this is the writer's end
                return "its writer has ended"
        return self._last_copy[1]

    def _hear(self, *, wait: bool) -> tuple[str, int, str] | None:
        """Return the next message about a save, or None; messages about anything else are stored."""
        while self._link is not None:
            try:
                message = self._link.recv(MAX_MESSAGE_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                message = b""
            if not message:
                self._is_pruning = False
                return "died", 0, ""
            what, of, text, points = msgpack.unpackb(message)
            if what in ("copied", "uncopied"):
                self._copies.append(str(text))
                self._last_copy = (of, str(text))
            elif what == "damaged":
                self._damaged.update(dict.fromkeys(_points_of(points), str(text)))
            elif what == "pruned":
                self._is_pruning = False
                self._pruned.append(Pruned(_points_of(points), self._damaged, str(text)))
                self._damaged = {}
                if self._in_hand is None:
                    return None
            else:
                return what, of, text
        return None

    def close(self) -> None:
        """Close the link, and wait until the process has finished the current save and exited."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            self._process.wait()
            self._process = None
        self._in_hand = None
        self._is_pruning = False

    def _died(self, point: Point) -> SaveOutcome:
        pid = self.pid
        assert self._process is not None
        process = self._process
        self.close()
        return SaveOutcome(
            point, f"its writer (pid {pid}) ended with status {process.returncode}; the next save starts another"
        )

    def _start(self) -> socket.socket:
        child = _waiting.pop(self._command, None)
        if child is not None and child.process.poll() is not None:  # it was killed
            child.dismiss()
            child = None
        child = child or _Child.start(self._command, self._inherited)
        self._process, self._link = child.process, child.link
        words = packed_task(str(self._root), self._job_name, str(self._room.path))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # already dead; reported by outcome()
            socket.send_fds(child.link, [words], [self._room.descriptor, self._lock_descriptor])
            if self._brief is not None:
                child.link.send(msgpack.packb(("brief", self._brief)))
        return child.link

    def let_go(self) -> None:
        """Close only this process's copy of the link, as a forked child does."""
        if self._link is not None:
            self._link.close()
            self._link = None


def _make_nice(pid: int) -> None:
    """Lower a new process's priority, so that it takes only a tenth of a busy core.

    This includes its imports, which take longer than most saves. If the kernel shares CPU time between sessions
    (sched(7), autogroup), a nice value has an effect only within a session; so the writer stays in its trainer's
    session. In a separate session with a lower priority, the writer got no CPU time at all beside a trainer that spins
    on the same core (measured on Linux 6.18), so its saves never finished.
    """
    with contextlib.suppress(OSError):  # already dead; reported by outcome()
        os.setpriority(os.PRIO_PROCESS, pid, min(LEAST_PRIORITY, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS))


_open_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for writer in list(_open_writers):
        writer.let_go()
    for child in _waiting.values():
        child.link.close()
    _waiting.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
