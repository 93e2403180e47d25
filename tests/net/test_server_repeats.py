"""Repeated messages and broadcasts are encoded once; a connection that sends nothing is closed."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator

import pytest
import zmq

from samebits.core import messages
from samebits.core.messages import Activity, AddressMap, Credential, Heartbeat, RoundId, RoundOpened, StopJob
from samebits.core.values import MAX_ID_CHARS, MAX_NODE_CHARS, replace
from samebits.net.address import endpoint
from samebits.net.client import Got
from samebits.net.server import MAX_REPEATED_BYTES, SHARED_BYTES, Arrived, ConnectionLost, Garbled
from tests.hostile.attackers import bare_dealer, hangs_up
from tests.net.ends import PATIENCE_S, Ends, until

BEAT = Heartbeat(Credential("job", "3", "session-a", 2), 1, Activity.TRAINING, 4, RoundId(1, 2), 100)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def said(ends: Ends, *items: object) -> list[Arrived]:
    """Return what the server hears of these messages of one client."""
    client = ends.clients[0] if ends.clients else ends.connected("session-a")
    for item in (*items, StopJob("the end")):
        client.send(item)
    seen = until(ends.heard, lambda item: item == Arrived("session-a", StopJob("the end")))
    return [item for item in seen if isinstance(item, Arrived)][:-1]


def test_repeated_message_is_the_same_object(ends: Ends) -> None:
    first, second = said(ends, BEAT, BEAT)
    assert first == Arrived("session-a", BEAT)
    assert second is first


def test_heartbeat_with_another_step_is_heard_with_its_step(ends: Ends) -> None:
    steps = [100, 101, 127, 128, 65_536, 5]
    heard = said(ends, *(replace(BEAT, step=step) for step in steps))
    assert heard == [Arrived("session-a", replace(BEAT, step=step)) for step in steps]


def test_changed_message_is_decoded_again(ends: Ends) -> None:
    changed = [BEAT, replace(BEAT, activity=Activity.WAITING), replace(BEAT, round=None), BEAT]
    assert [item.message for item in said(ends, *changed)] == changed


def test_strangers_message_is_not_cached_however_often_it_is_sent(ends: Ends) -> None:
    long = replace(BEAT, sender=replace(BEAT.sender, job="节" * MAX_ID_CHARS, node="点" * MAX_NODE_CHARS))
    assert len(messages.SCHEMA.pack(long)) > MAX_REPEATED_BYTES
    first, second = said(ends, long, long)
    assert first == second and first is not second


def test_garbage_after_a_known_prefix_is_rejected(ends: Ends) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.ROUTING_ID, b"session-a")
        peer.linger = 0
        peer.connect(endpoint("127.0.0.1", ends.port))
        packed = messages.SCHEMA.pack(BEAT)
        for body in (packed, packed[:-1], packed + b"\x01", packed[:-1] + b"\xc3"):
            peer.send(body)
        peer.send_multipart([packed, b"more"])
        seen: list[object] = []
        while len(seen) < 5:
            seen += ends.heard()
    assert [type(item) for item in seen] == [Arrived] + [Garbled] * 4


def test_broadcast_is_packed_once_and_sent_to_each(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = [ends.connected(f"session-{number}") for number in range(3)]
    for client in clients:
        client.send(StopJob("here"))
        until(ends.heard, lambda item: isinstance(item, Arrived))
    packed: list[object] = []
    pack = messages.SCHEMA.pack
    monkeypatch.setattr(messages.SCHEMA, "pack", lambda message: packed.append(message) or pack(message))
    blobs = tuple(bytes([number % 256]) * 50 for number in range(2 * SHARED_BYTES // 50))
    told = [
        RoundOpened("job-1", 1, 1, RoundId(1, 1), "why", ""),
        AddressMap("job-1", 1, 1, blobs),
        RoundOpened("job-1", 1, 2, RoundId(1, 1), "", ""),
    ]
    for message in told:
        for number in range(3):
            ends.server.send(f"session-{number}", copy.copy(message))
    assert packed == told
    for client in clients:
        heard: list[object] = []
        while len(heard) < len(told):
            heard += until(ends.got(client), lambda item: isinstance(item, Got))
        assert heard == [Got(message) for message in told]


def test_connection_without_a_byte_is_closed_and_one_with_heartbeats_is_not() -> None:
    """A proxy may hold it open for a worker that is gone. A live worker sends at least ZeroMQ's heartbeats."""
    ends = Ends(silence_s=3.0)  # the handshake has that long, too
    try:
        ends.connected("beats").send(StopJob("beats"))
        until(ends.heard, lambda item: isinstance(item, Arrived))
        with bare_dealer(ends.port, b"x") as silent:
            silent.sendall(b"\0" + bytes([len(body := messages.SCHEMA.pack(StopJob("silent")))]) + body)
            seen = until(ends.heard, lambda item: item == ConnectionLost("x"))
            assert hangs_up(silent, PATIENCE_S)
        assert Arrived("x", StopJob("silent")) in seen
        assert ConnectionLost("beats") not in seen
        assert ends.server.connections == 1
    finally:
        ends.close()


def test_server_that_was_paused_takes_no_peer_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(silence_s=30.0)
    try:
        with bare_dealer(ends.port, b"x") as connection:
            while ends.server.connections == 0:
                ends.heard()
            later = time.monotonic() + 3600.0
            monkeypatch.setattr("samebits.net.gate.time.monotonic", lambda: later)
            for _ in range(5):
                ends.heard()
            monkeypatch.undo()
            assert not hangs_up(connection, 0.5)
    finally:
        ends.close()
