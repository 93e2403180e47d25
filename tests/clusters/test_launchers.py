"""Workers started on other hosts by a real ssh and a real srun: killed, restarted there, and drained."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits.account.job_view import JobView
from samebits.store.process_identity import ProcessIdentity
from tests.clusters import slurm, ssh_server
from tests.clusters.hosts import SECRET
from tests.clusters.namespaces import Switch
from tests.clusters.slurm import SlurmCluster
from tests.clusters.ssh_server import SshServer
from tests.launcher.shell_job import ROOT, UNTIL_TOLD, WAIT_S, WORKER, Shell, ShellJob
from tests.system.processes import signal_process

pytestmark = [pytest.mark.system, pytest.mark.thorough]

LEAVES = r"worker 1 leaves at the next commit: host {name} is gone\n"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ShellJob]:
    (tmp_path / "a job").mkdir()
    made = ShellJob(tmp_path / "a job")
    yield made
    left = made.close()
    assert not left, f"left behind: {left}\n{made.tails()}"


@pytest.fixture
def server(job: ShellJob) -> Iterator[SshServer]:
    """A host named b."""
    if why_not := ssh_server.missing():
        pytest.skip(f"no ssh server can run on this machine: {why_not}")
    made = SshServer(job.folder.parent / "ssh", "b")
    yield made
    made.close()


def hosts(job: ShellJob, *lines: str) -> None:
    """Set what the discovery script prints from now on."""
    (job.folder / "hosts.new").write_text("".join(f"{line}\n" for line in lines))
    (job.folder / "hosts.new").rename(job.folder / "hosts")


def drive(job: ShellJob, launch: str, *before: str, **more: str) -> Shell:
    """Start ``samebits run`` with discovery and this template; ``before`` precedes the command."""
    settings = {name: text for name, text in job.settings.items() if name != "WORKER_NUM"}
    settings |= {"GRACE": "shrink=0.5", "PYTHONPATH": str(ROOT), **more}
    found = ("--host-discovery-script", "cat hosts", "--nnodes", "1:2", "--launch", launch)
    script = (str(WORKER), "--seated", *UNTIL_TOLD)
    return job.shell(*before, sys.executable, "-P", "-m", "samebits", "run", *found, *script, **settings)


def trains(view: JobView, *nodes: str) -> bool:
    workers = tuple(one.node for one in view.workers if not one.is_joining)
    return (view.phase, view.alive) == ("training", len(nodes)) and workers == nodes


def words_of(identity: ProcessIdentity, name: str) -> list[bytes]:
    return Path(f"/proc/{identity.pid}/{name}").read_bytes().split(b"\0")


def test_death_of_a_worker_started_by_ssh_does_not_count_against_its_host(job: ShellJob, server: SshServer) -> None:
    hosts(job, "localhost:1", "b:1")
    shell = drive(job, f"ssh -F '{server.config}' -o BatchMode=yes {{host}} {{command}}")
    first = job.wait_view(lambda view: trains(view, "0", "1")).node("1")
    assert first is not None
    assert any(one.startswith(b"SSH_CONNECTION=") for one in words_of(first.identity, "environ"))
    assert job.identity("worker_1") != first.identity, "the pid file names the ssh that holds it"
    signal_process(first.identity, signal.SIGKILL)
    again = job.wait_view(_moved)
    assert any(one.startswith(b"SSH_CONNECTION=") for one in words_of(again.workers[1].identity, "environ"))
    assert "rests" not in "\n".join(shell.all_lines()), "a killed worker is no failure of its host"
    hosts(job, "localhost:1")
    job.wait_view(lambda view: trains(view, "0"))
    shell.wait_for(r"leaves at the next commit: host b is gone\n")
    job.let_finish()
    assert shell.end() == 0, shell.text


def _moved(view: JobView) -> bool:
    """Return whether another process has the second slot, as the first one's replacement or as a new worker."""
    return len(view.workers) == 2 and trains(view, "0", view.workers[1].node) and view.workers[1].node != "1"


def test_worker_whose_ssh_dies_leaves_and_is_replaced(job: ShellJob, server: SshServer) -> None:
    """A dead ssh stands for a broken network to the host, where the worker keeps running without a launcher."""
    hosts(job, "localhost:1", "b:1")
    shell = drive(job, f"ssh -F '{server.config}' -o BatchMode=yes {{host}} {{command}}")
    first = job.wait_view(lambda view: trains(view, "0", "1")).node("1")
    assert first is not None
    job.kill("worker_1")  # the ssh
    seen = job.wait_view(_moved)
    assert any(one.startswith(b"SSH_CONNECTION=") for one in words_of(seen.workers[-1].identity, "environ"))
    assert first.identity.wait_for_exit(60.0), "no process asked it to leave"
    job.let_finish()
    assert shell.end() == 0, shell.text


