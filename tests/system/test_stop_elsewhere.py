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


def test_drained_job_ends_at_a_commit_and_repeats_no_step(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job(*TRAINED, "--gates", str(GATES), workers=2)
    job.start()
    job.open_gates(0)
    job.wait_for(0, f"waits at the gate of step {GATES}")
    with stop(job, "--drain", str(WAIT_S)) as asked:
        job.wait_for("scheduler", "2 workers are to leave at their next commit")
        for gate in (GATES, 2 * GATES):  # not all at once: it must not come to its end before its workers have heard
            job.open_gates(gate)
            job.wait_for(0, f"asked to leave|waits at the gate of step {gate + GATES}")
        said, _ = asked.communicate(timeout=WAIT_S)
    assert asked.returncode == 0, said
    assert job.wait_ended() == {0: 143, 1: 143, "scheduler": 78}
    job.open_gates(3 * GATES)
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
    job.worker(1).kill()
    assert asked.returncode == 0, said
    assert "worker 1 has not left after 0.1 s" in said.replace("worker 0, 1", "worker 1"), said
    assert "the job is ended without that" in said
    assert job.scheduler.wait() == 78
