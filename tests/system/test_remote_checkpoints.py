"""Checkpoints in a bucket: a job killed entirely resumes from there, and an unreachable bucket delays no step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.store.checkpoint.remote.s3_server import BUCKET, S3Server, step_of
from tests.system.far_points import goes_on_after_all_was_lost
from tests.system.job import Job
from tests.system.kill_list import GATED, STEPS, TRAINED

pytestmark = pytest.mark.system

URL = f"s3://{BUCKET}/job"


@pytest.fixture
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


def points_in(s3: S3Server, slot: int) -> list[int]:
    """Return the steps of a slot's complete points, in order."""
    return sorted(step_of(name) for name in s3.names() if f"/{slot}/step" in name and name.endswith(".msgpack"))


def test_job_that_was_killed_entirely_resumes_from_the_bucket(
    s3: S3Server, new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job(*TRAINED, *GATED, workers=2, settings={"CHECKPOINT_PATH": URL, **s3.environment})
    goes_on_after_all_was_lost(job, lambda slot: points_in(s3, slot), undisturbed)


def test_unreachable_bucket_delays_no_step(
    s3: S3Server, new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job(*TRAINED, workers=2, settings={"CHECKPOINT_PATH": URL, **s3.environment})
    job.start()
    job.wait_for_step(5)
    s3.stop()
    for rank in job.ranks:
        job.wait_for_step(STEPS, rank)
    s3.start()
    assert job.wait_finished() == undisturbed(*TRAINED, workers=2)
