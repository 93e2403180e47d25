"""FSDP2: a model that no rank holds completely resumes after kills with the undisturbed bits."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.__main__ import main
from samebits.errors import JobStoppedError
from samebits.store.checkpoint import SHARED_MEMORY
from samebits.store.checkpoint.memory_room import room_path
from samebits.store.owner import read_owner
from tests.system.job import WAIT_S, Job
from tests.system.kill_list import replace
from tests.system.processes import Command, WarmStarter

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("sharded_script.py")
WORKERS = 3


KILLS = ("1:backward:11", "0:committed:14", "2:train_returned")


def ended_as_torch_alone(
    new_job: Callable[..., Job], marks: Path, kills: tuple[str, ...], *, interval: int, copy_every: str
) -> Job:
    """Return a job with these kills that has ended with the bits of torch alone."""
    trained = ("--steps", "20", "--interval", str(interval), "--rng", "saved")
    alone = new_job(*trained, script=SCRIPT, workers=WORKERS, settings={"ENABLE_RECOVERY": "0"})
    alone.start()
    expected = alone.wait_finished()
    words = [word for kill in kills for word in ("--kill", kill)]
    settings = {"SHARD_COPY_EVERY": copy_every}
    job = new_job(*trained, *words, "--marks", str(marks), script=SCRIPT, workers=WORKERS, settings=settings)
    replace(*(int(kill[0]) for kill in kills))(job)
    assert job.wait_finished() == expected
    return job


def test_kills_return_all_to_the_newest_common_point_and_change_no_bit(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    """One in a backward pass, one between two steps, one after the end; the reference is torch alone."""
    job = ended_as_torch_alone(new_job, tmp_path, KILLS, interval=4, copy_every="off")
    assert job.matches(2, "goes back from step 10 to step 8: 2 to be repeated")
    # Whether the others had committed step 14 when the first rank to do so was killed varies.
    assert job.matches(2, r"continues from step 12, .*from every rank's own checkpoint \(step 1[34] is not held by all")
    assert job.matches(2, "training has already finished: loaded the final state, step 20")


COPIED = ("1:forward:4", "2:backward:7", "1:stepping:10", "2:stepped:13", "1:committed:16")


def test_a_killed_process_costs_at_most_one_step_if_every_commit_is_copied(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    """One in each part of a step; no checkpoint is saved meanwhile, so only shared memory has the lost shards."""
    job = ended_as_torch_alone(new_job, tmp_path, COPIED, interval=1000, copy_every="1")
    begun = job.matches(0, r"generation (\d+): rank 0 of 3 continues from step (\d+)")
    assert [int(one[2]) for one in begun[:4]] == [3, 6, 9, 12], job.tails()
    assert int(begun[4][2]) in (15, 16)  # whether the others had committed step 16 varies
    assert job.matches("scheduler", "in the memory of ranks 0 and 2, in the shared-memory copy of rank 1$")
    redone = [found[1] for rank in job.ranks for found in job.matches(rank, r"(\d+) to be repeated")]
    assert set(redone) <= {"1"}, job.tails()
    assert len(job.matches(0, "seated:")) == 1  # a survivor keeps its process
    assert not job.memory_rooms()


LEFT_BY_SIGTERM = 143


def test_a_rank_that_leaves_hands_its_shard_over_to_another_host(new_job: Callable[..., Job], tmp_path: Path) -> None:
    """Its checkpoints and its memory are gone before its successor starts, as if that were on another host."""
    trained = ("--steps", "20", "--interval", "1000", "--rng", "saved", "--buddies")
    alone = new_job(*trained, script=SCRIPT, workers=WORKERS, settings={"ENABLE_RECOVERY": "0"})
    alone.start()
    gate = ("--gate", "11", "--marks", str(tmp_path))
    settings = {"SHARD_COPY_EVERY": "off", "REGISTER_COOLDOWN": "0"}
    job = new_job(*trained, *gate, script=SCRIPT, workers=WORKERS, settings=settings)
    job.start()
    job.wait_for_step(10, 2)
    job.worker(2).signal(signal.SIGTERM)
    (tmp_path / "gate").touch()
    assert job.worker(2).wait(WAIT_S) == LEFT_BY_SIGTERM
    checkpoints = job.checkpoints / "2"
    owner = read_owner(checkpoints)
    assert owner is not None
    shutil.rmtree(room_path(SHARED_MEMORY, owner.job, 2))
    shutil.rmtree(checkpoints)
    job.start_worker(2)
    assert job.wait_finished() == alone.wait_finished()
    assert job.matches(2, r"the last commit \(step 11\) is on disk and on another host")
    assert job.matches(2, "rank 2 of 3 continues from step 11"), job.tails()
    assert not [rank for rank in job.ranks if job.matches(rank, "to be repeated")], job.tails()


def test_flip_in_a_shard_that_no_other_rank_holds_is_named_and_changes_no_bit(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    """A weight of one rank, then a moment of another; the second flip comes between two copies in shared memory."""
    trained = ("--steps", "20", "--interval", "1000", "--rng", "saved")
    alone = new_job(*trained, script=SCRIPT, workers=WORKERS, settings={"ENABLE_RECOVERY": "0"})
    alone.start()
    settings = {"CONSISTENCY": "majority:1", "SHARD_COPY_EVERY": "2"}
    flips = ("--flip", "1:6:weight", "--flip", "2:13:moment")
    job = new_job(*trained, *flips, script=SCRIPT, workers=WORKERS, settings=settings)
    job.start()
    assert job.wait_finished() == alone.wait_finished()
    for rank, step, what in ((1, 6, "model.second.weight"), (2, 13, "exp_avg of model.second.weight")):
        (said,) = job.matches("scheduler", rf"rank (\d)'s {what} changed in memory after the commit of step {step}, ")
        assert int(said[1]) == rank
    begun = job.matches(0, r"generation \d+: rank 0 of 3 continues from step (\d+)")
    assert [int(one[1]) for one in begun] == [6, 12], job.tails()


STRANGER = SCRIPT.with_name("stranger.py")


def test_a_job_that_has_lost_a_host_for_good_continues_with_fewer_ranks_from_an_export(
    new_job: Callable[..., Job], warm: WarmStarter, tmp_path: Path
) -> None:
    """Four ranks train past step 10, whose bits are those of a job that ends there; then two ranks load them."""
    alone = new_job("--steps", "10", script=SCRIPT, settings={"ENABLE_RECOVERY": "0"})
    alone.start()
    expected = alone.wait_finished()
    lost = ("--kill", "3:committed:12", "--marks", str(tmp_path))
    first = new_job("--steps", "30", *lost, script=SCRIPT, settings={"REGISTER_COOLDOWN": "0"})
    first.start()
    first.wait_killed(3)
    first.wait_for("scheduler", "sharded over 4 ranks, so training continues only with worker 3[.] .*ckpt export")
    assert first.stop() == dict.fromkeys(("scheduler", 0, 1, 2), JobStoppedError.exit_code) | {3: -signal.SIGKILL}
    first.wait_for_writers()
    directory = tmp_path / "exported"
    words = ["--format", "dcp", "--folder", str(first.checkpoints)]
    assert main(["ckpt", "export", "1/10", str(directory), *words]) == 0

    log = tmp_path / "stranger.log"
    ranks = [
        warm.start(
            Command(
                STRANGER, (str(directory), str(rank), "2", str(tmp_path / "store")), first.environment(), tmp_path, log
            )
        )
        for rank in range(2)
    ]
    assert [one.wait(60.0) for one in ranks] == [0, 0], log.read_text()
    said = re.findall(r"epoch (\d+) rate (\S+) moments (\S+) sha256=(\w+)", log.read_text())
    assert len(said) == 2 and said[0] == said[1], log.read_text()
    assert said[0][:2] == ("0", "0.009") and said[0][3] == expected

    second = new_job("--steps", "10", "--begin-with", str(directory), script=SCRIPT, workers=2)
    second.start()
    assert second.wait_finished() == expected
    assert second.matches(0, r"begins with model, optimizer, .* step 10 of job")
