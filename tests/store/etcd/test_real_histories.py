"""Histories of a journal in three real etcd servers, and of keys on it, while servers are killed and stopped.

Several schedulers take the journal from each other, append and compact, and a reader reads. Some order of all calls
must explain every answer (``tests.core.linearizability``). The first seed always runs; the others are the campaign.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from samebits.errors import StoreError, SupersededError
from samebits.etcd_place import EtcdAccess, EtcdPlace
from samebits.store.etcd.etcd_journal import EtcdClaim, EtcdJournal, read_etcd_journal
from samebits.store.etcd.gateway import Equals, EtcdGateway, PutKey
from tests.core.key_world import CALLS, Build, World
from tests.core.linearizability import NEVER, has_order, is_linearizable
from tests.store.etcd.etcd_cluster import ETCD, EtcdCluster, cluster_in

pytestmark = pytest.mark.skipif(ETCD is None, reason="no etcd is installed (apt-get install etcd-server)")

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 20))]
SCHEDULERS = 3
APPENDS = 25
"""By each scheduler, at most: it stops earlier once all others have ended."""
HOLDER = b'{"pid": 1}\n'


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with cluster_in(tmp_path / "etcd") as found:
        yield found


@dataclass(slots=True)
class Call:
    """One call to the journal: an append of one payload, or a read. Without an answer an append may happen later."""

    payload: bytes | None
    began: int
    ended: int = NEVER
    answer: tuple[bytes, ...] | None = None


class History:
    """All calls, from any thread."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._lock = threading.Lock()
        self._moment = 0

    def begin(self, payload: bytes | None = None) -> Call:
        with self._lock:
            self._moment += 1
            self.calls.append(Call(payload, self._moment))
            return self.calls[-1]

    def end(self, call: Call, answer: tuple[bytes, ...] = ()) -> None:
        with self._lock:
            self._moment += 1
            call.ended, call.answer = self._moment, answer

    def is_linearizable(self) -> bool:
        """Return whether one list, to which each append adds its payload once, can have given these answers.

        The last call is a read after all others. A journal only grows, so every state is a beginning of that answer,
        and its length is all that the search needs.
        """
        last = self.calls[-1].answer
        assert last is not None

        def after(length: int, call: Call) -> Iterator[int]:
            if call.payload is None:
                if call.answer is not None and call.answer == last[:length]:
                    yield length
            elif last[length : length + 1] == (call.payload,):
                yield length + 1

        return has_order(self.calls, 0, after)

    def discard(self, call: Call) -> None:
        """The call changed nothing and returned nothing."""
        with self._lock:
            self.calls.remove(call)


def schedule(place: EtcdPlace, history: History, name: int, seed: int) -> None:
    """Be a scheduler that claims the job, writes until it is superseded, and claims it again."""
    random, number = Random(f"{seed}/{name}"), 0
    gateway = EtcdGateway(place, EtcdAccess())
    while number < APPENDS:
        read = history.begin()
        try:
            log, payloads = EtcdJournal.load(EtcdClaim.take(gateway, HOLDER), "journal")
        except SupersededError:
            history.discard(read)
            continue
        known = payloads or []
        history.end(read, tuple(known))
        for _ in range(random.randint(2, 12)):
            payload = b"%d.%d" % (name, number)
            number += 1
            call = history.begin(payload)
            try:
                log.append([payload])
                history.end(call)
                known.append(payload)
                if random.random() < 0.1:
                    log.compact(known)
            except SupersededError:
                break  # without an answer: whether the append happened is unknown
        time.sleep(random.uniform(0.0, 0.1))


def read(place: EtcdPlace, history: History, is_over: threading.Event) -> None:
    """Be a command that reads the journal now and then.

    Without a claim a read may be late, because a member that was suspended answers from an earlier state. But it is not
    earlier than the previous read, so it counts as begun when that one ended.
    """
    gateway = EtcdGateway(place, EtcdAccess())
    earliest = 0
    while not is_over.wait(0.05):
        call = history.begin()
        history.end(call, tuple(read_etcd_journal(gateway, "journal") or ()))
        call.began, earliest = earliest, call.ended


