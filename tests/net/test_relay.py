"""Ranks behind a relay: messages in both directions, closes, and what a hostile relay cannot do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import zmq
from pytest import MonkeyPatch

from samebits import config
from samebits.core.end_kinds import EndKind
from samebits.core.messages import (
    SCHEMA,
    Activity,
    Credential,
    EndJob,
    Heartbeat,
    Pending,
    StatusQuery,
    StopJob,
)
from samebits.errors import UsageError
from samebits.net import relaying
from samebits.net.address import endpoint
from samebits.net.channel import ABOUT, ForgedError, RankEnd, relays_key
from samebits.net.client import Client, Down, Got, Up
from samebits.net.curve import ClusterKeys, cluster_keys
from samebits.net.relay_tree import RelayNote
from samebits.net.relaying import DOWNWARD, MAX_BATCH, NOTE, UPWARD, Downward, Upward
from samebits.net.server import Arrived, ConnectionLost, Garbled, Server
from samebits.scheduler_hosts import SchedulerAddress
from samebits.service import relay
from samebits.service.relay import RelayService
from tests.net.ends import PATIENCE_S, Ends, listened, until
from tests.system.processes import free_port

SECRET = "correct-horse-battery-staple"
KEYS = cluster_keys(SECRET, None)
RANKS = ("session-a", "session-b")
ASKED = StatusQuery(follow=False)


def _id_of(param: tuple[ClusterKeys | None, bool]) -> str:
    keys, has_inner = param
    return ("open" if keys is None else "secret") + ("-inner" if has_inner else "")


class RunningRelay:
    """A relay of the product, in a thread."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.service = RelayService(config.read(environ, role_required=False)[0])
        self._thread = threading.Thread(target=self.service.serve)
        self._thread.start()

    def end(self) -> None:
        self.service.stop()
        self._thread.join()


class Behind(Ends):
    """A server, a relay of the product, perhaps behind an inner relay, and clients behind it."""

    def __init__(self, keys: ClusterKeys | None, *, has_inner: bool = False, silence_s: float = 5.0) -> None:
        super().__init__(keys, silence_s=silence_s)
        self.keys = keys
        self.inner_place = SchedulerAddress("127.0.0.1", free_port())
        self.inner: RunningRelay | None = None
        if has_inner:
            self.start_inner()
        self.place = SchedulerAddress("127.0.0.1", free_port())
        above = f"relay:{self.inner_place}," if has_inner else ""
        self.relay = RunningRelay(self.environ(f"relay:{self.place},{above}127.0.0.1"))

    def environ(self, hosts: str) -> dict[str, str]:
        settings = {"SCHED_HOST": hosts, "SCHED_PORT": str(self.port), "NODE_TIMEOUT": f"{self.silence_s:g}"}
        return settings if self.keys is None else {**settings, "CLUSTER_SECRET": SECRET}

    def start_inner(self) -> None:
        self.inner = RunningRelay(self.environ(f"relay:{self.inner_place},127.0.0.1"))

    def end_inner(self) -> None:
        if self.inner is not None:
            self.inner.end()
        self.inner = None

    def end_relay(self) -> None:
        self.relay.end()

    def client(self, identity: str, keys: ClusterKeys | None = None) -> Client:
        client = Client(self.address, self.port, identity, self.silence_s, keys=self.keys, relay=self.place)
        self.clients.append(client)
        return client

    def until_heard(self, are_all: Callable[[list[object]], bool]) -> list[object]:
        """Return what the server has heard once that is enough."""
        seen: list[object] = [*self.aside]
        self.aside.clear()

        def step() -> list[object]:
            seen.extend(self.heard())
            return [are_all(seen)]

        until(step, bool)
        return seen

    def close(self) -> None:
        self.end_relay()
        self.end_inner()
        super().close()


