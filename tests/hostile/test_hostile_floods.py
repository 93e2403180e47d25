"""A peer that sends without end: it is closed and reported, and honest peers are answered meanwhile.

The floor is the same flood against a bare ROUTER beside the same job.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median

import pytest
import zmq

from samebits import config
from samebits.core import messages
from samebits.core.messages import Refused, StatusQuery
from samebits.net.address import endpoint
from samebits.net.server import MAX_INCOMING_BYTES, Rejected, Rejection
from samebits.service.relay import RelayService
from samebits.service.scheduling.unknown_peers import Offence, UnknownPeers
from tests.hostile.attackers import dealers, registration
from tests.hostile.test_hostile_service import Attacked
from tests.net.ends import Ends, until
from tests.system.processes import free_port

Way = Callable[[Attacked], AbstractContextManager[tuple[int, UnknownPeers]]]
PROBES = 8
ASKED = messages.SCHEMA.pack(StatusQuery(follow=False))
FLOODER = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.routing_id = b"flooder"
socket.connect(sys.argv[1])
message = bytes.fromhex(sys.argv[2]) * int(sys.argv[3])
while True:
    socket.send(message)
"""
BARE = """
import sys, zmq
router = zmq.Context().socket(zmq.ROUTER)
router.bind(sys.argv[1])
while True:
    router.recv(copy=False)
"""


@contextmanager
def child(program: str, *words: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", program, *words])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def flood(port: int, message: bytes = ASKED, times: int = 1) -> Iterator[None]:
    with child(FLOODER, endpoint("127.0.0.1", port), message.hex(), str(times)):
        yield


def test_flooding_peer_is_closed_and_reported() -> None:
    ends = Ends()
    try:
        with flood(ends.port):
            until(ends.heard, lambda item: item == Rejected("127.0.0.1", Rejection.FLOOD))
            until(ends.heard, lambda item: item == Rejected("127.0.0.1", Rejection.FLOOD))  # it has reconnected
    finally:
        ends.close()


def test_flood_of_long_messages_is_closed_while_the_reader_is_idle() -> None:
    """The main thread may wait for a disk; the memory stays bounded."""
    ends = Ends()
    try:
        closed = threading.Event()
        cut, ends.server._guard._cut = ends.server._guard._cut, lambda one: (cut(one), closed.set())
        with flood(ends.port, b"\0" * 1024, MAX_INCOMING_BYTES // 1024):
            assert closed.wait(60)
            until(ends.heard, lambda item: item == Rejected("127.0.0.1", Rejection.FLOOD))
    finally:
        ends.close()


def answer_s(peer: zmq.Socket[bytes], packed: bytes) -> float:
    """Return how long the scheduler needs for a registration that it refuses."""
    began = time.monotonic()
    peer.send(packed)
    assert peer.poll(30_000)
    assert isinstance(messages.SCHEMA.unpack(peer.recv()), Refused)
    return time.monotonic() - began


def probe_ms(attacked: Attacked) -> tuple[float, float, float]:
    """Return the median time of an answer over a new and over an open connection, and the longest time of all."""
    packed = registration("7", "honest", attacked.fixed)
    new, known = [], []
    for _ in range(PROBES):
        began = time.monotonic()
        with dealers(attacked.port, [b"honest"]) as (peer,):
            answer_s(peer, packed)
            new.append(time.monotonic() - began)
            known.append(answer_s(peer, packed))
    return 1000 * median(new), 1000 * median(known), 1000 * max(new + known)


@contextmanager
def direct(attacked: Attacked) -> Iterator[tuple[int, UnknownPeers]]:
    assert attacked.house.service is not None
    yield attacked.port, attacked.house.service.strangers


@contextmanager
def relayed(attacked: Attacked) -> Iterator[tuple[int, UnknownPeers]]:
    port = free_port()
    environ = attacked.house.environ | {"SCHED_HOST": f"relay:127.0.0.1:{port},127.0.0.1"}
    relay = RelayService(config.read(environ, role_required=False)[0])
    thread = threading.Thread(target=relay.serve)
    thread.start()
    try:
        yield port, relay.strangers
    finally:
        relay.stop()
        thread.join()


@pytest.mark.parametrize("way", [direct, relayed], ids=["direct", "relayed"])
def test_honest_peers_are_answered_during_a_flood(
    tmp_path: Path,
    way: Callable[[Attacked], AbstractContextManager[tuple[int, UnknownPeers]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    attacked = Attacked(tmp_path, SPARE_NUM="0")
    try:
        calm = probe_ms(attacked)
        bare = free_port()
        with child(BARE, endpoint("127.0.0.1", bare)), flood(bare):
            floor = probe_ms(attacked)
        with way(attacked) as (port, strangers), flood(port):
            attacked.wait(lambda: strangers.totals[Offence.FLOOD] > 0)
            flooded = probe_ms(attacked)
        with capsys.disabled():
            for name, found in (("calm", calm), ("floor", floor), ("flood", flooded)):
                print(f"\n{name:>6}: {found[0]:.1f} ms new, {found[1]:.1f} ms open, {found[2]:.1f} ms at most", end="")
            print(f"\nflood ÷ floor: {flooded[0] / floor[0]:.1f} new, {flooded[1] / floor[1]:.1f} open")
        attacked.finish()
    finally:
        attacked.house.close()
