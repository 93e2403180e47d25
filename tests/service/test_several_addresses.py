"""A scheduler at one of two addresses: it moves, is superseded while alive, hangs, or is another job's.

Real schedulers and agents over loopback; a listener that never answers plays a host that hangs.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from samebits.account.job_view import JobView
from samebits.core import records
from samebits.core.records import GenerationCommitted, JobInterrupted, SeatLost
from samebits.errors import RefusedError, SchedulerLeftError, SupersededError
from samebits.launcher.scheduler_link import Linked, SchedulerLink, ask_once, decide_once
from samebits.service.agent import Agent
from samebits.service.scheduling.loop import SchedulerService
from samebits.store.journal import Journal, read_journal
from tests.service.house import PATIENCE_S, House
from tests.system.processes import free_port

MUTE_S = 1.0  # how long an unresponsive one is tried


class TwoPlaces(House):
    """A job whose scheduler may be at either of two ports."""

    def __init__(self, path: Path, workers: int = 2, **environ: str) -> None:
        self.ports = (free_port(), free_port())
        self._held: list[socket.socket] = []
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        super().__init__(path, workers, SCHED_HOST=hosts, LOG_DIR=str(path), **environ)

    def hold(self, port: int) -> None:
        """Take the port without answering on it."""
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
        held.listen()
        self._held.append(held)

    def serves(self) -> SchedulerService:
        """Start a scheduler that listens on the first free port."""
        is_ready = threading.Event()
        self.service = SchedulerService(self.settings("scheduler"), on_ready=is_ready.set)
        self.served: Future[object] = self.pool.submit(self._serve, self.service)
        assert is_ready.wait(PATIENCE_S)
        return self.service

    def _serve(self, service: SchedulerService) -> object:
        self.thread = threading.get_ident()
        return service.serve()

    def journaled(self) -> list[records.Record]:
        contents = read_journal(self.path / "recovery")
        assert contents is not None
        return [records.SCHEMA.unpack(payload) for payload in contents.payloads]

    def has_written(self, text: bytes) -> bool:
        return any(text in path.read_bytes() for path in (self.path / "recovery").rglob("*") if path.is_file())

    def close(self) -> None:
        super().close()
        for held in self._held:
            held.close()


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Callable[..., TwoPlaces]]:
    made: list[TwoPlaces] = []

    def make(name: str = "job", **options: object) -> TwoPlaces:
        made.append(TwoPlaces(tmp_path / name, **options))  # type: ignore[arg-type]
        made[-1].path.mkdir()
        return made[-1]

    yield make
    for house in reversed(made):
        house.close()


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def are_at(house: TwoPlaces, agents: list[Agent], port: int, term: int) -> None:
    """Wait until the scheduler of this term at this port reports every agent as present."""

    def all_there() -> bool:
        told = ask_once(house.settings("worker", "0"), MUTE_S)
        if told is None or told.term != term:
            return False
        return [worker.activity for worker in told.workers] == ["training"] * len(agents)

    wait_until(all_there, "all are with the new scheduler")
    told = ask_once(house.settings("worker", "0"), MUTE_S)
    assert told is not None and told.address == f"127.0.0.1:{port}"


def nothing_was_lost(house: TwoPlaces) -> None:
    kinds = [type(record) for record in house.journaled()]
    assert SeatLost not in kinds and JobInterrupted not in kinds
    assert kinds.count(GenerationCommitted) == 1


def test_moved_scheduler_is_found_and_the_generation_continues(places: Callable[..., TwoPlaces]) -> None:
    house = places()
    first = house.serves()
    agents = house.seated("0", "1")
    house.mapped(agents, house.generation(*agents))
    first.abandon()
    with pytest.raises(SchedulerLeftError):
        house.served.result(PATIENCE_S)
    house.hold(house.ports[0])
    house.serves()
    are_at(house, agents, house.ports[1], term=2)
    nothing_was_lost(house)
    for agent in agents:
        assert not agent.interrupted and agent.must_end is None


def test_superseded_scheduler_finds_out_without_writing(places: Callable[..., TwoPlaces]) -> None:
    """The scheduler's lock is lost, as on a shared folder, and no event makes it write."""
    house = places()
    house.serves()
    old = house.served
    agents = house.seated("0", "1")
    house.mapped(agents, house.generation(*agents))
    (house.path / "recovery" / "lock").unlink()
    house.serves()
    with pytest.raises(SupersededError, match="has claimed term 2, so this scheduler, of term 1, has stopped"):
        old.result(PATIENCE_S)
    are_at(house, agents, house.ports[1], term=2)
    nothing_was_lost(house)


