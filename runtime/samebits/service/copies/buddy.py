"""Buddy copies as a trainer sees them: where its writer will listen, and what it is told when a generation begins.

Here live the listening socket, made before anybody knows whether it will be needed, and the brief; the exchange itself
is ``writer_process``'s. The one idea: a port that is open from the start can be told to the peers in the one message in
which a generation meets, and whoever connects before the writer runs waits in the kernel.
"""

from __future__ import annotations

import os
import secrets
import socket
import weakref

from samebits.core.values import Int, Schema, Value
from samebits.net.address import endpoint
from samebits.net.copies import TICKET_BYTES, Keeper
from samebits.net.curve import ClusterKeys
from samebits.store.checkpoint.writer import command_of

MAX_BRIEF_BYTES = 64 * 1024
_BACKLOG = 64


class Brief(Value, frozen=True, tag=1):
    """What a generation means for a rank's copies.

    Attributes:
        base, job: where in memory copies are kept, and whose.
        keeper: where this rank's are to go, :class:`samebits.net.copies.Keeper` as text; empty where there is nobody.
        who: the keeper, for people.
        keeps: the slots whose copies come here.
        ticket: by which they come, this process's own.
        public_key, secret_key: both ends', where there is a secret.
    """

    base: str
    job: str
    keeper: str
    who: str
    keeps: tuple[Int, ...]
    ticket: bytes
    public_key: bytes = b""
    secret_key: bytes = b""

    def pack(self) -> bytes:
        """For :meth:`samebits.store.checkpoint.Writer.brief`."""
        return _SCHEMA.pack(self)

    @classmethod
    def unpack(cls, words: bytes) -> Brief:
        """The reverse of :meth:`pack`."""
        return _SCHEMA.unpack(words, MAX_BRIEF_BYTES)


_SCHEMA: Schema[Brief] = Schema(Brief)


def brief_of(
    keys: ClusterKeys | None, base: str, job: str, keeper: str, who: str, keeps: tuple[int, ...], ticket: bytes
) -> Brief:
    """A :class:`Brief` with the cluster's keys."""
    pair = (b"", b"") if keys is None else (keys.worker.public, keys.worker.secret)
    return Brief(base, job, keeper, who, keeps, ticket, *pair)


class CopyListener:
    """A TCP socket of this process that its writer will take copies in from.

    Args:
        address: a numeric IP address of this host that all peers reach.

    Attributes:
        keeper: what the members of a generation are told.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)  # ZeroMQ asks for connections when there may be none any more
        self.keeper = Keeper(endpoint(address, self._socket.getsockname()[1]), secrets.token_bytes(TICKET_BYTES))
        _open_listeners.add(self)

    @property
    def descriptor(self) -> int:
        """To be inherited by the writer."""
        return self._socket.fileno()

    @property
    def command(self) -> tuple[str, ...]:
        """What starts a writer that exchanges copies here; it must inherit the descriptor."""
        return *command_of("samebits.service.copies.writer_process"), "--listener", str(self.descriptor)

    def close(self) -> None:
        """Close this process's copy."""
        self._socket.close()


_open_listeners: weakref.WeakSet[CopyListener] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for listener in list(_open_listeners):
        listener.close()


os.register_at_fork(after_in_child=_let_go_in_child)
