"""The rendezvous of ``--rdzv-backend=samebits``: agents in threads, and their scheduler a real process."""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from samebits.core.agent import agent_core as core_agent
from samebits.core.messages import PROTOCOL
from samebits.integrations import torchrun_rendezvous
from samebits.integrations.torchrun_rendezvous import SamebitsRendezvous
from samebits.launcher.kept_scheduler import LOG_NAME
from samebits.net.address import folder_of_holder
from samebits.service import log
from samebits.store.process_identity import ProcessIdentity
from tests.system.processes import found_below, free_port, signal_process

WAIT_S = 60.0


def within(wanted: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not wanted():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def untouched_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent sets up the log of its process, which is this one."""
    monkeypatch.setattr(log.LOGGER, "propagate", log.LOGGER.propagate)
    monkeypatch.setattr(log.LOGGER, "handlers", [*log.LOGGER.handlers])
    monkeypatch.setattr(log.LOGGER, "level", log.LOGGER.level)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Endpoint:
    """Makes agents of one job, as torch's registry does."""

    def __init__(self) -> None:
        self.port = free_port()
        self._agents: list[SamebitsRendezvous] = []

    def agent(self, nodes: str, run_id: str = "ours") -> SamebitsRendezvous:
        least, _, most = nodes.partition(":")
        parameters = RendezvousParameters("samebits", f"127.0.0.1:{self.port}", run_id, int(least), int(most or least))
        made = get_rendezvous_handler(parameters)
        assert isinstance(made, SamebitsRendezvous)
        self._agents.append(made)
        return made

    def lose(self, agent: SamebitsRendezvous) -> None:
        """The agent's process ends without a shutdown."""
        self._agents.remove(agent)
        agent._agent.leave(on_purpose=False, text="the test ends this node")
        agent._scheduler.close()

    def close(self) -> None:
        for one in self._agents:
            if not one.is_closed():
                one.set_closed()
                within(one.is_closed, "the end of the job")
            one.shutdown()


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEALTH", "off")
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


def scheduler_in(folder: Path) -> ProcessIdentity:
    """The only scheduler that was started there."""
    found = [one for one in found_below(folder) if b"scheduler" in Path(f"/proc/{one.pid}/cmdline").read_bytes()]
    (scheduler,) = found
    return scheduler


def all_meet(pool: ThreadPoolExecutor, *agents: RendezvousHandler) -> list[RendezvousInfo]:
    """Return the agents' next rendezvous, by node rank."""
    found = list(pool.map(lambda one: one.next_rendezvous(), agents, timeout=WAIT_S))
    return sorted(found, key=lambda info: info.rank)


def test_agents_meet_again_with_an_empty_store_and_a_standby_replaces_a_lost_agent(
    tmp_path: Path, endpoint: Endpoint, pool: ThreadPoolExecutor
) -> None:
    first, second = endpoint.agent("2:3"), endpoint.agent("2:3")
    infos = all_meet(pool, first, second)
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
    infos[0].store.set("of the first meeting", "0")
    assert infos[1].store.get("of the first meeting") == b"0"

    standby = endpoint.agent("2:3")
    joined = pool.submit(standby.next_rendezvous)
    within(lambda: "is here, 1 of 1 (SPARE_NUM)" in (tmp_path / "recovery" / LOG_NAME).read_text(), "the standby")
    assert [one.num_nodes_waiting() for one in (first, second, standby)] == [0, 0, 0]

    # Workers of the second agent have failed: torch's agent there meets again, and the other one follows.
    again = pool.submit(second.next_rendezvous)
    within(first.num_nodes_waiting, "the first agent hears of it")
    infos = sorted((first.next_rendezvous(), again.result(WAIT_S)), key=lambda info: info.rank)
    assert not infos[0].store.check(["of the first meeting"])
    assert first.num_nodes_waiting() == 0 and not joined.done()

    scheduler = scheduler_in(tmp_path)
    signal_process(scheduler, signal.SIGKILL)
    within(lambda: "term 2" in (tmp_path / "recovery" / LOG_NAME).read_text(), "another scheduler")
    assert [one.num_nodes_waiting() for one in (first, second)] == [0, 0]

    endpoint.lose(second)
    within(first.num_nodes_waiting, "the first agent hears of the loss")
    infos = sorted((first.next_rendezvous(), joined.result(WAIT_S)), key=lambda info: info.rank)
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]


