"""LOSS_ANOMALY=recompute: a transient NaN leaves no trace in the bits; a persistent one ends the script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import AnomalyError
from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("anomaly_script.py")
RECOMPUTED = {"LOSS_ANOMALY": "recompute"}
BAD = "the loss is not a number"


def test_transient_error_is_named_and_leaves_no_trace(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job("--bad", "once", script=SCRIPT, workers=2, settings=RECOMPUTED)
    job.start()
    end = job.wait_finished()
    assert job.matches("scheduler", rf"worker 1 \(rank 1\), step 12: {BAD}: all ranks return to the last commit")
    assert job.matches(
        "scheduler", rf"worker 1 \(rank 1, pid \d+ on .*\), step 12: {BAD}, but was .*: a transient error"
    )
    assert end == undisturbed(script=SCRIPT, workers=2)


@pytest.mark.thorough
def test_persistent_nan_ends_the_script(new_job: Callable[..., Job]) -> None:
    job = new_job("--bad", "always", script=SCRIPT, workers=2, settings=RECOMPUTED)
    job.start()
    assert job.wait_ended()[1] == AnomalyError.exit_code
    assert job.matches(
        1, rf"rank 1, step 12: {BAD}, and the same value was recomputed .*the model or the data is at fault"
    )
