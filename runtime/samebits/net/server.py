"""Receive fairly from all peers, over the scheduler's ROUTER socket, and report closed connections.

A peer is identified by its ZeroMQ identity, which is its session. A closed connection is an event with a descriptor.
Messages carry the descriptor over which they arrived (``SRCFD``), so an event can be mapped to a session. Events are
read first but handled after the socket is drained, because by then everything that a peer sent before it died has been
received.

Whatever a peer sends, its cost is bounded by the constants below. ROUTER takes from all connections in turn, and a
drain ends when one of them has had ``PEER_TURNS``, or when each could have had one. So every drain receives from all
other peers too, and pending messages are read before leases are checked. Per peer two entries are kept, by descriptor
and by name, which are removed with its connection. They hold its last heartbeat, and an identical one is not parsed
again.

The queues have no limit, because a full one is dangerous. ZeroMQ stops reading such a connection, and if the peer then
resets it while a ping is among the data that was read before, libzmq 4.3.5 aborts this process (``!_io_error`` in
``stream_engine_base.cpp``, reported as libzmq #4841). Instead a peer that has used up its turns for ``FLOOD_TURNS`` in
consecutive drains is closed, and what remains of it is dropped. An honest peer would have to leave 4,096 messages or
64 MiB unread. While the main thread is busy, ``net.gate.IntakeGuard`` bounds the memory.

Descriptors are reused, and a close may be read before or after messages of the next connection with the same number. So
``ConnectionLost`` may be reported for a peer that has already reconnected, which is then probed (``core.scheduler``);
it is always reported for a peer that is gone. Unread messages of a connection whose peer has reconnected are dropped:
they arrive under a name that no peer has, and the peer repeats those that matter.

A peer may be a relay, whose ranks are peers like any other (``net.relaying``) but share its descriptor. If a relay's
connection closes, its ranks' connections do not count as closed.

A dead connection that was not closed is detected by its silence (``net.gate``), not by heartbeats that ZeroMQ sends
from here: to cancel a timer, ZeroMQ searches the timers of all connections (``poller_base_t::cancel_timer`` in libzmq),
which took half a core with ten thousand connections. Workers and tools have one connection each, so they use these
heartbeats, and ZeroMQ answers them.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from samebits.core import messages
from samebits.core.messages import (
    PROTOCOL,
    AddressMap,
    Admitted,
    CommittedPoint,
    EndJob,
    Finished,
    Heartbeat,
    Pending,
    RoundOpened,
    Status,
)
from samebits.errors import ProtocolError
from samebits.net.address import BACKLOG, cannot_listen, endpoint, not_to_listen_on, place_of
from samebits.net.curve import ClusterKeys
from samebits.net.descriptors import raise_descriptor_limit
from samebits.net.gate import RELAYS_ID, UNKNOWN, Gate, IntakeGuard, Rejected, Rejection
from samebits.net.relaying import RELAY_PREFIX, Attachment, Carried, Detached, Dropped, RelayedRanks
from samebits.net.sockets import Waker, Wire, source_of

__all__ = ["Arrived", "ConnectionLost", "Garbled", "Incoming", "Rejected", "Rejection", "Server"]

MAX_INCOMING_BYTES = 1 << 20
MAX_UNHEARD_BYTES = 33 * MAX_INCOMING_BYTES
"""The most bytes that a connection may send without completing a message."""
MAX_OUTGOING_QUEUE = 100
PEER_TURNS = 512  # messages of one peer per drain; a close is read after so many
BYTES_A_TURN = 16 << 10  # a longer message takes several turns
MANY_TURNS = PEER_TURNS // 2
FLOOD_TURNS = 8 * PEER_TURNS
"""A peer is closed once it has had so many turns in consecutive drains that ended before everything was read."""
DRAIN_LIMIT = 8192  # messages per drain, those in relays' frames included, or one per connection, if that is more
MAX_SOCKETS = 65535
MAX_REPEATED_BYTES = 512
"""A heartbeat has about 120 bytes; a longer one is not from SameBits, and is not kept."""
SHARED_BYTES = 1 << 12
"""From this size on, a message to many peers is one shared piece of memory."""
TOLD_ALIKE = (RoundOpened, AddressMap, Finished, EndJob, Status, CommittedPoint)
"""Messages that rarely differ between receivers; they are repacked only when they differ."""

WELCOMES = (Admitted, Pending)
"""A peer that received one of these is settled, so its connection is not closed to make room for another."""

# Plain integers, because combining two of zmq's flags creates a new object, which costs as much as a message.
_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
OLD_ZMTP = "its sender does not speak ZMTP 3 (a browser, a scraper, a port scanner), so it is not a worker"
_PEER = re.compile(rb"[0-9A-Za-z._-]{1,64}")  # a session is 32 hexadecimal digits


@dataclass(frozen=True, slots=True)
class Arrived:
    """A well-formed message. ``peer`` is the identity of the connection on which it arrived."""

    peer: str
    message: Any


@dataclass(frozen=True, slots=True)
class Garbled:
    """Bytes that are not a message. ``peer`` is "" if there is no valid name to reply to."""

    peer: str
    problem: str
    address: str = ""
    other_protocol: bool = False  # a worker of another version, which can be notified


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The peer's connection was closed, and the peer has not reconnected."""

    peer: str


