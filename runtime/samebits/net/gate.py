"""Watch the connections of a listening socket, authenticate them, and close those beyond the bounds.

This module handles ZeroMQ's connection events (``zmq_socket_monitor(3)``), the decision on a key (ZAP, RFC 27), and the
bound on connections, but no messages. A connection that ends before it becomes a peer is counted here with its address
and leaves no other state.

A connection is a guest until it is settled. With a secret, its first message settles it, since only a process that
knows the secret can send one. Without a secret, it is settled when the scheduler promises it a seat. Beyond the bound,
guests are closed before settled connections, the address with the most guests first, and the oldest of its guests
first. So a flood from another host does not affect an honest process, a flood from its own host costs it a few
attempts, and no connection keeps its place by staying idle. A guest must send its first message within the time that a
connection may be silent. ``net.client`` relies on the order: while an older connection from the same host is open, no
younger one was closed because of the bound.

A descriptor's events arrive in order from the one I/O thread, and a failed handshake is followed at once by the
DISCONNECTED event of its descriptor. So the address that was looked up on accept belongs to the failure.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import ipaddress
import itertools
import math
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from samebits.net.curve import ClusterKeys
from samebits.net.sockets import EVENT, STOPPED, close_both

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"samebits"
MAX_EVENTS = 4096
"""Events handled per call: twice what ZeroMQ queues before its I/O thread waits for this process."""
RELAYS_ID = "relay"
"""ZeroMQ's ``User-Id`` of connections that used the relays' key."""
UNKNOWN = "an unknown address"
CHECK_S = 1.0  # how often a connection without messages is checked
SLICES = 16  # connections are checked in slices, because checking thousands at once would delay detection of a loss
_BYTES_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received in struct tcp_info (linux/tcp.h, since Linux 4.2)

_NOW = int(zmq.NOBLOCK)
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILURES | STOPPED
_CRYPTOGRAPHIC = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
_MECHANISM_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)


class Rejection(enum.Enum):
    """The reason why a connection did not become a peer."""

    SECRET = "another secret"
    MECHANISM = "a secret on one side only"
    HANDSHAKE = "no handshake"
    SILENT = "no message"
    TOO_MANY = "too many connections"
    ENDLESS = "an endless message"
    FLOOD = "more messages than can be read"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A connection that ended before its first message."""

    address: str
    why: Rejection


@dataclass(frozen=True, slots=True)
class ConnectionEnded:
    """A connection that has ended. ``is_counted`` is true if it was already reported as rejected."""

    descriptor: int
    address: str
    is_counted: bool


@dataclass(slots=True)
class _Unheard:
    """A connection that has not sent a complete message yet, and how many bytes it has sent."""

    first: int
    last: int
    silent_checks: int = 0  # in a row, without a byte


@dataclass(slots=True)
class _Guest:
    """A connection that is not settled."""

    home: str  # its address; all loopback addresses count as one, since a process can choose among them
    has_spoken: bool = False
    checks: int = 0  # number of checks without a message so far


