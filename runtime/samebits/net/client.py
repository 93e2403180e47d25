"""Connect the worker to the scheduler, with a DEALER socket that reconnects and reports it.

With ``IMMEDIATE``, ZeroMQ queues nothing while there is no connection. Messages are dropped while the scheduler is
away, and the agent repeats those that still matter after the reconnect.

A failed handshake has several possible causes. The scheduler closes the connection of a worker with another secret or
none, and, while it is flooded, the connection of any worker. So after ``ASK_AFTER`` failures in a row, :func:`greet`
requests the other end's greeting. A greeting with another mechanism is conclusive. A greeting with our mechanism is
not: its connection is then kept open as a witness. Our secret was refused only if ``REFUSED_AFTER`` younger connections
are closed while the witness stays open (``net.gate`` closes connections in this order). In all other cases, the
handshake is retried, even if ZeroMQ itself would give up.

If SCHED_HOST names several addresses, each gets its own socket, so that no message from one address is received over
the next. The client leaves an address if no handshake completes in time, if its secret differs, or if the client's user
requests it.

If this host has a relay, it is tried first, and the messages are sealed for the scheduler (``net.channel``). The
connection counts as up once the scheduler's welcome has arrived. If the relay dies, stops or loses the scheduler, the
client connects directly to the scheduler, after a delay that differs between sessions and is short enough to keep the
lease.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from samebits.core import messages
from samebits.core.membership.leases import is_repeated
from samebits.core.messages import Heartbeat
from samebits.errors import ProtocolError
from samebits.net.address import endpoint
from samebits.net.address_book import AddressBook
from samebits.net.channel import ATTACH_AGAIN, DATA, UNREACHABLE, WELCOME, ForgedError, RankEnd
from samebits.net.curve import ClusterKeys
from samebits.net.relaying import MAX_RELAYED_BYTES
from samebits.net.sockets import EVENT, STOPPED, Waker, Wire, close_both
from samebits.scheduler_hosts import SchedulerAddress

_SIGNATURE_AND_VERSION = b"\xff" + bytes(8) + b"\x7f" + b"\x03"
_MINOR_VERSION = b"\x01"
_AS_CLIENT_AND_FILLER = bytes(32)
_STAY_S = 0.05  # the scheduler looks up a connection's address on accept, so the connection must still be open
_GREETING_BYTES = 64
_MECHANISM = slice(12, 32)


class Greeted:
    """A connection on which only ZMTP greetings were exchanged.

    Attributes:
        mechanism: the mechanism that the other end announced, ``CURVE`` or ``NULL``.
    """

    def __init__(self, connection: socket.socket, mechanism: str) -> None:
        self._connection = connection
        self.mechanism = mechanism

    def stands(self) -> bool:
        """Return whether the other end has kept the connection open."""
        self._connection.setblocking(False)
        try:
            while self._connection.recv(_GREETING_BYTES):
                continue
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def greet(host: str, port: int, ours: str, timeout_s: float) -> Greeted | None:
    """Exchange greetings with the listener, or return None if there is no ZMTP 3 greeting in time.

    Args:
        host: the listener's address.
        port: the listener's port.
        ours: the mechanism to announce, ``CURVE`` or ``NULL``.
        timeout_s: time limit for the entire exchange.
    """
    deadline_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as undo, contextlib.suppress(OSError):
        connection = undo.enter_context(socket.create_connection((host.strip("[]"), port), timeout_s))
        greeting = _read_greeting(connection, deadline_s)
        if len(greeting) < _GREETING_BYTES or greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3:
            return None
        connection.settimeout(_STAY_S)
        with contextlib.suppress(TimeoutError):
            connection.recv(1)
        connection.sendall(_MINOR_VERSION + ours.encode("ascii").ljust(20, b"\0") + _AS_CLIENT_AND_FILLER)
        undo.pop_all()
        return Greeted(connection, greeting[_MECHANISM].rstrip(b"\0").decode("ascii", errors="replace"))
    return None


def _read_greeting(connection: socket.socket, deadline_s: float) -> bytes:
    greeting = b""
    connection.sendall(_SIGNATURE_AND_VERSION)
    while len(greeting) < _GREETING_BYTES:
        connection.settimeout(max(_STAY_S, deadline_s - time.monotonic()))
        more = connection.recv(_GREETING_BYTES - len(greeting))
        if not more or time.monotonic() > deadline_s:
            break
        greeting += more
    return greeting


MAX_INCOMING_BYTES = 256 << 20  # an address map of ten thousand members
RECONNECT_MS = 100
RETRY_S = 1.0  # after a handshake that ZeroMQ does not retry
TRY_S = 1.0  # per address if there are several; doubled once all were tried in vain
# Time limit once the TCP connection is open; up to 8 times longer after futile rounds, since many workers may connect
# at once.
GREET_S = 2.0
SEARCH_S = 3.0  # per address on average; a scheduler allows its workers this much time for the search
STAYS_S = 5.0  # a connection that lasted this long was the right one
ASK_AFTER = 3
ASK_TIMEOUT_S = 1.0
REFUSED_AFTER = 2  # a killed scheduler closes all its connections, and one of them may stay open a moment longer
AT_RELAY = 3
"""A relay's connection may be silent for NODE_TIMEOUT / AT_RELAY, which leaves time to connect elsewhere."""
SPREAD = 5
"""Ranks whose relay is gone connect to the scheduler within NODE_TIMEOUT / SPREAD."""
_FINAL = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_CRYPTOGRAPHIC = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | _FINAL
    | STOPPED
)


