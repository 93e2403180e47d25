"""``samebits run --nnodes 2`` on each host: two folders that share only the scheduler's address."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

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
