"""Time-based checkpoints: all ranks save at the same steps through kills of rank 0 and others, with equal bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import Job

pytestmark = pytest.mark.system

STEPS = 90
GATE = 50  # the job waits here until it was disturbed
INTERVAL_S = 0.1
KEPT = 3  # the probe's keep_checkpoint_max


def points_of(job: Job) -> dict[int, set[str]]:
    """Return the names of every rank's points."""
    return {rank: {path.name for path in Path(job.checkpoints, str(rank)).glob("step_*")} for rank in job.ranks}


def test_time_based_points_are_at_common_steps_through_a_kill(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job("--steps", str(STEPS), "--save-seconds", str(INTERVAL_S), "--gates", str(GATE))
    job.start()
    job.open_gates(0)
    job.wait_for_step(40, rank=1)
    job.kill(0)
    job.open_gates(GATE)
    job.start_worker(0)
    assert job.wait_finished() == undisturbed("--steps", str(STEPS))
    points = points_of(job)
    assert {frozenset(names) for names in points.values()} == {frozenset(points[0])}, points
    assert len(points[0]) == KEPT
    steps = sorted(int(name.split("_")[1]) for name in points[0])
    assert steps[-1] == STEPS
    assert steps[0] > 40, "only the end was saved after the kill"
    job.wait_for(0, r"saves every (\d+ )?steps? \(100 ms, save_checkpoint_seconds\): a step takes")


@pytest.mark.thorough  # → test_everything_killed; which steps have points: the test before
def test_killed_job_resumes_from_a_time_based_point(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job("--steps", str(STEPS), "--save-seconds", str(INTERVAL_S), "--gates", str(GATE))
    job.start()
    job.open_gates(0)
    job.wait_for_step(40, rank=1)
    job.kill_everything()
    job.open_gates(GATE)
    newest = max(int(name.split("_")[1]) for names in points_of(job).values() for name in names)
    job.start()
    assert job.wait_finished() == undisturbed("--steps", str(STEPS))
    assert newest > 0
    for rank in job.ranks:
        job.wait_for(rank, rf"generation 2: rank {rank} of 4 continues from step {newest}\b")


@pytest.mark.thorough  # → what auto saves when, and its messages: tests/training/checkpoint
def test_auto_reports_its_interval(new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    """The job saves after five seconds to measure the cost, and ends before a second save is worthwhile."""
    job = new_job("--steps", str(STEPS), "--auto", "--pause-ms", "80")
    job.start()
    assert job.wait_finished() == undisturbed("--steps", str(STEPS))
    assert all(len(names) == KEPT for names in points_of(job).values()), (
        "step 0, the one that measures the cost, the last"
    )
