"""The door of the scheduler's socket: who connects, from where, who is turned away, and whose connection closed.

Here live ZeroMQ's connection events (``zmq_socket_monitor(3)``), the answer to its question whether a key may enter
(ZAP, RFC 27), and the bound on connections; never a message. The one idea: whatever ends before it has become a peer
is counted here with its address and leaves nothing behind.

A connection is a guest until it is settled: with a secret by its first message, which only who knows the secret can
say; without one by being told that it has, or will have, a seat. Beyond the bound guests leave before the settled, of
those the ones from where most come, and of those the oldest: so a flood from elsewhere costs an honest process nothing,
a flood from its own host a few tries, and nobody can keep a place by sitting in it. A guest has as long to say its
first word as a connection may be silent. ``net.client`` relies on the order: while an older connection from the same
host stands, no younger one was closed for want of room.

A descriptor's events come in order from the one I/O thread, and a failed handshake is followed at once by the
DISCONNECTED event of its descriptor; so the address that was looked up when it was accepted names the failure.
"""

from __future__ import annotations

import enum
import heapq
import ipaddress
import itertools
import math
import socket
import struct
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from samebits.net.curve import ClusterKeys
from samebits.net.sockets import EVENT, STOPPED, close_both

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"samebits"
MAX_EVENTS = 4096
"""How many events one look at the door takes in: twice what ZeroMQ queues before its I/O thread waits for us."""
UNKNOWN = "an address unknown"
CHECK_S = 1.0  # how often a connection is looked at over which no message came
SLICES = 16  # of the connections: one slice is looked at at a time, for a look at thousands keeps a loss waiting
_BYTES_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received in struct tcp_info (linux/tcp.h, since Linux 4.2)

_NOW = int(zmq.NOBLOCK)
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILURES | STOPPED
_CRYPTOGRAPHIC = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
_MECHANISM_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)


class Rejection(enum.Enum):
    """Why a connection did not become a peer."""

    SECRET = "another secret"
    MECHANISM = "a secret on one side only"
    HANDSHAKE = "no handshake"
    SILENT = "not a word"
    TOO_MANY = "too many connections"
    ENDLESS = "a message without end"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A connection that ended before anybody spoke over it."""

    address: str
    why: Rejection


@dataclass(frozen=True, slots=True)
class Ended:
    """A connection's end; ``is_counted`` where it was reported as rejected already."""

    descriptor: int
    address: str
    is_counted: bool


@dataclass(slots=True)
class _Unheard:
    """A connection over which no whole message has come, in bytes received."""

    first: int
    last: int
    silent_checks: int = 0  # in a row, without a byte


@dataclass(slots=True)
class _Guest:
    """A connection that is not settled."""

    home: str  # where it comes from; all of loopback is one place, whoever chose which of its addresses
    has_spoken: bool = False
    checks: int = 0  # without a word so far


