"""Bounds on what one peer costs the others: turns in a drain, table sizes, admission of connections."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from samebits.core import messages
from samebits.core.messages import Pending, StatusQuery, StopJob
from samebits.net import gate, server
from samebits.net.curve import derive_keys
from samebits.net.server import PEER_TURNS, Arrived, ConnectionLost, Garbled, Incoming, Rejected, Rejection
from tests.hostile.attackers import bare_dealer, dealers, half_open, hangs_up
from tests.net.ends import PATIENCE_S, Ends, until

ROOT = Path(__file__).resolve().parents[2]

ASKED = messages.SCHEMA.pack(StatusQuery(follow=False))
ATTEMPTS = 10
KEYS = derive_keys(b"correct-horse-battery-staple")


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_flooding_peer_does_not_keep_others_from_being_heard(ends: Ends) -> None:
    """A drain ends after PEER_TURNS of one peer, and includes every peer that has sent something by then."""
    with dealers(ends.port, [b"flood-1", b"flood-2"]) as flooders:
        for flooder in flooders:
            for _ in range(20_000):
                flooder.send(ASKED)
        honest = ends.connected("honest")
        assert not [item for item in ends.aside if isinstance(item, ConnectionLost)]
        honest.send(StopJob("honest"))
        drains: list[list[Incoming]] = []
        while not any(item == Arrived("honest", StopJob("honest")) for drain in drains for item in drain):
            ends.server.wait(PATIENCE_S)
            drains.append(list(ends.server.drain()))
            assert len(drains) < 10_000, "never heard"
        while drains[-1] and len(drains) < 50:
            ends.server.wait(PATIENCE_S)
            drains.append(list(ends.server.drain()))
        turns = [
            sum(isinstance(item, Arrived) and item.peer == name for item in drain)
            for drain in drains
            for name in ("flood-1", "flood-2")
        ]
        assert max(turns) == PEER_TURNS, "the flood was too small or endless"


def test_every_peer_is_heard_in_a_drain_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are judged after the drain, so a peer that has sent a message must not count as silent."""
    count, words = 40, 3
    monkeypatch.setattr(server, "DRAIN_LIMIT", count // 4)
    ends = Ends(most_connections=count)
    try:
        names: list[bytes | None] = [b"peer-%d" % number for number in range(count)]
        with dealers(ends.port, names) as peers:
            for _ in range(ATTEMPTS):  # on a busy machine not all of it may arrive in time
                for peer in peers:
                    for _ in range(words):
                        peer.send(ASKED)
                time.sleep(0.5)  # no peer is heard meanwhile
                ends.server.wait(PATIENCE_S)
                drained = [item.peer for item in ends.server.drain() if isinstance(item, Arrived)]
                if len({*drained}) == count:
                    break
                while any(isinstance(item, Arrived) for item in ends.server.drain()):
                    pass
            assert len({*drained}) == count, "a peer was left out each time"
            assert len(drained) < count * words, "the limit had no effect"
    finally:
        ends.close()


def test_rest_of_a_drain_is_not_lost(ends: Ends) -> None:
    client = ends.connected("talker")
    count = PEER_TURNS + 100  # the client's own queue holds 1000
    for number in range(count):
        client.send(StopJob(str(number)))
    seen = until(ends.heard, lambda item: item == Arrived("talker", StopJob(str(count - 1))))
    assert [item.message.by for item in seen if isinstance(item, Arrived)] == [str(number) for number in range(count)]


def test_tables_hold_only_connected_peers(ends: Ends) -> None:
    for turn in range(5):
        names: list[bytes | None] = [b"peer-%d-%d" % (turn, number) for number in range(40)]
        with dealers(ends.port, names) as peers:
            for peer in peers:
                for _ in range(PEER_TURNS + 1):
                    peer.send(ASKED)
            heard: list[object] = []
            while len({item.peer for item in heard if isinstance(item, Arrived)}) < len(names):
                heard += until(ends.heard, lambda item: isinstance(item, Arrived))
        while sum(isinstance(item, ConnectionLost) for item in heard) < len(names):
            heard += until(ends.heard, lambda item: isinstance(item, ConnectionLost))
    ends.heard()
    assert len(ends.server._descriptor_of) <= len(ends.server._peer_of) <= 40
    assert ends.server.connections == 0


def test_seated_peers_stay_and_the_oldest_others_are_closed() -> None:
    """Idling keeps no connection open: with the server crowded, a new one has the time of a handshake."""
    ends = Ends(most_connections=10)
    try:
        client = ends.connected("first")
        client.send(StatusQuery(follow=False))
        until(ends.heard, lambda item: item == Arrived("first", StatusQuery(follow=False)))
        ends.server.send("first", Pending("first", 1, 1, 4))
        with half_open(ends.port, 30) as connections:
            seen: list[object] = []
            while sum(item == Rejected("127.0.0.1", Rejection.TOO_MANY) for item in seen) < 21:
                seen += until(ends.heard, lambda item: isinstance(item, Rejected))
            assert sum(hangs_up(connection, 1) for connection in connections[:21]) == 21
            client.send(StatusQuery(follow=False))
            until(ends.heard, lambda item: item == Arrived("first", StatusQuery(follow=False)))
            client.send(StatusQuery(follow=True))
            until(ends.heard, lambda item: item == Arrived("first", StatusQuery(follow=True)))
    finally:
        ends.close()


def test_with_a_secret_one_message_is_enough_to_stay() -> None:
    ends = Ends(KEYS, most_connections=10)
    try:
        client = ends.connected("first", KEYS)
        client.send(StatusQuery(follow=False))
        until(ends.heard, lambda item: item == Arrived("first", StatusQuery(follow=False)))
        with half_open(ends.port, 30):
            seen: list[object] = []
            while sum(item == Rejected("127.0.0.1", Rejection.TOO_MANY) for item in seen) < 21:
                seen += until(ends.heard, lambda item: isinstance(item, Rejected))
            client.send(StatusQuery(follow=True))
            seen += until(ends.heard, lambda item: item == Arrived("first", StatusQuery(follow=True)))
        assert ConnectionLost("first") not in seen
    finally:
        ends.close()


def test_crowd_from_one_address_does_not_displace_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = iter([*["198.51.100.7"] * 9, *["192.0.2.1"] * 3, *["198.51.100.7"] * 18])
    monkeypatch.setattr(gate, "_peer_address", lambda _: next(homes))
    ends = Ends(most_connections=10)
    try:
        with half_open(ends.port, 9), half_open(ends.port, 3) as few, half_open(ends.port, 18):
            seen: list[object] = []
            while sum(isinstance(item, Rejected) for item in seen) < 20:
                seen += until(ends.heard, lambda item: isinstance(item, Rejected))
            assert {*seen} == {Rejected("198.51.100.7", Rejection.TOO_MANY)}
            assert not any(hangs_up(connection, 0.05) for connection in few)
    finally:
        ends.close()


def test_all_of_loopback_is_one_address() -> None:
    assert {gate._home_of(address) for address in ("127.0.0.1", "127.3.4.5", "::1")} == {"loopback"}
    assert gate._home_of("192.0.2.1") == "192.0.2.1"
    assert gate._home_of("fe80::1%eth0") == "fe80::1%eth0"
    assert gate._home_of(gate.UNKNOWN) == gate.UNKNOWN


def test_peer_without_a_message_is_closed_however_busy_its_connection_is() -> None:
    """ZeroMQ's own heartbeats do not count: a handshake and occasional pings once kept a connection forever."""
    ends = Ends(silence_s=1.0)
    try:
        with bare_dealer(ends.port, b"x") as connection:
            connection.settimeout(0.01)
            seen: list[object] = []
            deadline = time.monotonic() + PATIENCE_S
            while Rejected("127.0.0.1", Rejection.SILENT) not in seen:
                assert time.monotonic() < deadline, "never ended"
                with contextlib.suppress(OSError):  # it is closed, and the server reports that shortly after
                    connection.sendall(b"\x04\x07\x04PING\x00\x0a")  # RFC 37
                seen += ends.heard()
    finally:
        ends.close()


def test_handshake_time_is_limited() -> None:
    ends = Ends(silence_s=1.0)
    try:
        with half_open(ends.port, 5) as connections:
            seen: list[object] = []
            while sum(item == Rejected("127.0.0.1", Rejection.HANDSHAKE) for item in seen) < 5:
                seen += until(ends.heard, lambda item: isinstance(item, Rejected))
            assert all(hangs_up(connection, 5) for connection in connections)
    finally:
        ends.close()


def test_endless_message_ends_its_connection(ends: Ends) -> None:
    """Every frame announces another one. ZeroMQ would keep them forever and deliver none."""
    with bare_dealer(ends.port, b"x") as connection:
        frame = b"\x03" + (1 << 19).to_bytes(8, "big") + bytes(1 << 19)
        connection.settimeout(0.05)
        seen: list[Incoming] = []
        sent = 0
        while Rejected("127.0.0.1", Rejection.ENDLESS) not in seen:
            assert sent < 4 << 30, "never ended"
            try:
                sent += connection.send(frame[sent % len(frame) :])
            except OSError:
                sent += 0  # its queue is full, or it was closed
            ends.server.wait(0)
            seen += ends.server.drain()
        assert [item for item in seen if not isinstance(item, Rejected)] == []


def test_silent_connections_are_examined_a_few_at_a_time_and_equally_often(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looked_at = [float(math.ceil(time.monotonic()))], []
    monkeypatch.setattr(gate, "bytes_received", lambda descriptor: looked_at.append(descriptor) or 0)
    with half_open(ends.port, 48):
        deadline = time.monotonic() + PATIENCE_S
        while ends.server.connections < 48 and time.monotonic() < deadline:
            ends.heard()
        monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: now[0]))

        def look_after(pause_s: float) -> list[int]:
            looked_at.clear()
            now[0] += pause_s
            list(ends.server.drain())
            return list(looked_at)

        standing = sorted(look_after(1000.0))
        assert len(standing) == len(set(standing)) == 48, "however late: each once"
        a_round = [look_after(gate.CHECK_S / gate.SLICES) for _ in range(gate.SLICES)]
        assert sorted(itertools.chain(*a_round)) == standing
        assert max(map(len, a_round)) < 48 / 4


