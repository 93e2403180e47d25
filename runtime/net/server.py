"""The scheduler's socket: one ROUTER that is drained whole, and the monitor that tells whose connection closed.

A peer is known by its ZeroMQ identity, which is its session. A closed connection is an event with a descriptor;
messages carry the descriptor they came over (``SRCFD``), so the event names the session. Events are read first and
acted on after the socket is drained, because what a peer sent before it died lies in the queue by then.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from runtime.core import messages
from runtime.errors import ListenError, ProtocolError
from runtime.net.address import endpoint, port_holder
from runtime.net.waker import Waker

MAX_INCOMING_BYTES = 1 << 20
MAX_OUTGOING_QUEUE = 1000
DRAIN_LIMIT = 8192
MAX_SOCKETS = 65535


@dataclass(frozen=True, slots=True)
class Arrived:
    """A well-formed message; ``peer`` is the identity of the connection it came over."""

    peer: str
    message: Any


@dataclass(frozen=True, slots=True)
class Garbled:
    """Bytes that are no message."""

    peer: str
    problem: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The peer's connection closed, and the peer has not come back over another one."""

    peer: str


Incoming = Arrived | Garbled | Lost


class Server:
    """Listens, drains, sends. Not thread-safe, but for ``wake``.

    Args:
        addresses: local addresses, IPv4 and IPv6.
        port: TCP port.
        silence_s: after this long without ZeroMQ's own heartbeat a connection counts as closed.
    """

    def __init__(self, addresses: Sequence[str], port: int, silence_s: float) -> None:
        _raise_descriptor_limit()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in {
            zmq.LINGER: 1000,
            zmq.IPV6: 1,
            zmq.ROUTER_HANDOVER: 1,
            zmq.MAXMSGSIZE: MAX_INCOMING_BYTES,
            zmq.SNDHWM: MAX_OUTGOING_QUEUE,
            zmq.BACKLOG: 4096,
            zmq.HEARTBEAT_IVL: max(1, int(silence_s * 1000 / 3)),
            zmq.HEARTBEAT_TIMEOUT: int(silence_s * 1000),
        }.items():
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._waker = Waker()
        for source in (self._socket, self._monitor, self._waker.descriptor):
            self._poller.register(source, zmq.POLLIN)
        self._peer_of: dict[int, str] = {}
        self._descriptor_of: dict[str, int] = {}
        self._listen(addresses, port)

    def _listen(self, addresses: Sequence[str], port: int) -> None:
        for address in addresses:
            try:
                self._socket.bind(endpoint(address, port))
            except zmq.ZMQError as error:
                self.close()
                raise ListenError(
                    f"SCHED_PORT={port} on {address} cannot be listened on ({error.strerror}): held by "
                    f"{port_holder(port)}. End it, or set SCHED_PORT to a free port in every process"
                ) from None

    def watch(self, descriptor: int) -> None:
        """Let ``wait`` return when this descriptor becomes readable, too."""
        self._poller.register(descriptor, zmq.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Undo ``watch``."""
        self._poller.unregister(descriptor)

    def wait(self, timeout_s: float) -> set[int]:
        """Sleep until something can be read. Returns those watched descriptors that became readable."""
        ready = self._poller.poll(max(0, int(timeout_s * 1000 + 0.999)))
        descriptors = {source for source, _ in ready if isinstance(source, int)}
        if self._waker.descriptor in descriptors:
            self._waker.rest()
            descriptors.discard(self._waker.descriptor)
        return descriptors

    def wake(self) -> None:
        """Make ``wait`` return; callable from any thread and from a signal handler."""
        self._waker.wake()

    def drain(self) -> Iterator[Incoming]:
        """What has come in by now, at most ``DRAIN_LIMIT`` messages; closed connections last."""
        closed = self._closed_descriptors()
        # A number of a closed descriptor may be in use again: its owners, in order, are closed one an event.
        owners: dict[int, list[str]] = {descriptor: [] for descriptor in closed}
        for descriptor in owners:
            if (owner := self._peer_of.pop(descriptor, None)) is not None:
                owners[descriptor].append(owner)
        for _ in range(DRAIN_LIMIT):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            yield self._read(frames, owners)
        for descriptor in closed:
            if owners[descriptor]:
                yield from self._close(owners[descriptor].pop(0), descriptor, still_used=bool(owners[descriptor]))

    def _close(self, peer: str, descriptor: int, *, still_used: bool) -> Iterator[Lost]:
        if not still_used:
            self._peer_of.pop(descriptor, None)
        if self._descriptor_of.get(peer) == descriptor:
            del self._descriptor_of[peer]
            yield Lost(peer)

    def _closed_descriptors(self) -> list[int]:
        closed: list[int] = []
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return closed
            closed.append(int(event["value"]))

    def _read(self, frames: list[zmq.Frame], owners: dict[int, list[str]]) -> Incoming:
        peer = bytes(frames[0].buffer).decode("ascii", errors="replace")
        last = frames[-1]
        descriptor = int(last.get(zmq.SRCFD))
        if self._descriptor_of.get(peer) != descriptor:
            self._descriptor_of[peer] = descriptor
        if descriptor in owners and owners[descriptor][-1:] != [peer]:
            owners[descriptor].append(peer)
        self._peer_of[descriptor] = peer
        if len(frames) != 2:
            return Garbled(peer, f"{len(frames) - 1} frames where one message is expected")
        try:
            return Arrived(peer, messages.SCHEMA.unpack(last.buffer, MAX_INCOMING_BYTES))
        except ProtocolError as error:
            return Garbled(peer, str(error))

    def send(self, peer: str, message: object) -> None:
        """Send, or drop where the peer is gone: it is told again when it comes back."""
        try:
            self._socket.send_multipart([peer.encode("ascii"), messages.SCHEMA.pack(message)], zmq.NOBLOCK)
        except zmq.Again:
            return  # its queue is full: a peer that does not read is mended by its next heartbeat, or lost

    def close(self) -> None:
        """Close after what was sent is out, at most a second later."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
        self._waker.close()


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
