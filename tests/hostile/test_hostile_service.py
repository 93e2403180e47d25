"""A running job on real sockets under attack: the attacks are refused and counted, and have no effect.

Memory is measured where it would grow: the tables of peers, connections and waiting processes, and the queues' limits.
The job itself measures time: a worker that was not heard for NODE_TIMEOUT would be lost.
"""

from __future__ import annotations

import collections
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from samebits import config
from samebits.core import messages, records
from samebits.core.messages import Activity, Credential, Heartbeat, Refusal, Refused, Status, StatusQuery
from samebits.core.point import Point
from samebits.core.ready import JobEnded
from samebits.core.records import GenerationCommitted, SeatLost
from samebits.errors import RefusedError, SecretError
from samebits.net.curve import derive_keys
from samebits.net.server import FLOOD_TURNS, MAX_INCOMING_BYTES, Server
from samebits.service.agent import Agent
from samebits.service.scheduling import loop as scheduler_module
from samebits.service.scheduling import unknown_peers
from samebits.service.scheduling.unknown_peers import Offence
from samebits.store import journal as journals
from tests.hostile.attackers import dealers, half_open, hangs_up, registration, say_if_open
from tests.net.wires import Tap
from tests.service.house import PATIENCE_S, House, final

WORKERS = 2
SECRET = "correct-horse-battery-staple"


class Attacked:
    """A job of two workers that trains in generation 1, with a check that it was not disturbed."""

    def __init__(self, path: Path, **environ: str) -> None:
        self.house = House(path, WORKERS, NODE_TIMEOUT="3", HEARTBEAT_INTERVAL="0.2", **environ)
        self.fixed = config.fixed_settings(self.house.settings("scheduler"))
        self.port = int(self.house.environ["SCHED_PORT"])
        self.served: Future[JobEnded] = self.house.scheduler()
        self.agents = self.house.seated("0", "1")
        self.broken: list[str] = []
        for agent in self.agents:
            agent.on_break = self.broken.append
        self.house.mapped(self.agents, self.house.generation(*self.agents))

    @property
    def server(self) -> Server:
        assert self.house.service is not None
        assert self.house.service._server is not None
        return self.house.service._server

    def count(self, offence: Offence) -> int:
        assert self.house.service is not None
        return self.house.service.strangers.totals[offence]

    def wait(self, wanted: Callable[[], bool], patience_s: float = 30.0) -> None:
        """Poll what only the scheduler's thread changes."""
        deadline = time.monotonic() + patience_s
        while not wanted():
            assert time.monotonic() < deadline, "not within the time"
            assert not self.served.done(), self.served.result()
            threading.Event().wait(0.01)

    def finish(self) -> None:
        """Check that the job ends in its first generation and that its journal has no loss."""
        with ThreadPoolExecutor(WORKERS) as pool:
            finals = list(pool.map(lambda agent: agent.complete(1, 40, [final(40)]), self.agents, timeout=PATIENCE_S))
        assert finals == [Point(40, 1)] * WORKERS
        for agent in self.agents:
            agent.leave(on_purpose=True, text="status 0")
        self.served.result(PATIENCE_S)
        assert self.broken == []
        contents = journals.read_journal(self.house.path / "recovery")
        assert contents is not None
        kinds = [type(records.SCHEMA.unpack(payload)) for payload in contents.payloads]
        assert kinds.count(GenerationCommitted) == 1
        assert SeatLost not in kinds


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Attacked]:
    attacked = Attacked(tmp_path)
    yield attacked
    attacked.house.close()


def test_binary_names_are_ignored(attacked: Attacked) -> None:
    """ZeroMQ's own names contain bytes that no session has; an answer to them once ended the scheduler."""
    names: list[bytes | None] = [None, b"\xff\xfe", b"a b", b"x" * 200, "é".encode()]
    with dealers(attacked.port, names) as strangers_:
        for stranger in strangers_:
            stranger.send(messages.SCHEMA.pack(StatusQuery(follow=True)))
            stranger.send(registration("0", "�", attacked.fixed))
        attacked.wait(lambda: attacked.count(Offence.GARBLED) == 2 * len(names))
        assert not set(attacked.server._descriptor_of) - {agent.session for agent in attacked.agents}
    attacked.finish()