def close_with_a_full_queue() -> None:
    """Leave ZeroMQ's connection events unread while thousands arrive, then close the server."""
    ends = Ends()
    connections = []
    for _ in range(2200):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", ends.port))
        connections.append(connection)
    threading.Event().wait(1.0)  # the queue is full by now
    for connection in connections:
        connection.close()
    ends.close()


def test_closing_does_not_wait_for_a_reader_of_its_own_events() -> None:
    """With a full event queue ZeroMQ's thread blocks and holds what closing needs. Runs in a process that may be
    killed.
    """
    closing = "from tests.net.test_server_bounds import close_with_a_full_queue as close; close()"
    subprocess.run([sys.executable, "-c", closing], cwd=ROOT, check=True, timeout=PATIENCE_S)


def lose_a_peer_with_unread_messages(count: int) -> None:
    """Reset a connection whose messages and ping are unread, as a worker does that waits in vain for a pong."""
    ends = Ends()
    with bare_dealer(ends.port, b"impatient") as connection:
        for _ in range(count):
            connection.sendall(bytes([0, len(ASKED)]) + ASKED)
        connection.sendall(b"\x04\x07\x04PING\x00\x0a")  # RFC 37
        unread = ends.server._socket.poll(PATIENCE_S * 1000)
        assert unread
        threading.Event().wait(0.5)  # until ZeroMQ's thread has read what it takes
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset (socket(7))
    seen = until(ends.heard, lambda item: item == ConnectionLost("impatient"))
    assert seen.count(Arrived("impatient", StatusQuery(follow=False))) == count
    ends.close()


