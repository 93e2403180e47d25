"""Waking a thread that sleeps in a poller: a pipe that any thread, or a signal handler, may write to."""

from __future__ import annotations

import os
import threading


class Waker:
    """``descriptor`` becomes readable by ``wake`` and quiet again by ``rest``; after ``close`` a wake does nothing."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # So that nothing is written to a number that is closed, or another file's by now. A signal handler may wake
        # while its own thread does, so it can be taken twice.
        self._lock = threading.RLock()

    def wake(self) -> None:
        """Make the descriptor readable."""
        with self._lock:
            if self._write < 0:
                return
            try:
                os.write(self._write, b"w")
            except BlockingIOError:
                return  # the pipe is full of wake-ups already

    def rest(self) -> None:
        """Take back every wake so far."""
        try:
            os.read(self.descriptor, 4096)
        except BlockingIOError:
            return  # nobody woke us

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            write, self._write = self._write, -1
            os.close(write)
            os.close(self.descriptor)
