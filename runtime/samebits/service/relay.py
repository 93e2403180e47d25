"""Run a relay: one connection to the scheduler for all ranks of a host, or for the relays of many hosts.

A relay reads only the names of the connections, and treats relays that connect to it like ranks. It packs its ranks'
messages into frames, and copies the scheduler's messages to the ranks (``net.relaying``). It has no state that outlives
a connection, so it may be killed, stopped and restarted at any time: its ranks continue training and connect elsewhere.

The scheduler may tell a relay to attach to another one (``net.relay_tree``). The relay tries that with a second
connection, and keeps the first until the scheduler has answered through the second.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence

import zmq

from samebits.config import Settings, inherited_sockets, is_loopback, require_secret
from samebits.errors import ProtocolError, SettingsError, UsageError
from samebits.net.address import listening, taken_over
from samebits.net.channel import ABOUT, ATTACH_AGAIN, DATA, HELLO, MAY_WAIT, MOVE, UNREACHABLE
from samebits.net.client import Client, Down, Got, PassedOver, ShutOut, TurnedAway, Up
from samebits.net.curve import cluster_keys
from samebits.net.relay_tree import MAX_AVOIDED, RelayNote
from samebits.net.relaying import (
    MAX_BATCH,
    MAX_NESTED_BYTES,
    MAX_RANKS,
    MAX_RELAYED_BYTES,
    NOTE,
    RELAY_PREFIX,
    Downward,
    RelayedMessage,
    RelayWire,
    Upward,
    address_in,
)
from samebits.net.server import Arrived, ConnectionLost, Garbled, Rejected, Server
from samebits.net.sockets import Waker
from samebits.printable import counted
from samebits.scheduler_hosts import SchedulerAddress
from samebits.service import log
from samebits.service.scheduling.unknown_peers import UnknownPeers

HOLD_S = 0.25
"""The longest time for which messages that may wait are held back, so that they share a frame."""
HOLDS_A_TIMEOUT = 20
"""That time is at most NODE_TIMEOUT divided by this, so that no lease depends on it."""
LOOK_S = 1.0  # how often silent connections are checked, if nothing arrives
CONNECTIONS_A_RANK = 2
OVERHEAD_BYTES = 80
"""The most bytes that a message takes in a frame besides its body: the session, and msgpack's lengths."""
SEAL_BYTES = 64
"""Room for the counter and hash with which a frame is sealed for an inner relay."""


class Sealed:
    """The encoding between a relay and its ranks, which leaves messages unchanged."""

    def pack(self, value: object) -> bytes:
        """Return the bytes unchanged."""
        assert isinstance(value, bytes), "a relay sends only bytes"
        return value

    def unpack(self, packed: bytes, max_bytes: int) -> bytes:
        """Return the bytes unchanged.

        Raises:
            ProtocolError: the bytes do not fit into a frame.
        """
        most = min(max_bytes, MAX_NESTED_BYTES)
        if len(packed) > most:
            raise ProtocolError(f"{len(packed)} bytes, at most {most} are accepted")
        return packed


