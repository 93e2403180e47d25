"""Open the checkpoint writer's listening socket for buddy copies, and brief the writer for each generation.

This runs in the trainer. The port is opened before it is known whether it is needed. It can therefore be sent to the
peers in the single message that a rank contributes to a generation, and connections made before the writer runs wait in
the backlog.
"""

from __future__ import annotations

import os
import secrets
import socket
import weakref

from samebits.core.values import Int, Schema, Value
from samebits.net.address import endpoint
from samebits.net.copies import TICKET_BYTES, BuddyAddress
from samebits.net.curve import ClusterKeys
from samebits.store.checkpoint.writer import command_of

MAX_BRIEF_BYTES = 64 * 1024
_BACKLOG = 64


class Brief(Value, frozen=True, tag=1):
    """Where a rank's copies go in one generation, and which copies this rank stores.

    Attributes:
        base, job: the folder in memory for copies, and the job's id.
        keeper: destination of this rank's copies, a :class:`samebits.net.copies.BuddyAddress` as text; "" without a
            buddy.
        who: a description of the keeper, for messages.
        keeps: the slots whose copies are sent here.
        ticket: this process's own ticket, the proof that copies sent to it must carry.
        public_key, secret_key: the key pair of both ends, if there is a secret.
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
        """Serialise for :meth:`samebits.store.checkpoint.Writer.brief`."""
        return _SCHEMA.pack(self)

    @classmethod
    def unpack(cls, words: bytes) -> Brief:
        """Parse the output of :meth:`pack`."""
        return _SCHEMA.unpack(words, MAX_BRIEF_BYTES)


_SCHEMA: Schema[Brief] = Schema(Brief)


def brief_of(
    keys: ClusterKeys | None, base: str, job: str, keeper: str, who: str, keeps: tuple[int, ...], ticket: bytes
) -> Brief:
    """Return a :class:`Brief` with the cluster's keys."""
    pair = (b"", b"") if keys is None else (keys.worker.public, keys.worker.secret)
    return Brief(base, job, keeper, who, keeps, ticket, *pair)


class CopyListener:
    """A TCP socket of this process on which its writer receives copies.

    Args:
        address: a numeric IP address of this host that all peers can reach.

    Attributes:
        keeper: the address and ticket to give to the members of a generation.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)  # ZeroMQ accepts after a connection may have been closed
        self.keeper = BuddyAddress(endpoint(address, self._socket.getsockname()[1]), secrets.token_bytes(TICKET_BYTES))
        _open_listeners.add(self)

    @property
    def descriptor(self) -> int:
        """Return the descriptor that the writer inherits."""
        return self._socket.fileno()

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command of a writer that exchanges copies. The writer must inherit the descriptor."""
        return *command_of("samebits.service.copies.copying_writer"), "--listener", str(self.descriptor)

    def close(self) -> None:
        """Close this process's copy of the socket."""
        self._socket.close()


_open_listeners: weakref.WeakSet[CopyListener] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for listener in list(_open_listeners):
        listener.close()


os.register_at_fork(after_in_child=_let_go_in_child)
