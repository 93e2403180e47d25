"""Tools of an attacker: raw ZeroMQ and TCP sockets that send arbitrary data to a port of loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import zmq

from samebits.core import messages
from samebits.core.messages import PROTOCOL, Pairs, Process, Register
from samebits.errors import ProtocolError
from samebits.net.address import endpoint
from samebits.service.scheduling.unknown_peers import implausible


@contextmanager
def dealers(port: int, names: list[bytes | None]) -> Iterator[list[zmq.Socket[bytes]]]:
    """Connections under these names; None lets ZeroMQ choose one, which is no text."""
    with zmq.Context() as context:
        sockets = []
        for name in names:
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 0
            dealer.sndhwm = 100_000
            if name is not None:
                dealer.setsockopt(zmq.ROUTING_ID, name)
            dealer.connect(endpoint("127.0.0.1", port))
            sockets.append(dealer)
        try:
            yield sockets
        finally:
            for dealer in sockets:
                dealer.close(linger=0)


def say_if_open(stranger: zmq.Socket[bytes], packed: bytes) -> None:
    """Send unless the handshake has failed; ZeroMQ would then wait forever for a peer."""
    with suppress(zmq.Again):
        stranger.send(packed, zmq.NOBLOCK)


@contextmanager
def half_open(port: int, count: int) -> Iterator[list[socket.socket]]:
    """TCP connections that send nothing."""
    connections = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(count)]
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


def bare_dealer(port: int, name: bytes) -> socket.socket:
    """A peer after the handshake without ZeroMQ behind it: it sends only what it is given, no heartbeats."""
    connection = socket.create_connection(("127.0.0.1", port), 30)
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity" + len(name).to_bytes(4, "big") + name
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)  # RFC 37
    connection.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
    answered = b""
    while not answered.endswith(b"ROUTER\x08Identity\0\0\0\0"):  # a message that comes before that is an error
        answered += connection.recv(4096)
    return connection


def hangs_up(connection: socket.socket, patience_s: float) -> bool:
    """Return whether the other end closes within the time."""
    connection.settimeout(patience_s)
    try:
        while connection.recv(4096):
            continue
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def registration(
    node: str, session: str, settings: Pairs, *, protocol: int = PROTOCOL, incarnation: int = 0, job: str = ""
) -> bytes:
    """A Register that is right in all that can be known from outside."""
    process = Process("elsewhere", 4242, 1, "cpu")
    return messages.SCHEMA.pack(Register(protocol, job, "", node, session, incarnation, process, settings))


def objection(message: object) -> str | None:
    """Return why a scheduler rejects it as a message, or None."""
    try:
        return implausible(messages.SCHEMA.unpack(messages.SCHEMA.pack(message)))
    except ProtocolError as error:
        return str(error)


def listening_ports(pid: int) -> list[tuple[str, int]]:
    """Return where this process listens for TCP over IPv4: its addresses and ports."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
    return [(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in found]


def is_let_in(address: tuple[str, int]) -> bool:
    """Return whether a handshake completes there; over loopback the kernel has done it before ``connect`` returns."""
    with socket.socket() as caller:
        caller.settimeout(0.2)
        return caller.connect_ex(address) == 0