@pytest.fixture(params=[(None, False), (KEYS, False), (None, True), (KEYS, True)], ids=_id_of)
def behind(request: pytest.FixtureRequest) -> Iterator[Behind]:
    keys, has_inner = request.param
    ends = Behind(keys, has_inner=has_inner)
    yield ends
    ends.close()


@pytest.fixture(params=[None, KEYS], ids=["open", "secret"])
def tree(request: pytest.FixtureRequest) -> Iterator[Behind]:
    ends = Behind(request.param, has_inner=True)
    yield ends
    ends.close()


def test_messages_pass_a_relay_in_both_directions(behind: Behind) -> None:
    clients = {session: behind.connected(session) for session in RANKS}
    for session, client in clients.items():
        client.send(StopJob(session))
    sent = {Arrived(session, StopJob(session)) for session in RANKS}
    behind.until_heard(lambda seen: sent <= {*seen})
    assert behind.server.connections == 1, "the ranks came without the relay"
    for session in RANKS:
        assert behind.server.send(session, Pending(session, 1, 2, 4))
    for session, client in clients.items():
        assert Got(Pending(session, 1, 2, 4)) in until(behind.got(client), lambda item: isinstance(item, Got))


def test_close_of_a_rank_is_reported_after_its_messages(behind: Behind) -> None:
    client, other = (behind.connected(session) for session in RANKS)
    client.send(ASKED)
    client.close()
    behind.clients.remove(client)
    seen = behind.until_heard(lambda seen: ConnectionLost("session-a") in seen)
    assert seen == [Arrived("session-a", ASKED), ConnectionLost("session-a")]
    other.send(ASKED)
    behind.until_heard(lambda seen: Arrived("session-b", ASKED) in seen)


def test_ranks_of_an_ended_relay_connect_to_the_scheduler_and_none_is_reported_as_closed(behind: Behind) -> None:
    clients = {session: behind.connected(session) for session in RANKS}
    for client in clients.values():
        client.send(ASKED)
    behind.until_heard(lambda seen: {Arrived(session, ASKED) for session in RANKS} <= {*seen})
    behind.end_relay()
    for session, client in clients.items():
        until(behind.got(client), lambda item: isinstance(item, Up))
        client.send(StopJob(session))
    seen = behind.until_heard(lambda seen: {Arrived(session, StopJob(session)) for session in RANKS} <= {*seen})
    assert not [item for item in seen if isinstance(item, ConnectionLost) and item.peer in RANKS]
    assert behind.server.send("session-a", Pending("session-a", 1, 2, 4))
    until(behind.got(clients["session-a"]), lambda item: item == Got(Pending("session-a", 1, 2, 4)))


def test_ranks_stay_at_the_relay_while_the_scheduler_is_replaced(behind: Behind) -> None:
    client = behind.connected("session-a")
    behind.server.close()
    until(lambda: listened(client), lambda item: isinstance(item, Down))
    behind.server = Server(["127.0.0.1"], behind.port, 5.0, keys=behind.keys)
    until(behind.got(client), lambda item: isinstance(item, Up))
    client.send(ASKED)
    behind.until_heard(lambda seen: Arrived("session-a", ASKED) in seen)
    assert behind.server.connections == 1, "the rank came without the relay"


def test_repeated_heartbeat_waits_for_others_and_keeps_its_place(behind: Behind, monkeypatch: MonkeyPatch) -> None:
    client = behind.connected("session-a")
    beats = [Heartbeat(Credential("job", "0", "session-a", 1), 1, Activity.TRAINING, 1, None, step) for step in (1, 2)]
    for beat in beats:
        client.send(beat)
        behind.until_heard(lambda seen, beat=beat: Arrived("session-a", beat) in seen)
    monkeypatch.setattr(behind.relay.service, "_hold_s", 1e6)
    client.send(beats[0])
    until(lambda: behind.relay.service._messages, bool)
    client.send(ASKED)
    seen = behind.until_heard(lambda seen: Arrived("session-a", ASKED) in seen)
    assert seen == [Arrived("session-a", beats[0]), Arrived("session-a", ASKED)]


