"""Pipeline stages: a rank killed in any microbatch is replaced, and no bit changes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import FINISH_S, WAIT_S, Job, JobFolder
from tests.system.kill_list import replace
from tests.system.kill_points import Way, mark_of
from tests.system.matrix import is_stopped
from tests.system.processes import signal_process
from tests.system.scripted import ScriptJob

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("pipeline_script.py")
TRAINED = ("--steps", "16", "--interval", "5")
EVERY_COMMIT = {"SHARD_COPY_EVERY": "1"}


def undisturbed(new_job: Callable[..., Job], workers: int, words: tuple[str, ...]) -> str:
    """Return what torch alone makes of it."""
    alone = new_job(*TRAINED, *words, script=SCRIPT, workers=workers, settings={"ENABLE_RECOVERY": "0"})
    alone.start()
    return alone.wait_finished()


def killed(new_job: Callable[..., Job], workers: int, words: tuple[str, ...], kills: tuple[str, ...], at: Path) -> Job:
    at.mkdir()
    options = [word for kill in kills for word in ("--kill", kill)]
    job = new_job(
        *(*TRAINED, *words, *options, "--marks", str(at)), script=SCRIPT, workers=workers, settings=EVERY_COMMIT
    )
    killed = [int(kill[0]) for kill in kills]
    replace(*killed)(job)
    job.wait_for(0, "final step=", timeout_s=FINISH_S)
    assert [job.seatings(rank) for rank in job.ranks] == [1 + killed.count(rank) for rank in job.ranks], job.tails()
    return job


def redone(job: Job) -> set[int]:
    """Return how many steps were repeated, in each rank that went back and in each recovery."""
    found = [one for rank in job.ranks for one in job.matches(rank, r"goes back from step (\d+) to step (\d+)")]
    return {int(one[1]) - int(one[2]) for one in found}


def test_two_stages_killed_in_microbatches_end_with_the_same_bits(new_job: Callable[..., Job], tmp_path: Path) -> None:
    words = ("--schedule", "gpipe")
    expected = undisturbed(new_job, 2, words)
    kills = ("1:forward2:3", "0:backward1:5", "1:backward3:7", "0:forward0:9", "1:stepping:11", "0:stepped:13")
    job = killed(new_job, 2, (*words, "--keeps"), kills, tmp_path / "marks")
    assert job.wait_finished() == expected
    assert redone(job) <= {1}, job.tails()


def test_interleaved_stages_of_a_model_built_without_memory(new_job: Callable[..., Job], tmp_path: Path) -> None:
    words = ("--schedule", "interleaved", "--meta")
    expected = undisturbed(new_job, 2, words)
    kills = ("0:forward5:3", "1:backward6:5", "1:forward1:8", "0:committed:11")
    job = killed(new_job, 2, (*words, "--keeps"), kills, tmp_path / "marks")
    assert job.wait_finished() == expected
    assert redone(job) <= {1}, job.tails()


def test_sharded_stages_under_1f1b_end_with_the_same_bits(new_job: Callable[..., Job], tmp_path: Path) -> None:
    words = ("--schedule", "1f1b", "--dp-shard", "2", "--meta")
    expected = undisturbed(new_job, 4, words)
    kills = ("3:forward2:3", "0:backward1:5", "2:stepping:7", "1:stepped:9", "3:backward3:12")
    job = killed(new_job, 4, (*words, "--keeps"), kills, tmp_path / "marks")
    assert job.wait_finished() == expected
    assert redone(job) <= {1}, job.tails()


def test_replicated_stages_redo_no_step(new_job: Callable[..., Job], tmp_path: Path) -> None:
    words = ("--schedule", "1f1b", "--dp-replicate", "2")
    expected = undisturbed(new_job, 4, words)
    kills = ("3:forward2:3", "0:backward1:5", "2:stepped:9", "1:committed:11")
    job = killed(new_job, 4, words, kills, tmp_path / "marks")
    assert job.wait_finished() == expected
    assert not redone(job), job.tails()


def stops_at(kills: tuple[str, ...], marks: Path) -> tuple[str, ...]:
    """Return the arguments with which ranks suspend themselves at these points."""
    marks.mkdir()
    return (*(word for kill in kills for word in ("--kill", f"{kill}:{Way.STOP}")), "--marks", str(marks))


def wait_suspended(job: JobFolder, mark: Path, pid: Callable[[], int]) -> None:
    """Wait until a rank has suspended itself at the point of this mark."""
    job.wait_until(lambda: mark.exists() or None, mark.name)
    job.wait_until(lambda: is_stopped(pid()) or None, f"a suspended process after {mark.name}")


def test_scheduler_killed_within_a_microbatch_and_a_stage_while_it_is_gone(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    words = ("--schedule", "1f1b")
    expected = undisturbed(new_job, 2, words)
    within, later, marks = "1:forward2:5", "0:backward1:9", tmp_path / "marks"
    stops = stops_at((within, later), marks)
    job = new_job(*TRAINED, *words, "--keeps", *stops, script=SCRIPT, workers=2, settings=EVERY_COMMIT)
    job.start()
    wait_suspended(job, mark_of(marks, within), lambda: job.worker(1).pid)
    job.scheduler.kill()
    job.worker(1).signal(signal.SIGCONT)
    wait_suspended(job, mark_of(marks, later), lambda: job.worker(0).pid)  # four steps without a scheduler
    job.kill(0)
    job.start_scheduler()
    job.start_worker(0)
    assert job.wait_finished() == expected
    assert [job.seatings(rank) for rank in job.ranks] == [2, 1], job.tails()
    assert redone(job) <= {1}, job.tails()


def kill_all_processes(job: JobFolder) -> None:
    """kill -9 every process of the job, launcher and checkpoint writers included."""
    while found := list(job.processes()):
        for identity in found:
            signal_process(identity, signal.SIGKILL)
        for identity in found:
            assert identity.wait_for_exit(WAIT_S), f"process {identity.pid} outlives kill -9"


def test_everything_killed_within_a_microbatch_is_recovered_from_memory_or_the_disks(
    new_job: Callable[..., Job], script_job: Callable[..., ScriptJob], tmp_path: Path
) -> None:
    words = ("--schedule", "1f1b", "--meta")
    expected = undisturbed(new_job, 2, words)
    first, second, marks = "1:backward2:8", "0:forward3:14", tmp_path / "marks"
    stops = stops_at((first, second), marks)
    job = script_job(*TRAINED, *words, *stops, script=SCRIPT, workers=2, settings=EVERY_COMMIT)
    job.run()
    wait_suspended(job, mark_of(marks, first), lambda: job.process(1).pid)
    kill_all_processes(job)
    job.recover()
    wait_suspended(job, mark_of(marks, second), lambda: job.process(0).pid)
    for rank in job.ranks:
        job.wait_for(rank, rf"generation 2: rank {rank} of 2 continues from step 7\b")
        saved = job.checkpoints / str(rank)
        job.wait_until(lambda saved=saved: any(saved.glob("step_*10_*")) or None, f"checkpoint of rank {rank}")
    kill_all_processes(job)
    job.forget_memory()
    assert job.finished(job.recover()) == expected
    for rank in job.ranks:
        job.wait_for(rank, rf"generation 3: rank {rank} of 2 continues from step 10\b")
