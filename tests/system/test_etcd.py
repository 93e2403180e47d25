"""A job whose journal lies in an etcd, and whose scheduler's host and etcd's leader are lost."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from samebits.account.event_log import read_events
from samebits.account.events import EventKind
from tests.store.etcd.etcd_cluster import ETCD, cluster_in
from tests.system.job import Job
from tests.system.processes import free_port

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(ETCD is None, reason="no etcd is installed (apt-get install etcd-server)"),
]

GATE = 40
TRAINED = ("--steps", "60", "--interval", "1000")


def test_scheduler_started_without_its_folder_continues_the_job_from_the_etcd(
    tmp_path: Path, new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    with cluster_in(tmp_path / "etcd") as cluster:
        job = new_job(*TRAINED, "--gates", str(GATE), settings={"RECOVERY_PATH": str(cluster.place())})
        job.start()
        job.open_gates(0)
        job.wait_for_step(15)
        job.scheduler.kill()
        shutil.rmtree(job.recovery)
        leader = cluster.leader()
        assert leader is not None
        cluster.signal(leader, signal.SIGKILL)
        job.start_scheduler()
        job.wait_for("scheduler", r"resumes, term 2: \d seats and generation 1 read from the journal")
        job.wait_for(0, r"the scheduler is reachable again after \d+\.\d s, term 2")
        job.open_gates(GATE)
        assert job.wait_finished() == undisturbed(*TRAINED)
        for rank in job.ranks:
            assert [step.number for step in job.steps(rank)] == list(range(1, 61)), "a step was repeated"
        started = [event for event in read_events(job.recovery) if event.kind is EventKind.SCHEDULER]
        assert len(started) == 2, "the events of the first scheduler came back from the etcd"


def test_scheduler_that_stands_by_takes_over(
    tmp_path: Path, new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    ports = [free_port(), free_port()]
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    with cluster_in(tmp_path / "etcd", members=1) as cluster:
        settings = {"RECOVERY_PATH": str(cluster.place()), "SCHED_HOST": hosts}
        job = new_job(*TRAINED, "--gates", str(GATE), settings=settings)
        job.start()
        job.open_gates(0)
        job.wait_for_step(15)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        command = [sys.executable, "-m", "samebits", "scheduler"]
        environment = job.environment(ROLE="scheduler")
        with subprocess.Popen(
            command, cwd=elsewhere, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as standby:
            try:
                assert standby.stdout is not None
                lines = iter(standby.stdout.readline, "")
                assert any("this scheduler stands by" in line for line in lines)
                job.scheduler.kill()
                assert any("resumes, term 2" in line for line in lines)
                job.wait_for(0, r"the scheduler is reachable again after \d+\.\d s, term 2")
                job.open_gates(GATE)
                statuses = job.wait_ended()
                assert {rank: statuses[rank] for rank in job.ranks} == dict.fromkeys(job.ranks, 0), job.tails()
                assert job.sha256() == undisturbed(*TRAINED)
                standby.communicate(timeout=60)
                assert standby.returncode == 0
            finally:
                standby.kill()
        for rank in job.ranks:
            assert [step.number for step in job.steps(rank)] == list(range(1, 61)), "a step was repeated"


def test_outage_of_the_whole_etcd_loses_nothing_and_is_reported(
    tmp_path: Path, new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    with cluster_in(tmp_path / "etcd") as cluster:
        job = new_job(*TRAINED, "--gates", str(GATE), settings={"RECOVERY_PATH": str(cluster.place())})
        job.start()
        job.open_gates(0)
        job.wait_for_step(15)
        for member in cluster.members:
            cluster.signal(member, signal.SIGKILL)
        for rank in job.ranks:
            job.wait_for_step(GATE, rank)  # nothing that needs the journal happens, so training continues
        with followed(job) as lines:
            job.wait_until(lambda: "step" in lines() or None, "progress from `samebits follow`")
            job.kill(1)
            why = r"the etcd does not answer .*\. Fix: bring a majority of its members back"
            job.wait_for("scheduler", why)
            job.wait_until(lambda: re.search(why, lines()), "the reason from `samebits follow`")
            shown = told(job, "status")
            assert re.search(r"no member of the etcd cluster has answered for 1 s .* Fix: bring a majority", shown), (
                shown
            )
            for member in cluster.members:
                cluster.start(member)
            cluster.wait_ready()
            job.start_worker(1)
            job.open_gates(GATE)
            assert job.wait_finished() == undisturbed(*TRAINED)
        lost = [event.node for event in read_events(job.recovery) if event.kind is EventKind.LOST]
        assert lost.count("1") == 1, lost
        for rank in (0, 2, 3):
            assert [step.number for step in job.steps(rank)] == list(range(1, 61)), "a step was repeated"
    assert not job.matches("scheduler", "term 2"), "the same scheduler serves the whole job"


@contextmanager
def followed(job: Job) -> Iterator[Callable[[], str]]:
    """Follow the job with ``samebits follow``; yield a function that returns what it has printed."""
    path = job.folder / "follow.out"
    with path.open("w") as out:
        command = [sys.executable, "-m", "samebits", "follow"]
        with subprocess.Popen(command, cwd=job.folder, env=job.environment(), stdout=out, stderr=out) as follower:
            try:
                yield path.read_text
            finally:
                follower.kill()


def told(job: Job, *command: str) -> str:
    """Return what a command prints in the job's folder."""
    found = subprocess.run(
        [sys.executable, "-m", "samebits", *command],
        cwd=job.folder,
        env=job.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return found.stdout + found.stderr
