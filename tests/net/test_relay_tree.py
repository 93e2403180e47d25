"""The places of relays in their tree: the choice as a pure function, in random histories, and with real relays."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from pytest import MonkeyPatch

from samebits import config
from samebits.core.messages import Pending, StopJob
from samebits.net import relay_tree
from samebits.net.client import Client, Down, Got, Up
from samebits.net.curve import ClusterKeys
from samebits.net.relay_tree import MAX_AVOIDED, MAX_DEPTH, RelayMove, RelayNote, RelayPlace, RelayTree, choose
from samebits.net.relaying import NOTE, Upward
from samebits.net.server import ConnectionLost, Server
from samebits.scheduler_hosts import SchedulerAddress
from samebits.service import relay as relay_service
from samebits.service.relay import RelayService
from samebits.service.scheduling.unknown_peers import Offence
from tests.net.ends import Ends, until
from tests.net.test_relay import KEYS, SECRET, Behind, RunningRelay
from tests.system.processes import free_port

FAN_OUT = 2


@pytest.fixture(autouse=True)
def _fan_out(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(relay_tree, "FAN_OUT", FAN_OUT)


def address_of(name: str) -> str:
    return f"10.0.0.{name}:8119"


class Grown:
    """A tree, and its places by name."""

    def __init__(self) -> None:
        self.tree = RelayTree()
        self.at: dict[str, RelayPlace] = {}

    def attach(self, name: str, above: str | None = None, **note: object) -> RelayMove | None:
        place = self.at[name] = self.tree.attach(name, None if above is None else self.at[above])
        return self.note(place, RelayNote(**{"at": address_of(name), **note}))  # type: ignore[arg-type]

    def note(self, place: RelayPlace, note: RelayNote) -> RelayMove | None:
        """Enter the note, and return the order that follows."""
        self.tree.note(place, note)
        return next(self.tree.moves(), None)

    def moved(self, move: RelayMove | None) -> str:
        """Carry out an order, and return the name of the new parent."""
        assert move is not None
        (above,) = (name for name in self.at if address_of(name) == move.address)
        self.attach(move.place.name, above)
        self.tree.detach(move.place)
        self._states_relays(above)
        return above

    def _states_relays(self, name: str) -> None:
        """Let a relay state how many relays are attached to it, as it does whenever that changes."""
        place = self.at[name]
        assert place.note is not None
        self.tree.note(place, RelayNote(place.note.at, len(place.below), place.note.avoids))


@pytest.fixture
def grown() -> Grown:
    return Grown()


def test_relays_beyond_the_fan_out_are_sent_to_the_nearest_with_room(grown: Grown) -> None:
    assert [grown.attach(name) for name in "12"] == [None, None]
    above = [grown.moved(grown.attach(name)) for name in "3456789"]
    assert above[:4] == ["1", "2", "1", "2"]
    assert above[4:] == ["3", "4", "5"], "a level is filled before the next one, evenly"
    assert len(grown.tree.direct) == FAN_OUT
    assert grown.at["9"].depth == 3


def test_orders_that_were_not_carried_out_yet_take_room(grown: Grown) -> None:
    moves = [grown.attach(name) for name in "1234567"]
    assert Counter(move.address for move in moves if move) == {address_of("1"): 2, address_of("2"): 2}
    assert moves[-1] is None, "a relay that will move is no parent"


def test_relay_is_never_sent_below_itself_or_below_one_that_moves(grown: Grown) -> None:
    grown.attach("1")
    grown.attach("2", relays=1)
    for name in "34":
        grown.attach(name, "2")
    move = grown.attach("5", relays=1)
    assert move is not None
    assert move.place.name == "1", "a relay without relays moves rather than one with some"
    assert move.address == address_of("5"), "2 has no room"
    assert grown.attach("6", relays=1) == RelayMove(grown.at["6"], address_of("3")), "1 is about to move"
    assert choose([[grown.at["1"], grown.at["3"]], [grown.at["4"]]], grown.at["2"]) is None, "3 and 4 are below 2"


def test_relay_with_relays_below_moves_if_there_is_no_other(grown: Grown) -> None:
    for name, below in (("1", "3"), ("2", "4")):
        grown.attach(name, relays=1)
        grown.attach(below, name)
    move = grown.attach("5", relays=2)
    assert move is not None
    assert (move.place.name, move.address) == ("5", address_of("1"))


def test_unreachable_places_are_avoided_and_after_some_another_relay_moves(grown: Grown) -> None:
    for name in "12":
        grown.attach(name)
    assert grown.attach("3") == RelayMove(grown.at["3"], address_of("1"))
    again = grown.note(grown.at["3"], RelayNote(address_of("3"), 0, (address_of("1"),)))
    assert again == RelayMove(grown.at["3"], address_of("2"))
    other = grown.note(grown.at["3"], RelayNote(address_of("3"), 0, (address_of("1"), address_of("2"), "a:1")))
    assert other == RelayMove(grown.at["2"], address_of("1")), "the failed attempts have given their room back"


def test_order_is_withdrawn_if_the_relay_to_attach_to_is_gone(grown: Grown) -> None:
    for name in "12":
        grown.attach(name)
    assert grown.attach("3") == RelayMove(grown.at["3"], address_of("1"))
    grown.tree.detach(grown.at["1"])
    assert [*grown.tree.moves()] == [], "there are no more than there should be"
    assert grown.attach("4") == RelayMove(grown.at["4"], address_of("2"))


def test_doubted_place_is_the_last_resort(grown: Grown) -> None:
    for name in "12":
        grown.attach(name)
    grown.at["1"].is_doubted = True
    assert [grown.moved(grown.attach(name)) for name in "345"] == ["2", "2", "3"]
    for name in ("2", "3", "4", "5"):
        grown.at[name].is_doubted = True
    assert grown.moved(grown.attach("6")) == "1"


@pytest.mark.parametrize(
    ("mover", "other", "wanted"),
    [
        (RelayNote("10.0.0.1:1"), RelayNote("127.0.0.1:1"), False),
        (RelayNote("127.0.0.1:2"), RelayNote("127.0.0.1:1"), True),
        (RelayNote("[::1]:2"), RelayNote("localhost:1"), True),
        (RelayNote(), RelayNote("10.0.0.1:1"), True),
        (RelayNote(), RelayNote(), False),
        (None, RelayNote("10.0.0.1:1"), False),
    ],
    ids=["loopback", "same-host", "same-host-v6", "mover-unreachable", "none-reachable", "older"],
)
def test_addresses_decide_who_can_be_reached(
    mover: RelayNote | None, other: RelayNote, *, wanted: bool, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_tree, "FAN_OUT", 1)
    tree = RelayTree()
    places = [tree.attach(name, None) for name in "12"]
    tree.note(places[0], other)
    if mover is not None:
        tree.note(places[1], mover)
    assert [*tree.moves()] == ([RelayMove(places[1], other.at)] if wanted else [])


def test_depth_is_bounded(grown: Grown, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(relay_tree, "FAN_OUT", 1)
    grown.attach("1")
    for number in range(2, MAX_DEPTH + 1):
        assert grown.moved(grown.attach(f"{number}")) == f"{number - 1}"
    assert grown.attach("99") is None, "it stays at the scheduler"


# ---- random histories


@dataclass(eq=False)
class Relay:
    """A relay's process, and what it knows."""

    name: str
    above: Relay | None = None  # None: the scheduler
    place: RelayPlace | None = None  # None: its connection is closed, or the scheduler does not know it yet
    trial: Relay | None = None
    order: RelayMove | None = None
    tried: RelayPlace | None = None
    avoids: list[str] = field(default_factory=list)
    below: set[Relay] = field(default_factory=set)
    is_gone: bool = False
    stated: int = 0  # how many relays are below, as of its last note


