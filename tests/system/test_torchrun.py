"""torchrun with ``--rdzv-backend=samebits`` or a ported script: whatever is killed, training continues."""

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
from tests.system.torchrun_ported_script import undisturbed_bits

SCRIPT = Path(__file__).with_name("torchrun_script.py")
PORTED = Path(__file__).with_name("torchrun_ported_script.py")
WAIT_S = 90 * PATIENCE

pytestmark = [pytest.mark.system]


class TorchrunJob:
    """torchrun's agents of one job, a node each with one worker, in one folder."""

    def __init__(self, folder: Path, starter: WarmStarter) -> None:
        self.folder = folder
        self.script = SCRIPT
        self._starter = starter
        self._endpoint = f"127.0.0.1:{free_port()}"
        self.agents: dict[str, Running] = {}

    @property
    def wait_s(self) -> float:
        """A ported script is started twice until it trains."""
        return 2 * WAIT_S if self.script == PORTED else WAIT_S

    def start(self, name: str, *options: str) -> None:
        here = ("--rdzv-backend=samebits", f"--rdzv-endpoint={self._endpoint}", "--rdzv-id=job", "--nproc-per-node=1")
        words = (*(() if "--standalone" in options else here), *options, str(self.script))
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

    def waits(self, step: int) -> dict[str, ProcessIdentity]:
        """The process of each rank of the ported script that waits at this step, if all of them do."""
        logs = "\n".join(map(self.log, self.agents))
        told = re.findall(rf"rank (\d) waits at {step}, pid (\d+)", logs)
        found = {rank: one for rank, pid in told if (one := ProcessIdentity.of(int(pid))) is not None}
        return found if len(found) == 2 else {}

    def passes(self, step: int) -> None:
        """Open the ported script's gate at this step."""
        (self.folder / f"pass_{step}").touch()

    def wait(self, wanted: Callable[[], object], what: str) -> None:
        wait_s = self.wait_s
        deadline = time.monotonic() + wait_s
        while not wanted():
            logs = "\n".join(f"{name}: {self.log(name)[-2000:]}" for name in self.agents)
            assert time.monotonic() < deadline, f"not within {wait_s:g} s: {what}\n{logs}"
            time.sleep(0.1)

    def scheduler(self) -> ProcessIdentity:
        pids = re.findall(r"started the job's scheduler here: pid (\d+)", "".join(map(self.log, self.agents)))
        (found,) = [one for one in found_below(self.folder) if str(one.pid) in pids]
        return found

    def scheduler_of_ranks(self) -> ProcessIdentity:
        pids = re.findall(r"keeper: started the job's scheduler here: pid (\d+)", "".join(map(self.log, self.agents)))
        (found,) = [one for one in found_below(self.folder) if str(one.pid) in pids]
        return found

    def ended_with(self) -> set[str]:
        """The hashes of the ranks' final weights."""
        return {bits for name in self.agents for bits in re.findall(r"rank \d ends with (\w{64})", self.log(name))}

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
    job.wait(
        lambda: (
            "the scheduler is reachable again" in job.log("a") and "the scheduler is reachable again" in job.log("b")
        ),
        "it is back",
    )
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
    assert job.agents[other].wait(WAIT_S) == 78, "whether its own worker or the end of the job was noticed first"
    ended = "ended (with status 1|by signal 6)"  # torch's threads may abort the exiting interpreter
    cause = rf"failed first: global rank 1 \(pid \d+\) {ended}, failed at {SCRIPT}:\d+: ValueError"
    assert re.search(f"the job ends: stopped by torchrun on node .*{cause}", job.history()), job.history()
    job.wait(lambda: not found_below(job.folder), "all processes end")


def keeper_of(child: ProcessIdentity) -> ProcessIdentity:
    """The process that torchrun's agent has started for this rank."""
    found = ProcessIdentity.of(int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1]))
    assert found is not None
    return found


