"""Messages and sockets to copy restore points between two hosts.

The keeper acknowledges every piece, and the sender never has more than ``WINDOW_BYTES`` unacknowledged. So neither end
needs more memory than that outside its slots, however large the point is and however slow the other end.
``service.copies.buddy`` decides what is sent when.

With a secret, both sockets use CURVE (``curve``). The keeper is CURVE's server, with the workers' key pair. Its public
half is as secret as the rest, and no handshake can be requested without it (RFC 26, section 6.2), so a sender whose
handshake succeeds knows the secret. In any case, an offer carries the keeper's ticket: random bytes that the keeper's
process generates and that the members of its generation receive through the scheduler. A process that can only reach
the port has no ticket and is ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import zmq

from samebits.core.point import Point
from samebits.core.values import Int, Schema, Value
from samebits.errors import ProtocolError
from samebits.net.curve import KeyPair
from samebits.net.descriptors import raise_descriptor_limit
from samebits.net.gate import CHECK_S, Gate
from samebits.net.sockets import source_of

PIECE_BYTES = 4 << 20  # takes a third less CPU time per GiB at both ends than 1 MiB
WINDOW_BYTES = 2 * PIECE_BYTES
MAX_WORDS_BYTES = 64 * 1024
MAX_TEXT_BYTES = 4 * 1024
TICKET_BYTES = 16
_QUEUE = 8
"""Messages queued per direction.

ZeroMQ reports what was read in steps of half a queue, so the queue must hold twice the window.
"""
_OVERHEAD_BYTES = 1024  # for encryption
_NOW = int(zmq.NOBLOCK)
MOST_CONNECTIONS = 256
_HANDSHAKE_MS = 5000
_ANY_SILENCE_S = 1e9  # a sender sends nothing between two checkpoints
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


@dataclass(frozen=True, slots=True)
class BuddyAddress:
    """The address and ticket of a buddy. ``str()`` gives the form that a generation's members receive."""

    endpoint: str
    ticket: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.endpoint}/{self.ticket.hex()}"

    @classmethod
    def of(cls, text: str) -> BuddyAddress:
        """Parse the result of ``str``; raise :class:`ProtocolError` for anything else."""
        where, _, ticket = text.rpartition("/")
        try:
            keeper = cls(where, bytes.fromhex(ticket))
        except ValueError:
            raise ProtocolError(f"{text[:80]!r} is not a keeper's address") from None
        if not where.startswith("tcp://") or len(keeper.ticket) != TICKET_BYTES:
            raise ProtocolError(f"{text[:80]!r} is not a keeper's address")
        return keeper


class PointOffer(Value, frozen=True, tag=1):
    """Sender's message: offers a point."""

    ticket: bytes  # the keeper's ticket
    transfer: Int  # increases with every offer of the sender
    job: str
    slot: Int
    point: Point
    digest: bytes  # xxh3_128 of the manifest
    manifest_bytes: Int
    data_bytes: Int


class StreamChunk(Value, frozen=True, tag=2):
    """Sender's message: the next bytes of its stream follow in a separate frame."""

    transfer: Int
    offset: Int


class BytesReceived(Value, frozen=True, tag=3):
    """Buddy's message: the number of bytes that it has received.

    0 means that there is room and the sender may begin.
    """

    transfer: Int
    received_bytes: Int


class Whole(Value, frozen=True, tag=4):
    """Buddy's answer if the point is complete and verified, or was already there."""

    transfer: Int


class Declined(Value, frozen=True, tag=5):
    """Buddy's answer if it does not accept the point, or the rest of it."""

    transfer: Int
    text: str
    again: bool  # a retry may succeed


FromSender = PointOffer | StreamChunk
FromKeeper = BytesReceived | Whole | Declined

SCHEMA: Schema[FromSender | FromKeeper] = Schema(FromSender | FromKeeper)


@dataclass(frozen=True, slots=True)
class CopyMessage:
    """A sender's message. ``data`` contains the bytes of a piece."""

    sender: bytes
    message: FromSender
    data: memoryview
    connection: int | None  # the connection's descriptor, if ZeroMQ reports it