class Gate:
    """Watches the connections of one listening socket. Not thread-safe.

    Args:
        listening: the socket, before it is bound.
        keys: the cluster's keys; None admits every connection.
        max_connections: bound on connections, with or without a finished handshake; beyond it, guests are closed.
        max_unheard_bytes: how much a connection may send without completing a message, because ZeroMQ bounds the frame
            and the queue, but not the number of frames per message.
        silence_s: a connection is closed once it has sent no byte for about a third longer than this. A job's processes
            send more often than this, or else ZeroMQ's own heartbeat does. A late check counts once, so a scheduler
            that was stopped closes no connection. A guest must send its first message in the same time.
    """

    def __init__(
        self,
        listening: zmq.Socket[bytes],
        keys: ClusterKeys | None,
        max_connections: int,
        max_unheard_bytes: int,
        silence_s: float,
    ) -> None:
        self._socket = listening
        self._max_connections = max_connections
        self._max_unheard_bytes = max_unheard_bytes
        self._heard: set[int] = set()  # descriptors that received a message since they were last checked
        self._max_silent_checks = math.ceil(silence_s * 4 / 3 / CHECK_S)
        self._unheard: dict[int, _Unheard] = {}  # by descriptor
        self._slices: list[set[int]] = [set() for _ in range(SLICES)]  # all connections, by descriptor modulo SLICES
        self._slice = 0  # the next to be checked
        self._looked_at = time.monotonic()
        self._address_of: dict[int, str] = {}  # by descriptor, for all connections
        self._guests: dict[int, _Guest] = {}  # by descriptor, oldest first
        self._words_settle = keys is not None
        self._turned_away: set[int] = set()
        self._ended: list[ConnectionEnded] = []
        self._rejected: list[Rejected] = []
        self._flooding: deque[int] = deque()  # closed by another thread, but not yet reported
        self._failure: Rejection | None = None  # of the descriptor that the next DISCONNECTED event names
        self._zap: zmq.Socket[bytes] | None = None
        self._user_of: dict[bytes, bytes] = {}  # by public key
        if keys is not None:
            self._zap = listening.context.socket(zmq.REP)
            self._zap.linger = 0
            self._zap.bind(ZAP_ENDPOINT)
            self._user_of = {z85.decode(keys.worker.public): b""}
            if keys.relay is not None:
                self._user_of[z85.decode(keys.relay.public)] = RELAYS_ID.encode()
            listening.curve_server = True
            listening.curve_secretkey = keys.scheduler.secret
            listening.zap_domain = ZAP_DOMAIN
            listening.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer, no connection is admitted
        self._monitor = listening.get_monitor_socket(_EVENTS)

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets that become readable when a connection needs attention."""
        return [self._monitor] if self._zap is None else [self._monitor, self._zap]

    @property
    def connections(self) -> int:
        """Return the number of connections, as of the last events processed."""
        return len(self._address_of)

    def address_of(self, descriptor: int) -> str:
        """Return the IP address from which the connection comes."""
        return self._address_of.get(descriptor, UNKNOWN)

    def take(self, *, is_rung: bool = True) -> tuple[list[ConnectionEnded], list[Rejected]]:
        """Process events. Return the connections that have ended, in order, and those that were rejected.

        Args:
            is_rung: whether one of ``sources`` may be readable; if false, they are not read.
        """
        if self._flooding:
            self._take_events()  # these connections may be new, and their ends follow
        while self._flooding:
            self._rejected.append(Rejected(self.address_of(self._flooding.popleft()), Rejection.FLOOD))
        if is_rung:
            for question in self._zap_questions():
                self._take_events()  # the connection was accepted earlier, so its address can still be looked up
                self._answer(question)
            self._take_events()
        self._rejected += self._turn_away()
        self._rejected += self._look_at_due()
        ended, rejected = self._ended, self._rejected
        self._ended, self._rejected = [], []
        return ended, rejected

    def turn_away(self, descriptor: int) -> list[Rejected]:
        """Close a connection because it floods, and return it as rejected unless it was closed before."""
        if descriptor in self._turned_away or descriptor not in self._address_of:
            return []
        self._turned_away.add(descriptor)
        shut_down(descriptor)
        return [Rejected(self._address_of[descriptor], Rejection.FLOOD)]

    def was_cut(self, descriptor: int) -> None:
        """Record that another thread is closing a connection because it floods."""
        self._flooding.append(descriptor)

    def is_over(self, descriptor: int) -> bool:
        """Return whether the end of the connection was already processed, so that its sender is no longer a peer."""
        self._take_events()
        return descriptor not in self._address_of and all(end.descriptor != descriptor for end in self._ended)

    @property
    def has_guests(self) -> bool:
        """Return whether any connection is not settled."""
        return bool(self._guests)

    @property
    def has_news(self) -> bool:
        """Return whether ``take`` would return something although no source is readable."""
        return bool(self._ended or self._rejected)

    def stands(self, descriptor: int) -> bool:
        """Return whether an open connection has this descriptor.

        Pending events are processed first; every sender was accepted before its message.
        """
        self._take_events()
        return descriptor in self._address_of

    def _take_events(self) -> None:
        for event, value in self._events():
            if event == zmq.EVENT_ACCEPTED:
                address = self._address_of[value] = _peer_address(value)
                self._guests[value] = _Guest(_home_of(address))
                self._slices[value % SLICES].add(value)
            elif event == zmq.EVENT_DISCONNECTED:
                address = self._address_of.pop(value, UNKNOWN)
                failure, self._failure = self._failure, None
                was_turned_away = value in self._turned_away
                self._turned_away.discard(value)
                if failure is not None and not was_turned_away:
                    self._rejected.append(Rejected(address, failure))
                self._unheard.pop(value, None)
                self._guests.pop(value, None)
                self._slices[value % SLICES].discard(value)
                self._ended.append(ConnectionEnded(value, address, is_counted=was_turned_away or failure is not None))
            else:
                self._failure = _why(event, value)

    def heard(self, descriptors: Collection[int]) -> None:
        """Record that complete messages have arrived on these connections."""
        self._heard.update(descriptors)
        if not self._guests:
            return
        for descriptor in descriptors:
            if (guest := self._guests.get(descriptor)) is not None:
                guest.has_spoken = True
                if self._words_settle:
                    del self._guests[descriptor]

    def settle(self, descriptor: int) -> None:
        """Mark the connection as settled, because its process has a seat or will get one."""
        self._guests.pop(descriptor, None)

    def close(self) -> None:
        """Close the socket, and stop watching it."""
        if self._zap is not None:
            self._zap.close(linger=0)  # first, since connections with unanswered requests do not end before that
        close_both(self._socket, self._monitor)

    def _events(self) -> Iterator[tuple[int, int]]:
        receive = self._monitor.recv
        for _ in range(MAX_EVENTS):
            try:
                event = receive(_NOW)
            except zmq.Again:
                return
            receive(_NOW)  # the listening address
            yield EVENT.unpack(event)

    def _zap_questions(self) -> Iterator[list[bytes]]:
        """Yield authentication requests. Each must be answered before the next is read."""
        if self._zap is None:
            return
        for _ in range(MAX_EVENTS):
            try:
                yield self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _answer(self, question: list[bytes]) -> None:
        """Answer whether a key is admitted.

        A request consists of version, request id, domain, address, identity, mechanism and key (RFC 27).
        """
        assert self._zap is not None, "a question came over it"
        user = self._user_of.get(question[6]) if len(question) == 7 and question[5] == b"CURVE" else None
        status = [b"400", b"another key", b""] if user is None else [b"200", b"OK", user]
        self._zap.send_multipart([b"1.0", question[1], *status, b""])

    def _turn_away(self) -> Iterator[Rejected]:
        """Close connections beyond the limit. They are removed once ZeroMQ notices the close."""
        surplus = len(self._address_of) - len(self._turned_away) - self._max_connections
        if surplus <= 0:
            return
        for descriptor in list(itertools.islice(self._first_to_leave(), surplus)):
            self._turned_away.add(descriptor)
            shut_down(descriptor)
            yield Rejected(self._address_of[descriptor], Rejection.TOO_MANY)

    def _first_to_leave(self) -> Iterator[int]:
        """Yield connections in the order in which they are closed.

        Guests come first, the oldest of the largest group before others, then settled connections, newest first.
        """
        crowds: dict[str, deque[int]] = {}
        for descriptor, guest in self._guests.items():
            if descriptor not in self._turned_away:
                crowds.setdefault(guest.home, deque()).append(descriptor)
        largest_first = [(-len(crowd), home) for home, crowd in crowds.items()]
        heapq.heapify(largest_first)
        while largest_first:
            size, home = heapq.heappop(largest_first)
            yield crowds[home].popleft()
            if crowds[home]:
                heapq.heappush(largest_first, (size + 1, home))
        for descriptor in reversed(self._address_of):
            if descriptor not in self._guests and descriptor not in self._turned_away:
                yield descriptor

    def _look_at_due(self) -> Iterator[Rejected]:
        """Check all slices of connections that are due, each at most once."""
        due = int((time.monotonic() - self._looked_at) * SLICES / CHECK_S)
        if due >= SLICES:  # any further delay is this process's own, not the connections' silence
            due, self._looked_at = SLICES, time.monotonic()
        else:
            self._looked_at += due * CHECK_S / SLICES
        for _ in range(due):
            yield from self._look_at_unheard(self._slices[self._slice])
            self._slice = (self._slice + 1) % SLICES

    def _look_at_unheard(self, standing: set[int]) -> Iterator[Rejected]:
        """Close connections that have sent much without completing a message, or nothing for long."""
        heard = standing & self._heard
        self._heard -= heard
        for descriptor in self._unheard.keys() & heard:
            del self._unheard[descriptor]
        for descriptor in standing - heard - self._turned_away:
            received = bytes_received(descriptor)
            if received is None:
                continue
            known = self._unheard.setdefault(descriptor, _Unheard(received, -1))
            known.silent_checks = known.silent_checks + 1 if received == known.last else 0
            known.last = received
            if received - known.first > self._max_unheard_bytes:
                self._turned_away.add(descriptor)
                shut_down(descriptor)
                yield Rejected(self._address_of[descriptor], Rejection.ENDLESS)
            elif known.silent_checks >= self._max_silent_checks or self._has_no_word(descriptor):
                shut_down(descriptor)

    def _has_no_word(self, descriptor: int) -> bool:
        """Return whether a guest has exceeded the time limit for its first complete message."""
        guest = self._guests.get(descriptor)
        if guest is None or guest.has_spoken:
            return False
        guest.checks += 1
        return guest.checks > self._max_silent_checks


def _why(event: int, value: int) -> Rejection:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == _CRYPTOGRAPHIC:
        return Rejection.SECRET
    return Rejection.MECHANISM if value == _MECHANISM_MISMATCH else Rejection.HANDSHAKE


def _connection(descriptor: int) -> socket.socket:
    """Wrap the descriptor in a socket, which the caller detaches.

    Naming the family and type saves system calls.
    """
    return socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, descriptor)


def _peer_address(descriptor: int) -> str:
    """Return the peer's address, which is available only while the connection is open."""
    try:
        connection = _connection(descriptor)
    except OSError:
        return UNKNOWN
    try:
        return str(connection.getpeername()[0]).removeprefix("::ffff:")
    except OSError:
        return UNKNOWN
    finally:
        connection.detach()