def test_peer_that_gives_up_on_a_busy_scheduler_does_not_abort_it() -> None:
    """libzmq aborts if the peer's queue was full. Runs in a process that may be aborted."""
    losing = "from tests.net.test_server_bounds import lose_a_peer_with_unread_messages as lose; lose(500)"
    subprocess.run([sys.executable, "-c", losing], cwd=ROOT, check=True, timeout=PATIENCE_S)


SPEAKER = """
import sys, zmq
endpoint, name, message = sys.argv[1:]
sys.stdin.readline()
socket = zmq.Context().socket(zmq.DEALER)
socket.routing_id = name.encode()
socket.connect(endpoint)
socket.send(bytes.fromhex(message))
sys.stdin.readline()
"""


def test_next_connection_with_the_same_descriptor_is_not_closed_with_the_last(ends: Ends) -> None:
    """A stranger checks whether the port is open and leaves; a worker registers; the server sees both at once."""
    words = [f"tcp://127.0.0.1:{ends.port}", "session-b", ASKED.hex()]
    speaker = subprocess.Popen([sys.executable, "-c", SPEAKER, *words], stdin=subprocess.PIPE, text=True)
    assert speaker.stdin is not None
    gc.collect()  # otherwise a garbage file may free its number in between
    before = descriptors()
    stranger = socket.create_connection(("127.0.0.1", ends.port))
    assert stranger.recv(10)  # ZeroMQ's greeting: it was accepted
    (accepted,) = descriptors() - before - {stranger.fileno()}
    stranger.shutdown(socket.SHUT_WR)
    while stranger.recv(100):
        continue  # until the other side has closed it
    speaker.stdin.write("go\n")
    speaker.stdin.flush()
    assert ends.server._socket.poll(PATIENCE_S * 1000)
    seen = list(ends.server.drain())
    assert ends.server._descriptor_of == {"session-b": accepted}, "the case under test did not occur"
    assert [type(item) for item in seen] == [Rejected, Arrived]
    speaker.communicate("go\n", timeout=PATIENCE_S)
    assert until(ends.heard, lambda item: item == ConnectionLost("session-b"))
    assert ends.server._descriptor_of == ends.server._peer_of == {}
    stranger.close()