Incoming = Arrived | Garbled | ConnectionLost | Rejected
_Sender = tuple[int, bytes]
"""A connection's descriptor, which the next one may get while messages are unread, and its name."""


@dataclass(slots=True)
class _Peer:
    """The process at the other end of a connection, and its last heartbeat."""

    name: bytes
    session: str
    said: bytes | None = None
    arrived: Arrived | None = None


class Server:
    """The scheduler's listening socket. Not thread-safe, except for ``wake``.

    Args:
        addresses: the local addresses to listen on, IPv4 and IPv6.
        port: the TCP port.
        silence_s: time limit of a handshake; after about a third longer without a byte, a connection counts as closed.
        keys: the cluster's keys; None for no authentication or encryption.
        wire: encodes and decodes the messages.
        takes_relays: whether peers may be relays, with ranks behind them.
        most_connections: how many connections an honest cluster may need at a time; bounded by the system's limits.
        inherited: listening sockets that the parent process opened.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        silence_s: float,
        *,
        keys: ClusterKeys | None = None,
        wire: Wire = messages.SCHEMA,
        takes_relays: bool = True,
        most_connections: int = MAX_SOCKETS,
        inherited: Sequence[socket.socket] = (),
    ) -> None:
        # A quarter of the descriptors is reserved for files, and for connections accepted before their event is read.
        self.max_connections = min(most_connections, raise_descriptor_limit() * 3 // 4)
        self._drain_limit = max(DRAIN_LIMIT, self.max_connections)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._socket = self._context.socket(zmq.ROUTER)
        # zmq.Socket's own method first checks for sockets of draft types, which doubles the time.
        self._send_frame = super(zmq.Socket, self._socket).send
        for option, value in {
            zmq.LINGER: 1000,
            zmq.IPV6: 1,
            zmq.ROUTER_HANDOVER: 1,
            zmq.ROUTER_MANDATORY: 1,  # otherwise sending to a peer that is gone fails silently
            zmq.MAXMSGSIZE: MAX_INCOMING_BYTES,
            zmq.RCVHWM: 0,
            zmq.SNDHWM: MAX_OUTGOING_QUEUE,
            zmq.BACKLOG: BACKLOG,
            zmq.HANDSHAKE_IVL: max(1000, int(silence_s * 1000)),
        }.items():
            self._socket.setsockopt(option, value)
        self._gate = Gate(self._socket, keys, self.max_connections, MAX_UNHEARD_BYTES, silence_s)
        self._poller = zmq.Poller()
        self._waker = Waker()
        self._bells, self._is_rung = self._gate.sources, True
        for source in (self._socket, *self._bells, self._waker.descriptor):
            self._poller.register(source, zmq.POLLIN)
        self._peer_of: dict[int, _Peer] = {}
        self._descriptor_of: dict[str, int] = {}
        self._displaced: list[str] = []  # peers whose descriptor another peer now uses
        self._turns: dict[_Sender, int] = {}  # of consecutive drains that left messages unread
        self._ignored: set[_Sender] = set()  # closed, perhaps with messages unread
        self._guard = IntakeGuard(port, self._gate.was_cut)
        self._wire = wire
        self._has_keys = keys is not None
        self._takes_relays = takes_relays
        session_key = b"" if keys is None else keys.session_key
        self._relayed = RelayedRanks(session_key, most_connections, self._send)
        self._told: dict[type, tuple[object, bytes | zmq.Frame]] = {}  # by type, the last message and its packed form
        self._listen(addresses, port, {place_of(one): one for one in inherited})

    def _listen(self, addresses: Sequence[str], port: int, inherited: dict[tuple[str, int], socket.socket]) -> None:
        wanted = [(address, port) for address in addresses]
        surplus = next((one for place, one in inherited.items() if place not in wanted), None)
        if surplus is not None:
            self.close()
            raise not_to_listen_on(surplus, wanted)
        for address in addresses:
            listening = inherited.pop((address, port), None)
            self._socket.setsockopt(zmq.USE_FD, -1 if listening is None else listening.detach())
            try:
                self._socket.bind(endpoint(address, port))
            except zmq.ZMQError as error:
                self.close()
                raise cannot_listen(address, port, error.errno, error.strerror) from None

    def also_listen(self, address: str, port: int) -> bool:
        """Listen on another local address; return whether that is possible."""
        self._socket.setsockopt(zmq.USE_FD, -1)
        try:
            self._socket.bind(endpoint(address, port))
        except zmq.ZMQError:
            return False
        return True

    @property
    def sources(self) -> list[zmq.Socket[bytes] | int]:
        """Return the sources to poll before ``wait(0)``, for a loop that also polls other sockets."""
        return [self._socket, *self._bells, self._waker.descriptor]

    def watch(self, descriptor: int) -> None:
        """Make ``wait`` also return when this descriptor becomes readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Undo ``watch``."""
        self._poller.unregister(descriptor)

    def wait(self, timeout_s: float) -> set[int]:
        """Sleep until something can be read; return the watched descriptors that are readable."""
        self._relayed.flush()
        ready = self._poller.poll(0 if self._gate.has_news else max(0, int(timeout_s * 1000 + 0.999)))
        self._is_rung = any(source is bell for source, _ in ready for bell in self._bells)
        descriptors = {source for source, _ in ready if isinstance(source, int)}
        if self._waker.descriptor in descriptors:
            self._waker.rest()
            descriptors.discard(self._waker.descriptor)
        return descriptors

    def wake(self) -> None:
        """Make ``wait`` return. May be called from any thread and from a signal handler."""
        self._waker.wake()

    def drain(self) -> Iterator[Incoming]:
        """Yield what has arrived, within the limits: rejected connections first, closed connections last."""
        self._guard.has_drained = True
        ended, rejected = self._gate.take(is_rung=self._is_rung)
        self._is_rung = True  # until the next ``wait``
        yield from rejected
        # The number of a closed descriptor may already be reused, so each event closes its owners in order. If the
        # closed connection never sent anything, the first sender with this number already belongs to the next
        # connection.
        owners: dict[int, list[str]] = {end.descriptor: [] for end in ended}
        for number, sessions in owners.items():
            if (owner := self._peer_of.pop(number, None)) is not None:
                sessions.append(owner.session)
        known = {descriptor for descriptor, sessions in owners.items() if sessions}
        turns: dict[_Sender, int] = {}
        turns_of_old: dict[bytes, int] = {}  # of senders with an older ZMTP, which has no descriptors, by name
        receive = self._socket.recv
        allowed = self._drain_limit
        while allowed > 0:
            allowed -= 1
            try:
                name = receive(_NOW)
            except zmq.Again:
                self._turns, self._ignored = {}, set()
                break
            body, more = receive(_NOW, copy=False, track=False), 0
            while body.more:  # messages are received completely, so the other parts are here
                body, more = receive(_NOW, copy=False, track=False), more + 1
            descriptor = source_of(body)
            if descriptor is None:
                yield Garbled("", OLD_ZMTP, UNKNOWN)
                turn = turns_of_old[name] = turns_of_old.get(name, 0) + 1
            else:
                sender = descriptor, name
                if sender in self._ignored:
                    turns[sender] = turns.get(sender, 0) + 1
                    continue
                yield from self._read(name, body, more, descriptor, owners)
                taken = 1 + len(body) // BYTES_A_TURN
                if (relay := self._relayed.relays.get(descriptor)) is not None:
                    taken = max(taken, self._relayed.turns(descriptor))
                    allowed -= relay.messages
                turn = turns[sender] = turns.get(sender, 0) + taken
            if turn >= PEER_TURNS:
                yield from self._cut_floods(turns)
                break  # the others have had their turn; the rest follows at the next drain
        else:
            yield from self._cut_floods(turns)
        self._gate.heard({descriptor for descriptor, _ in turns})
        for end in ended:
            self._ignored.update(one for one, had in turns.items() if one[0] == end.descriptor and had >= MANY_TURNS)
            left = owners[end.descriptor]
            is_the_next_ones = end.descriptor not in known and len(left) == 1 and self._gate.stands(end.descriptor)
            known.discard(end.descriptor)
            if left and not is_the_next_ones:
                yield from self._close(left.pop(0), end.descriptor, still_used=bool(left))
            elif not end.is_counted:
                yield Rejected(end.address, Rejection.SILENT)
        displaced, self._displaced = self._displaced, []
        yield from (ConnectionLost(peer) for peer in displaced if self._descriptor(peer) is None)

    def _cut_floods(self, turns: dict[_Sender, int]) -> Iterator[Rejected]:
        """Close connections that have used too many turns and still have unread messages."""
        self._turns = {one: self._turns.get(one, 0) + had for one, had in turns.items() if had >= MANY_TURNS}
        for sender, had in self._turns.items():
            descriptor, name = sender
            owner = self._peer_of.get(descriptor)
            if had >= FLOOD_TURNS and (owner is None or owner.name == name):
                self._turns[sender] = 0
                self._ignored.add(sender)
                yield from self._gate.turn_away(descriptor)

    def _close(self, peer: str, descriptor: int, *, still_used: bool) -> Iterator[ConnectionLost]:
        if not still_used:
            self._peer_of.pop(descriptor, None)
            self._forget_relay(descriptor)
        if self._descriptor_of.get(peer) == descriptor:
            del self._descriptor_of[peer]
            yield ConnectionLost(peer)

    def _read(
        self, name: bytes, body: zmq.Frame, more: int, descriptor: int, owners: dict[int, list[str]]
    ) -> list[Incoming]:
        peer = self._peer_of.get(descriptor)
        if peer is None or name != peer.name or self._descriptor_of.get(peer.session) != descriptor:
            if problem := self._problem_of_name(name, body):
                return [Garbled("", problem, self._gate.address_of(descriptor))]
            if not _PEER.fullmatch(name):  # ZeroMQ has given its name to another connection
                return []
            if descriptor not in owners and self._gate.is_over(descriptor):
                return []  # more messages than one drain takes were left of a closed connection
            peer = self._meet(name, descriptor, peer)
        if owners and descriptor in owners and owners[descriptor][-1:] != [peer.session]:
            owners[descriptor].append(peer.session)
        if more:
            address = self._gate.address_of(descriptor)
            return [Garbled(peer.session, f"{more + 1} frames instead of one message", address)]
        packed = body.bytes
        if packed == peer.said:
            assert peer.arrived is not None, "the heartbeat was stored"
            return [peer.arrived]
        if name.startswith(RELAY_PREFIX) and self._takes_relays:
            return self._read_relayed(name, packed, descriptor)
        return [self._decoded(peer, peer.session, packed, descriptor)]

    def _decoded(self, memory: _Peer | Attachment, session: str, packed: bytes, descriptor: int) -> Arrived | Garbled:
        """Decode a message. A heartbeat is stored in ``memory``."""
        try:
            arrived = Arrived(session, self._wire.unpack(packed, MAX_INCOMING_BYTES))
        except ProtocolError as error:
            return self._garbled(session, packed, error, self._gate.address_of(descriptor))
        if type(arrived.message) is Heartbeat and len(packed) <= MAX_REPEATED_BYTES:
            memory.said, memory.arrived = packed, arrived
        return arrived

    def _read_relayed(self, name: bytes, packed: bytes, descriptor: int) -> list[Incoming]:
        """Return the messages in a relay's frame as if each rank had its own connection."""
        found: list[Incoming] = []
        try:
            for part in self._relayed.take(name, descriptor, packed):
                match part:
                    case Carried(session, body, attachment):
                        self._descriptor_of.pop(session, None)  # it had a connection of its own before
                        is_repeated = body == attachment.said
                        found.append(
                            attachment.arrived if is_repeated else self._decoded(attachment, session, body, descriptor)
                        )
                    case Dropped(problem):
                        found.append(Garbled("", problem, self._gate.address_of(descriptor)))
                    case Detached(session):
                        found.append(ConnectionLost(session))
        except ProtocolError as error:
            found.append(Garbled("", f"a relay's frame is {error}", self._gate.address_of(descriptor)))
        return found

    def _meet(self, name: bytes, descriptor: int, before: _Peer | None) -> _Peer:
        """Register a peer that sends over this connection for the first time, or has returned to it."""
        peer = _Peer(name, name.decode("ascii"))
        if before is not None and before.name != name and self._descriptor_of.get(before.session) == descriptor:
            del self._descriptor_of[before.session]
            self._displaced.append(before.session)
        self._forget_relay(descriptor, still=name)
        self._relayed.leave(peer.session, is_back=True)
        self._peer_of[descriptor] = peer
        self._descriptor_of[peer.session] = descriptor
        return peer

    def _forget_relay(self, descriptor: int, still: bytes = b"") -> None:
        """Forget the ranks of a relay whose connection was closed.

        Their connections do not count as closed; each rank's lease decides.
        """
        self._relayed.drop(descriptor, still)

    def _problem_of_name(self, name: bytes, body: zmq.Frame) -> str:
        """Return why a connection may not have this name, or "".

        With a secret, relays have their own keys.
        """
        if not _PEER.fullmatch(name):
            return "" if _was_renamed(body) else f"its name is {name[:40]!r}, expected a session"
        is_relays = self._has_keys and body.get("User-Id") == RELAYS_ID
        if not self._has_keys or is_relays == name.startswith(RELAY_PREFIX):
            return ""
        if is_relays:
            return "a relay uses a worker's session as its own; its messages were dropped"
        return "a worker sends as a relay; its messages were dropped"

    @staticmethod
    def _garbled(session: str, packed: bytes, error: ProtocolError, address: str) -> Garbled:
        speaks = messages.protocol_of(packed)
        if speaks in (None, PROTOCOL):
            return Garbled(session, str(error), address)
        return Garbled(session, messages.protocol_difference("the worker", speaks), address, other_protocol=True)

    @property
    def connections(self) -> int:
        """Return the number of connections, including those that are not peers yet."""
        return self._gate.connections

    def address_of(self, peer: str) -> str:
        """Return the IP address from which the peer's connection comes."""
        descriptor = self._descriptor(peer)
        return UNKNOWN if descriptor is None else self._gate.address_of(descriptor)

    def _descriptor(self, peer: str) -> int | None:
        """Return the descriptor of the connection over which the peer sends: its own, or a relay's."""
        return self._descriptor_of.get(peer) or self._relayed.descriptor_of(peer)

    def send_frames(self, peer: str, *frames: bytes) -> bool:
        """Send a message of several frames. If the peer is gone, drop it and return False."""
        return self._send(peer.encode("ascii"), *frames)

    def send(self, peer: str, message: object) -> bool:
        """Send a message. If the peer is gone, drop it and return False.

        The scheduler repeats it when the peer returns.
        """
        packed = self._pack(message)
        if type(message) in WELCOMES and (descriptor := self._descriptor(peer)) is not None:
            self._gate.settle(descriptor)
        if peer in self._relayed:
            self._relayed.add(peer, packed, packed if isinstance(packed, bytes) else packed.bytes)
            return True
        return self._send(peer.encode("ascii"), packed)

    def flush(self) -> None:
        """Send the queued messages to ranks behind relays. ``wait`` does this, too."""
        self._relayed.flush()

    def _send(self, name: bytes, *frames: bytes | zmq.Frame) -> bool:
        try:
            self._send_frame(name, _MORE)
            for frame in frames[:-1]:
                self._send_frame(frame, _MORE)
            self._send_frame(frames[-1], _NOW)
        except zmq.Again:
            return True  # the queue is full: a peer that does not read recovers with its next heartbeat, or is lost
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _pack(self, message: object) -> bytes | zmq.Frame:
        kind = type(message)
        if kind not in TOLD_ALIKE:
            return self._wire.pack(message)
        last = self._told.get(kind)
        if last is not None and (last[0] is message or last[0] == message):
            return last[1]
        packed = self._wire.pack(message)
        ready = packed if len(packed) < SHARED_BYTES else zmq.Frame(packed)
        self._told[kind] = (message, ready)
        return ready

    def close(self) -> None:
        """Close after all messages are sent, or a second later at most."""
        self._relayed.flush()
        self._guard.close()
        self._gate.close()
        self._context.term()
        self._waker.close()


def _was_renamed(body: zmq.Frame) -> bool:
    """Return whether ZeroMQ has renamed the connection because its peer now uses another one."""
    try:
        introduced_as = str(body.get("Identity"))
    except (zmq.ZMQError, UnicodeDecodeError):
        return False
    return _PEER.fullmatch(introduced_as.encode()) is not None
