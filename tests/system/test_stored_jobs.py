"""Compatibility: journals and checkpoints of the last release are read, and a job resumes from both."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits import earlier
from samebits.core.messages import RoundId
from samebits.core.point import Cut, Point
from samebits.core.records import SCHEMA as RECORDS
from samebits.core.records import GenerationCommitted, Record
from samebits.core.values import replace
from samebits.service.job_journal import history_of
from samebits.service.status import stored_view
from samebits.store.journal import JOURNAL_FILE, Journal, read_journal
from tests.system.job import Job
from tests.system.processes import environment_of_tests

pytestmark = pytest.mark.system

STORED = Path(__file__).parents[1] / "stored"
KEPT = STORED / "last_release"
"""Made by ``small_job.py`` with two workers: worker 1 was killed after step 3, and everything after step 6, or not."""


def history(folder: Path) -> list[Record]:
    contents = read_journal(folder)
    assert contents is not None and contents.torn_tail is None
    return history_of(folder, contents.payloads)


def run(*words: str, **settings: str) -> str:
    command = [sys.executable, "-m", "samebits", *words]
    environment = environment_of_tests() | settings
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_journal_shows_the_jobs_state() -> None:
    view = stored_view(KEPT / "recovery")
    assert view is not None
    assert (view.phase, view.generation, view.step, view.world_size) == ("no scheduler", 2, 4, 2)
    generation = next(one for one in reversed(history(KEPT / "recovery")) if isinstance(one, GenerationCommitted))
    assert (generation.round, generation.members) == (RoundId(1, 2), (("0", 1), ("1", 2)))
    assert (generation.restore, generation.line) == (Point(3, 1), (Cut(1, 3),))


def test_journal_of_a_finished_job_says_so() -> None:
    view = stored_view(KEPT / "finished")
    assert view is not None
    assert (view.phase, view.step) == ("finished", 12)


def test_status_and_verify_read_the_stored_files() -> None:
    told = run("status", RECOVERY_PATH=str(KEPT / "recovery"), SCHED_PORT="1")  # a job may run on the default port
    assert "generation 2" in told and "small_job" in told
    verified = run("ckpt", "verify", CHECKPOINT_PATH=str(KEPT / "ckpt_of_rank"))
    assert "8 of 8 points whole" in verified


@pytest.mark.thorough
def test_stored_job_resumes_to_its_end(new_job: Callable[..., Job]) -> None:
    job = new_job(
        workers=2,
        script=STORED / "small_job.py",
        settings={"JOB_NAME": "small_job", "PYTHONPATH": str(Path(earlier.__file__).parent)},
    )
    recovery, checkpoints = (job.folder / name for name in ("recovery", "ckpt_of_rank"))
    shutil.copytree(KEPT / "ckpt_of_rank", checkpoints)
    recovery.mkdir(mode=0o700)
    # another machine's numerics would be refused, so the stored ones are removed
    with Journal.open(recovery)[0] as journal:
        of_anybody = [
            replace(record, numerics=()) if isinstance(record, GenerationCommitted) else record
            for record in history(KEPT / "recovery")
        ]
        journal.append([RECORDS.pack(record) for record in of_anybody])
    assert (recovery / JOURNAL_FILE).exists()
    job.start()
    job.wait_finished()
    assert job.matches(0, "this job was started by an earlier release")
    job.wait_for(0, r"generation 3: rank 0 of 2 continues from step 6, .*\(restore point: step 6 of generation 2")
