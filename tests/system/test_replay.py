"""The step log: steps repeated after a total kill are compared with it, and the first difference is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from samebits.store.step_log import read_step_log
from tests.system.elastic_job import ElasticJob
from tests.system.job import Job, JobFolder
from tests.system.processes import REPOSITORY, WarmStarter

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("replay_script.py")
KILLED_AT = 37
GATE = 50
GATED = ("--gate", str(GATE))
POINT = 30
DIVERGENCE = 86
LR_FROM, SKIP_FROM, NOISE_AT = "REPLAY_LR_FROM", "REPLAY_SKIP_FROM", "REPLAY_NOISE_AT"  # see the script

SAMPLES_DIFFER = r"samples .*\(8 in all\) when generation 1 logged it, .*\(7 in all\) now"


def killed(job: Job) -> Job:
    """Return a job that was killed after a point, with logged steps that it has to repeat."""
    job.start()
    job.wait_for_step(KILLED_AT)
    job.kill_everything()
    job.open_gates(GATE)
    return job


def start_otherwise(job: Job, more: Mapping[str, str]) -> None:
    """Restart everything as if the script had been changed."""
    job.start_scheduler()
    for rank in job.ranks:
        job.start_worker(rank, **more)


def steps_of(*words: str) -> tuple[int, dict[str, Any]]:
    """Return the output of ``samebits steps --json`` and its status."""
    command = [sys.executable, "-m", "samebits", "steps", "--json", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    "args",
    [
        pytest.param((), marks=pytest.mark.thorough, id="before"),  # and with a spare, with a warning
        pytest.param(("--record-after", "--digest-every", "5"), id="after, every 5"),
    ],
)
def test_repeated_steps_equal_the_logged_ones(
    new_job: Callable[..., Job], undisturbed: Callable[..., str], args: tuple[str, ...]
) -> None:
    job = killed(new_job(*args, *GATED, script=SCRIPT, workers=2))
    job.start()
    assert job.wait_finished() == undisturbed(script=SCRIPT, workers=2)
    for rank in job.ranks:
        said = job.wait_for(rank, r"steps (\d+) to (\d+) were replayed: same samples, same weights$")
        assert int(said[1]) == POINT + 1 and int(said[2]) >= KILLED_AT - 1
        assert not job.matches(rank, "step log .*begins at|could not be written to the step log")
    status, found = steps_of(str(job.checkpoints))
    assert (status, [one["first_difference"] for one in found["comparisons"]]) == (0, [None])
    for log in found["logs"]:
        newest = {one["step"]: one for one in log["steps"]}
        assert list(newest) == list(range(1, 81))
        assert {len(one["samples"]) for one in newest.values()} <= {8, 2}, "an epoch's last batch is smaller"
        assert any(one["generation"] == 2 for one in log["steps"])


@pytest.mark.parametrize(
    ("variable", "args", "expected"),
    [
        # How two records may differ: tests/training/checkpoint/test_replay.py.
        pytest.param(
            LR_FROM,
            (),
            r"learning rate 0\.01 when generation 1 logged it, 0\.02 now",
            marks=pytest.mark.thorough,
            id="learning rate",
        ),
        pytest.param(SKIP_FROM, (), SAMPLES_DIFFER, marks=pytest.mark.thorough, id="samples before"),
        pytest.param(SKIP_FROM, ("--record-after",), SAMPLES_DIFFER, id="samples after"),
    ],
)
def test_first_differing_step_is_named_and_ends_the_job(
    new_job: Callable[..., Job], variable: str, args: tuple[str, ...], expected: str
) -> None:
    job = killed(new_job(*args, *GATED, script=SCRIPT, workers=2))
    start_otherwise(job, {variable: "34"})
    statuses = job.wait_ended()
    assert {statuses[0], statuses[1]} == {DIVERGENCE}
    for rank in job.ranks:
        job.wait_for(rank, rf"step 34 differs from the log, and is the first that does: {expected}")
        assert not job.matches(rank, r"were replayed")


def test_differing_weights_are_named_and_a_warning_lets_the_job_continue(new_job: Callable[..., Job]) -> None:
    job = killed(new_job("--on-divergence", "warn", *GATED, script=SCRIPT, workers=2))
    start_otherwise(job, {NOISE_AT: "33"})
    job.wait_finished()
    for rank in job.ranks:
        job.wait_for(
            rank,
            r"step 34 differs from the log, .*: weights before it [0-9a-f]{32} when generation 1 logged it, "
            r"[0-9a-f]{32}",
        )
        assert len(job.matches(rank, "differs from the log")) == 1, "reported more than once"
        assert not job.matches(rank, r"were replayed")
    folder = job.checkpoints / "0"
    assert steps_of(str(folder), "--against", str(job.checkpoints / "1"))[0] == 0


def test_lost_worker_repeats_no_step_and_continues_its_log(new_job: Callable[..., Job]) -> None:
    job = new_job(*GATED, script=SCRIPT, workers=2)
    job.start()
    job.wait_for_step(KILLED_AT)
    job.kill(1)
    job.open_gates(GATE)
    job.start_worker(1)
    job.wait_finished()
    for rank in job.ranks:
        assert not job.matches(rank, r"were replayed|differs from the log|step log of slot \d+ begins")
    status, found = steps_of(str(job.checkpoints))
    assert (status, found["comparisons"][0]["first_difference"]) == (0, None)
    assert found["comparisons"][0]["shared_steps"] >= 79  # a step by which the other was ahead is only in its log


@pytest.fixture
def elastic_job(tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None]) -> Callable[..., ElasticJob]:
    def make(**options: Any) -> ElasticJob:
        settings = {"REGISTER_COOLDOWN": "3600", **options.pop("settings", {})}
        job = ElasticJob(tmp_path, warm, script=SCRIPT, args=GATED, settings=settings, **options)
        watched(job)
        return job

    return make


@pytest.mark.parametrize(
    "same_host",
    [pytest.param(True, id="same folder"), pytest.param(False, marks=pytest.mark.thorough, id="another folder")],
)
def test_spare_continues_the_log_of_its_slot_or_says_that_it_starts_one(
    elastic_job: Callable[..., ElasticJob], same_host: bool
) -> None:
    job = elastic_job(workers=2)
    job.settings["SPARE_NUM"] = "1"
    job.start()
    checkpoints = job.checkpoints if same_host else job.folder / "ckpt_of_another_host"
    job.start_worker(2, CHECKPOINT_PATH=str(checkpoints))
    job.wait_warm(2)
    job.wait_for_step(20)
    job.kill(1)
    job.open_gates(GATE)
    job.finish()
    found = read_step_log(checkpoints / "1")
    assert found is not None and found.header is not None
    assert (found.header.node, found.header.slot, found.problems) == ("2", 1, [])
    begins = job.matches(2, r"the step log of slot 1 begins at step (\d+): this host has no record")
    if same_host:
        assert not begins
        assert set(found.history.line) >= set(range(1, 81)) - {int(first_step_of(job, 2)) - 1}
    else:
        assert min(found.history.line) == int(begins[0][1])
    assert max(found.history.line) == 80
    assert not job.matches(0, "differs from the log") and not job.matches(2, "differs from the log")


def first_step_of(job: Job, node: int) -> str:
    return job.matches(node, r"^epoch \d+ step (\d+) ")[0][1]


@pytest.mark.thorough  # → test_elastic; a record has its world's size: tests/store/test_store_step_record.py
def test_world_that_shrinks_is_logged_with_its_size(elastic_job: Callable[..., ElasticJob]) -> None:
    job = elastic_job(workers=3, settings={"MIN_WORKER_NUM": "2", "GRACE": "shrink=0"})
    job.start()
    job.wait_for_step(20)
    job.kill(2)
    job.open_gates(GATE)
    job.finish()
    for rank in (0, 1):
        found = read_step_log(job.checkpoints / str(rank))
        assert found is not None
        sizes = [one.world_size for _, one in sorted(found.history.line.items())]
        assert sizes == sorted(sizes, reverse=True) and set(sizes) == {3, 2}
    assert steps_of(str(job.checkpoints / "0"), "--against", str(job.checkpoints / "1"))[0] == 0
