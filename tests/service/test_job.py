"""Scheduler loop and agent threads together over real sockets: admission, generations, restarts, the end."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from samebits.account.job_view import JobView
from samebits.core import records
from samebits.core.end_kinds import EndKind
from samebits.core.messages import GenerationStarted, Holdings, Status, StatusQuery, StopJob
from samebits.core.point import Point
from samebits.core.ready import JobEnded
from samebits.core.records import JobCreated, Record, SeatGranted, SeatLost
from samebits.errors import (
    ForeignFolderError,
    GenerationEndedError,
    JobStoppedError,
    ListenError,
    LockedError,
    NumericsError,
    RefusedError,
    SchedulerLeftError,
    StoreError,
    SupersededError,
)
from samebits.net.client import Client, Got
from samebits.service import agent as agent_module
from samebits.service.agent import Agent
from samebits.service.process_state import Whereabouts
from samebits.service.scheduling.loop import SchedulerService
from samebits.service.status import stored_view, view_in
from samebits.store import journal as journals
from samebits.store.journal import Journal
from samebits.store.lock import DirectoryLock
from samebits.store.term_claim import TermClaim, highest_claim
from tests.service.house import NUMERICS, PATIENCE_S, House, final, free_port, remove_folder


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, workers=3)
    yield house
    house.close()


@pytest.mark.parametrize("mode", [0o1777, 0o770])
def test_recovery_path_that_others_may_write_is_refused(house: House, mode: int) -> None:
    path = house.path / "recovery"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(StoreError, match=r"recovery: other users can write to this folder.*Fix: .*chmod go-w"):
        house.scheduler().result(PATIENCE_S)
    assert list(path.iterdir()) == []


def training(house: House) -> tuple[Future[JobEnded], list[Agent]]:
    served = house.scheduler()
    agents = house.seated("0", "1", "2")
    house.mapped(agents, house.generation(*agents))
    return served, agents


def until_has_left(recovery: Path, node: str) -> JobView:
    """Return the journal's state once it records that this node left and is claimed again."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        stored = stored_view(recovery)
        is_claimed = highest_claim(recovery) > 1
        if (
            is_claimed
            and stored is not None
            and (node, "left") in {(one.node, one.presence.value) for one in stored.workers}
        ):
            return stored
        time.sleep(0.01)
    raise AssertionError(f"the journal does not say that {node} has left: {stored_view(recovery)}")


def remove_claim(recovery: Path) -> None:
    (recovery / "term.1").unlink()


@pytest.mark.parametrize("remove", [remove_folder, remove_claim])
def test_removed_recovery_path_is_written_again(house: House, remove: Callable[[Path], None]) -> None:
    recovery = house.path / "recovery"
    served, agents = training(house)
    view = stored_view(recovery)
    assert view is not None
    for node in (1, 2):
        remove(recovery)
        agents[node].leave(on_purpose=True, text="it was asked to")
        again = until_has_left(recovery, str(node))
        assert (again.job, again.generation) == (view.job, 1)
        remove = remove_folder
    with pytest.raises(LockedError):
        DirectoryLock(recovery, "another scheduler").acquire()
    abandoned(house, served)
    house.scheduler()
    assert house.seated("2")[0] is not None


def test_scheduler_that_started_meanwhile_is_not_overwritten(house: House) -> None:
    recovery = house.path / "recovery"
    served, agents = training(house)
    remove_folder(recovery)
    with Journal.open(recovery, TermClaim.take(recovery, "another scheduler"))[0]:
        written = (recovery / "journal").read_bytes()
        (recovery / "term.1").rename(recovery / "not a claim")
        agents[2].leave(on_purpose=True, text="it was asked to")
        with pytest.raises(SupersededError, match="another scheduler has written this journal since"):
            served.result(PATIENCE_S)
        assert (recovery / "journal").read_bytes() == written


def abandoned(house: House, served: Future[JobEnded]) -> None:
    """Let the scheduler leave as if killed."""
    assert house.service is not None
    house.service.abandon()
    with pytest.raises(SchedulerLeftError):
        served.result(PATIENCE_S)