def test_failing_ssh_is_a_failure_of_its_host(job: ShellJob, server: SshServer) -> None:
    server.close()
    hosts(job, "localhost:1", "b:1")
    shell = drive(job, f"ssh -F '{server.config}' -o BatchMode=yes {{host}} {{command}}", GRACE="start=0.5,shrink=0.5")
    job.wait_view(lambda view: trains(view, "0"))
    shell.wait_for(r"host b is not used for 10 s: worker 1: what starts it there ended with status 255\n")
    job.let_finish()
    assert shell.end() == 0, shell.text


@pytest.fixture
def cluster(tmp_path: Path, new_switch: Callable[..., Switch]) -> Iterator[SlurmCluster]:
    if why_not := slurm.missing():
        pytest.skip(f"Slurm is not installed on this machine: {why_not}")
    (tmp_path / "slurm").mkdir()
    made = SlurmCluster(tmp_path / "slurm", new_switch("head", "n1", "n2"))
    yield made
    made.close()


@pytest.mark.timeout(400)
def test_srun_starts_a_worker_on_each_host_and_restarts_a_killed_one(job: ShellJob, cluster: SlurmCluster) -> None:
    (job.folder / "secret").write_text(SECRET)
    (job.folder / "secret").chmod(0o600)
    hosts(job, "n1:1", "n2:1")
    enter = ("nsenter", "--target", str(cluster.head.pid), "--net", "--uts")
    shell = drive(
        job,
        "srun -w {host} -N1 -n1 --job-name=worker-{node} sh -c {command}",
        *enter,
        SLURM_CONF=str(cluster.folder / "slurm.conf"),
        SCHED_HOST=cluster.head.address(),
        CLUSTER_SECRET_FILE=str(job.folder / "secret"),
    )
    shell.wait_until(lambda: b"SLURM_JOB_NAME=worker-1" in _environments(cluster, "n2"))
    assert b"SLURM_JOB_NAME=worker-0" in _environments(cluster, "n1")
    shell.wait_for(r"2/2 workers")
    (killed,) = _workers(cluster, "n2")
    os.kill(killed, signal.SIGKILL)
    shell.wait_until(lambda: any(pid != killed for pid in _workers(cluster, "n2")))
    assert "rests" not in "\n".join(shell.all_lines()), "a killed worker is no failure of its host"
    hosts(job, "n1:1")
    shell.wait_for(r"leaves at the next commit: host n2 is gone\n")
    shell.wait_until(lambda: _workers(cluster, "n2") == [])
    job.let_finish()
    assert shell.end() == 0, shell.text


@pytest.mark.timeout(400)
def test_slurms_host_list_is_the_discovery_script_in_an_allocation(job: ShellJob, cluster: SlurmCluster) -> None:
    (job.folder / "secret").write_text(SECRET)
    (job.folder / "secret").chmod(0o600)
    words = [sys.executable, "-P", "-m", "samebits", "run", "--nnodes", "1:2"]
    words += ["--host-discovery-script", "scontrol show hostnames"]
    words += ["--launch", "srun -w {host} -N1 -n1 --overlap sh -c {command}"]
    words += [str(WORKER), "--seated", *UNTIL_TOLD]
    (job.folder / "elastic.sh").write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")
    settings = {name: text for name, text in job.settings.items() if name != "WORKER_NUM"}
    settings |= {"SCHED_HOST": cluster.computing[0].address(), "CLUSTER_SECRET_FILE": str(job.folder / "secret")}
    settings |= {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    number = cluster.submit(job.folder, settings, "--nodes=2", "--output=sbatch.out", "elastic.sh")
    said = job.folder / "sbatch.out"
    _until(lambda: said.exists() and "2/2 workers" in said.read_text(), said)
    assert len(_workers(cluster, "n1")) == len(_workers(cluster, "n2")) == 1
    (killed,) = _workers(cluster, "n2")
    os.kill(killed, signal.SIGKILL)
    _until(lambda: any(pid != killed for pid in _workers(cluster, "n2")), said)
    job.let_finish()
    assert cluster.wait_for_state(number, "COMPLETED", "FAILED", timeout_s=120) == "COMPLETED", said.read_text()
    assert "rests" not in said.read_text()


def _until(is_so: Callable[[], bool], said: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, said.read_text() if said.exists() else "no output"
        time.sleep(0.05)


def _workers(cluster: SlurmCluster, name: str) -> list[int]:
    """Return the workers' processes on this host by the pids that they have here."""
    (host,) = [one for one in cluster.computing if one.name == name]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_there = (folder / "ns" / "pid").readlink() == Path(f"/proc/{host.pid}/ns/pid").readlink()
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # gone
        if is_there and b"python" in words[0] and words[1:2] == [str(WORKER).encode()]:
            found.append(int(folder.name))
    return found


def _environments(cluster: SlurmCluster, name: str) -> bytes:
    found = b""
    for pid in _workers(cluster, name):
        try:
            found += Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
    return found
