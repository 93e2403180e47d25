"""The parts that both ends share: a pipe that wakes a polling thread, ZeroMQ's event format, and the codec's type."""

from __future__ import annotations

import os
import struct
import threading
from typing import Protocol

import zmq


class Waker:
    """Makes ``descriptor`` readable by ``wake`` and unreadable by ``rest``; after ``close`` a wake does nothing."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Prevents a write to a descriptor that was closed, or reused since. Reentrant, because a signal handler may
        # call wake() while its own thread does.
        self._lock = threading.RLock()

    def wake(self) -> None:
        """Make the descriptor readable."""
        with self._lock:
            if self._write < 0:
                return
            try:
                os.write(self._write, b"w")
            except BlockingIOError:
                return  # the pipe is already full of wake-ups

    def rest(self) -> None:
        """Consume all wake-ups so far."""
        try:
            os.read(self.descriptor, 4096)
        except BlockingIOError:
            return  # there was none

    def close(self) -> None:
        """Close the descriptors."""
        with self._lock:
            write, self._write = self._write, -1
            os.close(write)
            os.close(self.descriptor)


class Wire(Protocol):
    """Writes and reads the messages of a connection."""

    def pack(self, value: object) -> bytes:
        """Return the message's bytes."""

    def unpack(self, packed: bytes, max_bytes: int) -> object:
        """Return the message.

        Raises:
            ProtocolError: ``packed`` is longer than ``max_bytes`` or malformed.
        """


STOPPED = zmq.EVENT_MONITOR_STOPPED  # must be among the events that the monitor is asked for
EVENT = struct.Struct("=HI")  # the event, and a value: often a descriptor
_SRCFD = int(zmq.SRCFD)


def close_both(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close ``socket``, waiting as long as it lingers, and its monitor."""
    socket.close()
    event = 0
    while event != STOPPED:
        event, _ = EVENT.unpack(monitor.recv_multipart()[0])
    monitor.close(linger=0)


def source_of(body: zmq.Frame) -> int | None:
    """Return the descriptor of the connection that a message came over, or None if ZeroMQ has none.

    ZeroMQ has none for a peer that speaks ZMTP 1.0 or 2.0. It treats any peer whose data does not begin with a
    signature as such a peer: a browser, a scraper, a TLS hello, five bytes.
    """
    try:
        return int(body.get(_SRCFD))
    except zmq.ZMQError as error:
        if error.errno != zmq.EINVAL:
            raise
        return None