def test_relay_of_an_ended_inner_relay_connects_to_the_scheduler_and_no_rank_is_reported_as_closed(
    tree: Behind,
) -> None:
    clients = {session: tree.connected(session) for session in RANKS}
    for client in clients.values():
        client.send(ASKED)
    tree.until_heard(lambda seen: {Arrived(session, ASKED) for session in RANKS} <= {*seen})
    tree.end_inner()
    for session, client in clients.items():
        until(tree.got(client), lambda item: isinstance(item, Up))
        assert client.address == tree.place, "the rank has left its relay"
        client.send(StopJob(session))
    seen = tree.until_heard(lambda seen: {Arrived(session, StopJob(session)) for session in RANKS} <= {*seen})
    assert not [item for item in seen if isinstance(item, ConnectionLost) and item.peer in RANKS]
    assert tree.server.connections == 1
    assert tree.server.send("session-a", Pending("session-a", 1, 2, 4))
    until(tree.got(clients["session-a"]), lambda item: item == Got(Pending("session-a", 1, 2, 4)))


def test_relay_below_an_inner_relay_is_not_reported_as_a_rank(tree: Behind) -> None:
    client = tree.connected("session-a")
    client.send(ASKED)
    tree.until_heard(lambda seen: Arrived("session-a", ASKED) in seen)
    tree.end_relay()
    until(tree.got(client), lambda item: isinstance(item, Up))
    assert client.address == SchedulerAddress("127.0.0.1", tree.port)
    client.send(StopJob("direct"))
    seen = tree.until_heard(lambda seen: Arrived("session-a", StopJob("direct")) in seen)
    assert not [item for item in seen if isinstance(item, ConnectionLost | Garbled)]


def test_relay_connects_directly_if_its_inner_relay_answers_nothing() -> None:
    """A scheduler without inner relays refuses the hello, so that no welcome arrives."""
    ends = Ends()
    silent = zmq.Context()
    listening = silent.socket(zmq.ROUTER)
    inner = listening.bind_to_random_port("tcp://127.0.0.1")
    place = free_port()
    environ = {"SCHED_PORT": str(ends.port), "NODE_TIMEOUT": f"{ends.silence_s:g}"}
    hosts = f"relay:127.0.0.1:{place},relay:127.0.0.1:{inner},127.0.0.1"
    relay = RunningRelay({"SCHED_HOST": hosts, **environ})
    try:
        client = Client("127.0.0.1", ends.port, "session-a", ends.silence_s, relay=SchedulerAddress("127.0.0.1", place))
        ends.clients.append(client)
        until(ends.got(client), lambda item: isinstance(item, Up))
        client.send(ASKED)
        until(ends.heard, lambda item: item == Arrived("session-a", ASKED))
    finally:
        relay.end()
        silent.destroy(linger=0)
        ends.close()


