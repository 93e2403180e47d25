"""Waking a thread that sleeps in a poller: a pipe that any thread, or a signal handler, may write to."""

from __future__ import annotations

import os
import struct
import threading

import zmq


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


STOPPED = zmq.EVENT_MONITOR_STOPPED  # one of the events that the monitor must be asked for
EVENT = struct.Struct("=HI")  # what happened, and a value: often a descriptor
_SRCFD = int(zmq.SRCFD)


def close_both(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close ``socket``, waiting for as long as it lingers, and the reader of its events."""
    socket.close()
    event = 0
    while event != STOPPED:
        event, _ = EVENT.unpack(monitor.recv_multipart()[0])
    monitor.close(linger=0)


def source_of(body: zmq.Frame) -> int | None:
    """Return the descriptor of the connection that a message came over, or None if ZeroMQ keeps none.

    It keeps none of a peer of ZMTP 1.0 or 2.0, and takes whatever does not begin with a signature for one: a browser, a
    scrape, a TLS hello, five bytes.
    """
    try:
        return int(body.get(_SRCFD))
    except zmq.ZMQError as error:
        if error.errno != zmq.EINVAL:
            raise
        return None
