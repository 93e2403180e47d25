"""The disk's content after ``state.flush()`` and at the end of training, and the effect of a failing disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import Job
from tests.system.kill_list import GATE, GATED, STEPS, TRAINED

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
    assert job.memory_rooms() == [], "a finished job frees its memory"


def test_last_state_waits_for_a_failing_disk(new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    """One rank's folder is gone and returns. The other rank waits, and its death costs no step."""
    job = new_job(*TRAINED, *GATED, workers=2)
    job.start()
    job.open_gates(0)
    job.wait_for(0, f"gate of step {GATE}")
    folder = job.checkpoints / "0"
    aside = folder.rename(job.folder / "aside")
    folder.write_text("not a folder")
    job.open_gates(GATE)
    job.wait_for(0, rf"the last state \(step {STEPS}\) could not be saved; this rank keeps it in memory")
    job.kill(1)
    job.start_worker(1)
    job.wait_for(0, f"generation 2: rank 0 of 2 continues from step {STEPS}")
    folder.unlink()
    aside.rename(folder)
    assert job.wait_finished() == undisturbed(*TRAINED, workers=2)
    job.wait_for(0, f"checkpoints are saved again, from step {STEPS} on")
