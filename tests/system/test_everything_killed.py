"""Promise d: kill -9 everything; the job goes on from the newest checkpoint that can be made whole."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import Job, JobFolder
from tests.system.kill_list import INTERVAL, MIDDLE
from tests.system.probe import gate_of
from tests.system.scripted import SCHEDULER, ScriptJob

pytestmark = pytest.mark.system

TRAINED = ("--steps", "80", "--interval", str(INTERVAL))
COOL_DOWN_S = 30.0


def test_everybody_is_back_31_seconds_after_the_schedulers_load(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    expected = undisturbed(*TRAINED)
    job = killed(new_job(*TRAINED, settings={"REGISTER_COOLDOWN": ""}))
    newest = newest_step(job)
    job.start()
    job.wait_for(SCHEDULER, "goes on, term 2: 4 seats and generation 1 read from the journal")
    loaded_at = time.monotonic()
    for rank in job.ranks:
        job.wait_for(rank, f"seated: slot {rank} of 4, incarnation 2", timeout_s=COOL_DOWN_S + 15.0)
    assert time.monotonic() - loaded_at <= COOL_DOWN_S + 1.0
    assert "waits at most 30 s (REGISTER_COOLDOWN), once" in job.wait_for(SCHEDULER, "leases start anew").string
    for rank in job.ranks:
        explained = job.wait_for(rank, r"free again in (\d+\.\d) s \(REGISTER_COOLDOWN=30\)")
        assert float(explained[1]) <= COOL_DOWN_S
    assert job.wait_finished() == expected
    assert_goes_on_from(job, newest)


def truncate(point: Path) -> None:
    data = point / "data.safetensors"
    data.write_bytes(data.read_bytes()[:-1000])


def flip_one_byte(point: Path) -> None:
    data = point / "data.safetensors"
    content = bytearray(data.read_bytes())
    content[len(content) * 2 // 3] ^= 0x10
    data.write_bytes(content)


def truncate_manifest(point: Path) -> None:
    manifest = point / "manifest.msgpack"
    manifest.write_bytes(manifest.read_bytes()[:40])


# What may be damaged, and that each is noticed: tests/store/checkpoint. Here: what a job does about it.
@pytest.mark.parametrize(
    "damage",
    [flip_one_byte, *(pytest.param(one, marks=pytest.mark.thorough) for one in (truncate, truncate_manifest))],
)
def test_a_damaged_newest_checkpoint_costs_no_step(
    damage: Callable[[Path], None], new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = killed(new_job(*TRAINED))
    newest = newest_step(job)
    point = points_of(job, 1)[newest]
    damage(point)
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED)
    assert_goes_on_from(job, newest, r"held by rank 0, 2, 3; sent to rank 1")
    job.wait_for(1, rf"passed over the restore point of step {newest}\b.*{point.name}")
    assert list(point.parent.glob(f"*{point.name}")), "a damaged point was deleted"


def test_a_rank_without_its_directory_costs_no_step(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = killed(new_job(*TRAINED))
    newest = newest_step(job)
    shutil.rmtree(job.checkpoints / "0")
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED)
    assert_goes_on_from(job, newest, "held by rank 1, 2, 3; sent to rank 0")


def test_a_damaged_checkpoint_with_saved_random_numbers_goes_back_to_one_that_all_hold(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = killed(new_job(*TRAINED, "--rng", "saved"))
    newest = newest_step(job)
    flip_one_byte(points_of(job, 3)[newest])
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED, "--rng", "saved")
    assert_goes_on_from(job, newest - INTERVAL)


def test_points_that_no_disk_has_are_taken_from_memory(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    """All are killed when step 20 is hashed and before a disk has it: what disks have of it is taken away."""
    job = new_job(*TRAINED, "--gates", str(INTERVAL))
    job.start()
    for step in (0, INTERVAL):
        gate_of(job.folder, step).touch()
    for rank in job.ranks:
        job.wait_for(rank, f"gate of step {2 * INTERVAL}")
    job.kill_everything()
    points = {rank: points_of(job, rank)[2 * INTERVAL] for rank in job.ranks}
    for point in points.values():
        shutil.rmtree(point)
    for step in range(2 * INTERVAL, 80, INTERVAL):
        gate_of(job.folder, step).touch()
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED)
    assert_goes_on_from(job, 2 * INTERVAL)
    for rank in job.ranks:
        job.wait_for(rank, rf"the restore point of step {2 * INTERVAL}\b.* comes from memory")
    assert job.memory_rooms() == [], "a finished job gives its memory back"


def test_a_job_that_is_told_to_stop_goes_on_from_its_very_last_commit(
    script_job: Callable[..., ScriptJob], undisturbed: Callable[..., str]
) -> None:
    never = ("--steps", "80", "--interval", "1000")
    expected = undisturbed(*never, workers=2)
    job = script_job(*never, "--pause-ms", "30", workers=2)
    run = job.run()
    job.wait_for_step(MIDDLE)
    run.press_ctrl_c()
    assert run.wait(30.0) != 0, "the job did not finish"
    newest = newest_step(job)
    assert newest >= max(job.steps(rank)[-1].number for rank in job.ranks) >= MIDDLE
    assert job.finished(job.recover()) == expected
    for rank in job.ranks:
        job.wait_for(rank, rf"generation 2: rank {rank} of 2 goes on from step {newest}\b")


def killed(job: Job) -> Job:
    """The job, all of it killed in the middle of its training by what empties memory too."""
    job.start()
    job.wait_for_step(MIDDLE)
    job.kill_everything()
    job.forget_memory()
    return job


def points_of(job: JobFolder, rank: int) -> dict[int, Path]:
    """The rank's checkpoints by step."""
    return {int(path.name.split("_")[1]): path for path in (job.checkpoints / str(rank)).glob("step_*")}


def newest_step(job: JobFolder) -> int:
    """The newest checkpoint that any rank holds."""
    return max(max(points_of(job, rank)) for rank in job.ranks)


def assert_goes_on_from(job: JobFolder, step: int, source: str = "from every rank's own checkpoint") -> None:
    """All ranks began their second generation there, and the log says where from."""
    for rank in job.ranks:
        job.wait_for(rank, rf"generation 2: rank {rank} of {job.workers} goes on from step {step}\b.*{source}")