def journaled(house: House) -> list[Record]:
    contents = journals.read_journal(house.path / "recovery")
    return [] if contents is None else [records.SCHEMA.unpack(payload) for payload in contents.payloads]


def test_job_from_the_first_register_to_its_end(house: House) -> None:
    served = house.scheduler()
    agents = house.seated("0", "1", "2")
    places = house.generation(*agents)
    assert [(place.rank, place.world_size, place.local_rank) for place in places] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    assert house.mapped(agents, places) == [[b"address of 0", b"address of 1", b"address of 2"]] * 3
    with ThreadPoolExecutor(3) as pool:
        finals = list(pool.map(lambda agent: agent.complete(1, 40, [final(40)]), agents, timeout=PATIENCE_S))
    assert finals == [Point(40, 1)] * 3
    for agent in agents:
        agent.leave(on_purpose=True, text="status 0")
    assert served.result(PATIENCE_S).kind is EndKind.FINISHED
    assert [type(record).__name__ for record in journaled(house)][-1] == "JobFinished"


def test_lost_member_interrupts_the_others_and_its_successor_joins_the_next_round(house: House) -> None:
    house.scheduler()
    agents = house.seated("0", "1", "2")
    house.mapped(agents, house.generation(*agents))
    broken: list[str] = []
    agents[0].on_break = broken.append

    agents[1].leave(on_purpose=False, text="ValueError: 42")
    with pytest.raises(GenerationEndedError):
        agents[0].complete(1, 3, [final(3)])
    assert broken == ["worker 1 (" + broken[0].split("(", 1)[1]]
    assert "ValueError: 42" in broken[0]

    (successor,) = house.seated("1")
    places = house.generation(agents[0], successor, agents[2])
    assert [place.generation for place in places] == [2, 2, 2]


MEMBER = """
import time
from samebits import config
from samebits.core.messages import Holdings
from samebits.service.agent import Agent
settings, _ = config.read()
agent = Agent(settings, "test", "cpu")
agent.register()
at = agent.life_sign.whereabouts
print(at.host, at.pid, at.descriptor, at.session, flush=True)
agent.enter(Holdings((), False, (("threads", "1"),)))
time.sleep(600)
"""


@contextlib.contextmanager
def beside(house: House) -> Iterator[tuple[subprocess.Popen[str], Whereabouts, list[Agent], list[GenerationStarted]]]:
    """Run member 2 as a process whose death is observed, and two more members in this process."""
    environment = {**os.environ, **house.environ, "ROLE": "worker", "NODE_ID": "2"}
    house.scheduler()
    command = [sys.executable, "-c", MEMBER]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as member:
        try:
            agents = house.seated("0", "1")
            assert member.stdout is not None
            host, pid, descriptor, session = member.stdout.readline().split()
            places = house.generation(*agents)
            yield member, Whereabouts(host, int(pid), int(descriptor), session), agents, places
        finally:
            member.kill()