def test_relay_without_ranks_that_reconnects_logs_no_second_line(monkeypatch: MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(relay.log, "say", said.append)
    hosts = f"relay:127.0.0.1:{free_port()},127.0.0.1"
    service = RelayService(config.read({"SCHED_HOST": hosts}, role_required=False)[0])
    monkeypatch.setattr(service._above, "drain", lambda: iter([Up(), Down(), Up()]))
    service._carry_down()
    service.stop()
    service.serve()
    assert said == ["the scheduler is reachable", f"relay for this host's workers, listening on {service._where}"]


def test_relay_without_an_address_is_refused_with_the_line_to_export() -> None:
    settings, _ = config.read({"SCHED_HOST": "10.0.0.1"}, role_required=False)
    with pytest.raises(UsageError, match=r"Fix: export SCHED_HOST=relay:127\.0\.0\.1:8119,10\.0\.0\.1 here"):
        RelayService(settings)


class LyingRelay:
    """A relay of the test, with everything that a relay knows, behind which a rank is attached."""

    def __init__(self, ends: Ends, keys: ClusterKeys, session: str = "session-a") -> None:
        self.ends, self.session = ends, session
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.ROUTING_ID, b"relay-0")
        above = keys.above_relay()
        self.socket.curve_serverkey = above.scheduler.public
        self.socket.curve_publickey, self.socket.curve_secretkey = above.worker.public, above.worker.secret
        self.socket.connect(endpoint("127.0.0.1", ends.port))
        self.rank = RankEnd(keys.session_key, session)
        self.send((session, self.rank.hello))
        assert self.rank.welcome(self.receive().deliveries[0].body)

    def send(self, *messages: tuple[str, bytes], closed: tuple[str, ...] = ()) -> None:
        self.socket.send(UPWARD.pack(Upward(messages, closed)))

    def receive(self) -> Downward:
        for _ in range(int(PATIENCE_S / 0.1)):
            self.ends.aside += self.ends.heard()
            if self.socket.poll(0):
                return DOWNWARD.unpack(self.socket.recv())
        raise AssertionError("the server sent no frame")

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def guarded() -> Iterator[Ends]:
    ends = Ends(KEYS)
    yield ends
    ends.close()


@pytest.fixture
def liar(guarded: Ends) -> Iterator[LyingRelay]:
    assert KEYS is not None
    relay = LyingRelay(guarded, KEYS)
    yield relay
    relay.close()


def heard_after(ends: Ends, liar: LyingRelay) -> list[object]:
    """Return what the server heard until the rank's next authentic message."""
    end = StopJob("the end")
    liar.send((liar.session, liar.rank.seal(SCHEMA.pack(end))))
    seen = until(ends.heard, lambda item: item == Arrived(liar.session, end))
    return [item for item in seen if item != Arrived(liar.session, end)]


def problem_of(seen: list[object]) -> str:
    (garbled,) = seen
    assert isinstance(garbled, Garbled)
    return garbled.problem


class LyingInnerRelay(LyingRelay):
    """A relay of the test, behind which a relay is attached, behind which a rank is."""

    def __init__(self, ends: Ends, keys: ClusterKeys) -> None:
        super().__init__(ends, keys)
        self.relay = RankEnd(relays_key(keys.session_key), "relay-below")
        self.send(("relay-below", self.relay.hello))
        assert self.relay.welcome(self.receive().deliveries[0].body)
        self.inside = RankEnd(keys.session_key, "session-inside")
        self.send_inside(("session-inside", self.inside.hello))
        assert self.inside.welcome(self.receive_inside().deliveries[0].body)

    def send_inside(self, *messages: tuple[str, bytes], closed: tuple[str, ...] = ()) -> None:
        self.send(("relay-below", self.relay.seal(UPWARD.pack(Upward(messages, closed)))))

    def receive_inside(self) -> Downward:
        """Return the frame of the relay below, which the scheduler sent in a frame of this one."""
        (delivery,) = self.receive().deliveries
        assert delivery.sessions == ("relay-below",)
        self.relay.check(delivery.stamps[0], delivery.body)
        return DOWNWARD.unpack(delivery.body)

    def beat(self) -> bytes:
        return self.inside.seal(SCHEMA.pack(ASKED))


@pytest.fixture
def inner_liar(guarded: Ends) -> Iterator[LyingInnerRelay]:
    assert KEYS is not None
    relay = LyingInnerRelay(guarded, KEYS)
    yield relay
    relay.close()


