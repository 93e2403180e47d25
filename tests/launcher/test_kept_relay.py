"""The relay that a launcher starts for its host: who starts one, its death, its stop, and its end."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import pytest

from samebits import config
from samebits.launcher.processes import send_signal
from samebits.launcher.relay_process import MOST_DIRECT_RANKS, relay_of, served_by, wants_relay
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.shell_job import UNTIL_TOLD, WAIT_S, Shell, ShellJob

ON, OFF = "relay:on,127.0.0.1", "relay:off,127.0.0.1"
SECRET = "a secret of the test, long enough"


@pytest.mark.parametrize(
    ("hosts", "ranks", "has_other_hosts", "discovers_hosts", "wanted"),
    [
        ("127.0.0.1", MOST_DIRECT_RANKS + 1, True, False, True),
        ("127.0.0.1", MOST_DIRECT_RANKS, True, False, False),
        ("127.0.0.1", MOST_DIRECT_RANKS + 1, False, False, False),
        (ON, 2, False, False, True),
        (OFF, MOST_DIRECT_RANKS + 1, True, False, False),
        (ON, 2, True, True, False),
        ("relay:127.0.0.1:9000,127.0.0.1", MOST_DIRECT_RANKS + 1, True, False, False),
    ],
    ids=["many", "few", "one-host", "on", "off", "discovered", "own"],
)
def test_size_or_the_setting_decides_about_a_relay(
    hosts: str, ranks: int, has_other_hosts: bool, discovers_hosts: bool, wanted: bool
) -> None:
    settings, _ = config.read({"ROLE": "scheduler", "WORKER_NUM": str(ranks), "SCHED_HOST": hosts})
    assert wants_relay(settings, has_other_hosts=has_other_hosts, discovers_hosts=discovers_hosts) is wanted


@pytest.fixture
def training(job: ShellJob) -> Iterator[Shell]:
    """Start a job of three workers behind a relay."""
    shell = job.run(*UNTIL_TOLD, SCHED_HOST=ON, MAX_RESTARTS="3", CLUSTER_SECRET=SECRET)
    try:
        job.wait_training()
        yield shell
        assert running(job) is None
    finally:
        left = relay_of(job.log_dir)
        if left is not None:
            send_signal(left, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch, job: ShellJob) -> None:
    monkeypatch.setitem(job.settings, "CLUSTER_SECRET", SECRET)


def running(job: ShellJob) -> ProcessIdentity | None:
    return relay_of(job.log_dir)


def relay(job: ShellJob) -> ProcessIdentity:
    found = running(job)
    assert found is not None, job.tails()
    return found


def generations(job: ShellJob) -> int:
    return len(re.findall(r"round \S+ opened", job.log("scheduler")))


def finish(job: ShellJob, shell: Shell) -> None:
    rounds = generations(job)
    job.let_finish()
    assert shell.end() == 0, shell.text
    assert (rounds, generations(job)) == (1, 1), job.log("scheduler")


def test_relay_serves_the_host_s_workers_and_ends_with_the_job(job: ShellJob, training: Shell) -> None:
    assert re.search(r"3 workers, a scheduler and a relay of ", training.wait_for("started; .*").string)
    one = relay(job)
    assert served_by(one) == 3
    rows = json.loads(_output(job.tool("ps", "--json", **job.settings)))
    assert [row | {"started_at": 0} for row in rows if row["role"] == "relay"] == [
        {"node": None, "slot": None, "role": "relay", "pid": one.pid, "started_at": 0, "state": "runs", "serves": 3}
    ]
    assert re.search(rf"relay +{one.pid} +runs, serves 3 connections\n", _output(job.tool("ps", **job.settings)))
    assert f"relay (pid {one.pid}) serves 3 connections\n" in _output(job.tool("status", **job.settings))
    finish(job, training)


def test_killed_relay_is_restarted_and_no_step_is_lost(job: ShellJob, training: Shell) -> None:
    first = relay(job)
    send_signal(first, signal.SIGKILL)
    training.wait_for(r"the relay \(pid \d+\) was killed by signal 9 \(SIGKILL\); it was restarted \(pid \d+\)")
    assert relay(job) != first
    for node in range(3):
        training.wait_until(lambda node=node: "is reachable again" in job.log(f"worker_{node}"))  # type: ignore[misc]
    job.kill("worker_1")  # its replacement connects to the new relay
    training.wait_until(lambda: served_by(relay(job)) >= 1)  # others may have returned to it as well
    job.let_finish()
    assert training.end() == 0, training.text


def test_stopped_relay_costs_no_step_and_is_ended(job: ShellJob, training: Shell) -> None:
    send_signal(relay(job), signal.SIGSTOP)
    for node in range(3):
        training.wait_until(lambda node=node: "is reachable again" in job.log(f"worker_{node}"))  # type: ignore[misc]
    assert re.search(r"relay +\d+ +stopped, ", _output(job.tool("ps", **job.settings)))
    finish(job, training)


def test_relay_outlives_its_launcher_and_samebits_stop_ends_it(job: ShellJob, training: Shell) -> None:
    one = relay(job)
    training.send(signal.SIGSTOP)
    assert served_by(one) == 3
    training.process.kill()
    training.process.wait()
    assert one.is_alive()
    assert job.tool("stop", **job.settings).end() == 0
    assert not one.is_alive()


def test_recover_restarts_the_relay_at_its_address(job: ShellJob, training: Shell) -> None:
    one = relay(job)
    told = job.proc_environment("worker_0")["SCHED_HOST"]
    job.kill_everything(training)
    send_signal(one, signal.SIGKILL)
    assert one.wait_for_exit(WAIT_S)
    shell = job.recover(CLUSTER_SECRET=SECRET)
    job.wait_training(generation=2)
    assert job.proc_environment("worker_0.1")["SCHED_HOST"] == told
    assert served_by(relay(job)) == 3
    job.let_finish()
    assert shell.end() == 0, shell.text


def test_relay_without_a_launcher_ends_by_itself(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD, options=("--detach",), SCHED_HOST=ON)
    assert shell.end() == 0, shell.text
    job.wait_training()
    one = relay(job)
    job.let_finish()
    assert one.wait_for_exit(WAIT_S)
    assert "no worker is connected any more" in job.log("relay")


def _output(shell: Shell) -> str:
    assert shell.end() == 0, shell.text
    return shell.text