def test_death_is_reported_by_the_watching_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler is on another host and waits ten minutes after a connection has closed."""
    monkeypatch.setattr("samebits.service.scheduling.loop.host_id", lambda: "elsewhere")
    with contextlib.closing(House(tmp_path, workers=3, GRACE="reconnect=600", NODE_TIMEOUT="600")) as house:
        with beside(house) as (_, at, agents, places):
            assert agents[1].watch("2", at)
        for agent, place in zip(agents, places, strict=True):
            waiting = house.pool.submit(agent.address_map, place.generation)  # the third never gave its part
            assert isinstance(waiting.exception(PATIENCE_S), GenerationEndedError)
        (lost,) = [record for record in journaled(house) if isinstance(record, SeatLost)]
        assert (lost.node, lost.reason) == ("2", "its process ended (seen by worker 1 on the same host)")


@pytest.mark.parametrize("named", ["2", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("1", "2\n"))])
def test_watching_process_reports_that_a_silent_process_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """The scheduler is on another host, and no follower runs. A report under another name is ignored."""
    monkeypatch.setattr("samebits.service.scheduling.loop.host_id", lambda: "elsewhere")
    with contextlib.closing(House(tmp_path, workers=3, NODE_TIMEOUT="3")) as house:
        with beside(house) as (member, at, agents, places):
            assert agents[1].watch(named, at)
            assert not agents[1].watch("2", Whereabouts(at.host, at.pid, at.descriptor, "another"))
            member.send_signal(signal.SIGSTOP)
            waiting = house.pool.submit(agents[0].address_map, places[0].generation)
            assert isinstance(waiting.exception(PATIENCE_S), GenerationEndedError)
        lost = [record for record in journaled(house) if isinstance(record, SeatLost)]
        assert {one.node for one in lost} == {"2"}, lost  # once more if its close came after its loss
        assert ("is stopped (SIGSTOP)" in lost[0].reason) == (named == "2"), lost


def test_scheduler_restart_costs_no_worker_its_place(house: House) -> None:
    first = house.scheduler()
    agents = house.seated("0", "1", "2")
    places = house.generation(*agents)
    house.mapped(agents, places)
    before = journaled(house)
    abandoned(house, first)

    house.scheduler()
    with ThreadPoolExecutor(3) as pool:
        finals = list(pool.map(lambda agent: agent.complete(1, 9, [final(9)]), agents, timeout=PATIENCE_S))
    assert finals == [Point(9, 1)] * 3
    assert journaled(house)[: len(before)] == before


def test_nothing_is_sent_before_it_is_durable(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: journals.Journal, payloads: list[bytes]) -> None:
        if any(isinstance(records.SCHEMA.unpack(payload), SeatGranted) for payload in payloads):
            raise StoreError("no space left")
        genuine(self, payloads)

    genuine = journals.Journal.append
    monkeypatch.setattr(journals.Journal, "append", full)
    served = house.scheduler()
    agent = house.agent("0")
    registered = house.pool.submit(agent.register)
    with pytest.raises(StoreError, match="no space left"):
        served.result(PATIENCE_S)
    assert not registered.done()
    monkeypatch.undo()
    house.scheduler()
    assert registered.result(PATIENCE_S).incarnation == 1


def test_stop_is_sent_to_all_and_leaves_the_journal_unfinished(house: House) -> None:
    served = house.scheduler()
    agents = house.seated("0", "1", "2")
    waiting = [house.pool.submit(agent.enter, Holdings((), False, NUMERICS)) for agent in agents[:2]]
    client = Client("127.0.0.1", int(house.environ["SCHED_PORT"]), "follower", silence_s=5)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not any(future.done() for future in waiting) and time.monotonic() < deadline:
            client.send(StopJob("the test"))
            client.wait(0.1)
            list(client.drain())
    finally:
        client.close()
    for future in waiting:
        with pytest.raises(JobStoppedError, match="stopped by the test"):
            future.result(PATIENCE_S)
    for agent in agents:
        agent.leave(on_purpose=True, text="told to end")
    assert served.result(PATIENCE_S).kind is EndKind.STOPPED
    assert not any(type(record).__name__ == "JobFinished" for record in journaled(house))


def test_follower_is_notified_at_once_and_at_every_change(house: House) -> None:
    house.scheduler()
    follower = Client("127.0.0.1", int(house.environ["SCHED_PORT"]), "follower", silence_s=5)
    told: list[dict[str, object]] = []

    def until(alive: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (told and told[-1].alive == alive):
            assert time.monotonic() < deadline, told
            follower.wait(0.2)
            for incoming in follower.drain():
                if isinstance(incoming, Got) and isinstance(incoming.message, Status):
                    content = view_in(incoming.message)
                    assert content is not None
                    told.append(content)
                elif not isinstance(incoming, Got):
                    follower.send(StatusQuery(follow=True))

    try:
        until(alive=0)
        house.seated("0", "1")
        until(alive=2)
    finally:
        follower.close()
    assert told[-1].phase.startswith("filling; waiting for 2")


def test_second_scheduler_on_the_same_path_learns_the_holder(house: House) -> None:
    house.scheduler()
    house.seated("0")
    house.environ["SCHED_PORT"] = str(free_port())
    with pytest.raises(LockedError, match="scheduler on port"):
        house.scheduler().result(PATIENCE_S)


def test_taken_port_is_an_error_that_names_the_variable(house: House) -> None:
    house.scheduler()
    house.seated("0")
    house.environ["RECOVERY_PATH"] = str(house.path / "another")
    with pytest.raises(ListenError, match="SCHED_PORT"):
        house.scheduler().result(PATIENCE_S)


def test_journal_with_other_settings_is_refused(house: House) -> None:
    served = house.scheduler()
    house.seated("0")
    abandoned(house, served)
    house.environ["WORKER_NUM"] = "5"
    with pytest.raises(ForeignFolderError, match="WORKER_NUM is 5 here and 3 there"):
        house.scheduler().result(PATIENCE_S)


def test_worker_with_other_settings_is_shown_both_values(house: House) -> None:
    house.scheduler()
    house.environ["WORKER_NUM"] = "4"
    with pytest.raises(RefusedError, match="WORKER_NUM is 4 here and 3 there"):
        house.agent("0").register()


def test_worker_with_other_numerics_is_refused_with_both_values(house: House) -> None:
    house.scheduler()
    agents = house.seated("0", "1", "2")
    futures = [
        house.pool.submit(agent.enter, Holdings((), False, (("threads", threads),)))
        for agent, threads in zip(agents, ["1", "2", "1"], strict=True)
    ]
    with pytest.raises(NumericsError, match="threads is 2 here and 1 there"):
        futures[1].result(PATIENCE_S)
    (successor,) = house.seated("1")
    assert house.generation(successor)[0].rank == 1
    assert [future.result(PATIENCE_S).rank for future in (futures[0], futures[2])] == [0, 2]


def test_job_id_is_announced_once_it_is_durable(house: House) -> None:
    told: list[tuple[str, str]] = []
    house.environ["JOB_NAME"] = "test"
    service = house.service = SchedulerService(
        house.settings("scheduler"), on_job=lambda job, name: told.append((job, name))
    )
    house.pool.submit(service.serve)
    house.seated("0")
    created = journaled(house)[0]
    assert isinstance(created, JobCreated)
    assert told == [(created.job, "test")]


REFUSED_AND_GOES_ON = """
import threading
from samebits import config
from samebits.errors import RefusedError
from samebits.service import agent
agent.END_GRACE_S = 0.1
worker = agent.Agent(config.read()[0], "test", "cpu")
try:
    worker.register()