def test_inner_relay_can_forge_neither_a_frame_nor_a_rank_in_it(guarded: Ends, inner_liar: LyingInnerRelay) -> None:
    recorded = inner_liar.beat()
    frame = inner_liar.relay.seal(UPWARD.pack(Upward((("session-inside", recorded),))))
    inner_liar.send(("relay-below", frame))
    assert heard_after(guarded, inner_liar) == [Arrived("session-inside", ASKED)]
    inner_liar.send(("relay-below", frame))
    assert "it is repeated" in problem_of(heard_after(guarded, inner_liar))
    inner_liar.send_inside(("session-inside", recorded))
    assert "it is repeated" in problem_of(heard_after(guarded, inner_liar))
    inner_liar.send_inside(("session-inside", inner_liar.beat()[:-1] + b"\xc3"))
    assert "it is forged" in problem_of(heard_after(guarded, inner_liar))
    inner_liar.send(("session-inside", inner_liar.beat()))
    assert heard_after(guarded, inner_liar) == [], "a rank belongs to the relay through which it has attached"
    inner_liar.send_inside(("session-b", RankEnd(relays_key(KEYS.session_key), "session-b").hello))  # type: ignore[union-attr]
    assert "does not know the cluster's secret" in problem_of(heard_after(guarded, inner_liar))


def test_inner_relay_reports_no_closed_connection_of_a_rank(guarded: Ends, inner_liar: LyingInnerRelay) -> None:
    inner_liar.send_inside(("session-inside", inner_liar.beat()))
    assert heard_after(guarded, inner_liar) == [Arrived("session-inside", ASKED)]
    inner_liar.send(closed=("session-inside",))
    assert heard_after(guarded, inner_liar) == []
    inner_liar.send_inside(closed=(inner_liar.session,))
    assert heard_after(guarded, inner_liar) == []
    assert guarded.server.send("session-inside", Pending("session-inside", 1, 2, 4))
    assert inner_liar.receive_inside().deliveries[0].sessions == ("session-inside",)
    inner_liar.send(closed=("relay-below",))
    assert heard_after(guarded, inner_liar) == [], "the end of a relay is not the end of its ranks"
    assert not guarded.server.send("session-inside", Pending("session-inside", 1, 2, 4))


def test_frames_inside_frames_are_bounded(guarded: Ends, inner_liar: LyingInnerRelay, monkeypatch: MonkeyPatch) -> None:
    assert KEYS is not None
    inner_liar.send(("relay-below", inner_liar.relay.seal(b"\xdd\xff\xff\xff\xff")))
    assert "a relay's frame is malformed" in problem_of(heard_after(guarded, inner_liar))
    inner_liar.send_inside(*[("x", b"")] * (MAX_BATCH + 1))
    assert "a relay's frame is malformed" in problem_of(heard_after(guarded, inner_liar))
    monkeypatch.setattr(relaying, "MAX_DEPTH", 2)
    inner_liar.send_inside(("relay-2", RankEnd(relays_key(KEYS.session_key), "relay-2").hello))
    assert "that no rank can have sent" in problem_of(heard_after(guarded, inner_liar))
    inner_liar.send(("relay-2", RankEnd(KEYS.session_key, "relay-2").hello))
    assert "does not know the cluster's secret" in problem_of(heard_after(guarded, inner_liar))
    monkeypatch.setattr(relaying, "MAX_RANKS", 1)
    inner_liar.send_inside(("session-b", RankEnd(KEYS.session_key, "session-b").hello))
    assert "more than 1 rank" in problem_of(heard_after(guarded, inner_liar))


def test_message_is_accepted_once_and_only_unchanged(guarded: Ends, liar: LyingRelay) -> None:
    packed = SCHEMA.pack(ASKED)
    sealed = liar.rank.seal(packed)
    liar.send((liar.session, sealed))
    assert Arrived(liar.session, ASKED) in heard_after(guarded, liar)
    liar.send((liar.session, sealed))
    assert "that came through a relay: it is repeated" in problem_of(heard_after(guarded, liar))
    liar.send((liar.session, liar.rank.seal(packed)[:-1] + b"\xc3"))
    assert "forged" in problem_of(heard_after(guarded, liar))