def test_invalid_bytes_are_only_counted(attacked: Attacked) -> None:
    """Truncated everywhere, deeply nested, wrong types, lists that claim more than they hold, too many frames."""
    good = registration("0", "stranger", attacked.fixed)
    bad = [good[:length] for length in range(len(good))]
    bad += [b"\x91" * 100_000, b"\xdd\x00\x0f\xff\xff" * 500, b"\xc7\x00\x05", b"\x81\x01\x02", b"\x92\x01\xc3" * 50]
    bad += [good + b"\x00", b"\x93\x07\xc2\xc2", b"\x92\x63\x01", bytes(MAX_INCOMING_BYTES)]
    with dealers(attacked.port, [b"stranger"]) as (stranger,):
        for packed in bad:
            stranger.send(packed)
        stranger.send_multipart([b"", good])
        stranger.send_multipart([good] * 1000)
        attacked.wait(lambda: attacked.count(Offence.GARBLED) == len(bad) + 2)
    attacked.finish()


def test_oversized_message_ends_its_connection_before_it_is_read(attacked: Attacked) -> None:
    with dealers(attacked.port, [b"stranger"]) as (stranger,):
        stranger.send(bytes(MAX_INCOMING_BYTES + 1))
        attacked.wait(lambda: attacked.count(Offence.SILENT) >= 1)
    attacked.finish()


def test_other_protocol_version_is_refused_with_the_reason(attacked: Attacked) -> None:
    """The second element of a Register is the version in every version, whatever the other fields are."""
    with dealers(attacked.port, [b"stranger"]) as (stranger,):
        for packed in (registration("0", "stranger", attacked.fixed, protocol=99), b"\x93\x01\x63\xa3new"):
            stranger.send(packed)
            assert stranger.poll(10_000)
            answer = messages.SCHEMA.unpack(stranger.recv())
            assert isinstance(answer, Refused)
            assert answer.refusal is Refusal.PROTOCOL
            assert "speaks protocol" in answer.text
            assert "99" in answer.text
    attacked.finish()


def test_stolen_node_id_and_replayed_messages_change_nothing(attacked: Attacked) -> None:
    """The node's name is no secret; its session is, and counts only on its own connection."""
    victim = attacked.agents[0]
    job = victim._core.job
    captured = messages.SCHEMA.pack(
        Heartbeat(Credential(job, "0", victim.session, 1), 1, Activity.WAITING, 1, None, 10**6)
    )
    with dealers(attacked.port, [b"thief"]) as (thief,):
        for _ in range(50):
            thief.send(captured)
        attacked.wait(lambda: attacked.count(Offence.GARBLED) == 50)
        for incarnation in (0, 1, 2, 99):
            thief.send(registration("0", "thief", attacked.fixed, incarnation=incarnation, job=job))
            assert thief.poll(10_000)
            answer = messages.SCHEMA.unpack(thief.recv())
            assert isinstance(answer, Refused) is (incarnation == 0), answer
        forged = Heartbeat(Credential(job, "0", "thief", 1), 1, Activity.WAITING, 1, None, 10**6)
        thief.send(messages.SCHEMA.pack(forged))
        assert thief.poll(10_000)
        assert type(messages.SCHEMA.unpack(thief.recv())).__name__ == "Fenced"
    attacked.finish()


def test_flood_of_registrations_is_answered_and_reported_once(
    attacked: Attacked, caplog: pytest.LogCaptureFixture
) -> None:
    count = FLOOD_TURNS - 100  # with more its connection is closed (test_hostile_floods)
    with dealers(attacked.port, [b"flooder"]) as (flooder,):
        flood = registration("0", "flooder", attacked.fixed)
        for _ in range(count):
            flooder.send(flood)
        attacked.wait(lambda: attacked.count(Offence.REGISTRATION) >= count - unknown_peers.REFUSALS_SAID, 60)
    attacked.wait(lambda: any(" more registrations: " in record.message for record in caplog.records))
    said = [record.message for record in caplog.records if "refused" in record.message]
    assert sum("ALIVE" in line and line.startswith("refused pid 4242") for line in said) == unknown_peers.REFUSALS_SAID
    assert 1 <= sum(" more registrations: " in line for line in said) <= 3  # one line in 30 s
    assert any("from 127.0.0.1" in line for line in said)
    attacked.finish()