def test_close_is_reported_even_if_the_next_user_of_its_number_is_heard_first(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    speakers = []
    for name in ("session-a", "session-b"):
        words = [f"tcp://127.0.0.1:{ends.port}", name, ASKED.hex()]
        speakers.append(subprocess.Popen([sys.executable, "-c", SPEAKER, *words], stdin=subprocess.PIPE, text=True))
    first, second = speakers
    gc.collect()  # otherwise a garbage file may free its number in between
    assert first.stdin is not None and second.stdin is not None
    first.stdin.write("go\n")
    first.stdin.flush()
    until(ends.heard, lambda item: isinstance(item, Arrived))
    before = dict(ends.server._descriptor_of)
    first.communicate("go\n", timeout=PATIENCE_S)
    monkeypatch.setattr(ends.server._gate, "take", lambda **_: ([], []))  # the close is not read yet
    second.stdin.write("go\n")
    second.stdin.flush()
    seen = until(ends.heard, lambda item: isinstance(item, Arrived))
    assert ends.server._descriptor_of == {"session-b": before["session-a"]}, "the case under test did not occur"
    assert seen == [Arrived("session-b", StatusQuery(follow=False)), ConnectionLost("session-a")]
    second.communicate("go\n", timeout=PATIENCE_S)


def test_remains_of_a_reconnected_peers_connection_are_not_counted_against_it(ends: Ends) -> None:
    with dealers(ends.port, [b"session-a"]) as (old,):
        old.send(ASKED)
        until(ends.heard, lambda item: isinstance(item, Arrived))
        for _ in range(3):
            old.send(ASKED)
        assert ends.server._socket.poll(PATIENCE_S * 1000)
        old.close(linger=int(PATIENCE_S * 1000))
    with dealers(ends.port, [b"session-a"]) as (new,):
        new.send(messages.SCHEMA.pack(StopJob("the new one")))
        for _ in range(100):  # ZeroMQ notes the new connection before anything of the old one is read
            ends.server._socket.poll(0)
            time.sleep(0.005)
        seen = until(ends.heard, lambda item: item == Arrived("session-a", StopJob("the new one")))
    assert {type(item) for item in seen} <= {Arrived, ConnectionLost}


def descriptors() -> set[int]:
    """Return this process's descriptors, without the one used to list them."""
    listed = [entry.name for entry in Path("/proc/self/fd").iterdir()]
    return {int(name) for name in listed if os.path.lexists(f"/proc/self/fd/{name}")}


def test_names_without_a_session_are_unknown(ends: Ends) -> None:
    with dealers(ends.port, [None, b"\xff", b"a b"]) as strangers:
        for stranger in strangers:
            stranger.send(ASKED)
        seen: list[object] = []
        while len(seen) < 3:
            seen += ends.heard()
    assert [type(item) for item in seen] == [Garbled] * 3
    assert {(item.peer, item.address) for item in seen if isinstance(item, Garbled)} == {("", "127.0.0.1")}
    assert ends.server._descriptor_of == ends.server._peer_of == {}
