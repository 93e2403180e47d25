"""A job whose checkpoints are in HDFS; run by ``python -m tests.hdfs``, which provides one."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.store.checkpoint.conftest import HDFS, Folder
from tests.store.checkpoint.remote.s3_server import step_of
from tests.system.far_points import goes_on_after_all_was_lost
from tests.system.job import Job
from tests.system.kill_list import GATED, TRAINED

pytestmark = pytest.mark.system


def points_in(folder: Folder, slot: int) -> list[int]:
    """Return the steps of a slot's complete points, in order."""
    return sorted(step_of(name) for name in folder.names() if f"{slot}/step" in name and name.endswith(".msgpack"))


def test_job_that_was_killed_entirely_resumes_from_hdfs(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    folder = Folder(f"{os.environ[HDFS]}/{os.getpid()}/job")
    job = new_job(*TRAINED, *GATED, workers=2, settings={"CHECKPOINT_PATH": folder.url})
    goes_on_after_all_was_lost(job, lambda slot: points_in(folder, slot), undisturbed)
