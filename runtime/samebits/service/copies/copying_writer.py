"""Run the checkpoint writer of a rank with a buddy, which also exchanges copies with other hosts.

A second thread sends and receives copies. This process does it because it has the hashed slot, does not use the
trainer's GIL, and survives the trainer's death. It unlocks the copies that it stores as soon as its own trainer is
gone, so that a replacement can use them.
"""

from __future__ import annotations

import argparse
import collections
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from samebits.net.copies import BuddyAddress
from samebits.net.curve import KeyPair
from samebits.net.sockets import Waker
from samebits.service.copies.buddy import Brief
from samebits.service.copies.keeper import CopyKeeper
from samebits.service.copies.sender import CopySender
from samebits.store.checkpoint import Location, writer_process
from samebits.store.checkpoint.writer_process import Task, Tell
from samebits.store.process_identity import ProcessIdentity


class Copies:
    """The thread that exchanges copies. It is created and closed by the writer's thread.

    Args:
        room, room_descriptor: the folder of the rank's slots, and its open descriptor.
        root: the job's checkpoint folder.
        listener: descriptor of a listening TCP socket.
        trainer: the process with which this one ends.
        tell: sends a result to the trainer.
    """

    def __init__(
        self, room: Path, room_descriptor: int, root: Location, listener: int, trainer: ProcessIdentity, tell: Tell
    ) -> None:
        self._context = zmq.Context()
        self._listener = listener
        self._trainer = trainer
        self._sender = CopySender(
            self._context,
            room,
            room_descriptor,
            root,
            lambda sequence, problem: tell("uncopied" if problem else "copied", sequence, problem),
        )
        self._keeper: CopyKeeper | None = None
        self._tasks: collections.deque[Callable[[], None]] = collections.deque()
        self._waker = Waker()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="samebits-copies", daemon=True)
        self._thread.start()

    # ---- the writer's thread

    def brief(self, words: bytes) -> None:
        """Begin a generation with this brief."""
        self._post(lambda: self._begin(Brief.unpack(words)))

    def hashed(self, name: str, sequence: int) -> None:
        """Pass the newest slot to the sender."""
        self._post(lambda: self._sender.hashed(name, sequence, time.monotonic()))

    def close(self) -> None:
        """Discard unsent points, and unlock the stored copies."""
        self._post(self._end)
        self._thread.join()

    def _post(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._waker.wake()

    def _begin(self, brief: Brief) -> None:
        keys = KeyPair(brief.public_key, brief.secret_key) if brief.secret_key else None
        if self._keeper is None:
            self._keeper = CopyKeeper(self._context, self._listener, keys, Path(brief.base), brief.job, brief.ticket)
        self._keeper.keep(frozenset(brief.keeps))
        keeper = BuddyAddress.of(brief.keeper) if brief.keeper else None
        self._sender.go_to(keeper, brief.who, keys, time.monotonic())

    def _end(self) -> None:
        self._is_over = True

    def _run(self) -> None:
        watched = self._trainer_descriptor()
        try:
            while not self._is_over:
                if watched is not None and watched in self._wait(watched):
                    break
                if watched is None:
                    self._wait(None)
                while self._tasks:
                    self._tasks.popleft()()
                if self._keeper is not None:
                    self._keeper.look()
                self._sender.look(time.monotonic())
        finally:
            if watched is not None:
                os.close(watched)
            self._sender.close()
            if self._keeper is not None:
                self._keeper.close()
            self._context.destroy(linger=0)

    def _wait(self, watched: int | None) -> list[Any]:
        poller = zmq.Poller()
        sources = [self._waker.descriptor, watched, self._sender.socket]
        if self._keeper is not None:
            sources += self._keeper.sources
        for source in sources:
            if source is not None:
                poller.register(source, zmq.POLLIN)
        wake_at = self._sender.wake_at
        pauses_s = [] if wake_at is None else [max(0.0, wake_at - time.monotonic())]
        if self._keeper is not None and self._keeper.look_within_s is not None:
            pauses_s.append(self._keeper.look_within_s)
        pause_ms = int(min(pauses_s) * 1000 + 1) if pauses_s else None
        ready = [source for source, _ in poller.poll(pause_ms)]
        if self._waker.descriptor in ready:
            self._waker.rest()
        return ready

    def _trainer_descriptor(self) -> int | None:
        """Return a descriptor that becomes readable when the trainer dies; None if unsupported.

        The writer's thread also notices the death, but possibly only after a long save.
        """
        try:
            return os.pidfd_open(self._trainer.pid)
        except (AttributeError, OSError):
            return None


def _copies(given: argparse.Namespace, task: Task, tell: Tell) -> Copies:
    trainer = ProcessIdentity(*given.trainer)
    return Copies(task.room, task.room_descriptor, task.root, given.listener, trainer, tell)


if __name__ == "__main__":
    writer_process.main(_copies)