def test_ported_script_survives_a_rank_and_its_scheduler_though_torchrun_may_not_restart(job: TorchrunJob) -> None:
    """torchrun writes its usual logs and prefixes, and counts a single attempt."""
    job.script = PORTED
    job.start("one", "--standalone", "--nproc-per-node=2", "--max-restarts=0", "--log-dir=logs", "--tee=3")
    job.wait(lambda: job.waits(10), "both ranks train")
    before = job.waits(10)
    signal_process(before["1"], signal.SIGKILL)
    job.wait(lambda: job.waits(10).get("1", before["1"]) != before["1"], "rank 1 is replaced")
    assert job.waits(10)["0"] == before["0"], "its peer keeps its process"
    assert keeper_of(job.waits(10)["1"]).is_alive()
    signal_process(job.scheduler_of_ranks(), signal.SIGKILL)
    for step in (10, 20, 30):
        job.passes(step)
    assert job.agents["one"].wait(job.wait_s) == 0, job.log("one")
    assert job.ended_with() == {undisturbed_bits()}
    assert re.search(r"\[default1\]:rank 1 ends with", job.log("one"))
    (attempt,) = (job.folder / "logs").glob("*/attempt_*")
    assert "rank 1 ends with" in (attempt / "1" / "stderr.log").read_text()
    job.wait(lambda: not found_below(job.folder), "all processes end")


def test_ported_script_on_two_nodes_ends_with_the_same_bits_whatever_is_killed(job: TorchrunJob) -> None:
    job.script = PORTED
    options = ("--nnodes=2", "--max-restarts=1", "--monitor-interval=0.1")
    for name in ("a", "b"):
        job.start(name, *options)
    job.wait(lambda: job.waits(10), "both ranks train")
    before = job.waits(10)
    signal_process(before["0"], signal.SIGKILL)
    job.wait(lambda: job.waits(10).get("0", before["0"]) != before["0"], "rank 0 is replaced")
    assert job.waits(10)["1"] == before["1"], "the other node notices nothing"
    job.passes(10)

    job.wait(lambda: job.waits(20), "both ranks train on")
    before = job.waits(20)
    signal_process(keeper_of(before["0"]), signal.SIGKILL)
    job.wait(lambda: {*job.waits(20).values()}.isdisjoint(before.values()) and job.waits(20), "torchrun restarts both")
    job.passes(20)

    job.wait(lambda: job.waits(30), "both ranks train on")
    before = job.waits(30)
    job.agents["b"].kill()
    job.start("b", *options)
    job.wait(lambda: {*job.waits(30).values()}.isdisjoint(before.values()) and job.waits(30), "the node is replaced")
    job.passes(30)
    assert (job.agents["a"].wait(job.wait_s), job.agents["b"].wait(job.wait_s)) == (0, 0), job.log("a")
    assert job.ended_with() == {undisturbed_bits()}
    job.wait(lambda: not found_below(job.folder), "all processes end")


def test_error_of_a_ported_script_is_torchruns_first_cause(job: TorchrunJob) -> None:
    """The script has no @record."""
    job.script = PORTED
    job.start("one", "--standalone", "--nproc-per-node=2", "--max-restarts=0")
    job.wait(lambda: job.waits(10), "both ranks train")
    (job.folder / "fail").touch()
    assert job.agents["one"].wait(job.wait_s) == 1
    log = job.log("one")
    assert "ChildFailedError" in log and "torchrun_ported_script.py FAILED" in log
    cause = log.partition("Root Cause (first observed failure)")[2]
    assert "rank      : 1" in cause and "exitcode  : 1" in cause, log
    assert f'File "{PORTED}"' in cause and "ValueError: the loss is not a number" in cause, log
    job.wait(lambda: not found_below(job.folder), "all processes end")


def test_exit_status_of_a_ported_script_is_torchruns_first_cause(job: TorchrunJob) -> None:
    """The rank that exits leaves no error file, and its peer, which has one, ends because of it."""
    job.script = PORTED
    job.start("one", "--standalone", "--nproc-per-node=2", "--max-restarts=0")
    job.wait(lambda: job.waits(10), "both ranks train")
    (job.folder / "exit").touch()
    assert job.agents["one"].wait(job.wait_s) == 1
    cause = job.log("one").partition("Root Cause (first observed failure)")[2]
    assert "rank      : 1" in cause and "exitcode  : 3" in cause, job.log("one")
