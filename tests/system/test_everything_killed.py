"""Promise d: after kill -9 of everything the job resumes from the newest checkpoint that can be completed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.core.records import SCHEMA, PointCommitted
from samebits.errors import JobStoppedError, PointsLostError
from samebits.store.journal import read_journal
from tests.system.job import Job, JobFolder
from tests.system.kill_list import GATE, GATED, INTERVAL, MIDDLE, STEPS, TRAINED
from tests.system.scripted import SCHEDULER, ScriptJob

pytestmark = pytest.mark.system


@pytest.mark.parametrize("cool_down", ["10", pytest.param("", marks=pytest.mark.thorough)], ids=["short", "default"])
def test_all_are_back_after_a_single_cool_down(
    cool_down: str, new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    """Each worker waits for one cool-down; tests/core checks with a manual clock that none is refused after it."""
    expected = undisturbed(*TRAINED)
    job = killed(new_job(*TRAINED, *GATED, settings={"REGISTER_COOLDOWN": cool_down}))
    newest = newest_step(job)
    job.start()
    job.wait_for(SCHEDULER, "resumes, term 2: 4 seats and generation 1 read from the journal")
    for rank in job.ranks:
        job.wait_for(rank, f"seated: slot {rank} of 4, start 2")
    cool_down_s = cool_down or "30"
    said = job.wait_for(SCHEDULER, "leases start again").string
    assert f"waits at most {cool_down_s} s (REGISTER_COOLDOWN), once" in said
    for rank in job.ranks:
        explained = job.wait_for(rank, rf"free again in (\d+\.\d) s \(REGISTER_COOLDOWN={cool_down_s}\)")
        assert float(explained[1]) <= float(cool_down_s)
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


# Detection of every kind of damage: tests/store/checkpoint. Here: what a job does about it.
@pytest.mark.parametrize(
    "damage",
    [pytest.param(one, marks=pytest.mark.thorough) for one in (flip_one_byte, truncate, truncate_manifest)],
)
def test_damaged_newest_checkpoint_costs_no_step(
    damage: Callable[[Path], None], new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = killed(new_job(*TRAINED, *GATED))
    newest = newest_step(job)
    point = points_of(job, 1)[newest]
    damage(point)
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED)
    assert_goes_on_from(job, newest, r"held by ranks 0, 2 and 3; sent to rank 1")
    job.wait_for(1, rf"ignored the restore point of step {newest}\b.*{point.name}")
    assert list(point.parent.glob(f"*{point.name}")), "a damaged point was deleted"


def test_damaged_checkpoint_and_a_rank_without_its_directory_cost_no_step(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = killed(new_job(*TRAINED, *GATED))
    newest = newest_step(job)
    point = points_of(job, 1)[newest]
    flip_one_byte(point)
    shutil.rmtree(job.checkpoints / "0")
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED)
    assert_goes_on_from(job, newest, "held by ranks 2 and 3; sent to ranks 0 and 1")
    job.wait_for(1, rf"ignored the restore point of step {newest}\b.*{point.name}")


def test_job_that_lost_all_checkpoints_is_refused_until_they_return(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job(*TRAINED, *GATED, workers=2)
    job.start()
    job.open_gates(0)
    step = job.wait_until(lambda: committed_step(job), "a point that every disk holds")
    job.kill_everything()
    job.forget_memory()
    job.open_gates(GATE)
    aside = job.checkpoints.rename(job.folder / "aside")
    job.start()
    assert set(job.wait_ended().values()) == {PointsLostError.exit_code}, job.tails()
    said = job.wait_for(
        SCHEDULER, r"the job ends: every rank had the restore point of step (\d+) .* no restore point is left"
    )
    assert int(said[1]) >= step and f"and {job.checkpoints}. Starting from step 0" in said.string
    shutil.rmtree(job.checkpoints, ignore_errors=True)  # each rank has claimed its folder, which is empty
    aside.rename(job.checkpoints)
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED, workers=2)
    assert int(job.wait_for(0, r"generation 2: rank 0 of 2 continues from step (\d+)")[1]) >= step


@pytest.mark.thorough
def test_rank_without_its_directory_costs_no_step(new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    job = killed(new_job(*TRAINED, *GATED))
    newest = newest_step(job)
    shutil.rmtree(job.checkpoints / "0")
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED)
    assert_goes_on_from(job, newest, "held by ranks 1, 2 and 3; sent to rank 0")


def test_damaged_checkpoint_with_saved_random_numbers_falls_back_to_a_common_one(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job(*TRAINED, *GATED, "--rng", "saved")
    job.start()
    job.open_gates(0)
    for rank in job.ranks:
        job.wait_for(rank, f"gate of step {GATE}")
    job.kill_everything()
    job.forget_memory()
    flip_one_byte(points_of(job, 3)[GATE])
    job.open_gates(GATE)
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED, "--rng", "saved")
    assert_goes_on_from(job, GATE - INTERVAL)


def test_points_missing_on_every_disk_are_taken_from_memory(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    """All are killed when step 20 is hashed and not yet on any disk; what disks have of it is removed."""
    job = new_job(*TRAINED, "--gates", str(INTERVAL))
    job.start()
    job.open_gates(0, INTERVAL)
    for rank in job.ranks:
        job.wait_for(rank, f"gate of step {2 * INTERVAL}")
    job.kill_everything()
    points = {rank: points_of(job, rank)[2 * INTERVAL] for rank in job.ranks}
    for point in points.values():
        shutil.rmtree(point)
    job.open_gates(*range(2 * INTERVAL, STEPS, INTERVAL))
    job.start()
    assert job.wait_finished() == undisturbed(*TRAINED)
    assert_goes_on_from(job, 2 * INTERVAL)
    for rank in job.ranks:
        job.wait_for(rank, rf"the restore point of step {2 * INTERVAL}\b.* comes from memory")
    assert job.memory_rooms() == [], "a finished job frees its memory"


NEVER = ("--steps", str(STEPS), "--interval", "1000")


def test_stopped_job_resumes_from_its_last_commit(new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    job = new_job(*NEVER, *GATED, workers=2)
    job.start()
    job.open_gates(0)
    job.wait_for_step(MIDDLE)
    assert set(job.stop().values()) == {JobStoppedError.exit_code}
    newest = newest_step(job)
    assert newest >= max(job.steps(rank)[-1].number for rank in job.ranks) >= MIDDLE
    job.open_gates(GATE)
    job.start()
    assert job.wait_finished() == undisturbed(*NEVER, workers=2)
    assert_goes_on_from(job, newest, "")


@pytest.mark.thorough
def test_job_stopped_by_ctrl_c_resumes_from_its_last_commit(
    script_job: Callable[..., ScriptJob], undisturbed: Callable[..., str]
) -> None:
    expected = undisturbed(*NEVER, workers=2)
    job = script_job(*NEVER, *GATED, workers=2)
    job.open_gates(0)
    run = job.run()
    job.wait_for_step(MIDDLE)
    run.press_ctrl_c()
    assert run.wait() != 0, "the job did not finish"
    job.open_gates(GATE)
    newest = newest_step(job)
    assert newest >= max(job.steps(rank)[-1].number for rank in job.ranks) >= MIDDLE
    assert job.finished(job.recover()) == expected
    for rank in job.ranks:
        job.wait_for(rank, rf"generation 2: rank {rank} of 2 continues from step {newest}\b")


def killed(job: Job) -> Job:
    """Return a job that was killed entirely in the middle of training, by something that erases memory too."""
    job.start()
    job.open_gates(0)
    job.wait_for_step(MIDDLE)
    job.kill_everything()
    job.forget_memory()
    job.open_gates(GATE)
    return job


def committed_step(job: JobFolder) -> int | None:
    """Return the journal's newest step that every disk held; None before the first save."""
    contents = read_journal(job.recovery)
    records = () if contents is None else map(SCHEMA.unpack, contents.payloads)
    return max((one.point.step for one in records if isinstance(one, PointCommitted)), default=0) or None


def points_of(job: JobFolder, rank: int) -> dict[int, Path]:
    """Return the rank's checkpoints by step."""
    return {int(path.name.split("_")[1]): path for path in (job.checkpoints / str(rank)).glob("step_*")}


def newest_step(job: JobFolder) -> int:
    """Return the step of the newest checkpoint of any rank."""
    return max(max(points_of(job, rank)) for rank in job.ranks)


def assert_goes_on_from(job: JobFolder, step: int, source: str = "from every rank's own checkpoint") -> None:
    """Check that all ranks began their second generation at that step, and that the log names the source."""
    for rank in job.ranks:
        job.wait_for(rank, rf"generation 2: rank {rank} of {job.workers} continues from step {step}\b.*{source}")