def test_relay_cannot_introduce_or_speak_for_another_rank(guarded: Ends, liar: LyingRelay) -> None:
    liar.send(("session-b", RankEnd(b"", "session-b").hello))
    assert "does not know the cluster's secret" in problem_of(heard_after(guarded, liar))
    liar.send(("session-b", liar.rank.hello))
    assert "does not know the cluster's secret" in problem_of(heard_after(guarded, liar))
    liar.send(("session-b", liar.rank.seal(SCHEMA.pack(ASKED))), closed=("session-b",))
    assert heard_after(guarded, liar) == []
    assert liar.receive().detached == ("session-b",), "a rank that is not attached has to attach"


def test_recorded_attachment_is_worthless(guarded: Ends, liar: LyingRelay) -> None:
    beat = liar.rank.seal(SCHEMA.pack(ASKED))
    liar.send((liar.session, beat), (liar.session, liar.rank.hello), (liar.session, beat))
    seen = heard_after(guarded, liar)
    assert seen.count(Arrived(liar.session, ASKED)) == 1
    assert "repeated" in problem_of([item for item in seen if not isinstance(item, Arrived)])


def test_repeated_hello_does_not_shut_its_rank_out(guarded: Ends, liar: LyingRelay) -> None:
    assert KEYS is not None
    rank = RankEnd(KEYS.session_key, "session-b")
    liar.send(("session-b", rank.hello))
    assert rank.welcome(liar.receive().deliveries[0].body)
    liar.send(("session-b", rank.hello), ("session-b", rank.seal(SCHEMA.pack(ASKED))))
    assert heard_after(guarded, liar) == [Arrived("session-b", ASKED)]


def test_late_messages_of_a_rank_that_left_its_relay_change_nothing(guarded: Ends, liar: LyingRelay) -> None:
    liar.send((liar.session, liar.rank.seal(SCHEMA.pack(ASKED))))
    until(guarded.heard, lambda item: item == Arrived(liar.session, ASKED))
    direct = guarded.connected(liar.session, KEYS)
    direct.send(StopJob("direct"))
    until(guarded.heard, lambda item: item == Arrived(liar.session, StopJob("direct")))
    liar.send((liar.session, liar.rank.seal(SCHEMA.pack(ASKED))), closed=(liar.session,))
    assert liar.receive().detached == (liar.session,)
    assert guarded.aside == []
    guarded.server.send(liar.session, Pending(liar.session, 1, 2, 4))
    until(guarded.got(direct), lambda item: isinstance(item, Got))


def test_frames_and_ranks_of_a_relay_are_bounded(guarded: Ends, liar: LyingRelay, monkeypatch: MonkeyPatch) -> None:
    liar.send(*[("x", b"")] * (MAX_BATCH + 1))
    assert "a relay's frame is malformed" in problem_of(heard_after(guarded, liar))
    liar.socket.send(b"\xdd\xff\xff\xff\xff")
    assert "a relay's frame is malformed" in problem_of(heard_after(guarded, liar))
    monkeypatch.setattr(relaying, "MAX_RANKS", 1)
    assert KEYS is not None
    liar.send(("session-b", RankEnd(KEYS.session_key, "session-b").hello))
    assert "more than 1 rank" in problem_of(heard_after(guarded, liar))


def test_common_message_passes_a_relay_once(guarded: Ends, liar: LyingRelay) -> None:
    assert KEYS is not None
    other = RankEnd(KEYS.session_key, "session-b")
    liar.send(("session-b", other.hello))
    assert other.welcome(liar.receive().deliveries[0].body)
    for session, rank in (("session-a", liar.rank), ("session-b", other)):
        liar.send((session, rank.seal(SCHEMA.pack(ASKED))))
        until(guarded.heard, lambda item, session=session: item == Arrived(session, ASKED))
    end = EndJob("job", 1, EndKind.STOPPED, "the test")
    for session in RANKS:
        guarded.server.send(session, end)
    (delivery,) = liar.receive().deliveries
    assert delivery.sessions == RANKS
    assert SCHEMA.unpack(delivery.body) == end
    liar.rank.check(delivery.stamps[0], delivery.body)
    with pytest.raises(ForgedError):
        other.check(delivery.stamps[0], delivery.body)
    other.check(delivery.stamps[1], delivery.body)
    with pytest.raises(ForgedError):
        other.check(delivery.stamps[1], delivery.body)


