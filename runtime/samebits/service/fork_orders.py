"""Exchange messages between a zygote and the process that orders forks.

Each order gets one answer, over a pair of connected sockets. Datagrams keep each order atomic, and carry the descriptor
of the log. ``training.zygote`` forks; ``launcher.supervising`` sends the orders.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import msgpack

MAX_BYTES = 1 << 20
READY = "ready"


@dataclass(frozen=True, slots=True)
class Order:
    """A request to fork a process that is equivalent to ``python script args`` in this folder and environment."""

    folder: str
    interpreter: str
    script: str
    args: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ForkResult:
    """The pid of the new process, or 0 and the reason why there is none."""

    pid: int
    text: str = ""


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, each with room for an order."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
    return ends


def send_order(link: socket.socket, order: Order, log: int) -> None:
    """Send an order and the descriptor of the log.

    Raises:
        OSError: the other end is closed, or the order is too large.
    """
    environment = {os.fsencode(name): os.fsencode(text) for name, text in order.environment.items()}
    words = [os.fsencode(one) for one in (order.folder, order.interpreter, order.script, *order.args)]
    packed = msgpack.packb([words, environment])  # as bytes, independent of either side's locale
    rights = array.array("i", [log])
    link.sendmsg([packed], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive_order(link: socket.socket) -> tuple[Order, int] | None:
    """Wait for the next order and its log's descriptor, which the caller closes.

    Returns:
        None once the other end is closed.
    """
    try:
        packed, descriptors, _, _ = socket.recv_fds(link, MAX_BYTES, 1)
    except ConnectionResetError:  # closed with unread data
        return None
    if not packed:
        return None
    words, given = msgpack.unpackb(packed)
    folder, interpreter, script, *args = map(os.fsdecode, words)
    environment = {os.fsdecode(name): os.fsdecode(text) for name, text in given.items()}
    return Order(folder, interpreter, script, tuple(args), environment), descriptors[0]


def send_answer(link: socket.socket, answer: ForkResult) -> None:
    """Answer an order, or announce readiness (``READY``). Ignored if the other end is closed."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        link.send(msgpack.packb([answer.pid, answer.text]))


def receive_answer(link: socket.socket) -> ForkResult | None:
    """Wait for an answer, and return None if the other end is closed."""
    try:
        packed = link.recv(4096)
    except ConnectionResetError:
        return None
    if not packed:
        return None
    pid, text = msgpack.unpackb(packed)
    return ForkResult(pid, text)
