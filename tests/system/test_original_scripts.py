"""Promise i: a start script and a recovery command written for the original project work unchanged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.store.process_identity import ProcessIdentity
from tests.system.job import PROBE, JobFolder
from tests.system.processes import environment_of_tests, signal_process

pytestmark = [pytest.mark.system, pytest.mark.thorough]

ORIGINAL = Path(__file__).with_name("original")
TRAINED = ("--steps", "80", "--interval", "10")
WORKERS = 8
ENDS_WITHIN_S = 30.0  # eight of them at once, on two cores


def test_original_scripts_work_unchanged(
    tmp_path: Path, watched: Callable[[JobFolder], None], undisturbed: Callable[..., str]
) -> None:
    expected = undisturbed(*TRAINED, workers=WORKERS)
    job = JobFolder(tmp_path, workers=WORKERS)
    watched(job)
    call(job, "run.sh")
    job.wait_for_step(25, timeout_s=120.0)
    kill(job, "scheduler")
    call(job, "recover_scheduler.sh")
    job.wait_for("scheduler", "resumes, term 2: 8 seats and generation 1 read from the journal")
    job.wait_for(0, r"the scheduler is reachable again after \d+\.\d s, term 2")
    job.wait_for("scheduler", "job finished", timeout_s=90.0)
    assert process(job, "scheduler").wait_for_exit(ENDS_WITHIN_S)
    assert job.sha256() == expected
    assert [job.seatings(rank) for rank in job.ranks] == [1] * WORKERS
    for rank in job.ranks:
        job.wait_for(rank, f"seated: slot {rank} of 8, start 1")
        assert process(job, f"worker_{rank}").wait_for_exit(ENDS_WITHIN_S)


def call(job: JobFolder, script: str) -> None:
    """Run one of the original scripts in the job's folder, with this interpreter as ``python`` on the PATH."""
    environment = environment_of_tests()
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    words = ["bash", str(ORIGINAL / script), str(job.port), str(PROBE), *TRAINED, "--pause-ms", "60"]
    subprocess.run(words, cwd=job.folder, env=environment, check=True, timeout=30.0, stdin=subprocess.DEVNULL)


def process(job: JobFolder, name: str) -> ProcessIdentity:
    pid = int((job.log_dir / f"{name}.pid").read_text())
    return ProcessIdentity.of(pid) or ProcessIdentity(pid, 0)


def kill(job: JobFolder, name: str) -> None:
    identity = process(job, name)
    signal_process(identity, signal.SIGKILL)
    assert identity.wait_for_exit(ENDS_WITHIN_S)
