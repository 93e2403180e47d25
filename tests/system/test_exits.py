"""Every way in which a script can end: only status 0 finishes the job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import JobFailedError, ScriptFailedError, UntrainedError
from tests.system.job import Job

pytestmark = pytest.mark.system

BEGINNING = """\
import sys

import torch

import samebits

samebits.init()


def give(code):
    return code


def end_with(code):
    raise SystemExit(code)


"""
TRAINING = """\
model = torch.nn.Linear(4, 2)
state = samebits.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))


@samebits.elastic.run
def train(state):
    state.commit()
    {}


train(state)
"""
# tests/training/process/test_exit_status.py covers every way of ending; this covers a job's reaction to each outcome
# once.
THOROUGH = pytest.mark.thorough
FAST_LEASE = {"HEARTBEAT_INTERVAL": "0.5", "NODE_TIMEOUT": "2"}


@pytest.fixture
def ended(new_job: Callable[..., Job], tmp_path: Path) -> Callable[..., tuple[Job, int, int]]:
    """Run a job of one worker whose script ends in this way; also return the exits of worker and scheduler."""

    def run(text: str, *, recovers: bool = True) -> tuple[Job, int, int]:
        script = tmp_path / "script.py"
        script.write_text(BEGINNING + text + "\n")
        settings = FAST_LEASE | {"ENABLE_RECOVERY": "1" if recovers else "0"}
        job = new_job(script=script, workers=1, settings=settings)
        job.start()
        statuses = job.wait_ended()
        return job, statuses[0], statuses["scheduler"]

    return run


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("raise SystemExit(3)", "its program ended with a SystemExit before training had", marks=THOROUGH),
        pytest.param("exit(3)", "its program ended with status 3", marks=THOROUGH),
        ("end_with(3)", "its program ended with a SystemExit before training had finished"),
        (TRAINING.format("end_with(3)"), "its program ended with status 3"),
    ],
)
def test_job_whose_worker_exits_is_not_finished(
    ended: Callable[..., tuple[Job, int, int]], text: str, said: str
) -> None:
    job, worker, scheduler = ended(text)
    assert (worker, scheduler) == (3, ScriptFailedError.exit_code)
    assert job.matches("scheduler", rf"worker 0 \(pid \d+ on \S+\) is lost: {said}")
    assert not job.matches("scheduler", "job finished")


@pytest.mark.parametrize("text", [pytest.param("exit(3)", marks=THOROUGH), TRAINING.format("end_with(3)")])
def test_exit_with_recovery_off_fails_the_job(ended: Callable[..., tuple[Job, int, int]], text: str) -> None:
    _, worker, scheduler = ended(text, recovers=False)
    assert (worker, scheduler) == (3, JobFailedError.exit_code)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(TRAINING.format("pass"), marks=THOROUGH),
        TRAINING.format("pass") + "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass",
        pytest.param(TRAINING.format("pass") + "sys.exit(give(None))", marks=THOROUGH),
        pytest.param(TRAINING.format("pass") + "end_with(0)", marks=THOROUGH),
    ],
)
def test_script_that_ends_with_status_0_finishes_the_job(ended: Callable[..., tuple[Job, int, int]], text: str) -> None:
    job, worker, scheduler = ended(text)
    assert (worker, scheduler) == (0, 0)
    assert job.matches("scheduler", "worker 0 left: its program ended with (status 0|a SystemExit after training had)")
    assert job.matches("scheduler", "job finished")


@pytest.mark.parametrize(
    "text", ["", *(pytest.param(text, marks=THOROUGH) for text in ("sys.exit()", "sys.exit(give(None))"))]
)
def test_script_that_never_calls_elastic_run_finishes_nothing(
    ended: Callable[..., tuple[Job, int, int]], text: str
) -> None:
    job, worker, scheduler = ended(text)
    assert (worker, scheduler) == (UntrainedError.exit_code, UntrainedError.exit_code)
    assert job.matches(0, r"^samebits: worker 0 trained alone: samebits\.elastic\.run was never called\. Fix: ")
    assert job.matches("scheduler", "the job ends: every worker left before training began: its script never called")
    assert not job.matches("scheduler", "job finished")


def test_exit_with_0_inside_the_training_function_finishes_nothing(
    ended: Callable[..., tuple[Job, int, int]],
) -> None:
    job, worker, scheduler = ended(TRAINING.format("sys.exit(0)"))
    assert (worker, scheduler) == (UntrainedError.exit_code, ScriptFailedError.exit_code)
    assert job.matches("scheduler", "its program ended with status 0 inside samebits.elastic.run: return from")


@pytest.mark.parametrize(
    "text",
    [pytest.param("raise SystemExit(give(0))", marks=THOROUGH), TRAINING.format("pass") + "end_with(0)"],
)
def test_status_of_main_decides_with_recovery_off(ended: Callable[..., tuple[Job, int, int]], text: str) -> None:
    _, worker, scheduler = ended(text, recovers=False)
    assert (worker, scheduler) == (0, 0)
