"""AUDIT=50: a gradient that is wrong before it is reduced is found, named, and leaves no trace.

Each job has three real processes. At step 50 rank 1 is audited by rank 2, and rank 0 decides.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import UnequalError
from tests.system.job import Job
from tests.system.scripted import ScriptJob

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("audit_script.py")
AUDITED = {"AUDIT": "50", "REGISTER_COOLDOWN": "0"}


@pytest.mark.parametrize(
    ("option", "value", "erred", "said"),
    [
        ("--wrong", "1:50", 1, "rank 1's gradient of 0.weight is not what rank 2 and rank 0 compute.*repeat the step"),
        ("--wrong-again", "2", 2, ".*most likely rank 2's device is at fault; the step stands"),
    ],
    ids=["in training", "as it audits"],
)
def test_faulty_rank_is_named_and_leaves_no_trace(
    option: str,
    value: str,
    erred: int,
    said: str,
    new_job: Callable[..., Job],
    undisturbed: Callable[..., str],
) -> None:
    job = new_job(option, value, script=SCRIPT, workers=3, settings=AUDITED)
    job.start()
    end = job.wait_finished()
    assert len(job.matches(erred, "erred at step 50")) == 1
    assert len(job.matches("scheduler", rf"worker {erred} \(rank {erred}, pid \d+ on .*\), step 50: {said}")) == 1
    assert end == undisturbed(script=SCRIPT, workers=3)
    assert not job.matches(erred, "not audited")


def test_auditor_killed_during_its_audit_is_an_ordinary_loss(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job(script=SCRIPT, workers=3, settings={**AUDITED, "DIES": "2"})
    job.start()
    job.wait_killed(2)
    job.start_worker(2, DIES="")
    assert job.wait_finished() == undisturbed(script=SCRIPT, workers=3)
    assert not job.matches("scheduler", "gradient of")


@pytest.mark.thorough
def test_permanently_faulty_device_ends_the_job_with_its_last_clean_audit(
    script_job: Callable[..., ScriptJob],
) -> None:
    """Rank 1 passes at step 50 and fails at step 200, its next turn. Every 20th step is saved."""
    job = script_job("--wrong", "1:140", "--always", "--steps", "300", script=SCRIPT, workers=3, settings=AUDITED)
    run = job.run()
    assert run.wait() == UnequalError.exit_code
    assert not job.processes()
    for node in range(3):
        assert job.matches(node, r"step \d+: rank \d.*; the job ends")
        assert job.matches(node, r"last found right at step 50: .*`samebits ckpt export 0/40 clean --format dcp`")


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [2, 3])
def test_loop_that_cannot_be_audited_ends_the_audits_but_not_the_job(
    workers: int, new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job("--aside", script=SCRIPT, workers=workers, settings=AUDITED)
    job.start()
    end = job.wait_finished()
    assert len(job.matches("scheduler", "step 50: .*repeat the step")) == 1
    for node in range(workers):
        assert len(job.matches(node, "step 50: .*cannot be audited.*no other is audited")) == 1
        assert not job.matches(node, "step 100: ")
    assert end == undisturbed("--aside", script=SCRIPT, workers=workers)


@pytest.mark.thorough
def test_of_two_ranks_both_are_named(new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    job = new_job("--wrong", "1:50", script=SCRIPT, workers=2, settings=AUDITED)
    job.start()
    end = job.wait_finished()
    assert (
        len(
            job.matches("scheduler", "step 50: .*differently on rank 1, 0: it is unknown which rank is right; .*repeat")
        )
        == 1
    )
    assert end == undisturbed(script=SCRIPT, workers=2)
