"""The worker's connection to the scheduler: one DEALER that reconnects by itself and says when it does.

``IMMEDIATE`` keeps nothing queued for a connection that does not stand: what is said while the scheduler is away is
dropped, and the agent says everything that still matters when the connection is back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from runtime.core import messages
from runtime.errors import ProtocolError
from runtime.net.address import endpoint
from runtime.net.waker import Waker

MAX_INCOMING_BYTES = 256 << 20  # an address map of ten thousand members
RECONNECT_MS = 100


@dataclass(frozen=True, slots=True)
class Up:
    """The connection stands; the scheduler knows nothing of us yet."""


@dataclass(frozen=True, slots=True)
class Down:
    """The connection is gone."""


@dataclass(frozen=True, slots=True)
class Got:
    """A message came in."""

    message: Any


class Client:
    """One connection. Not thread-safe, but for ``wake``.

    Args:
        host: name or address of the scheduler's host.
        port: its TCP port.
        identity: this connection's name at the scheduler: the session, ASCII.
        silence_s: after this long without ZeroMQ's own heartbeat the connection counts as closed.
    """

    def __init__(self, host: str, port: int, identity: str, silence_s: float) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, identity.encode("ascii"))
        for option, value in {
            zmq.LINGER: 500,
            zmq.IPV6: 1,
            zmq.IMMEDIATE: 1,
            zmq.MAXMSGSIZE: MAX_INCOMING_BYTES,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.HANDSHAKE_IVL: max(1000, int(silence_s * 1000)),
            zmq.HEARTBEAT_IVL: max(1, int(silence_s * 1000 / 3)),
            zmq.HEARTBEAT_TIMEOUT: int(silence_s * 1000),
        }.items():
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._waker = Waker()
        for source in (self._socket, self._monitor, self._waker.descriptor):
            self._poller.register(source, zmq.POLLIN)
        self._socket.connect(endpoint(host, port))

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something has come in, ``wake`` was called, or the time is over."""
        ready = self._poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999)))
        if any(source == self._waker.descriptor for source, _ in ready):
            self._waker.rest()

    def wake(self) -> None:
        """Make ``wait`` return; callable from any thread."""
        self._waker.wake()

    def drain(self) -> Iterator[Up | Down | Got]:
        """What has come in by now, in order: connection events, then messages."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            yield Up() if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED else Down()
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield Got(messages.SCHEMA.unpack(frames[-1], MAX_INCOMING_BYTES))
            except ProtocolError:
                continue  # not our protocol: as if nothing had been said, and patience runs on

    def send(self, message: object) -> None:
        """Send, or drop where the connection does not stand."""
        try:
            self._socket.send(messages.SCHEMA.pack(message), zmq.NOBLOCK)
        except zmq.Again:
            return  # said again when the connection is back

    def close(self) -> None:
        """Close after what was sent is out, at most half a second later."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
        self._waker.close()
