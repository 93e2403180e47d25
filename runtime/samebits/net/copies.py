"""Copies of restore points between two hosts: what sender and keeper say, and the two sockets they say it over.

Here live the messages, their bounds and the encryption; who sends what when is ``service.copies.buddy``'s. The one
idea: the keeper answers every piece, and the sender never has more than ``WINDOW_BYTES`` unanswered, so that neither
end holds more of a point outside the slots than that, however large it is and however slow the other end.

With a secret both sockets speak CURVE (``curve``). The keeper is CURVE's server, with the workers' key pair: its public
half is as secret as the rest, and without it no handshake can even be asked for (RFC 26, section 6.2), so whoever gets
through knows the secret. With or without one an offer carries the keeper's ticket, made at random by its process and
told to the members of its generation by way of the scheduler: who can only reach the port has nothing to say there.
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

PIECE_BYTES = 4 << 20  # per GiB a third less of both ends' processors than with 1 MiB
WINDOW_BYTES = 2 * PIECE_BYTES
MAX_WORDS_BYTES = 64 * 1024
MAX_TEXT_BYTES = 4 * 1024
TICKET_BYTES = 16
_QUEUE = 8
"""Messages waiting in one direction. ZeroMQ hears of what was read in steps of half a queue, so the window and as many
messages again must fit.
"""
_OVERHEAD_BYTES = 1024  # of encryption
_NOW = int(zmq.NOBLOCK)
MOST_CONNECTIONS = 256
_HANDSHAKE_MS = 5000
_ANY_SILENCE_S = 1e9  # a sender has nothing to say from one checkpoint to the next
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


@dataclass(frozen=True, slots=True)
class Keeper:
    """Where copies are taken in, and the word that lets somebody in; as text for the members of a generation."""

    endpoint: str
    ticket: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.endpoint}/{self.ticket.hex()}"

    @classmethod
    def of(cls, text: str) -> Keeper:
        """The reverse of ``str``; :class:`ProtocolError` where it is none."""
        where, _, ticket = text.rpartition("/")
        try:
            keeper = cls(where, bytes.fromhex(ticket))
        except ValueError:
            raise ProtocolError(f"{text[:80]!r} is no keeper's address") from None
        if not where.startswith("tcp://") or len(keeper.ticket) != TICKET_BYTES:
            raise ProtocolError(f"{text[:80]!r} is no keeper's address")
        return keeper


class Offer(Value, frozen=True, tag=1):
    """The sender has this point for the keeper."""

    ticket: bytes  # the keeper's
    transfer: Int  # rises with every offer of the sender's
    job: str
    slot: Int
    point: Point
    digest: bytes  # xxh3_128 of the manifest
    manifest_bytes: Int
    data_bytes: Int


class Piece(Value, frozen=True, tag=2):
    """The next bytes of the stream, which are a frame of their own behind this one."""

    transfer: Int
    offset: Int


class Taken(Value, frozen=True, tag=3):
    """The keeper has so many bytes of it; 0: there is room, go on."""

    transfer: Int
    received_bytes: Int


class Whole(Value, frozen=True, tag=4):
    """The keeper has the point, compared with its hashes, or had it already."""

    transfer: Int


class Declined(Value, frozen=True, tag=5):
    """The keeper does not take it, or takes no more of it."""

    transfer: Int
    text: str
    again: bool  # it may a moment later


FromSender = Offer | Piece
FromKeeper = Taken | Whole | Declined

SCHEMA: Schema[FromSender | FromKeeper] = Schema(FromSender | FromKeeper)


@dataclass(frozen=True, slots=True)
class Said:
    """What a sender said; ``data`` is a piece's."""

    sender: bytes
    message: FromSender
    data: memoryview
    connection: int | None  # its descriptor, where ZeroMQ tells it


class KeeperSocket:
    """Takes copies in. Not thread-safe.

    Strangers' connections are bounded as the scheduler's are (``net.gate``): the process that keeps copies also writes
    checkpoints, and must have descriptors left for them.

    Args:
        context: of the process.
        descriptor: of a TCP socket that listens already; ZeroMQ closes it in the end.
        keys: both ends' where there is a secret.
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
        """The sockets that become readable when ``drain`` has something to do."""
        return [self.socket, *self._gate.sources]

    @property
    def look_within_s(self) -> float | None:
        """Seconds after which ``drain`` is due although nothing is readable; None: any number."""
        return CHECK_S if self._gate.has_guests else None

    def drain(self, most: int = 2 * _QUEUE) -> Iterator[Said]:
        """Yield what has come in, without what is no message of ours, and close connections beyond the bound."""
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

    def settle(self, said: Said) -> None:
        """Keep the connection of a sender that has shown the ticket, whatever strangers do."""
        if said.connection is not None:
            self._gate.settle(said.connection)

    def send(self, sender: bytes, message: FromKeeper) -> None:
        """Answer, or drop it where the sender is gone or does not read."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([sender, SCHEMA.pack(message)], _NOW)

    def close(self) -> None:
        """Stop listening, at once."""
        self._gate.close()


class SenderSocket:
    """One connection to a keeper, which comes and comes again by itself. Not thread-safe.

    Args:
        context: of the process.
        endpoint: ``tcp://address:port``.
        keys: both ends' where there is a secret.
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
        }.items():
            self.socket.setsockopt(option, value)
        if keys is not None:
            self.socket.curve_serverkey = keys.public
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.secret
        self.socket.connect(endpoint)

    def drain(self, most: int = 2 * _QUEUE) -> Iterator[FromKeeper]:
        """What has come in; what is no message of ours is dropped."""
        for _ in range(most):
            try:
                frames = self.socket.recv_multipart(_NOW)
            except zmq.Again:
                return
            with contextlib.suppress(ProtocolError):
                message = SCHEMA.unpack(frames[0], MAX_WORDS_BYTES)
                if len(frames) == 1 and isinstance(message, FromKeeper):
                    yield message

    def send(self, message: Offer) -> None:
        """Say so as soon as the connection stands."""
        with contextlib.suppress(zmq.Again):  # there is no answer then, and that is noticed
            self.socket.send(SCHEMA.pack(message), _NOW)

    def send_piece(self, message: Piece, data: bytes) -> bool:
        """As :meth:`send`; False where the queue is full, and nothing was said."""
        try:
            self.socket.send(SCHEMA.pack(message), _MORE)
        except zmq.Again:
            return False
        self.socket.send(data, _NOW, copy=False)
        return True

    def close(self) -> None:
        """Give it up, at once."""
        self.socket.close()


def _said(frames: list[Any], connection: int | None) -> Said:
    if len(frames) not in (2, 3):
        raise ProtocolError(f"{len(frames)} frames")
    message = SCHEMA.unpack(frames[1].buffer, MAX_WORDS_BYTES)
    if not isinstance(message, FromSender) or (len(frames) == 3) is not isinstance(message, Piece):
        raise ProtocolError(f"{len(frames)} frames of {type(message).__name__}")
    return Said(frames[0].bytes, message, frames[2].buffer if len(frames) == 3 else memoryview(b""), connection)