class Gate:
    """Watches one listening socket; not thread-safe.

    Args:
        listening: the socket, before it is bound.
        keys: the cluster's keys; None lets everybody in who can connect.
        max_connections: how many may stand at a time, finished handshake or not; beyond that guests are closed.
        max_unheard_bytes: how much may arrive over a connection while no message of it is complete: ZeroMQ bounds
            the frame and the queue, but not the frames of one message.
        silence_s: after about a third longer without a byte a connection is closed: every process of ours says
            something more often, and where it has nothing to say ZeroMQ's own heartbeat does. A check that comes late
            counts once, so that whoever stands still loses nobody. Nor has a guest more time for its first word.
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
        self._heard: set[int] = set()  # descriptors over which a message came since they were looked at
        self._max_silent_checks = math.ceil(silence_s * 4 / 3 / CHECK_S)
        self._unheard: dict[int, _Unheard] = {}  # by descriptor
        self._slices: list[set[int]] = [set() for _ in range(SLICES)]  # every connection that stands, by its number
        self._slice = 0  # the next to be looked at
        self._looked_at = time.monotonic()
        self._address_of: dict[int, str] = {}  # by descriptor, of every connection that stands
        self._guests: dict[int, _Guest] = {}  # by descriptor, the oldest first
        self._words_settle = keys is not None
        self._turned_away: set[int] = set()
        self._ended: list[Ended] = []
        self._rejected: list[Rejected] = []
        self._failure: Rejection | None = None  # of the descriptor that the next DISCONNECTED names
        self._zap: zmq.Socket[bytes] | None = None
        self._expected = b""
        if keys is not None:
            self._zap = listening.context.socket(zmq.REP)
            self._zap.linger = 0
            self._zap.bind(ZAP_ENDPOINT)
            self._expected = z85.decode(keys.worker.public)
            listening.curve_server = True
            listening.curve_secretkey = keys.scheduler.secret
            listening.zap_domain = ZAP_DOMAIN
            listening.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody answers: nobody enters
        self._monitor = listening.get_monitor_socket(_EVENTS)

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        """What becomes readable when somebody is at the door."""
        return [self._monitor] if self._zap is None else [self._monitor, self._zap]

    @property
    def connections(self) -> int:
        """How many connections stand, as far as events were taken in."""
        return len(self._address_of)

    def address_of(self, descriptor: int) -> str:
        """Where the connection comes from: an IP address."""
        return self._address_of.get(descriptor, UNKNOWN)

    def take(self, *, is_rung: bool = True) -> tuple[list[Ended], list[Rejected]]:
        """What has happened by now: the connections that ended, in order, and who was turned away.

        Args:
            is_rung: whether one of ``sources`` is readable, as far as is known; else none is looked at.
        """
        if is_rung:
            for question in self._zap_questions():
                self._take_events()  # who asks was accepted before: its address is looked up while it is there
                self._answer(question)
            self._take_events()
        self._rejected += self._turn_away()
        self._rejected += self._look_at_due()
        ended, rejected = self._ended, self._rejected
        self._ended, self._rejected = [], []
        return ended, rejected

    @property
    def has_guests(self) -> bool:
        """Whether a connection stands that is not settled."""
        return bool(self._guests)

    @property
    def has_news(self) -> bool:
        """Whether ``take`` has something to give, whatever ``sources`` say."""
        return bool(self._ended or self._rejected)

    def stands(self, descriptor: int) -> bool:
        """Whether a connection has that number now; whoever has been heard was accepted before."""
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
                self._ended.append(Ended(value, address, is_counted=was_turned_away or failure is not None))
            else:
                self._failure = _why(event, value)

    def heard(self, descriptors: Collection[int]) -> None:
        """Whole messages have come over these connections."""
        self._heard.update(descriptors)
        if not self._guests:
            return
        for descriptor in descriptors:
            if (guest := self._guests.get(descriptor)) is not None:
                guest.has_spoken = True
                if self._words_settle:
                    del self._guests[descriptor]

    def settle(self, descriptor: int) -> None:
        """Whoever speaks over this connection has, or will have, a seat."""
        self._guests.pop(descriptor, None)

    def close(self) -> None:
        """Close the socket, and stop watching it."""
        if self._zap is not None:
            self._zap.close(linger=0)  # first: connections whose questions it holds do not end before
        close_both(self._socket, self._monitor)

    def _events(self) -> Iterator[tuple[int, int]]:
        receive = self._monitor.recv
        for _ in range(MAX_EVENTS):
            try:
                event = receive(_NOW)
            except zmq.Again:
                return
            receive(_NOW)  # the address that is listened on
            yield EVENT.unpack(event)

    def _zap_questions(self) -> Iterator[list[bytes]]:
        """Each is to be answered before the next is asked for."""
        if self._zap is None:
            return
        for _ in range(MAX_EVENTS):
            try:
                yield self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _answer(self, question: list[bytes]) -> None:
        """May this key enter? Version, request, domain, address, identity, mechanism, key (RFC 27)."""
        assert self._zap is not None, "a question came over it"
        is_right = len(question) == 7 and question[5] == b"CURVE" and question[6] == self._expected
        status = [b"200", b"OK"] if is_right else [b"400", b"another key"]
        self._zap.send_multipart([b"1.0", question[1], *status, b"", b""])

    def _turn_away(self) -> Iterator[Rejected]:
        """Close connections beyond the bound; they vanish from the books when ZeroMQ has noticed."""
        surplus = len(self._address_of) - len(self._turned_away) - self._max_connections
        if surplus <= 0:
            return
        for descriptor in list(itertools.islice(self._first_to_leave(), surplus)):
            self._turned_away.add(descriptor)
            _shut_down(descriptor)
            yield Rejected(self._address_of[descriptor], Rejection.TOO_MANY)

    def _first_to_leave(self) -> Iterator[int]:
        """Guests, the oldest of the largest crowd first; then the newest of the settled."""
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
        """Look at as many slices as time has passed for, at each of them at most once."""
        due = int((time.monotonic() - self._looked_at) * SLICES / CHECK_S)
        if due >= SLICES:  # whatever is later than that was nobody's silence
            due, self._looked_at = SLICES, time.monotonic()
        else:
            self._looked_at += due * CHECK_S / SLICES
        for _ in range(due):
            yield from self._look_at_unheard(self._slices[self._slice])
            self._slice = (self._slice + 1) % SLICES

    def _look_at_unheard(self, standing: set[int]) -> Iterator[Rejected]:
        """Close those of these over which much has come and no end of a message, or nothing for long."""
        heard = standing & self._heard
        self._heard -= heard
        for descriptor in self._unheard.keys() & heard:
            del self._unheard[descriptor]
        for descriptor in standing - heard - self._turned_away:
            received = _bytes_received(descriptor)
            if received is None:
                continue
            known = self._unheard.setdefault(descriptor, _Unheard(received, -1))
            known.silent_checks = known.silent_checks + 1 if received == known.last else 0
            known.last = received
            if received - known.first > self._max_unheard_bytes:
                self._turned_away.add(descriptor)
                _shut_down(descriptor)
                yield Rejected(self._address_of[descriptor], Rejection.ENDLESS)
            elif known.silent_checks >= self._max_silent_checks or self._has_no_word(descriptor):
                _shut_down(descriptor)

    def _has_no_word(self, descriptor: int) -> bool:
        """Whether the time is over for a guest's first message, whatever else it sends."""
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
    """As a socket of Python's, to be detached. What kind it is is said, so that the kernel is not asked three times."""
    return socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, descriptor)


def _peer_address(descriptor: int) -> str:
    """Asked while the connection stands; one that is gone already has none to tell."""
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


def _bytes_received(descriptor: int) -> int | None:
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


def _shut_down(descriptor: int) -> None:
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
