"""``samebits stop`` for a job started by other means, such as a container engine: its scheduler ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.system.job import WAIT_S, Job

pytestmark = pytest.mark.system

TRAINED = ("--steps", "40", "--interval", "10")
GATES = 10


def stop(job: Job, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "samebits", "stop", *words]
    return subprocess.Popen(
        command, cwd=job.folder, env=job.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_drained_job_stops_after_the_same_commit_in_every_rank_and_repeats_no_step(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job(*TRAINED, "--gates", str(GATES), workers=2)
    job.start()
    job.open_gates(0)
    job.wait_for(0, f"waits at the gate of step {GATES}")
    with stop(job, "--drain", str(WAIT_S)) as asked:
        job.wait_for("scheduler", "every worker is to stop after the same commit: samebits stop")
        job.open_gates(GATES)
        said, _ = asked.communicate(timeout=WAIT_S)
    assert asked.returncode == 0, said
    assert job.wait_ended() == {0: 78, 1: 78, "scheduler": 78}
    stopped_at = [int(job.matches(rank, r"stopped at step (\d+)")[0][1]) for rank in job.ranks]
    assert stopped_at[0] == stopped_at[1] == GATES + 1, "the gate held both before their next commit"
    assert {job.steps(rank)[-1].number for rank in job.ranks} == {GATES}, "the probe prints a step after its commit"
    assert not job.matches("scheduler", "is lost|left before training|round .* opened: worker"), job.tails()
    job.open_gates(2 * GATES, 3 * GATES)
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED, workers=2)
    for rank in job.ranks:
        numbers = [step.number for step in job.steps(rank)]
        assert numbers == sorted(set(numbers)), f"rank {rank} took a step twice: {numbers}"


@pytest.mark.thorough
def test_job_is_ended_though_a_worker_does_not_reach_its_next_commit(new_job: Callable[..., Job]) -> None:
    job = new_job(*TRAINED, "--gates", str(GATES), workers=2)
    job.start()
    job.open_gates(0)
    job.wait_for(0, f"waits at the gate of step {GATES}")
    job.worker(1).signal(signal.SIGSTOP)
    with stop(job, "--drain", "0.1") as asked:
        said, _ = asked.communicate(timeout=WAIT_S)
    job.kill(1)
    assert asked.returncode == 0, said
    assert "the workers have not stopped after the same commit within 0.1 s; the job is stopped now" in said
    assert job.wait_ended() == {0: 78, 1: -signal.SIGKILL, "scheduler": 78}
    job.wait_for_writers()