def test_scheduler_that_hangs_on_its_disk_is_left(
    places: Callable[..., TwoPlaces], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ's own heartbeats keep the connections open, so only silence shows the hang."""
    house = places()
    require, hangs, goes_on = Journal.require_claim, threading.Event(), threading.Event()
    old_thread: list[int] = []

    def hang(journal: Journal) -> None:
        if threading.get_ident() in old_thread:
            hangs.set()
            assert goes_on.wait(PATIENCE_S)
        require(journal)

    house.serves()
    old = house.served
    agents = house.seated("0", "1")
    house.mapped(agents, house.generation(*agents))
    monkeypatch.setattr(Journal, "require_claim", hang)
    old_thread.append(house.thread)
    assert hangs.wait(PATIENCE_S), "it never checked whether its claim holds"
    (house.path / "recovery" / "lock").unlink()
    house.serves()
    are_at(house, agents, house.ports[1], term=2)
    assert not old.done()
    goes_on.set()
    with pytest.raises(SupersededError):
        old.result(PATIENCE_S)
    are_at(house, agents, house.ports[1], term=2)
    nothing_was_lost(house)


def test_scheduler_of_another_job_at_the_first_address_is_skipped(
    places: Callable[..., TwoPlaces], tmp_path: Path
) -> None:
    foreign, house = places("foreign", JOB_NAME="foreign"), places(JOB_NAME="ours")
    hosts = f"127.0.0.1:{foreign.ports[0]},127.0.0.1:{house.ports[1]}"
    house.environ["SCHED_HOST"] = hosts
    foreign.serves()
    house.serves()
    agents = [Agent(house.settings("worker", node), "ours", "cpu") for node in ("0", "1")]
    house.agents += agents
    list(house.pool.map(lambda agent: agent.register(), agents, timeout=PATIENCE_S))
    settings = house.settings("worker", "0")
    told = ask_once(settings, PATIENCE_S)
    assert told is not None and (told.name, told.address) == ("ours", f"127.0.0.1:{house.ports[1]}")
    assert decide_once(settings, "a decision of ours", timeout_s=PATIENCE_S)
    wait_until(lambda: house.has_written(b"a decision of ours"), "the decision in its own job's folder")
    assert not foreign.has_written(b"a decision of ours")
    link = SchedulerLink(settings)
    try:
        seen: list[object] = []
        wait_until(lambda: bool(seen.extend(link.take())) or any(isinstance(one, JobView) for one in seen), "a word")
        if next(one for one in seen if isinstance(one, JobView)).name == "foreign":
            link.look_elsewhere()
        wait_until(
            lambda: (
                bool(seen.extend(link.take())) or any(isinstance(one, JobView) and one.name == "ours" for one in seen)
            ),
            "its own job's word",
        )
        assert Linked(f"127.0.0.1:{house.ports[1]}") in seen
    finally:
        link.close()


def test_worker_refused_everywhere_ends_at_once_with_the_reasons(
    places: Callable[..., TwoPlaces],
) -> None:
    one, other, house = places("one", JOB_NAME="one"), places("other", JOB_NAME="other"), places(JOB_NAME="ours")
    hosts = [f"127.0.0.1:{foreign.ports[0]}" for foreign in (one, other)]
    house.environ["SCHED_HOST"] = ",".join(hosts)
    one.serves()
    other.serves()
    agent = Agent(house.settings("worker", "0"), "ours", "cpu")
    house.agents.append(agent)
    with pytest.raises(RefusedError, match="every address of SCHED_HOST refuses it") as told:
        agent.register()
    for host, name in zip(hosts, ("one", "other"), strict=True):
        assert f"{host}: worker 0 was started for 'ours', this scheduler runs '{name}'" in str(told.value)