class KeeperSocket:
    """Receives copies. Not thread-safe.

    Connections of strangers are bounded as in the scheduler (``net.gate``), because the process that keeps copies also
    writes checkpoints and needs descriptors for them.

    Args:
        context: the process's ZeroMQ context.
        descriptor: a listening TCP socket, which ZeroMQ closes at the end.
        keys: both ends' keys, if there is a secret.
    """

    def __init__(self, context: zmq.Context[Any], descriptor: int, keys: KeyPair | None) -> None:
        self.socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        most = min(MOST_CONNECTIONS, max(1, raise_descriptor_limit() // 4))
        self._gate = Gate(self.socket, None, most, (_QUEUE + 1) * PIECE_BYTES, _ANY_SILENCE_S)
        for option, value in {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: PIECE_BYTES + _OVERHEAD_BYTES,
            zmq.RCVHWM: _QUEUE,
            zmq.SNDHWM: _QUEUE,
            zmq.USE_FD: descriptor,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
        }.items():
            self.socket.setsockopt(option, value)
        if keys is not None:
            self.socket.curve_server = True
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.secret
        self.socket.bind("tcp://127.0.0.1:*")  # the descriptor's own address counts, not this one

    @property
    def sources(self) -> list[zmq.Socket[Any]]:
        """Return the sockets that become readable when ``drain`` has something to do."""
        return [self.socket, *self._gate.sources]

    @property
    def look_within_s(self) -> float | None:
        """Return after how many seconds ``drain`` must be called even if nothing is readable, or None for never."""
        return CHECK_S if self._gate.has_guests else None

    def drain(self, most: int = 2 * _QUEUE) -> Iterator[CopyMessage]:
        """Yield the valid messages received, and close connections beyond the limit."""
        self._gate.take()
        for _ in range(most):
            try:
                frames = self.socket.recv_multipart(_NOW, copy=False)
            except zmq.Again:
                return
            connection = source_of(frames[-1])
            if connection is not None:
                self._gate.heard((connection,))
            with contextlib.suppress(ProtocolError):
                yield _said(frames, connection)

    def settle(self, said: CopyMessage) -> None:
        """Exempt the connection of a sender that has shown the ticket from the limit on unknown senders."""
        if said.connection is not None:
            self._gate.settle(said.connection)

    def send(self, sender: bytes, message: FromKeeper) -> None:
        """Send an answer, or drop it if the sender is gone or does not read."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([sender, SCHEMA.pack(message)], _NOW)

    def close(self) -> None:
        """Stop listening at once."""
        self._gate.close()


class SenderSocket:
    """A connection to a buddy, which reconnects automatically. Not thread-safe.

    Args:
        context: the process's ZeroMQ context.
        endpoint: ``tcp://address:port``.
        keys: both ends' keys, if there is a secret.
    """

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: KeyPair | None) -> None:
        self.socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
        for option, value in {
            zmq.LINGER: 0,
            zmq.IPV6: 1,
            zmq.MAXMSGSIZE: MAX_WORDS_BYTES,
            zmq.RCVHWM: _QUEUE,
            zmq.SNDHWM: _QUEUE,
            zmq.RECONNECT_IVL: 100,
            zmq.CONNECT_TIMEOUT: _HANDSHAKE_MS,
        }.items():
            self.socket.setsockopt(option, value)
        if keys is not None:
            self.socket.curve_serverkey = keys.public
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.secret
        self.socket.connect(endpoint)

    def drain(self, most: int = 2 * _QUEUE) -> Iterator[FromKeeper]:
        """Yield the valid messages received."""
        for _ in range(most):
            try:
                frames = self.socket.recv_multipart(_NOW)
            except zmq.Again:
                return
            with contextlib.suppress(ProtocolError):
                message = SCHEMA.unpack(frames[0], MAX_WORDS_BYTES)
                if len(frames) == 1 and isinstance(message, FromKeeper):
                    yield message

    def send(self, message: PointOffer) -> None:
        """Send the offer, or drop it if the queue is full."""
        with contextlib.suppress(zmq.Again):  # the missing answer is noticed
            self.socket.send(SCHEMA.pack(message), _NOW)

    def send_piece(self, message: StreamChunk, data: bytes) -> bool:
        """Send a piece; return False, without sending anything, if the queue is full."""
        try:
            self.socket.send(SCHEMA.pack(message), _MORE)
        except zmq.Again:
            return False
        self.socket.send(data, _NOW, copy=False)
        return True

    def close(self) -> None:
        """Close the socket at once."""
        self.socket.close()


def _said(frames: list[Any], connection: int | None) -> CopyMessage:
    if len(frames) not in (2, 3):
        raise ProtocolError(f"{len(frames)} frames")
    message = SCHEMA.unpack(frames[1].buffer, MAX_WORDS_BYTES)
    if not isinstance(message, FromSender) or (len(frames) == 3) is not isinstance(message, StreamChunk):
        raise ProtocolError(f"{len(frames)} frames of {type(message).__name__}")
    return CopyMessage(frames[0].bytes, message, frames[2].buffer if len(frames) == 3 else memoryview(b""), connection)
