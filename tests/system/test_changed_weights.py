"""A rank that begins generations with other weights than the others ends the job before anybody takes a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import UnequalError
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
        assert job.worker(rank).wait() == UnequalError.exit_code, job.tails()
        begun = job.matches(rank, r"^pid \d+ begins at step", since=before[rank])
        assert len(begun) == 2, (
            "all go back once, for it might be a device that has failed; then it is known what does it"
        )
        looked = job.matches(rank, r"^looks at (\S+)", since=before[rank])
        assert len(looked) == 2, "the comparison is over before the first step, not before the function runs"
        assert not job.matches(rank, "stepped", since=before[rank]), "a step was taken from weights that differ"
        assert not job.matches(rank, "the last commit, of step .*, is on disk"), "nobody knows whose weights are right"
    job.scheduler.wait()
    (said,) = job.matches("scheduler", "the job ends: the ranks are not equal .* not a device fault")
    print(said.string)