@pytest.mark.parametrize("name", [b"session-b", b"relay-1"])
def test_relays_and_workers_keys_do_not_stand_for_each_other(guarded: Ends, name: bytes) -> None:
    assert KEYS is not None
    pair = KEYS.relay if name == b"session-b" else KEYS.worker
    assert pair is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.setsockopt(zmq.ROUTING_ID, name)
        socket.curve_serverkey, socket.curve_publickey = KEYS.scheduler.public, pair.public
        socket.curve_secretkey = pair.secret
        socket.connect(endpoint("127.0.0.1", guarded.port))
        socket.send(SCHEMA.pack(ASKED))
        (found,) = until(guarded.heard, lambda item: isinstance(item, Garbled))
    assert isinstance(found, Garbled)
    assert found.problem.endswith("messages were dropped")


def test_notes_and_orders_from_strangers_change_nothing(guarded: Ends, liar: LyingRelay) -> None:
    whole = NOTE.pack(RelayNote())
    hostile = [b"", b"\xc1", whole[:-1], whole + b"\0", b"\xdd\xff\xff\xff\xff", NOTE.pack(RelayNote("x" * 999))]
    for packed in hostile:
        liar.send(("relay-0", ABOUT + packed))
        assert "dropped a relay's note" in problem_of(heard_after(guarded, liar)), packed
    for address in ("nonsense", "10.0.0.1", "10.0.0.1:0", "a:1,b:2", "file:/etc/passwd"):
        liar.send(("relay-0", ABOUT + NOTE.pack(RelayNote(address))))
        assert "is not the address of a relay" in problem_of(heard_after(guarded, liar))
    liar.send(("relay-1", ABOUT + NOTE.pack(RelayNote("10.0.0.1:1"))))
    assert heard_after(guarded, liar) == []
    tree = guarded.server._relayed._tree
    assert [one.note for one in tree.direct] == [None], "a relay states nothing about another one"


def test_relay_that_others_leave_is_doubted_until_it_sends(guarded: Ends, inner_liar: LyingInnerRelay) -> None:
    assert KEYS is not None
    assert KEYS.relay is not None
    (place,) = guarded.server._relayed._tree.direct
    assert not place.is_doubted
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.setsockopt(zmq.ROUTING_ID, b"relay-below")
        socket.curve_serverkey, socket.curve_publickey = KEYS.scheduler.public, KEYS.relay.public
        socket.curve_secretkey = KEYS.relay.secret
        socket.connect(endpoint("127.0.0.1", guarded.port))
        socket.send(UPWARD.pack(Upward()))
        until(lambda: [*guarded.heard(), len(guarded.server._relayed._tree.direct)], lambda item: item == 2)
        assert place.is_doubted
        inner_liar.send((inner_liar.session, inner_liar.rank.seal(SCHEMA.pack(ASKED))))
        until(guarded.heard, lambda item: item == Arrived(inner_liar.session, ASKED))
        assert not place.is_doubted


def test_relay_cannot_attach_below_itself(guarded: Ends, inner_liar: LyingInnerRelay) -> None:
    assert KEYS is not None
    key = relays_key(KEYS.session_key)
    inner_liar.send(("relay-0", RankEnd(key, "relay-0").hello))
    assert "tried to attach below itself" in problem_of(heard_after(guarded, inner_liar))
    inner_liar.send_inside(("relay-0", RankEnd(key, "relay-0").hello))
    assert "tried to attach below itself" in problem_of(heard_after(guarded, inner_liar))
