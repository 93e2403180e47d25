"""A rank that starts a generation with different weights ends the job before any step is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import UnequalError
from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("changed_script.py")


def test_different_weights_at_the_start_of_a_generation_end_the_job_before_a_step(new_job: Callable[..., Job]) -> None:
    job = new_job(script=SCRIPT, workers=3, settings={"REGISTER_COOLDOWN": "0.5"})
    job.start()
    for rank in job.ranks:
        job.wait_for(rank, r"stepped 3$")
    job.kill(1)
    before = [job.count(rank) for rank in job.ranks]
    job.start_worker(1)
    for rank in job.ranks:
        assert job.worker(rank).wait() == UnequalError.exit_code, job.tails()
        begun = job.matches(rank, r"^pid \d+ begins at step", since=before[rank])
        assert len(begun) == 2, "all roll back once, in case a device has failed; then the cause is known"
        looked = job.matches(rank, r"^looks at (\S+)", since=before[rank])
        assert len(looked) == 2, "the comparison is over before the first step, not before the function runs"
        assert not job.matches(rank, "stepped", since=before[rank]), "a step was taken from weights that differ"
        assert not job.matches(rank, r"the last commit \(step .*\) is on disk"), "it is unknown whose weights are right"
    job.scheduler.wait()
    (said,) = job.matches("scheduler", "the job ends: the ranks are not equal .* or by the script[.] Fix: ")
    print(said.string)