class History:
    """Relays that start, move, fail to move and die, in a random order of messages."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tree = RelayTree()
        self.relays: list[Relay] = []
        self.due: list[Callable[[], None]] = []
        self.closed: set[RelayPlace] = set()
        self.latest: dict[RelayPlace, RelayMove] = {}
        self.unreachable: set[tuple[str, str]] = set()

    def step(self, *, calm: bool) -> bool:
        if not calm and self.rng.random() < 0.2:
            self._disturb()
        elif self.due:
            self.due.pop(self.rng.randrange(len(self.due)))()
        for relay in self.relays:
            if relay.place is not None and not relay.is_gone and relay.stated != len(relay.below):
                self._note(relay)
        for move in self.tree.moves():
            self.latest[move.place] = move  # orders arrive in order
            self.due.append(lambda move=move: self._order(move))
        self._check()
        return bool(self.due)

    def _disturb(self) -> None:
        alive = [one for one in self.relays if not one.is_gone]
        if len(alive) < 20 and self.rng.random() < 0.7:
            relay = Relay(str(len(self.relays)))
            self.relays.append(relay)
            if alive and self.rng.random() < 0.2:
                self.unreachable.add((relay.name, self.rng.choice(alive).name))
            self.due.append(lambda: self._attach(relay))
        elif alive:
            self._kill(self.rng.choice(alive))

    def _kill(self, relay: Relay) -> None:
        relay.is_gone = True
        self._leave(relay)
        for child in relay.below:
            self._drop_place(child)
            child.above = None
            self.due.append(lambda child=child: self._attach(child))
        relay.below = set()

    def _leave(self, relay: Relay) -> None:
        if relay.above is not None:
            relay.above.below.discard(relay)
        for place in (relay.place, relay.tried):
            if place is not None:
                self._close(place)
        relay.place = relay.tried = relay.trial = None

    def _drop_place(self, relay: Relay) -> None:
        """The relay's attachment is over, and so are those behind it, which attach again."""
        place, relay.place = relay.place, None
        if relay.tried is not None:
            self._close(relay.tried)
        relay.trial = relay.tried = None
        if place is not None:
            self._close(place)
        for child in relay.below:
            self._drop_place(child)
            self.due.append(lambda child=child: self._attach(child))

    def _close(self, place: RelayPlace) -> None:
        """Let the scheduler forget a place, and those below it."""
        if place in self.closed:
            return
        self.closed.add(place)
        for one in [*place.below]:
            self._close(one)
        self.tree.detach(place)

    def _attach(self, relay: Relay) -> None:
        if relay.is_gone or relay.place is not None:
            return
        above = relay.above
        if above is not None and (above.place is None or above.place in self.closed):
            self.due.append(lambda: self._attach(relay))  # its parent has to attach first
            return
        if above is not None and above.place is not None and above.place.depth == MAX_DEPTH:
            above.below.discard(relay)  # its hello is dropped there
            relay.above = above = None
        relay.place = self.tree.attach(relay.name, None if above is None else above.place)
        self._note(relay)
        for child in relay.below:
            self.due.append(lambda child=child: self._attach(child))

    def _note(self, relay: Relay) -> None:
        place = relay.place
        assert place is not None
        relay.stated = len(relay.below)

        def arrive() -> None:
            if place in self.closed or relay.place is not place:
                return
            note = RelayNote(address_of(relay.name), len(relay.below), tuple(relay.avoids[-MAX_AVOIDED:]))
            self.tree.note(place, note)

        self.due.append(arrive)

    def _order(self, move: RelayMove) -> None:
        relay = self.relays[int(move.place.name)]
        if relay.place is move.place and self.latest[move.place] is move and not relay.is_gone:
            relay.trial = next(one for one in self.relays if address_of(one.name) == move.address)
            relay.order = move
            self.due.append(lambda: self._hello(relay, move))

    def _hello(self, relay: Relay, move: RelayMove) -> None:
        target = relay.trial
        if target is None or relay.place is not move.place or relay.order is not move:
            return
        place = target.place
        is_reached = place not in self.closed and (relay.name, target.name) not in self.unreachable
        if (
            place is None
            or not is_reached
            or place.depth == MAX_DEPTH
            or any(one.name == relay.name for one in place.path())
        ):
            relay.trial = None
            relay.avoids.append(address_of(target.name))
            self._note(relay)
            return
        if relay.tried is not None:
            self._close(relay.tried)  # of an earlier order
        relay.tried = self.tree.attach(relay.name, place)
        self.due.append(lambda: self._swap(relay))

    def _swap(self, relay: Relay) -> None:
        target, before, tried = relay.trial, relay.place, relay.tried
        if target is None or before is None or tried is None:
            return
        relay.trial = relay.tried = None
        if tried in self.closed or tried.parent is not target.place:  # its new parent is gone or has moved meanwhile
            self._close(tried)
            relay.avoids.append(address_of(target.name))
            self._note(relay)
            return
        relay.above, relay.place = target, tried
        target.below.add(relay)
        self._note(relay)
        self.due.append(lambda: self._close(before))
        for child in relay.below:
            self._drop_place(child)
            self.due.append(lambda child=child: self._attach(child))

    def _chain(self, relay: Relay) -> list[str] | None:
        """Return the names from a relay to the scheduler, or None if it is below itself."""
        names: list[str] = []
        one: Relay | None = relay
        while one is not None:
            if one.name in names:
                return None
            names.append(one.name)
            one = one.above
        return names

    def _check(self) -> None:
        for relay in self.relays:
            if not relay.is_gone:
                assert self._chain(relay) is not None, f"relay {relay.name} is below itself"
        for relay in self.relays:
            if relay.place is not None and relay.place not in self.closed:
                assert relay.place.depth <= MAX_DEPTH

    def settled(self) -> list[Relay]:
        return [one for one in self.relays if not one.is_gone]