def _home_of(address: str) -> str:
    try:
        return "loopback" if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address
    except ValueError:
        return address  # unknown


def bytes_received(descriptor: int) -> int | None:
    """Return how many bytes the connection has received, or None if it is closed."""
    try:
        connection = _connection(descriptor)
    except OSError:
        return None  # closed meanwhile
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        return int(_BYTES_RECEIVED.unpack(info)[0]) if len(info) == _BYTES_RECEIVED.size else None
    except OSError:
        return None  # closed meanwhile
    finally:
        connection.detach()


def shut_down(descriptor: int) -> None:
    """Close the connection; ZeroMQ notices."""
    try:
        connection = _connection(descriptor)
    except OSError:
        return  # closed meanwhile
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed meanwhile
    finally:
        connection.detach()


# ---- connections that fill this process's memory while its main thread is busy
#
# ZeroMQ's own thread receives messages even while the main thread waits for a disk, and its queues have no limit here
# (see ``net.server``). A thread therefore checks the process's memory. If it grows while no messages are
# read, the connections that continue to send are closed; no process of a job has that much unanswered. While the main
# thread reads messages, it closes floods itself.

LOOK_S = 0.2
GROWTH_BYTES = 64 << 20
"""Growth of the process without a drain from which on the connections are compared."""
COMPARE_S = 0.2
FLOOD_BYTES = 2 << 20
"""Bytes of one connection in ``COMPARE_S``."""


