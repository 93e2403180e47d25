"""Promise a: ``run.sh`` alone. The job finishes, and all ranks of two runs print the same sha256."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system.scripted import ScriptJob

pytestmark = pytest.mark.system

FINAL = r"^final step=600 loss=\S+ accuracy=(\S+) sha256=([0-9a-f]{64})$"


@pytest.mark.parametrize("runs", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_default_job_finishes_with_the_same_bits_twice(runs: int, script_job: Callable[..., ScriptJob]) -> None:
    unset = {"WORKER_NUM": "", "OMP_NUM_THREADS": "", "ENABLE_RECOVERY": "", "REGISTER_COOLDOWN": ""}
    job = script_job(script=None, settings=unset)
    first = job.run_sh()
    sha256 = job.finished(first)
    assert "job finished at step 600" in first.text()
    accuracy = job.matches(0, FINAL)[0][1]
    assert float(accuracy) > 0.95

    if runs == 1:
        assert {match[2] for rank in job.ranks for match in job.matches(rank, FINAL)} == {sha256}
        return
    again = job.run_sh()
    assert job.finished(again) == sha256
    assert "is finished; its folders are moved aside" in again.text()
    for rank in job.ranks:
        assert [match[2] for match in job.matches(rank, FINAL)] == [sha256, sha256], "a log was overwritten"
    assert len(list(job.folder.glob("recovery*"))) == 2, "a finished job's journal is gone"


@pytest.mark.thorough
def test_eight_workers(script_job: Callable[..., ScriptJob]) -> None:
    job = script_job(script=None, workers=8)
    job.finished(job.run_sh())
    for rank in job.ranks:
        assert len(job.matches(rank, r"^epoch \d+ step \d+ loss \d+\.\d+$")) == 600 // 20
