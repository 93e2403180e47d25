"""A hanging worker is named with its line, ended and replaced, and the job ends with the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import StuckError
from tests.system.job import Job
from tests.system.processes import REPOSITORY

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("hang_script.py")
WATCHED = {"HANG": "end:4", "HEARTBEAT_INTERVAL": "0.2", "REGISTER_COOLDOWN": "0"}
HUNG = 1
FR = ("samebits", "stack", "--fr", "fr")


def called(job: Job, *module: str) -> str:
    """Return what a module prints when run in the job's folder."""
    done = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=job.folder,
        env={**job.environment(), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def line_of(comment: str) -> str:
    """Return ``hang_script.py:51`` for the comment at the end of that line."""
    numbers = [at for at, line in enumerate(SCRIPT.read_text().splitlines(), 1) if line.endswith(f"# {comment}")]
    assert len(numbers) == 1
    return f"hang_script.py:{numbers[0]}"


@pytest.mark.parametrize(
    ("way", "comment", "called"),
    [
        ("sleep", "the sleeper's line", "(time.sleep)"),
        pytest.param("deadlock", "the deadlock's line", "(lock.acquire)", marks=pytest.mark.thorough),
        pytest.param("loader", "the loader's line", "(time.sleep) and waits for data", marks=pytest.mark.thorough),
    ],
)
def test_hanging_rank_is_named_ended_and_replaced(
    way: str, comment: str, called: str, new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job("--way", way, script=SCRIPT, workers=2, settings=WATCHED)
    job.start()
    said = job.wait_for("scheduler", r"no step for \d+ s: .*")
    sentence = rf"worker {HUNG} is in {line_of(comment)} {called}, worker 0 waits for it in all_reduce #\d+"
    job.wait_for("scheduler", sentence.replace("(", r"\(").replace(")", r"\)"))
    assert "it is ended and replaced after 8 s (HANG=end)" in said.string
    assert job.worker(HUNG).wait(60.0) == StuckError.exit_code
    assert job.matches(
        HUNG, f'File ".*{line_of(comment).partition(":")[0]}", line {line_of(comment).partition(":")[2]}'
    )
    job.start_worker(HUNG)
    assert job.wait_finished() == undisturbed("--way", "none", script=SCRIPT, workers=2)


@pytest.mark.thorough
def test_tell_only_reports_the_hang_and_saves_the_stacks_of_all_ranks(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job("--way", "busy", script=SCRIPT, workers=2, settings={**WATCHED, "HANG": "tell:4"})
    job.start()
    job.wait_for("scheduler", rf"worker {HUNG} is in hang_script.py:\d+.* and computes, worker 0 waits for it in all_")
    told = called(job, "samebits", "stack")
    assert f"worker {HUNG} (rank {HUNG}, pid {job.worker(HUNG).identity.pid}) is in" in told
    assert told.count("hang_script.py") >= 2 and "breakable_group.py" in told
    assert re.search(
        r"worker 0 .*; its last collective: all_reduce #\d+ \(float32, 10\) at hang_script.py:\d+, in flight", told
    )
    assert re.search(rf"worker {HUNG} .*: \d+ collectives in fr/rank_{HUNG}, the last: .*, over", called(job, *FR))
    assert f"missing ranks: {{{HUNG}}}" in called(job, "torch.distributed.flight_recorder.fr_trace", "fr")
    job.kill(HUNG)
    job.start_worker(HUNG)
    assert job.wait_finished() == undisturbed("--way", "none", script=SCRIPT, workers=2)
