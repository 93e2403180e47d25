"""Shared keys: kill -9 of the scheduler and of a worker repeats and loses no number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("queue_script.py")


def test_shared_queue_survives_the_scheduler_and_a_worker(new_job: Callable[..., Job]) -> None:
    job = new_job("--steps", "20", script=SCRIPT, workers=2, settings={"REGISTER_COOLDOWN": "0"})
    job.start()
    for rank in job.ranks:
        job.wait_for(rank, "step 5")
    job.scheduler.kill()
    job.open_gates(5)  # each asks for three numbers, which no one can give now
    job.wait_for(0, "the scheduler is unreachable")
    job.start_scheduler()
    for rank in job.ranks:
        job.wait_for(rank, "step 10")
    job.kill(1)
    job.start_worker(1)
    job.open_gates(10)
    job.wait_finished()
    taken = [int(match[1]) for rank in job.ranks for match in job.matches(rank, r"took (\d+)")]
    total = int(job.wait_for(0, r"summary step 20, (\d+) taken")[1])
    assert job.matches(1, r"summary step 20")
    assert len(set(taken)) == len(taken) >= 2 * 20 * 3, "a number was given twice"
    assert len(set(range(1, total + 1)) - set(taken)) <= 1, "except for one that the killed worker may have held"
