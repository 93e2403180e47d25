"""``state.flush()``: when it returns, every point that was due is on disk; at the end nothing is in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("flush_script.py")


def test_every_commit_is_on_disk_when_the_call_returns(new_job: Callable[..., Job]) -> None:
    job = new_job(script=SCRIPT, workers=2)
    job.start()
    for rank in job.ranks:
        for step in (2, 4, 6):
            job.wait_for(rank, rf"after step {step} flushed {step + 1} up to step_{step:010d}_gen_000001")
        assert job.worker(rank).wait() == 0
        assert not job.matches(rank, "waits for the disk|was not saved")
    assert job.scheduler.wait() == 0
    assert job.memory_rooms() == [], "a finished job gives its memory back"
