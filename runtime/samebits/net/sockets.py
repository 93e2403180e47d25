"""Parts shared by both ends: a pipe that wakes a polling thread, ZeroMQ's event format, and the codec's interface."""

from __future__ import annotations

import os
import struct
import threading
from typing import Protocol

import zmq


class Waker:
    """A descriptor that ``wake`` makes readable and ``rest`` makes unreadable.

    After ``close``, ``wake`` does nothing.
    """

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Prevents a write to a descriptor that has been closed or reused. Reentrant, because a signal handler may call
        # wake() while its thread is in it.
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
            return  # there was no wake-up

    def close(self) -> None:
        """Close the descriptors."""
        with self._lock:
            write, self._write = self._write, -1
            os.close(write)
            os.close(self.descriptor)


class Wire(Protocol):
    """Encodes and decodes the messages of a connection."""

    def pack(self, value: object) -> bytes:
        """Encode the message."""

    def unpack(self, packed: bytes, max_bytes: int) -> object:
        """Decode the message.

        Raises:
            ProtocolError: ``packed`` is longer than ``max_bytes`` or malformed.
        """


STOPPED = zmq.EVENT_MONITOR_STOPPED  # must be among the events requested from the monitor
EVENT = struct.Struct("=HI")  # the event, and a value: often a descriptor
_SRCFD = int(zmq.SRCFD)


def close_both(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close ``socket`` and its monitor. Unsent messages get as long as the socket lingers."""
    socket.close()
    event = 0
    while event != STOPPED:
        event, _ = EVENT.unpack(monitor.recv_multipart()[0])
    monitor.close(linger=0)


def source_of(body: zmq.Frame) -> int | None:
    """Return the descriptor of the connection over which a message arrived.

    Returns:
        None if the peer speaks ZMTP 1.0 or 2.0, for which ZeroMQ reports no descriptor. ZeroMQ treats any peer whose
        data does not begin with a signature as such a peer: a browser, a scraper, a TLS hello, five bytes.
    """
    try:
        return int(body.get(_SRCFD))
    except zmq.ZMQError as error:
        if error.errno != zmq.EINVAL:
            raise
        return None
