"""A rank that begins a generation with other weights than the others ends the job before anybody takes a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.errors import LayoutError
from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("changed_script.py")


def test_weights_that_differ_when_a_generation_begins_end_the_job_before_a_step(new_job: Callable[..., Job]) -> None:
    job = new_job(script=SCRIPT, workers=3, settings={"REGISTER_COOLDOWN": "0.5"})
    job.start()
    for rank in job.ranks:
        job.wait_for(rank, r"stepped 3$")
    job.kill(1)
    before = [job.count(rank) for rank in job.ranks]
    job.start_worker(1)
    for rank in job.ranks:
        assert job.worker(rank).wait() == LayoutError.exit_code, job.tails()
        job.wait_for(rank, r"the restored state of rank .* differs from rank 0's", since=before[rank])
        begun = job.matches(rank, r"^pid \d+ begins at step", since=before[rank])
        assert len(begun) == 1, "the comparison is over before the first step, not before the function runs"
        after = [line for line in job.lines(rank)[before[rank] :] if begun[0].string in line or "stepped" in line]
        assert after[-1] == begun[0].string, f"a step was taken from weights that differ: {after[-3:]}"
        assert not job.matches(rank, "the last commit, of step .*, is on disk"), "nobody knows whose weights are right"
    job.scheduler.wait()
    looked = [float(job.matches(rank, r"^looks at (\S+)")[-1][1]) for rank in job.ranks]
    died = [float(job.matches(rank, r"^dies at (\S+)")[-1][1]) for rank in job.ranks]
    assert min(died) > max(looked), "who dies of it first is a lost peer to those who have not compared yet"