def disturb(cluster: EtcdCluster, seed: int, is_over: threading.Event) -> None:
    """Kill, stop and restart servers until all calls have returned."""
    random = Random(seed)
    while not is_over.wait(random.uniform(0.2, 1.0)):
        leader = cluster.leader()
        member = leader if leader is not None and random.random() < 0.7 else random.choice(cluster.members)
        match random.randrange(3):
            case 0:
                cluster.signal(member, signal.SIGKILL)
                is_over.wait(random.uniform(0.0, 1.5))
                cluster.start(member)
            case 1:
                cluster.signal(member, signal.SIGSTOP)
                is_over.wait(random.uniform(0.5, 2.5))
                cluster.signal(member, signal.SIGCONT)
            case _:
                for one in cluster.members:
                    cluster.signal(one, signal.SIGKILL)
                for one in cluster.members:
                    cluster.start(one)
        cluster.wait_ready()


@pytest.mark.parametrize("seed", SEEDS)
def test_history_of_the_journal_is_linearizable(cluster: EtcdCluster, seed: int) -> None:
    history = recorded(cluster, seed)
    appends = [call for call in history.calls if call.payload is not None]
    assert sum(call.answer is not None for call in appends) >= 10
    assert any(call.answer is None for call in appends), "no scheduler was superseded in an append"
    assert history.is_linearizable(), "\n".join(map(str, history.calls))


def recorded(cluster: EtcdCluster, seed: int) -> History:
    history, is_over = History(), threading.Event()
    place = cluster.place()
    with ThreadPoolExecutor(SCHEDULERS + 2) as pool:
        others = [pool.submit(read, place, history, is_over), pool.submit(disturb, cluster, seed, is_over)]
        schedulers = [pool.submit(schedule, place, history, name, seed) for name in range(SCHEDULERS)]
        try:
            for one in schedulers:
                one.result()
        finally:
            is_over.set()
        for one in others:
            one.result()
    last = history.begin()
    _, payloads = EtcdJournal.load(EtcdClaim.take(EtcdGateway(place, EtcdAccess()), HOLDER), "journal")
    history.end(last, tuple(payloads or ()))
    return history


def _write_without_claim(self: EtcdJournal, before: Equals, change: PutKey) -> None:
    while not self._gateway.change([], [change]):
        pass


def test_checker_finds_schedulers_that_overwrite_each_other(
    cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EtcdJournal, "_write", _write_without_claim)
    first, second = (
        EtcdJournal.load(EtcdClaim.take(EtcdGateway(cluster.place(), EtcdAccess()), HOLDER), "journal")[0]
        for _ in range(2)
    )
    history = History()
    for log, payload in ((first, b"1"), (second, b"2")):
        call = history.begin(payload)
        log.append([payload])
        history.end(call)
    last = history.begin()
    history.end(last, tuple(read_etcd_journal(EtcdGateway(cluster.place(), EtcdAccess()), "journal") or ()))
    assert not history.is_linearizable()


# ---- the keys


class KeysInEtcd(World):
    """The world of the keys with its journal in the etcd; a killed scheduler may resume and write once more."""

    def __init__(self, place: EtcdPlace, seed: int, disturb: Callable[[Random], None]) -> None:
        self._place = place
        self._disturb = disturb
        self._former: EtcdJournal | None = None
        self._log, _ = self._opened()
        super().__init__(seed, is_durable=True, build=Build())

    def save(self, records: list[bytes]) -> None:
        if self.draw.random() < 0.05:
            self._disturb(self.draw)
        if self._former is not None and self.draw.random() < 0.3:
            with pytest.raises((SupersededError, StoreError)):
                self._former.append(records or [b"of a former scheduler"])
            self._former = None
        self._log.append(records)

    def compact(self, snapshot: list[bytes]) -> None:
        self._log.compact(snapshot)

    def stored(self) -> list[bytes]:
        self._former = self._log
        self._log, payloads = self._opened()
        return payloads

    def _opened(self) -> tuple[EtcdJournal, list[bytes]]:
        claim = EtcdClaim.take(EtcdGateway(self._place, EtcdAccess()), HOLDER)
        log, payloads = EtcdJournal.load(claim, "keys")
        return log, payloads or []


@pytest.mark.parametrize("seed", SEEDS)
def test_history_of_the_keys_is_linearizable(cluster: EtcdCluster, seed: int) -> None:
    def disturb(draw: Random) -> None:
        leader = cluster.leader()
        if leader is not None:
            cluster.signal(leader, signal.SIGKILL)
            cluster.start(leader)

    world = KeysInEtcd(cluster.place(), seed, disturb)
    history = world.run()
    assert sum(map(len, history.values())) >= CALLS
    for key, calls in history.items():
        assert is_linearizable(calls), f"{key!r}: {calls}"