class IntakeGuard:
    """Watches the connections of one listening socket.

    Args:
        port: the socket's port, because the main thread may not know the newest connections yet.
        cut: called from this object's thread with the descriptor of a connection that was closed.

    Attributes:
        has_drained: set by the main thread whenever it reads messages.
    """

    def __init__(self, port: int, cut: Callable[[int], object]) -> None:
        self.has_drained = True
        self._port, self._cut = port, cut
        self._is_closed = threading.Event()
        self._memory = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="samebits-intake-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._is_closed.set()
        self._thread.join()
        os.close(self._memory)

    def _run(self) -> None:
        before = 0
        while not self._is_closed.wait(LOOK_S):
            if self.has_drained:
                self.has_drained = False
                before = self._resident_bytes()
            elif self._resident_bytes() - before >= GROWTH_BYTES:
                with contextlib.suppress(OSError):  # no descriptor is free now: the next look compares again
                    self._compare()

    def _compare(self) -> None:
        first = {one: bytes_received(one) for one in _descriptors() if self._is_served(one)}
        self._is_closed.wait(COMPARE_S)
        for descriptor, received in first.items():
            later = bytes_received(descriptor)
            if received is not None and later is not None and later - received >= FLOOD_BYTES:
                self._cut(descriptor)
                shut_down(descriptor)

    def _is_served(self, descriptor: int) -> bool:
        try:
            one = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            return False  # closed, or no socket
        with one:
            return one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == self._port

    def _resident_bytes(self) -> int:
        return int(os.pread(self._memory, 200, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