def test_flood_of_connections_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler_module, "CONNECTIONS_OTHER", 20)
    attacked = Attacked(tmp_path)
    try:
        bound = attacked.server.max_connections
        assert bound == 2 * WORKERS + 64 + 20
        with half_open(attacked.port, bound + 60) as connections:
            # A slow one may find that an earlier one's handshake has timed out meanwhile.
            attacked.wait(lambda: attacked.count(Offence.TOO_MANY) + attacked.count(Offence.HANDSHAKE) >= 60)
            assert attacked.count(Offence.TOO_MANY) > 0
            attacked.wait(lambda: attacked.server.connections <= bound)
            ended = [connection for connection in connections[:60] if hangs_up(connection, 10)]
            assert len(ended) == 60
        attacked.wait(lambda: attacked.server.connections == WORKERS)
        attacked.wait(lambda: any("beyond the limit: " in r.message for r in caplog.records))
        attacked.finish()
    finally:
        attacked.house.close()


def test_half_open_connections_time_out_and_leave_nothing(attacked: Attacked) -> None:
    with half_open(attacked.port, 200) as connections:
        attacked.wait(lambda: attacked.server.connections + attacked.count(Offence.HANDSHAKE) >= 200)
        assert all(hangs_up(connection, 30) for connection in connections)  # HANDSHAKE_IVL, here 3 s
    attacked.wait(lambda: attacked.count(Offence.HANDSHAKE) == 200)
    attacked.wait(lambda: attacked.server.connections == WORKERS)
    attacked.finish()


def test_disconnected_peers_leave_nothing(attacked: Attacked) -> None:
    """A peer's data is removed with its connection, whether it sent sense, nonsense, or asked for a seat."""
    for number in range(6):
        names: list[bytes | None] = [b"peer-%d-%d" % (number, index) for index in range(50)]
        with dealers(attacked.port, names) as peers:
            for name, peer in zip(names, peers, strict=True):
                assert name is not None
                peer.send(registration("1", name.decode(), attacked.fixed))
                peer.send(messages.SCHEMA.pack(StatusQuery(follow=True)))
                peer.send(b"nonsense")
            attacked.wait(lambda n=number: attacked.count(Offence.GARBLED) == 50 * (n + 1))  # type: ignore[misc]
    attacked.wait(lambda: attacked.server.connections == WORKERS)
    sessions = {agent.session for agent in attacked.agents}
    attacked.wait(lambda: set(attacked.server._descriptor_of) == sessions)
    assert {peer.session for peer in attacked.server._peer_of.values()} == sessions
    service = attacked.house.service
    assert service is not None
    attacked.wait(lambda: len(service._followers) == 0)
    attacked.finish()


def test_endless_snapshot_requests_get_one_per_pass(attacked: Attacked) -> None:
    with dealers(attacked.port, [b"curious", b"honest"]) as (curious, honest):
        for _ in range(20_000):
            curious.send(messages.SCHEMA.pack(StatusQuery(follow=False)))
        honest.send(messages.SCHEMA.pack(StatusQuery(follow=False)))
        assert honest.poll(10_000)
        assert isinstance(messages.SCHEMA.unpack(honest.recv()), Status)
        answers = 0
        while curious.poll(1000 if answers else 10_000):
            curious.recv()
            answers += 1
        assert 1 <= answers <= 20_000 / 32
    attacked.finish()


# ---- with a secret


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Attacked]:
    attacked = Attacked(tmp_path, CLUSTER_SECRET=SECRET)
    yield attacked
    attacked.house.close()


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"CLUSTER_SECRET": SECRET + "!"}, "compare CLUSTER_SECRET"),
        ({"CLUSTER_SECRET": ""}, "requires a secret, and this process has none"),
    ],
    ids=["another secret", "no secret"],
)
def test_worker_without_the_secret_leaves_in_seconds_and_is_counted(
    guarded: Attacked, caplog: pytest.LogCaptureFixture, environ: dict[str, str], said: str
) -> None:
    settings, _ = config.read({**guarded.house.environ, **environ, "ROLE": "worker", "NODE_ID": "1"})
    agent = Agent(settings, "test", "cpu")
    with pytest.raises(SecretError, match=said) as caught:
        agent.register()
    agent.leave(on_purpose=False, text="the test is over")
    assert caught.value.exit_code == 85
    guarded.wait(lambda: guarded.count(Offence.SECRET) + guarded.count(Offence.MECHANISM) > 0)
    guarded.wait(lambda: any("; compare CLUSTER_SECRET" in record.message for record in caplog.records))
    shown = [record.message for record in caplog.records if record.message.startswith("refused ")]
    assert any(" from 127.0.0.1" in line for line in shown)
    assert len(shown) <= 3  # one line per kind in 30 s, however often it has tried
    assert SECRET not in caplog.text + str(caught.value)
    guarded.finish()