class RelayService:
    """The relay of one host, or the inner relay of several.

    Args:
        settings: SCHED_HOST names the relay's own address, perhaps an inner relay's, and the scheduler's.
        linger_s: ``serve`` returns once no worker was connected for so long, after the first one; None: never. Without
            a scheduler it returns after NODE_TIMEOUT, if that is shorter.

    Attributes:
        strangers: peers that were refused.

    Raises:
        UsageError: SCHED_HOST names no relay.
        ListenError: the relay cannot listen on its address.
        SettingsError: CLUSTER_SECRET_FILE contains no usable secret, or a secret is required to listen there.
    """

    def __init__(self, settings: Settings, linger_s: float | None = None) -> None:
        if settings.relay is None:
            raise UsageError(
                "SCHED_HOST names no relay: expected the relay's own address and then the scheduler's host. Fix: "
                f"export SCHED_HOST=relay:127.0.0.1:8119,{settings.sched_host} here and in this host's workers"
            )
        addresses, port = listening(settings.relay.host, settings.relay.port)
        require_secret(addresses, settings)
        keys = cluster_keys(settings.cluster_secret, settings.cluster_secret_file)
        self._stops = False
        self._waker = Waker()
        self._below = Server(
            addresses,
            port,
            settings.node_timeout_s,
            keys=None if keys is None else keys.below_relay(),
            wire=Sealed(),
            takes_relays=False,
            most_connections=CONNECTIONS_A_RANK * MAX_RANKS,
            inherited=taken_over(inherited_sockets()),
        )
        self._settings, self._port = settings, port
        self._name = f"{RELAY_PREFIX.decode()}{uuid.uuid4().hex}"
        self._keys_above = None if keys is None else keys.above_relay()
        self._above = self._client(settings.inner_relay)
        self._trial: tuple[SchedulerAddress, Client] | None = None  # where the scheduler has told this relay to attach
        self._avoids: tuple[str, ...] = ()  # addresses that could not be reached since the last direct connection
        self._outside = f"{settings.relay}"  # where other relays attach
        self._is_everywhere = settings.relay.host in ("0.0.0.0", "::")
        self._has_outside = not self._is_everywhere and not is_loopback(settings.relay.host)
        self._where, self._inner = f"{settings.relay}", settings.inner_relay
        self._ranks: set[str] = set()
        self._relays_stated, self._relays_changed = 0, False
        self._said = ""  # the last line about the scheduler
        self._messages: list[tuple[str, bytes]] = []  # for the next frame
        self._bytes = 0
        self._hold_s = min(HOLD_S, settings.node_timeout_s / HOLDS_A_TIMEOUT)
        self._send_by = math.inf  # when the next frame is due
        self.strangers = UnknownPeers()
        self._is_up = False
        self._linger_s = math.inf if linger_s is None else linger_s
        self._node_timeout_s = settings.node_timeout_s
        self._unused_since: float | None = None  # no worker is connected, but some were

    def _client(self, relay: SchedulerAddress | None, *, is_trial: bool = False) -> Client:
        return Client(
            self._settings.sched_host,
            self._settings.sched_port,
            self._name,
            self._settings.node_timeout_s,
            keys=self._keys_above,
            relay=relay,
            wire=RelayWire(),
            most_relayed_bytes=MAX_NESTED_BYTES - SEAL_BYTES,
            is_trial=is_trial,
        )

    def stop(self) -> None:
        """Make ``serve`` return. May be called from any thread and from a signal handler."""
        self._stops = True
        self._waker.wake()

    def serve(self) -> None:
        """Relay messages until ``stop`` is called."""
        log.say(f"relay for this host's workers, listening on {self._where}")
        try:
            while not self._stops:
                self._sleep()
                self._try()
                self._carry_down()
                self._carry_up()
                if self._is_unused():
                    log.say("no worker is connected any more: this relay exits")
                    break
        finally:
            self._end_trial()
            self._above.close()
            self._below.close()
            self._waker.close()

    def _is_unused(self) -> bool:
        if self._ranks or self._unused_since is None or self._linger_s == math.inf:
            return False
        linger_s = self._linger_s if self._is_up else min(self._linger_s, self._node_timeout_s)
        return time.monotonic() - self._unused_since >= linger_s

    def _sleep(self) -> None:
        poller = zmq.Poller()
        above = [self._above] if self._trial is None else [self._above, self._trial[1]]
        for source in (*self._below.sources, *(one for each in above for one in each.sources), self._waker.descriptor):
            poller.register(source, zmq.POLLIN)
        pause_s: float | None = min(LOOK_S, max(0.0, self._send_by - time.monotonic()))
        for one in above:
            pause_s = one.pause_s(pause_s)
        poller.poll(0 if pause_s is None else int(pause_s * 1000 + 0.999))
        self._below.wait(0)
        for one in above:
            one.wait(0)

    # ---- the place in the tree

    def _report(self) -> None:
        """State to the scheduler where other relays can attach, and what this one could not reach."""
        local = self._above.local_host  # by which other hosts reach this one, too
        if not self._has_outside and local is not None and not is_loopback(local):
            self._has_outside = True
            can_listen = self._is_everywhere or (
                _may_listen(local, self._settings) and self._below.also_listen(local, self._port)
            )
            self._outside = f"{SchedulerAddress(local, self._port)}" if can_listen else ""
        self._relays_stated = self._count_relays()
        note = ABOUT + NOTE.pack(RelayNote(self._outside, self._relays_stated, self._avoids))
        self._above.send(Upward(((self._name, note),)))

    def _count_relays(self) -> int:
        return sum(one.startswith(RELAY_PREFIX.decode()) for one in self._ranks)

    def _take_order(self, address: SchedulerAddress) -> None:
        """Try to attach to another relay, as the scheduler has told this one to."""
        self._end_trial()
        self._trial = address, self._client(address, is_trial=True)

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._trial[1].close()
        self._trial = None

    def _try(self) -> None:
        """Move to the other relay once the scheduler has answered through it; stay if it cannot be reached."""
        if self._trial is None:
            return
        address, client = self._trial
        if any(isinstance(one, Up) for one in client.drain()):
            self._above.close()
            self._trial, self._above, self._inner = None, client, address
            self._messages, self._bytes, self._send_by = [], 0, math.inf
            self._is_reachable()
        elif client.has_failed:
            self._end_trial()
            log.warn(f"the relay at {address} cannot be reached from here; this relay keeps its connection")
            self._avoids = (*self._avoids, f"{address}")[-MAX_AVOIDED:]
            if self._is_up:
                self._report()

    def _is_reachable(self) -> None:
        """Attach, and let the ranks attach again, because they belong to a connection."""
        self._is_up = True
        if (text := f"the scheduler is reachable{self._way()}") != self._said:
            log.say(text)  # without workers, an older scheduler closes the connection every few seconds
            self._said = text
        self._report()
        self._tell(self._ranks, ATTACH_AGAIN)

    def _carry_down(self) -> None:
        for incoming in self._above.drain():
            match incoming:
                case Up():
                    self._is_reachable()
                case Down() if self._is_up:
                    self._is_up = False
                    self._end_trial()  # an order is part of a connection
                    self._avoids = ()
                    self._messages, self._bytes, self._send_by = [], 0, math.inf
                    if self._ranks:
                        log.warn(f"the scheduler is unreachable; notifying {counted(len(self._ranks), 'worker')}")
                        self._said = ""
                    self._tell(self._ranks, UNREACHABLE)
                case Got(Downward(deliveries, detached)):
                    for delivery in deliveries:
                        self._deliver(delivery)
                    self._tell(detached, ATTACH_AGAIN)
                case ShutOut(text) | TurnedAway(text) | PassedOver(text):
                    log.warn(text)

    def _way(self) -> str:
        """Return how the scheduler is reached, or "" if there is only one way."""
        if self._inner is None:
            return ""
        return f" through the relay at {self._inner}" if self._above.address == self._inner else " directly"

    def _deliver(self, delivery: RelayedMessage) -> None:
        """Send a message to each rank that it names. Without stamps, it is a welcome, or an order to this relay."""
        if delivery.sessions == (self._name,) and delivery.body[:1] == MOVE:
            address = address_in(delivery.body[1:].decode(errors="replace"))
            if address is not None:
                self._take_order(address)
        elif not delivery.stamps:
            self._tell(delivery.sessions, delivery.body)
        else:
            for session, stamp in zip(delivery.sessions, delivery.stamps, strict=True):
                self._below.send_frames(session, DATA + stamp, delivery.body)

    def _tell(self, ranks: Iterable[str], body: bytes) -> None:
        for session in ranks:
            self._below.send(session, body)

    def _carry_up(self) -> None:
        closed: list[str] = []
        is_urgent = False
        for incoming in self._below.drain():
            match incoming:
                case Arrived(session, _) if session == self._name:
                    self.strangers.garbled(self._below.address_of(session), "its name is this relay's own")
                case Arrived(session, sealed):
                    if session not in self._ranks:
                        self._ranks.add(session)
                        self._relays_changed = True
                    if self._is_up:
                        self._messages.append((session, sealed))
                        self._bytes += len(sealed)
                        is_urgent = is_urgent or sealed[:1] != MAY_WAIT
                    elif sealed[:1] == HELLO:
                        self._below.send(session, UNREACHABLE)
                case ConnectionLost(session):
                    self._ranks.discard(session)
                    self._relays_changed = True
                    closed.append(session)
                    self._unused_since = time.monotonic()
                case Rejected(address, why):
                    self.strangers.rejected(address, why)
                case Garbled(_, problem, address):
                    self.strangers.garbled(address, problem)
        if self._is_up and self._relays_changed and self._count_relays() != self._relays_stated:
            self._report()
        self._relays_changed = False
        for note in self.strangers.lines(time.monotonic()):
            log.warn(note.text)
        if closed:
            is_urgent = True
        now = time.monotonic()
        if is_urgent or len(self._messages) >= MAX_BATCH or self._bytes >= MAX_RELAYED_BYTES or self._send_by <= now:
            for frame in frames_of(self._messages, closed):
                self._above.send(frame, may_wait=not is_urgent)
            self._messages, self._bytes, self._send_by = [], 0, math.inf
        elif self._messages and self._send_by == math.inf:
            self._send_by = now + self._hold_s


def _may_listen(address: str, settings: Settings) -> bool:
    try:
        require_secret([address], settings)
    except SettingsError:
        return False
    return True


def frames_of(messages: Sequence[tuple[str, bytes]], closed: Sequence[str]) -> Iterator[Upward]:
    """Pack messages, and then closed connections, into as few frames as their limits allow."""
    first, size = 0, 0
    for number, (_, sealed) in enumerate(messages):
        needs = len(sealed) + OVERHEAD_BYTES
        if number - first == MAX_BATCH or size + needs > MAX_RELAYED_BYTES:
            yield Upward(tuple(messages[first:number]))
            first, size = number, 0
        size += needs
    last = tuple(messages[first:])
    for at in range(0, max(len(closed), bool(last)), MAX_BATCH):
        yield Upward(last, tuple(closed[at : at + MAX_BATCH]))
        last = ()
