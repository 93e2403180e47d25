"""FSDP2: a model that no rank holds whole goes on after a kill, with the bits of a run that nobody disturbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("sharded_script.py")
WORKERS = 3


def test_a_killed_worker_takes_all_back_to_the_newest_point_that_all_hold(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    expected = undisturbed(script=SCRIPT, workers=WORKERS)
    job = new_job("--pause-ms", "10", script=SCRIPT, workers=WORKERS)
    job.start()
    job.wait_for_step(13)
    job.kill(1)
    job.start_worker(1)
    assert job.wait_finished() == expected