def test_nothing_reaches_the_scheduler_without_the_secret(guarded: Attacked) -> None:
    """Messages and floods of strangers get no further than the handshake."""
    other = derive_keys(b"another-secret-of-another-cluster")
    with dealers(guarded.port, [b"plain"] * 5) as plain, zmq.Context() as context:
        for stranger in plain:
            say_if_open(stranger, registration("0", "plain", guarded.fixed))
        wrong = context.socket(zmq.DEALER)
        wrong.linger = 0
        wrong.curve_serverkey = other.scheduler.public
        wrong.curve_publickey, wrong.curve_secretkey = other.worker.public, other.worker.secret
        wrong.connect(f"tcp://127.0.0.1:{guarded.port}")
        say_if_open(wrong, registration("0", "wrong", guarded.fixed))
        guarded.wait(lambda: guarded.count(Offence.SECRET) >= 3)
        wrong.close(linger=0)
    assert guarded.count(Offence.GARBLED) == guarded.count(Offence.REGISTRATION) == 0
    assert set(guarded.server._descriptor_of) == {agent.session for agent in guarded.agents}
    guarded.finish()


def test_replayed_conversation_has_no_effect(tmp_path: Path) -> None:
    """CurveZMQ's keys are fresh in each connection (RFC 26), so recorded bytes are useless."""
    attacked = Attacked(tmp_path, CLUSTER_SECRET=SECRET)
    tap = Tap(attacked.port)
    try:
        settings, _ = config.read(
            {**attacked.house.environ, "SCHED_PORT": str(tap.port), "ROLE": "worker", "NODE_ID": "7"}
        )
        agent = Agent(settings, "test", "cpu")
        with pytest.raises(Exception, match="names a spare"):
            agent.register()  # it has the secret, so it is heard: a register and its refusal were recorded
        agent.leave(on_purpose=False, text="the test is over")
        before = attacked.count(Offence.SECRET) + attacked.count(Offence.HANDSHAKE)
        with half_open(attacked.port, 1) as (connection,):
            connection.sendall(tap.sent)
            assert hangs_up(connection, 30)
        attacked.wait(lambda: attacked.count(Offence.SECRET) + attacked.count(Offence.HANDSHAKE) > before)
        sessions = {agent.session for agent in attacked.agents}
        attacked.wait(lambda: set(attacked.server._descriptor_of) == sessions)
        attacked.finish()
    finally:
        tap.close()
        attacked.house.close()


def test_flood_does_not_pass_for_a_wrong_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections without the secret keep coming while it is heard and gets an answer that no flood gives."""
    monkeypatch.setattr(scheduler_module, "CONNECTIONS_OTHER", 20)
    monkeypatch.setattr(scheduler_module, "MAX_FOLLOWERS", 0)
    attacked = Attacked(tmp_path, CLUSTER_SECRET=SECRET)
    over = threading.Event()
    flood = threading.Thread(target=reopen, args=(attacked.port, 4 * attacked.server.max_connections, over))
    flood.start()
    try:
        attacked.wait(lambda: attacked.count(Offence.TOO_MANY) >= 1000, 60)
        agent = attacked.house.agent("7")
        with pytest.raises(RefusedError, match="names a spare"):  # it was heard: an answer that no flood gives
            agent.register()
        # otherwise a second verdict ends the process of the tests
        agent.leave(on_purpose=False, text="the test is over")
        assert attacked.count(Offence.TOO_MANY) >= 1000
        assert not over.is_set()
        over.set()
        attacked.finish()
    finally:
        over.set()
        flood.join()
        attacked.house.close()


def reopen(port: int, count: int, over: threading.Event) -> None:
    """Hold this many connections, and reopen each when it is closed, or in turn."""
    connections: collections.deque[socket.socket] = collections.deque()
    try:
        while not over.is_set():
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
            connections.append(connection)
            if len(connections) >= count:
                connections.popleft().close()
    finally:
        for connection in connections:
            connection.close()


def test_half_open_connections_time_out_with_a_secret_too(guarded: Attacked) -> None:
    with half_open(guarded.port, 50) as connections:
        assert all(hangs_up(connection, 30) for connection in connections)
    guarded.wait(lambda: guarded.server.connections == WORKERS)
    guarded.finish()
