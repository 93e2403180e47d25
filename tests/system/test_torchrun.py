"""torchrun with ``--rdzv-backend=samebits`` and a script that is not ported: whatever is killed, training goes on."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits.store.process_identity import ProcessIdentity
from tests.system.processes import (
    PATIENCE,
    Command,
    Running,
    WarmStarter,
    environment_of_tests,
    found_below,
    free_port,
    lines_of,
    signal_process,
)

SCRIPT = Path(__file__).with_name("torchrun_script.py")
WAIT_S = 90 * PATIENCE

pytestmark = [pytest.mark.system]


class TorchrunJob:
    """torchrun's agents of one job, a node each with one worker, in one folder."""

    def __init__(self, folder: Path, starter: WarmStarter) -> None:
        self.folder = folder
        self._starter = starter
        self._endpoint = f"127.0.0.1:{free_port()}"
        self.agents: dict[str, Running] = {}

    def start(self, name: str, *options: str) -> None:
        words = (
            *("--rdzv-backend=samebits", f"--rdzv-endpoint={self._endpoint}", "--rdzv-id=job"),
            *("--nproc-per-node=1", *options, str(SCRIPT)),
        )
        environment = environment_of_tests() | {"HEALTH": "off", "OMP_NUM_THREADS": "1"}
        log = self.folder / f"{name}.log"
        self.agents[name] = self._starter.start(
            Command(None, words, environment, self.folder, log, module="torch.distributed.run")
        )

    def log(self, name: str) -> str:
        return "\n".join(lines_of(self.folder / f"{name}.log"))

    def began(self, name: str) -> list[str]:
        """``rank restart pid`` of each worker of this agent that has come to its first step."""
        return re.findall(r"begins as (\d) of 2, restart (\d), pid (\d+)", self.log(name))

    def worker(self, name: str) -> ProcessIdentity:
        """The newest worker of this agent."""
        found = ProcessIdentity.of(int(self.began(name)[-1][2]))
        assert found is not None
        return found

    def wait(self, wanted: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not wanted():
            logs = "\n".join(f"{name}: {self.log(name)[-2000:]}" for name in self.agents)
            assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}\n{logs}"
            time.sleep(0.1)

    def scheduler(self) -> ProcessIdentity:
        pids = re.findall(r"started the job's scheduler here: pid (\d+)", "".join(map(self.log, self.agents)))
        (found,) = [one for one in found_below(self.folder) if str(one.pid) in pids]
        return found

    def history(self) -> str:
        return (self.folder / "recovery" / "scheduler.log").read_text()


@pytest.fixture
def job(tmp_path: Path, warm: WarmStarter) -> Iterator[TorchrunJob]:
    job = TorchrunJob(tmp_path, warm)
    yield job
    for one in found_below(tmp_path):
        signal_process(one, signal.SIGKILL)


def test_a_worker_the_scheduler_and_a_node_are_killed_and_a_standby_takes_over(job: TorchrunJob) -> None:
    options = ("--nnodes=2:3", "--max-restarts=1", "--monitor-interval=0.1")
    for name in ("a", "b"):
        job.start(name, *options)
    job.wait(lambda: job.began("a") and job.began("b"), "both begin")
    job.start("standby", *options)
    job.wait(lambda: "as a standby" in job.log("standby"), "a standby")

    signal_process(job.worker("b"), signal.SIGKILL)
    job.wait(lambda: len(job.began("a")) == len(job.began("b")) == 2, "both begin again after a worker's death")

    signal_process(job.scheduler(), signal.SIGKILL)
    job.wait(lambda: "the scheduler is back" in job.log("a") and "the scheduler is back" in job.log("b"), "it is back")
    assert len(job.began("a")) == len(job.began("b")) == 2, "no worker is started again"

    job.agents["b"].kill()
    job.wait(lambda: len(job.began("a")) == 3 and job.began("standby"), "the standby begins")
    (job.folder / "end").touch()
    assert (job.agents["a"].wait(WAIT_S), job.agents["standby"].wait(WAIT_S)) == (0, 0), job.log("a")
    assert "ends as" in job.log("a") and "ends as" in job.log("standby")
    job.wait(lambda: not found_below(job.folder), "all processes end, also the worker of the lost node")
    assert "job finished" in job.history()


def test_an_error_ends_all_nodes_with_its_line_once_no_restart_is_left(job: TorchrunJob) -> None:
    for name in ("a", "b"):
        job.start(name, "--nnodes=2", "--max-restarts=0")
    job.wait(lambda: job.began("a") and job.began("b"), "both begin")
    failing, other = ("a", "b") if job.began("a")[0][0] == "1" else ("b", "a")
    (job.folder / "fail").touch()
    assert job.agents[failing].wait(WAIT_S) == 1
    assert "ChildFailedError" in job.log(failing) and "ValueError: the loss is not a number" in job.log(failing)
    # torch's agent may see that its own worker has lost its peer before it asks whether the job is over.
    assert job.agents[other].wait(WAIT_S) in (1, 78)
    cause = rf"failed first: global rank 1 \(pid \d+\) ended with status 1, failed at {SCRIPT}:\d+: ValueError"
    assert re.search(f"the job ends: stopped by torchrun on node .*{cause}", job.history()), job.history()
    job.wait(lambda: not found_below(job.folder), "all processes end")