@dataclass(frozen=True, slots=True)
class Up:
    """Event: the connection is open. The scheduler does not know this process yet."""


@dataclass(frozen=True, slots=True)
class Down:
    """The connection is gone."""


@dataclass(frozen=True, slots=True)
class ShutOut:
    """Event: the listener does not have our secret. Reported once until a handshake succeeds."""

    text: str  # the possible difference, and the fix


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """Event: connections are closed before the handshake, for unknown reasons.

    Reported once until a handshake succeeds.
    """

    text: str


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Event: an address, or the file of addresses, cannot be used now. Reported once per cause."""

    text: str


@dataclass(frozen=True, slots=True)
class Got:
    """A message arrived."""

    message: Any


class Client:
    """One connection to the scheduler. Not thread-safe, except for ``wake``.

    Args:
        host: SCHED_HOST: one host, several hosts, or a file of hosts.
        port: SCHED_PORT, for hosts that are given without a port.
        identity: the name under which the scheduler knows this connection: the session, in ASCII.
        silence_s: after this long without ZeroMQ's own heartbeat, the connection counts as closed.
        keys: the cluster's keys; None for no authentication or encryption.
        relay: the address of this host's relay, or of the inner relay above it; None if there is none.
        wire: encodes and decodes the messages.
        most_relayed_bytes: a longer message is not sent through the relay.
        is_trial: whether to try only ``relay`` until the scheduler has answered through it.

    Attributes:
        peer: the other end of the latest connection, as the kernel reports it; None before the first one.
        local_host: the address of this end of that connection.
        has_failed: whether a trial has failed; this client is then of no use.
    """

    def __init__(
        self,
        host: str,
        port: int,
        identity: str,
        silence_s: float,
        *,
        keys: ClusterKeys | None = None,
        relay: SchedulerAddress | None = None,
        wire: Wire = messages.SCHEMA,
        most_relayed_bytes: int = MAX_RELAYED_BYTES,
        is_trial: bool = False,
    ) -> None:
        self._waker = Waker()
        self._book = AddressBook(host, port, self.wake, relay)
        self._keys, self._wire, self._most_relayed_bytes = keys, wire, most_relayed_bytes
        self._delay_s = silence_s / SPREAD * zlib.crc32(identity.encode()) / 2**32
        self._identity, self._silence_s = identity, silence_s
        self._handshake_s = max(1.0, silence_s)
        self._said_elsewhere: set[str] = set()
        self._beat: Heartbeat | None = None  # the last one
        self.peer: tuple[str, int] | None = None
        self.local_host: str | None = None
        self._is_trial, self.has_failed = is_trial, False
        self._context = zmq.Context()
        self._sockets = itertools.count()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.descriptor, zmq.POLLIN)
        self._open()

    @property
    def address(self) -> SchedulerAddress | None:
        """Return the address that is being tried or used.

        Returns:
            None until the file that SCHED_HOST names has provided an address.
        """
        return self._book.present

    def _open(self) -> None:
        """Open a new socket for the current address."""
        self._connected_at = 0.0
        self._failures = 0  # in a row
        self._said: set[type[ShutOut | TurnedAway]] = set()
        self._witness: Greeted | None = None
        self._is_younger = False  # whether the current attempt began after the witness
        self._refusals = 0  # number of closed connections younger than the witness
        self._retry_at: float | None = None
        self._is_up, self._up_at = False, 0.0
        self._end: RankEnd | None = None  # this end of the attachment through a relay
        is_at_relay = self._book.is_at_relay
        silence_s = self._silence_s / AT_RELAY if is_at_relay else self._silence_s
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, self._identity.encode("ascii"))
        for option, value in {
            zmq.LINGER: 500,
            zmq.IPV6: 1,
            zmq.IMMEDIATE: 1,
            zmq.MAXMSGSIZE: MAX_INCOMING_BYTES,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            # The kernel repeats an unanswered SYN at doubling intervals, and would notice late that the host is back.
            zmq.CONNECT_TIMEOUT: int(self._handshake_s * 1000),
            zmq.HANDSHAKE_IVL: int(self._handshake_s * 1000),
            zmq.HEARTBEAT_IVL: max(1, int(silence_s * 1000 / 3)),
            zmq.HEARTBEAT_TIMEOUT: int(silence_s * 1000),
        }.items():
            self._socket.setsockopt(option, value)
        if self._keys is not None:
            relays = self._keys.relay if is_at_relay else None
            self._socket.curve_serverkey = (relays or self._keys.scheduler).public
            self._socket.curve_publickey = self._keys.worker.public
            self._socket.curve_secretkey = self._keys.worker.secret
        # A unique name, because by default the second socket would reuse that of the first, which is closed later.
        self._monitor = self._socket.get_monitor_socket(_EVENTS, f"inproc://events-{next(self._sockets)}")
        for source in (self._socket, self._monitor):
            self._poller.register(source, zmq.POLLIN)
        present = self._book.present
        if present is not None:
            self._endpoint = endpoint(present.host, present.port)
            self._socket.connect(self._endpoint)
        self._leave_at, self._is_waited_for = self._patience_ends_at(), True

    def _patience_ends_at(self) -> float | None:
        """Return when the client leaves the current address if no handshake completes.

        Returns:
            None if there is no other address.
        """
        if not self._book.has_choice:
            return None
        if self._is_trial:
            return time.monotonic() + self._handshake_s
        return time.monotonic() + TRY_S * self._book.slowness(2)

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something arrives, ``wake`` is called, or ``timeout_s`` has passed."""
        timeout_s = self.pause_s(timeout_s)
        ready = self._poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999)))
        if any(source == self._waker.descriptor for source, _ in ready):
            self._waker.rest()

    def pause_s(self, timeout_s: float | None) -> float | None:
        """Return ``timeout_s``, or less if ``drain`` must be called sooner."""
        for at in (self._retry_at, self._leave_at):
            if at is not None:
                left_s = max(0.0, at - time.monotonic())
                timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        return timeout_s

    @property
    def sources(self) -> list[zmq.Socket[bytes] | int]:
        """Return the sockets and the descriptor to poll instead of calling ``wait``.

        A reconnect may change them.
        """
        return [self._socket, self._monitor, self._waker.descriptor]

    def wake(self) -> None:
        """Make ``wait`` return. May be called from any thread."""
        self._waker.wake()

    def look_elsewhere(self, refusal: str = "") -> str:
        """Leave the current address, whose scheduler belongs to another job, if there is another address.

        Args:
            refusal: why the scheduler there refused this process as another job's, if it did so.

        Returns:
            All refusals, once every address has refused; otherwise "".
        """
        if not self._book.has_choice:
            return ""
        self._leave_soon()
        return self._book.refuses(refusal) if refusal else ""

    def _leave_soon(self) -> None:
        """Leave the current address soon, or later if all addresses were tried without success."""
        self._is_waited_for = False
        soon = time.monotonic() + RECONNECT_MS / 1000 * self._book.slowness(4)
        if self._book.is_at_relay:
            soon += self._delay_s
        self._leave_at = soon if self._leave_at is None else min(self._leave_at, soon)

    def drain(self) -> Iterator[Up | Down | ShutOut | TurnedAway | PassedOver | Got]:
        """Yield what has arrived, in order: connection events, then messages."""
        yield from self._take_file()
        began_with = self._witness
        while True:
            try:
                event, value = EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                break
            # Events were queued while the witness was being created, so their connections may be older than it.
            yield from self._take(event, value, is_after_witness=self._witness is began_with)
        now = time.monotonic()
        if self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
            self._socket.disconnect(self._endpoint)  # otherwise the socket counts as connected, and nothing happens
            self._socket.connect(self._endpoint)
        if self._leave_at is not None and self._leave_at <= now:
            yield from self._go_on()
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if self._book.is_at_relay:
                    yield from self._take_relayed(frames)
                else:
                    yield Got(self._wire.unpack(frames[-1], MAX_INCOMING_BYTES))
            except (ProtocolError, ForgedError):
                continue  # another protocol, or another scheduler: ignore it; the time limits keep running

    def _attach(self) -> None:
        """Introduce this rank to the scheduler through the relay.

        If no welcome arrives in time, the client leaves the relay.
        """
        session_key = b"" if self._keys is None else self._keys.session_key
        self._end = RankEnd(session_key, self._identity)
        self._leave_at, self._is_waited_for = time.monotonic() + self._silence_s / AT_RELAY + self._delay_s, False
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._end.hello, zmq.NOBLOCK)

    def _take_relayed(self, frames: list[bytes]) -> Iterator[Up | Down | Got]:
        """Yield the content of a relay's message.

        The relay passes on a message of the scheduler, or reports that the scheduler is gone or reachable.
        """
        kind = frames[0][:1]
        if kind == DATA and len(frames) == 2 and self._end is not None:
            self._end.check(frames[0][1:], frames[1])
            yield Got(self._wire.unpack(frames[1], MAX_INCOMING_BYTES))
        elif kind == WELCOME and self._end is not None and self._end.welcome(frames[0]):
            self._is_up, self._leave_at, self._up_at = True, None, time.monotonic()
            self._is_trial = False
            yield Up()
        elif kind in (ATTACH_AGAIN, UNREACHABLE):
            was_up, self._is_up, self._end = self._is_up, False, None
            if was_up:
                self._leave_at = time.monotonic() + self._silence_s / AT_RELAY + self._delay_s
                yield Down()
            if kind == ATTACH_AGAIN:
                self._attach()

    def _take_file(self) -> Iterator[Down | PassedOver]:
        in_use = self._book.present
        has_others, text = self._book.take()
        if text:
            yield PassedOver(text)
        if has_others and in_use not in self._book.every:
            yield from self._open_again()

    def _go_on(self) -> Iterator[Down]:
        """Move on to the next address, and read the file of addresses again."""
        if self._is_trial:
            self._leave_at, self.has_failed = None, True
            return
        self._book.look()
        self._book.turn()
        yield from self._open_again()

    def _open_again(self) -> Iterator[Down]:
        was_up = self._is_up
        self._dismiss()
        for source in (self._socket, self._monitor):
            self._poller.unregister(source)
        self._socket.linger = 0
        close_both(self._socket, self._monitor)
        self._open()
        if was_up:
            yield Down()

    def _take(
        self, event: int, value: int, *, is_after_witness: bool
    ) -> Iterator[Up | Down | ShutOut | TurnedAway | PassedOver]:
        if event == zmq.EVENT_CONNECTED:
            self._connected_at = time.monotonic()
            self._is_younger = is_after_witness  # only meaningful with a witness; a new witness resets it
            if (ends := _ends_of(value)) is not None:
                self.local_host, self.peer = ends[0][0], ends[1]
            is_slow = self._is_waited_for and not self._book.is_at_relay
            if self._leave_at is not None and is_slow:  # a process listens there: give it more time, once
                self._leave_at, self._is_waited_for = time.monotonic() + GREET_S * self._book.slowness(8), False
        elif event == zmq.EVENT_CLOSED:
            if self._leave_at is not None:  # nothing listens there
                self._leave_soon()
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures, self._said = 0, set()
            self._dismiss()
            if self._book.is_at_relay:
                self._attach()
                return
            self._is_up, self._leave_at, self._up_at = True, None, time.monotonic()
            yield Up()
        elif event == zmq.EVENT_DISCONNECTED:
            self._book.look()
            was_up, self._is_up, self._end = self._is_up, False, None
            if self._book.is_at_relay:
                self._leave_at, self._is_waited_for = time.monotonic() + self._delay_s, False
                if was_up:
                    yield Down()
                return
            if time.monotonic() - self._up_at > STAYS_S:
                self._book.stays()
            if self._leave_at is None:
                self._leave_at, self._is_waited_for = self._patience_ends_at(), True
            yield Down()
        else:
            told = self._handshake_failed(event, value)
            if told is not None and type(told) not in self._said:
                self._said.add(type(told))
                yield from self._told(told)

    def _told(self, told: ShutOut | TurnedAway) -> Iterator[ShutOut | TurnedAway | PassedOver]:
        """Report a failed handshake. It is final if there is no other address or all have failed."""
        if not self._book.has_choice:
            yield told
            return
        self._leave_soon()
        if isinstance(told, ShutOut) and self._book.refuses(told.text):
            yield told
        elif told.text not in self._said_elsewhere:
            self._said_elsewhere.add(told.text)
            yield PassedOver(f"{told.text}; trying the next address of SCHED_HOST")

    def _handshake_failed(self, event: int, value: int) -> ShutOut | TurnedAway | None:
        is_final = bool(event & _FINAL)
        if is_final:  # ZeroMQ does not retry, but a restarted scheduler may accept
            self._retry_at = time.monotonic() + RETRY_S
        elif time.monotonic() - self._connected_at > self._handshake_s / 2:
            return None  # it timed out instead of being closed: the listener is stopped or busy
        self._failures += 1
        if ShutOut in self._said:
            return None
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == _CRYPTOGRAPHIC:
            return ShutOut(self._explain("CURVE"))
        if self._witness is not None:
            return self._closed_beside(self._witness)
        return self._ask() if is_final or self._failures % ASK_AFTER == 0 else None

    def _closed_beside(self, witness: Greeted) -> ShutOut | TurnedAway | None:
        if not witness.stands():
            self._dismiss()
            return self._turned_away()
        self._refusals += self._is_younger
        self._is_younger = False
        if self._refusals < REFUSED_AFTER:
            return None
        self._dismiss()
        return ShutOut(self._explain("CURVE"))

    def _ask(self) -> ShutOut | TurnedAway | None:
        ours, present = "NULL" if self._keys is None else "CURVE", self._book.present
        greeted = None if present is None else greet(present.host, present.port, ours, ASK_TIMEOUT_S)
        if greeted is None:
            return self._turned_away()
        if greeted.mechanism == ours == "CURVE":
            self._witness, self._refusals, self._is_younger = greeted, 0, False
            return None
        greeted.close()
        is_ours_to_mend = {greeted.mechanism, ours} == {"CURVE", "NULL"}
        return ShutOut(self._explain(greeted.mechanism)) if is_ours_to_mend else self._turned_away()

    def _dismiss(self) -> None:
        """Close the witness."""
        if self._witness is not None:
            self._witness.close()
        self._witness = None

    def _turned_away(self) -> TurnedAway:
        return TurnedAway(
            f"the process that listens at {self._where()} closes connections before the handshake: it has too "
            "many connections, or is not a scheduler"
        )

    def _explain(self, mechanism: str) -> str:
        there = f"the scheduler at {self._where()}"
        if mechanism == "CURVE" and self._keys is not None:
            return (
                f"{there} refuses this process's secret. Fix: compare CLUSTER_SECRET (or the file that "
                "CLUSTER_SECRET_FILE names) here and in the scheduler's environment: they must be the same"
            )
        if mechanism == "CURVE":
            return (
                f"{there} requires a secret, and this process has none. Fix: export CLUSTER_SECRET, or "
                "CLUSTER_SECRET_FILE=<the file with it>, the same as the scheduler's"
            )
        return (
            f"{there} was started without a secret, and this process has one. Fix: start the scheduler with the "
            "same CLUSTER_SECRET or CLUSTER_SECRET_FILE, or unset both here"
        )

    def _where(self) -> str:
        present = self._book.present
        return "no address" if present is None else f"{present.host}, port {present.port} (SCHED_HOST, SCHED_PORT)"

    def send(self, message: object, *, may_wait: bool = False) -> None:
        """Send the message, or drop it if there is no connection.

        Args:
            message: what to send. A heartbeat that repeats the previous one may wait in any case.
            may_wait: whether a relay may hold the message back for a moment, to send it with others.
        """
        if type(message) is Heartbeat:
            may_wait, self._beat = self._beat is not None and is_repeated(message, self._beat), message
        packed = self._wire.pack(message)
        if self._book.is_at_relay:
            if self._end is None or not self._end.is_open or len(packed) > self._most_relayed_bytes:
                return
            packed = self._end.seal(packed, may_wait=may_wait)
        try:
            self._socket.send(packed, zmq.NOBLOCK)
        except zmq.Again:
            return  # repeated after the reconnect

    def close(self) -> None:
        """Close after all messages are sent, or half a second later at most."""
        self._dismiss()
        close_both(self._socket, self._monitor)
        self._context.term()
        self._waker.close()


def _ends_of(descriptor: int) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Return the addresses and ports of this and the other end, or None if the connection is closed."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            found = connection.getsockname(), connection.getpeername()
    except OSError:
        return None
    if not all(isinstance(one, tuple) for one in found):
        return None
    # ZeroMQ's sockets are IPv6, so an IPv4 address appears as a mapped one (RFC 4291, section 2.5.5.2).
    this, other = ((str(one[0]).removeprefix("::ffff:"), int(one[1])) for one in found)
    return this, other