def test_an_agent_that_was_replaced_while_it_was_stopped_returns_as_a_standby(
    tmp_path: Path, endpoint: Endpoint, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_TIMEOUT", "2")
    first, second, standby = endpoint.agent("2:3"), endpoint.agent("2:3"), endpoint.agent("2:3")
    all_meet(pool, first, second)
    joined = pool.submit(standby.next_rendezvous)
    journal = tmp_path / "recovery" / LOG_NAME
    within(lambda: "is here, 1 of 1 (SPARE_NUM)" in journal.read_text(), "the standby")
    goes_on = threading.Event()
    vars(second._agent)["life_sign"] = Mock(beat=lambda: goes_on.wait(WAIT_S))  # holds up its control thread
    within(first.num_nodes_waiting, "the first agent hears of the loss")
    first.next_rendezvous()
    joined.result(WAIT_S)
    goes_on.set()
    within(second.num_nodes_waiting, "torch's agent there has to stop its workers")
    returned = pool.submit(second.next_rendezvous)
    within(lambda: journal.read_text().count("is here, 1 of 1 (SPARE_NUM)") == 2, "it is a standby")
    assert first.num_nodes_waiting() == 0 and not returned.done() and not second.is_closed()
    endpoint.lose(standby)
    within(first.num_nodes_waiting, "the first agent hears of the next loss")
    first.next_rendezvous()
    assert returned.result(WAIT_S).world_size == 2


def test_the_job_ends_when_the_workers_of_all_agents_have_and_the_next_one_starts_afresh(
    tmp_path: Path, endpoint: Endpoint, pool: ThreadPoolExecutor
) -> None:
    first, second, standby = endpoint.agent("2:3"), endpoint.agent("2:3"), endpoint.agent("2:3")
    members = {pool.submit(one.next_rendezvous): one for one in (first, second, standby)}
    within(lambda: sum(future.done() for future in members) == 2, "two of three meet")
    done = [one for future, one in members.items() if future.done()]
    (waiting,) = (future for future in members if not future.done())
    shut = pool.submit(done[0].shutdown)
    with pytest.raises(TimeoutError):
        shut.result(0.5)  # the workers of the other agent continue
    assert done[1].num_nodes_waiting() == 0
    done[1].shutdown()
    assert shut.result(WAIT_S)
    with pytest.raises(RendezvousClosedError) as raised:
        waiting.result(WAIT_S)
    assert isinstance(raised.value, SystemExit) and raised.value.code == 0
    for one in members.values():
        assert one.is_closed()
        one.shutdown()
    within(lambda: not found_below(tmp_path), "the scheduler's end")

    alone = endpoint.agent("1")
    assert alone.next_rendezvous().world_size == 1
    assert len(list(tmp_path.glob("recovery.*.aside"))) == 1


def test_a_closed_rendezvous_ends_the_other_agents_with_its_exit_code_and_no_traceback(
    endpoint: Endpoint, pool: ThreadPoolExecutor
) -> None:
    first, second = endpoint.agent("2"), endpoint.agent("2")
    all_meet(pool, first, second)
    second.set_closed()
    within(first.is_closed, "the first agent hears of it")
    with pytest.raises(RendezvousClosedError, match="has closed the rendezvous") as raised:
        first.num_nodes_waiting()
    assert isinstance(raised.value, SystemExit) and raised.value.code == 78


@pytest.mark.parametrize("is_noticed_first", [False, True])
def test_a_node_whose_workers_followed_another_ones_failure_ends_with_one_status_and_the_first_cause(
    endpoint: Endpoint, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, is_noticed_first: bool
) -> None:
    said = list[str]()
    monkeypatch.setattr(log, "warn", said.append)
    monkeypatch.setattr(torchrun_rendezvous, "BLAME_S", 0.5)
    first, second = endpoint.agent("2"), endpoint.agent("2")
    all_meet(pool, first, second)

    def ends(agent: SamebitsRendezvous, rank: int, status: int) -> object:
        """End the agent as torch does, and return the exit status."""
        try:
            try:
                raise ChildFailedError("train.py", {rank: ProcessFailure(0, 7 + rank, status, "")})
            finally:
                agent.shutdown()
        except ChildFailedError:
            return 1
        except SystemExit as over:
            return over.code

    failing = pool.submit(ends, second, 1, 3)
    if is_noticed_first:
        within(first.is_closed, "the end of the job is known")
    else:
        within(lambda: second._agent._is_dying, "the first failure is reported")
    assert (ends(first, 0, 1), failing.result(WAIT_S)) == (78, 1)
    told = [line for line in said if "first cause: " in line and "global rank 1 (pid 8) ended with status 3" in line]
    assert len(told) == 2, said


@pytest.mark.parametrize(
    ("status", "has_raised", "told"),
    [
        (1, True, ("ended with status 1, ValueError: no number", 1)),
        (-6, True, ("ended by signal 6, ValueError: no number", 1)),
        (-6, False, ("was killed by signal 6", 134)),
    ],
)
def test_error_is_the_cause_even_if_the_exiting_process_was_aborted(
    tmp_path: Path, status: int, has_raised: bool, told: tuple[str, int]
) -> None:
    """torch's threads may abort an interpreter that exits after an error."""
    file = tmp_path / "error.json"
    if has_raised:
        file.write_text(json.dumps({"message": {"message": "ValueError: no number", "extraInfo": {"timestamp": "1"}}}))
    error = ChildFailedError("train.py", {1: ProcessFailure(0, 8, status, str(file))})
    assert torchrun_rendezvous._cause_in(error) == (f"global rank 1 (pid 8) {told[0]}", told[1])


def test_an_interrupted_agent_which_torch_does_not_shut_down_leaves_at_once(
    tmp_path: Path, endpoint: Endpoint, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = list[Callable[[], None]]()
    monkeypatch.setattr(atexit, "register", registered.append)
    first, second = endpoint.agent("2"), endpoint.agent("2")
    (at_exit,) = [one for one in registered if getattr(one, "__self__", None) is second]
    all_meet(pool, first, second)
    at_exit()
    within(first.num_nodes_waiting, "the first agent hears of it")
    assert "torchrun was interrupted" in (tmp_path / "recovery" / LOG_NAME).read_text()
    endpoint.lose(second)


def test_an_agent_that_does_not_belong_here_is_refused_with_both_values(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTER_SECRET", "0123456789abcdef0123456789abcdef")
    ours = endpoint.agent("1")
    ours.next_rendezvous()
    for other, message in (
        (endpoint.agent("1", run_id="theirs"), "'theirs'.*'ours'.*--rdzv-endpoint sets SCHED_HOST and SCHED_PORT"),
        (endpoint.agent("3"), "WORKER_NUM is 3 here and 1 there.*--nnodes"),
    ):
        with pytest.raises(RendezvousConnectionError, match=message) as raised:
            other.next_rendezvous()
        assert isinstance(raised.value, SystemExit) and raised.value.code == 68
    monkeypatch.setenv("CLUSTER_SECRET", "another, but as long as the one above")
    with pytest.raises(RendezvousConnectionError, match="CLUSTER_SECRET"):
        endpoint.agent("1").next_rendezvous()
    assert ours.num_nodes_waiting() == 0 and not ours.is_closed()
    monkeypatch.setenv("CLUSTER_SECRET", "0123456789abcdef0123456789abcdef")


def test_an_agent_of_another_release_is_refused_with_both_protocols(
    tmp_path: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is a process of this release; the agents that this process then makes are of the next one."""
    ours = endpoint.agent("1")
    ours.next_rendezvous()
    monkeypatch.setattr(core_agent, "PROTOCOL", PROTOCOL + 1)
    both = rf"speaks protocol {PROTOCOL}, worker \w+ speaks {PROTOCOL + 1}, .* Fix: install .* release on all hosts$"
    with pytest.raises(RendezvousConnectionError, match=both) as raised:
        endpoint.agent("1").next_rendezvous()
    assert isinstance(raised.value, SystemExit) and raised.value.code == 68
    assert ours.num_nodes_waiting() == 0 and not ours.is_closed()
    within(lambda: "(PROTOCOL)" in (tmp_path / "recovery" / LOG_NAME).read_text(), "the refusal is logged")


def test_a_second_torchrun_at_the_endpoint_waits_and_changes_nothing(
    tmp_path: Path, endpoint: Endpoint, pool: ThreadPoolExecutor
) -> None:
    ours, second = endpoint.agent("1"), endpoint.agent("1")
    ours.next_rendezvous()
    waits = pool.submit(second.next_rendezvous)
    within(
        lambda: "no seat for worker" in (tmp_path / "recovery" / LOG_NAME).read_text(), "it is told that all is held"
    )
    assert ours.num_nodes_waiting() == 0 and not ours.is_closed() and not waits.done()
    ours.shutdown()
    with pytest.raises(RendezvousConnectionError, match="the job is finished") as raised:
        waits.result(WAIT_S)
    assert isinstance(raised.value, SystemExit) and raised.value.code == 68


def test_a_scheduler_that_cannot_serve_is_an_error_of_the_agent_that_started_it(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    (tmp_path / "recovery").mkdir()
    (tmp_path / "recovery" / "journal").write_bytes(b"no journal of ours, and long enough to be a header of one")
    with pytest.raises(RendezvousConnectionError, match="journal"):
        endpoint.agent("1").next_rendezvous()


def test_an_endpoint_that_a_program_holds_is_an_error_that_names_the_program_and_the_option(endpoint: Endpoint) -> None:
    words = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(endpoint.port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as stranger:
        try:
            within(lambda: folder_of_holder(endpoint.port), "the program listens")
            with pytest.raises(RendezvousConnectionError, match=rf"pid {stranger.pid} .*--rdzv-endpoint") as raised:
                endpoint.agent("1")
            assert isinstance(raised.value, SystemExit) and raised.value.code == 75
        finally:
            stranger.kill()


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("", "127.0.0.1", 8118),
        ("node1", "node1", 8118),
        ("node1:29400", "node1", 29400),
        ("[fd00::1]:29400", "fd00::1", 29400),
        ("fd00::1", "fd00::1", 8118),
        ("node1:29400,node2:29400", "node1:29400,node2:29400", 8118),
        ("file:/etc/schedulers", "file:/etc/schedulers", 8118),
    ],
)
def test_an_endpoint_is_read_as_sched_host_is(
    endpoint: str, host: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"WORKER_NUM": "9", "MS_WORKER_NUM": "9", "MIN_WORKER_NUM": "9", "SCHED_HOST": ""}.items():
        monkeypatch.setenv(name, text)
    parameters = RendezvousParameters("samebits", endpoint, "digits", 2, 5, join_timeout="60")
    settings, environment = torchrun_rendezvous._settings_of(parameters)
    assert (settings.sched_host, settings.sched_port) == (host, port)
    assert (settings.worker_num, settings.spare_num, settings.job_name, settings.topo_timeout_s) == (2, 3, "digits", 60)
    assert "MS_WORKER_NUM" not in environment and "MIN_WORKER_NUM" not in environment


def test_an_unfinished_job_with_another_number_of_nodes_is_refused_with_the_values_that_differ(
    tmp_path: Path, endpoint: Endpoint, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(log, "warn", said.append)
    first, second = endpoint.agent("2"), endpoint.agent("2")
    all_meet(pool, first, second)
    for one in (first, second):
        one._scheduler.close()
    signal_process(scheduler_in(tmp_path), signal.SIGKILL)
    within(lambda: any("is unreachable: ranks that train go on until" in one for one in said), "agents count no steps")
    for one in (first, second):
        endpoint.lose(one)
    with pytest.raises(RendezvousConnectionError, match="WORKER_NUM is 3 here and 2 there") as raised:
        endpoint.agent("3").next_rendezvous()
    message = str(raised.value)
    assert "status 72" in message and "move that folder away" in message and "--nnodes sets" in message
    assert "SPARE_NUM is" not in message and "--fresh" not in message, "only what differs, and no other launcher"