except RefusedError:
    threading.Event().wait(3.0)  # longer than the grace and what faulthandler adds to it
    print("still here")
"""


def test_process_that_handles_its_error_is_not_killed(house: House) -> None:
    """The control thread's grace and faulthandler are for a main thread that is stuck."""
    house.scheduler()
    environ = {**os.environ, **house.environ, "ROLE": "worker", "NODE_ID": "0", "WORKER_NUM": "4"}
    done = subprocess.run(
        [sys.executable, "-c", REFUSED_AND_GOES_ON],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr


@pytest.fixture
def idle_agent(house: House) -> Iterator[Agent]:
    """Return an agent without its control thread.

    The thread would close its connection; an open context blocks garbage collection.
    """
    agent = house.agent("0")
    yield agent
    agent._client.close()


def test_main_thread_learns_of_the_end_only_after_its_cleanup_is_armed(
    idle_agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = idle_agent
    seen: list[object] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: seen.append(agent.must_end))
    agent._must_end(JobStoppedError("stopped"))
    assert seen == [None] and agent.must_end is not None
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: seen.append("taken back"))
    assert agent._told_to_end() is agent.must_end and seen[-1] == "taken back" and agent._end_at is None


def test_failing_control_thread_ends_the_process_with_an_unreadable_log_too(
    idle_agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = idle_agent
    ended: list[int] = []

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "a terminal that was closed")

    monkeypatch.setattr(agent, "_keep_the_seat", fail)
    monkeypatch.setattr(agent, "life_sign", None)  # a thread has at most one, and this is not the agent's
    monkeypatch.setattr(agent_module, "os", SimpleNamespace(write=fail, _exit=ended.append))
    agent._run()
    assert ended == [1]