@pytest.mark.parametrize("block", range(4))
def test_random_histories_have_no_cycle_and_settle_with_few_relays_at_the_scheduler(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        history = History(seed)
        for _ in range(300):
            history.step(calm=False)
        while history.step(calm=True):
            continue
        alive = history.settled()
        assert all(one.place is not None and one.place not in history.closed for one in alive), seed
        stays = [one for one in alive if one.above is None]
        movable = [one for one in stays if not one.avoids]
        assert len(stays) <= FAN_OUT or not [one for one in movable if one.place and not one.place.has_relays], seed
        assert history.tree._leaving == 0, seed
        assert {place.name for place in history.tree.direct} == {one.name for one in stays}, seed


# ---- real relays


class Forest(Behind):
    """A server, and relays of the product that choose their places by themselves."""

    def __init__(self, keys: ClusterKeys | None, silence_s: float = 15.0) -> None:
        Ends.__init__(self, keys, silence_s=silence_s)  # long, because relays share one interpreter lock
        self.keys = keys
        self.relays: dict[SchedulerAddress, RunningRelay] = {}
        self.ranks: dict[str, Client] = {}

    def start(self, count: int) -> None:
        """Start this many relays, each with a rank."""
        for _ in range(count):
            self.place = SchedulerAddress("127.0.0.1", free_port())
            self.relays[self.place] = RunningRelay(self.environ(f"relay:{self.place},127.0.0.1"))
            session = f"session-{self.place.port}"
            self.ranks[session] = self.connected(session)
            self.ranks[session].send(StopJob(session))

    def listen(self) -> list[object]:
        """Return what the server hears, while every rank listens too and sends again after a reconnect."""
        for session, client in self.ranks.items():
            client.wait(0)
            if any(isinstance(item, Up) for item in client.drain()):
                client.send(StopJob(session))
        return [*self.heard()]

    def until(self, holds: Callable[[], bool]) -> list[object]:
        return until(lambda: [*self.listen(), Settled(holds())], lambda item: item == Settled(True))

    def depths(self) -> list[int]:
        """Return the depth of each relay, as the scheduler sees it."""
        return sorted(place.depth for place in self.server._relayed._relay_at)

    def are_all_heard(self, through: int) -> bool:
        """Return whether all ranks are attached, behind so many relays."""
        attachments = self.server._relayed._attachments
        return {*self.ranks} <= {*attachments} and len(self.depths()) == through

    def settle(self, count: int, direct: int = FAN_OUT) -> None:
        self.until(lambda: self.server.connections == direct and self.are_all_heard(count))

    def close(self) -> None:
        for relay in self.relays.values():
            relay.end()
        Ends.close(self)


@dataclass(frozen=True)
class Settled:
    """Whether the tree has the wanted form."""

    holds: bool


@pytest.fixture(params=[None, KEYS], ids=["open", "secret"])
def forest(request: pytest.FixtureRequest) -> Iterator[Forest]:
    ends = Forest(request.param)
    yield ends
    ends.close()


def test_seven_relays_form_a_tree_of_three_levels_without_losing_a_rank(forest: Forest) -> None:
    forest.start(7)
    forest.settle(7)
    assert forest.depths() == [1, 1, 2, 2, 2, 2, 3]
    for session, client in forest.ranks.items():
        assert forest.server.send(session, Pending(session, 1, 2, 4))
        until(forest.got(client), lambda item, session=session: item == Got(Pending(session, 1, 2, 4)))


def test_relays_of_ended_ones_attach_elsewhere_and_no_rank_is_reported_as_closed(forest: Forest) -> None:
    forest.start(6)
    forest.settle(6)
    first = next(iter(forest.relays))
    forest.ranks.pop(f"session-{first.port}").close()
    forest.clients = [*forest.ranks.values()]
    forest.until(lambda: f"session-{first.port}" not in forest.server._relayed._attachments)
    forest.relays.pop(first).end()
    seen = forest.until(lambda: forest.server.connections == FAN_OUT and forest.are_all_heard(5))
    assert not [item for item in seen if isinstance(item, ConnectionLost) and item.peer in forest.ranks]


def test_tree_forms_again_at_another_scheduler(forest: Forest) -> None:
    forest.start(5)
    forest.settle(5)
    forest.server.close()
    forest.server = Server(["127.0.0.1"], forest.port, forest.silence_s, keys=forest.keys)
    forest.settle(5)


def test_relay_that_cannot_reach_the_others_stays_at_the_scheduler() -> None:
    """Its ranks do not notice the attempts."""
    forest = Forest(None, silence_s=3.0)
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            where = f"127.0.0.1:{silent.getsockname()[1]}"
            for number in (1, 2):
                other = forest.server._relayed._entered(f"relay-{number}", -number, None)
                forest.server._relayed._tree.note(other.place, RelayNote(where))
            forest.start(1)
            ((place, running),) = forest.relays.items()
            ((session, rank),) = forest.ranks.items()
            seen = until(
                lambda: [*forest.got(rank)(), Settled(bool(running.service._avoids))], lambda one: one == Settled(True)
            )
        assert running.service._avoids == (where,)
        assert forest.server.send(session, Pending(session, 1, 2, 4))
        seen += until(forest.got(rank), lambda item: item == Got(Pending(session, 1, 2, 4)))
        assert not [item for item in seen if isinstance(item, Down)]
        assert rank.address == place
    finally:
        forest.close()


def service_at(host: str, **more: str) -> RelayService:
    settings = {"SCHED_HOST": f"relay:{host}:{free_port()},127.0.0.1", **more}
    return RelayService(config.read(settings, role_required=False)[0])


@pytest.mark.parametrize(
    ("host", "local", "secret", "wanted"),
    [
        ("127.0.0.1", "127.0.0.3", "", "127.0.0.3"),
        ("127.0.0.1", "127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "192.0.2.1", "", ""),
        ("127.0.0.1", "192.0.2.1", SECRET, ""),
        ("0.0.0.0", "192.0.2.1", SECRET, "192.0.2.1"),
        ("127.0.0.3", "192.0.2.1", "", "127.0.0.3"),
    ],
    ids=["also-outside", "same-host", "no-secret", "cannot-listen", "everywhere", "named"],
)
def test_relay_states_an_address_at_which_it_listens(
    host: str, local: str, secret: str, wanted: str, monkeypatch: MonkeyPatch
) -> None:
    """For the test, 127.0.0.3 is an address that other hosts can reach."""
    monkeypatch.setattr(relay_service, "is_loopback", lambda address: address == "127.0.0.1")
    service = service_at(host, **({"CLUSTER_SECRET": secret} if secret else {}))
    sent: list[Upward] = []
    monkeypatch.setattr(service._above, "send", sent.append)
    service._above.local_host = local
    service._report()
    ((_, packed),) = sent[0].messages
    note = NOTE.unpack(packed[1:])
    assert note == RelayNote(f"{wanted}:{service._port}" if wanted else "")
    if wanted.startswith("127."):
        socket.create_connection((wanted, service._port)).close()
    service.stop()
    service.serve()


def test_relay_passes_on_nothing_from_a_peer_that_uses_its_name() -> None:
    ends = Forest(None)
    try:
        ends.start(1)
        ((place, running),) = ends.relays.items()
        thief = Client("127.0.0.1", ends.port, running.service._name, ends.silence_s, relay=place)
        ends.clients.append(thief)
        until(lambda: [*ends.got(thief)(), *running.service.strangers.totals], lambda item: item is Offence.GARBLED)
    finally:
        ends.close()
