"""A shared work queue: each item enters the weights once, even if a worker is killed while it holds one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("work_queue_script.py")
QUICK = {"REGISTER_COOLDOWN": "0"}


def require_each_once(job: Job) -> None:
    for rank in job.ranks:
        assert job.wait_for(rank, r"counts from (\d+) to (\d+)").groups() == ("1", "1"), job.tails()


def test_item_held_by_a_killed_worker_is_trained_on_once(new_job: Callable[..., Job]) -> None:
    job = new_job("--items", "24", "--gates", "4,8", script=SCRIPT, workers=2, settings=QUICK)
    job.start()
    for rank in job.ranks:
        job.wait_for(rank, r"holds \[\d+\] at gate 4")
    job.kill(1)
    job.open_gates(4)
    job.start_worker(1)
    for rank in job.ranks:
        job.wait_for(rank, r"holds \[\d+\] at gate 8")
    job.scheduler.kill()
    job.open_gates(8)  # from here on a worker asks for an item that does not exist yet
    job.wait_for(0, "the scheduler is unreachable")
    job.start_scheduler()
    job.wait_finished()
    require_each_once(job)


@pytest.mark.thorough
def test_job_that_returns_to_its_disks_takes_the_items_back_as_well(new_job: Callable[..., Job]) -> None:
    options = ("--items", "60", "--gates", "9,14", "--interval", "6")
    job = new_job(*options, script=SCRIPT, workers=3, settings=QUICK)
    job.start()
    for gate in (9, 14):
        for rank in job.ranks:
            job.wait_for(rank, rf"holds \[\d+\] at gate {gate}")
        job.kill_everything()
        job.forget_memory()  # otherwise the last commit is still there
        job.open_gates(gate)
        job.start()
    job.wait_finished()
    require_each_once(job)
    assert len(job.matches(0, r"step 8 of 3 took")) == 2, "it did return to a point before step 8"


@pytest.mark.thorough
def test_twelve_random_kills(new_job: Callable[..., Job]) -> None:
    """Every other one hits a worker that holds an item; the rest hit workers in any state."""
    draw, gates = random.Random(32), range(10, 130, 20)
    options = ("--items", "450", "--gates", ",".join(map(str, gates)))
    job = new_job(*options, script=SCRIPT, workers=3, settings=QUICK)
    job.start()
    for gate in gates:
        for rank in job.ranks:
            job.wait_for(rank, rf"holds \[\d+\] at gate {gate}")
        for wait_s in (0.0, draw.uniform(0.0, 0.5)):
            time.sleep(wait_s)  # any time will do
            rank = draw.choice(job.ranks)
            job.kill(rank)
            job.start_worker(rank)
            job.open_gates(gate)
    job.wait_finished()
    require_each_once(job)
