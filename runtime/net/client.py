"""The worker's connection to the scheduler: one DEALER that reconnects by itself and says when it does.

``IMMEDIATE`` keeps nothing queued for a connection that does not stand: what is said while the scheduler is away is
dropped, and the agent says everything that still matters when the connection is back.

A handshake that fails says little: whoever has another secret, or none, sees its connection closed, and so does whoever
comes while the scheduler is flooded. So when the other end has closed it ``ASK_AFTER`` times in a row it is asked for
its greeting. A greeting of another mechanism is a verdict. One of ours is none yet: the connection that it came over is
kept, and only who closes ``REFUSED_AFTER`` younger ones while that one stands has refused our secret (``net.greeting``
says why). Whatever else is closed before anything was agreed on is tried again. Where ZeroMQ gives up for good it is
told to try again, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from runtime.core import messages
from runtime.errors import ProtocolError
from runtime.net.address import endpoint
from runtime.net.curve import ClusterKeys
from runtime.net.greeting import Greeted, greet
from runtime.net.monitor import EVENT, STOPPED, close_both
from runtime.net.waker import Waker

MAX_INCOMING_BYTES = 256 << 20  # an address map of ten thousand members
RECONNECT_MS = 100
RETRY_S = 1.0  # after a handshake that ZeroMQ does not try again
ASK_AFTER = 3
ASK_TIMEOUT_S = 1.0
REFUSED_AFTER = 2  # a scheduler that is killed closes all connections, and for a moment one of them still stands
_FINAL = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_CRYPTOGRAPHIC = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | _FINAL
    | STOPPED
)


@dataclass(frozen=True, slots=True)
class Up:
    """The connection stands; the scheduler knows nothing of us yet."""


@dataclass(frozen=True, slots=True)
class Down:
    """The connection is gone."""


@dataclass(frozen=True, slots=True)
class ShutOut:
    """Whoever listens there does not share our secret; said once, until a handshake has succeeded."""

    text: str  # what may differ, and what to do


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """Our connections are closed, and not for what they say; said once, until a handshake has succeeded."""

    text: str


@dataclass(frozen=True, slots=True)
class Got:
    """A message came in."""

    message: Any


class Client:
    """One connection. Not thread-safe, but for ``wake``.

    Args:
        host: name or address of the scheduler's host.
        port: its TCP port.
        identity: this connection's name at the scheduler: the session, ASCII.
        silence_s: after this long without ZeroMQ's own heartbeat the connection counts as closed.
        keys: the cluster's keys; None speaks without authentication and encryption.
    """

    def __init__(
        self, host: str, port: int, identity: str, silence_s: float, *, keys: ClusterKeys | None = None
    ) -> None:
        self._host, self._port, self._has_secret = host, port, keys is not None
        self._handshake_s = max(1.0, silence_s)
        self._connected_at = 0.0
        self._failures = 0  # in a row
        self._said: set[type[ShutOut | TurnedAway]] = set()
        self._witness: Greeted | None = None
        self._is_younger = False  # the connection that is being made, than the witness
        self._refusals = 0  # of younger ones
        self._retry_at: float | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, identity.encode("ascii"))
        for option, value in {
            zmq.LINGER: 500,
            zmq.IPV6: 1,
            zmq.IMMEDIATE: 1,
            zmq.MAXMSGSIZE: MAX_INCOMING_BYTES,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.HANDSHAKE_IVL: int(self._handshake_s * 1000),
            zmq.HEARTBEAT_IVL: max(1, int(silence_s * 1000 / 3)),
            zmq.HEARTBEAT_TIMEOUT: int(silence_s * 1000),
        }.items():
            self._socket.setsockopt(option, value)
        if keys is not None:
            self._socket.curve_serverkey = keys.scheduler.public
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.worker.public, keys.worker.secret
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        self._waker = Waker()
        for source in (self._socket, self._monitor, self._waker.descriptor):
            self._poller.register(source, zmq.POLLIN)
        self._endpoint = endpoint(host, port)
        self._socket.connect(self._endpoint)

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something has come in, ``wake`` was called, or the time is over."""
        if self._retry_at is not None:
            left_s = max(0.0, self._retry_at - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        ready = self._poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999)))
        if any(source == self._waker.descriptor for source, _ in ready):
            self._waker.rest()

    def wake(self) -> None:
        """Make ``wait`` return; callable from any thread."""
        self._waker.wake()

    def drain(self) -> Iterator[Up | Down | ShutOut | TurnedAway | Got]:
        """What has come in by now, in order: connection events, then messages."""
        began_with = self._witness
        while True:
            try:
                event, value = EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                break
            # Events were queued while a witness was looked for: what connected then may be older than it is.
            yield from self._take(event, value, is_after_witness=self._witness is began_with)
        if self._retry_at is not None and self._retry_at <= time.monotonic():
            self._retry_at = None
            self._socket.disconnect(self._endpoint)  # else it counts as connected, and nothing is done
            self._socket.connect(self._endpoint)
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield Got(messages.SCHEMA.unpack(frames[-1], MAX_INCOMING_BYTES))
            except ProtocolError:
                continue  # not our protocol: as if nothing had been said, and patience runs on

    def _take(self, event: int, value: int, *, is_after_witness: bool) -> Iterator[Up | Down | ShutOut | TurnedAway]:
        if event == zmq.EVENT_CONNECTED:
            self._connected_at = time.monotonic()
            self._is_younger = is_after_witness  # where there is a witness: one that comes sets it back
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures, self._said = 0, set()
            self._dismiss()
            yield Up()
        elif event == zmq.EVENT_DISCONNECTED:
            yield Down()
        else:
            told = self._handshake_failed(event, value)
            if told is not None and type(told) not in self._said:
                self._said.add(type(told))
                yield told

    def _handshake_failed(self, event: int, value: int) -> ShutOut | TurnedAway | None:
        is_final = bool(event & _FINAL)
        if is_final:  # the end of this connection for ZeroMQ, which a scheduler started anew may fix
            self._retry_at = time.monotonic() + RETRY_S
        elif time.monotonic() - self._connected_at > self._handshake_s / 2:
            return None  # nobody closed it: whoever listens there is stopped, or busy
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
        ours = "CURVE" if self._has_secret else "NULL"
        greeted = greet(self._host, self._port, ours, ASK_TIMEOUT_S)
        if greeted is None:
            return self._turned_away()
        if greeted.mechanism == ours == "CURVE":
            self._witness, self._refusals, self._is_younger = greeted, 0, False
            return None
        greeted.close()
        is_ours_to_mend = {greeted.mechanism, ours} == {"CURVE", "NULL"}
        return ShutOut(self._explain(greeted.mechanism)) if is_ours_to_mend else self._turned_away()

    def _dismiss(self) -> None:
        """The witness has seen enough."""
        if self._witness is not None:
            self._witness.close()
        self._witness = None

    def _turned_away(self) -> TurnedAway:
        return TurnedAway(
            f"whoever listens at {self._host}, port {self._port} (SCHED_HOST, SCHED_PORT), closes connections before "
            "anything is agreed on: it has too many of them, or is no scheduler"
        )

    def _explain(self, mechanism: str) -> str:
        there = f"the scheduler at {self._host}, port {self._port} (SCHED_HOST, SCHED_PORT)"
        if mechanism == "CURVE" and self._has_secret:
            return (
                f"{there} refuses this process's secret. Fix: compare CLUSTER_SECRET (or the file that "
                "CLUSTER_SECRET_FILE names) here and in the scheduler's environment: they must be the same"
            )
        if mechanism == "CURVE":
            return (
                f"{there} asks for a secret, and this process has none. Fix: export CLUSTER_SECRET, or "
                "CLUSTER_SECRET_FILE=<the file with it>, as the scheduler has it"
            )
        return (
            f"{there} was started without a secret, and this process has one. Fix: start the scheduler with the "
            "same CLUSTER_SECRET or CLUSTER_SECRET_FILE, or unset both here"
        )

    def send(self, message: object) -> None:
        """Send, or drop where the connection does not stand."""
        try:
            self._socket.send(messages.SCHEMA.pack(message), zmq.NOBLOCK)
        except zmq.Again:
            return  # said again when the connection is back

    def close(self) -> None:
        """Close after what was sent is out, at most half a second later."""
        self._dismiss()
        close_both(self._socket, self._monitor)
        self._context.term()
        self._waker.close()
