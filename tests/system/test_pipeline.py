"""Pipeline stages: a rank killed in any microbatch is replaced, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import FINISH_S, Job
from tests.system.kill_list import replace

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
