"""``samebits run --nnodes 2`` on each host: two folders that share only the scheduler's address."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from samebits.errors import RefusedError
from tests.launcher.shell_job import UNTIL_TOLD, WORKER, Shell, ShellJob
from tests.system.processes import WarmStarter

pytestmark = pytest.mark.system


def started(host: ShellJob, port: int, node_rank: int, *words: str) -> Shell:
    """Start this host's share of a job of two hosts with one worker each."""
    share = ("--nnodes", "2", "--node-rank", str(node_rank), "-n", "1")
    where = ("--sched-host", "127.0.0.1", "--sched-port", str(port))
    settings = {name: text for name, text in host.settings.items() if name not in ("SCHED_PORT", "WORKER_NUM")}
    return host.tool("run", *share, *where, str(WORKER), *words, **settings)


@pytest.fixture
def other(tmp_path: Path, warm_commands: WarmStarter) -> ShellJob:
    folder = tmp_path / "the other host"
    folder.mkdir()
    return ShellJob(folder, warm_commands)


def test_each_host_starts_and_restarts_its_share(job: ShellJob, other: ShellJob) -> None:
    second = started(other, job.port, 1, *UNTIL_TOLD)  # it waits for the scheduler, which starts later
    first = started(job, job.port, 0, *UNTIL_TOLD)
    try:
        for shell in (first, second):
            shell.wait_for(r"· step [1-9]\S* .*2/2 workers")
        assert sorted(job.identities()) == ["scheduler", "worker_0"]
        assert sorted(other.identities()) == ["worker_1"]
        other.kill("worker_1")
        second.wait_for(r"worker 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\)")
        told = re.compile(r"worker 1 \(pid \d+ on \S+\) (is lost: )?was killed by signal 9 \(SIGKILL\)")
        first.wait_until(lambda: told.search(job.log("scheduler")) is not None)  # by the other host's follower alone
        for shell in (first, second):
            shell.wait_for(r"2/2 workers · 1 recovery, ")
        for host in (job, other):
            host.let_finish()
        assert (first.end(), second.end()) == (0, 0), f"{first.text}\n{second.text}"
    finally:
        for shell in (first, second):
            if shell.process.poll() is None:
                shell.send(signal.SIGTERM)
                shell.end()
        assert other.running() == []
        other.close()


def test_finished_job_gives_every_host_free(job: ShellJob, other: ShellJob) -> None:
    """The second host has no journal, but it followed the job to its end."""
    shells = [started(host, job.port, rank, "--steps", "10") for rank, host in enumerate((job, other))]
    assert [shell.end() for shell in shells] == [0, 0], "\n".join(shell.text for shell in shells)
    recover = other.recover()
    assert recover.end() == 0 and re.search(r"nothing to do: job \S+ is finished\n", recover.text), recover.text
    shells = [started(host, job.port, rank, "--steps", "20") for rank, host in enumerate((job, other))]
    assert [shell.end() for shell in shells] == [0, 0], "\n".join(shell.text for shell in shells)
    assert other.running() == []
    other.close()


def test_recovered_worker_of_an_earlier_job_is_refused_alone(
    job: ShellJob, other: ShellJob, tmp_path: Path, warm_commands: WarmStarter
) -> None:
    """The scheduler's host starts another job at the same address, while the second host still has the earlier one."""
    shells = [started(host, job.port, rank, *UNTIL_TOLD) for rank, host in enumerate((job, other))]
    shells[1].wait_for(r"· step [1-9]\S* .*2/2 workers")
    other.kill_everything(shells[1])
    job.kill_everything(shells[0])
    (tmp_path / "later").mkdir()
    later = ShellJob(tmp_path / "later", warm_commands)
    first = started(later, job.port, 0, "--steps", "10")
    first.wait_for("waiting for worker 1")
    stale = other.recover()
    stale.wait_for(r"the scheduler at SCHED_PORT=\d+ serves job .*, but this folder belongs to job ")
    assert stale.end() == RefusedError.exit_code, stale.text
    assert re.search(r"belongs to job \S+, this scheduler runs job \S+", other.log("worker_1")), stale.text
    (tmp_path / "later share").mkdir()
    share = ShellJob(tmp_path / "later share", warm_commands)
    second = started(share, job.port, 1, "--steps", "10")
    assert (first.end(), second.end()) == (0, 0), f"{first.text}\n{second.text}"
    for host in (other, later, share):
        assert host.running() == []
        host.close()
