"""A worker with a loader four times as slow is named; with swap a spare takes its slot, and the bits are the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.elastic_job import ElasticJob
from tests.system.job import Job, JobFolder
from tests.system.processes import REPOSITORY, WarmStarter

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("straggler_script.py")
SLOW = 1
SLOWED = ("--sample-s", "0.08", "--slow-node", str(SLOW))
WATCHED = {"HEARTBEAT_INTERVAL": "0.2"}
NAMED = rf"worker {SLOW} is \d\.\d × slower than the median over \d+ steps: data \(\d+ ms a step, \d+ ms elsewhere\)"
AHEAD = 100
"""The end is announced this many steps ahead; a step takes about a tenth of a second."""


def tell_the_end(job: JobFolder) -> int:
    """Let the job end soon; return the step."""
    step = max(int(one[1]) for one in job.matches(0, r"step (\d+) ")) + AHEAD
    job.end_at(step)
    return step


def test_straggler_is_named_and_shown_by_status(new_job: Callable[..., Job]) -> None:
    job = new_job(*SLOWED, script=SCRIPT, workers=2, settings=WATCHED)
    job.start()
    job.wait_for("scheduler", NAMED)
    told = subprocess.run(
        [sys.executable, "-m", "samebits", "status"],
        cwd=job.folder,
        env={**job.environment(), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert f"worker {SLOW} is " in told.stdout and "slower than the median" in told.stdout, told
    assert not job.matches("scheduler", "worker 0 is .* slower|is asked to leave")
    job.kill_everything()


@pytest.mark.thorough
def test_spare_gets_the_stragglers_slot_with_the_undisturbed_bits(
    tmp_path: Path,
    warm: WarmStarter,
    watched: Callable[[JobFolder], None],
    undisturbed: Callable[..., str],
) -> None:
    job = ElasticJob(
        tmp_path, warm, script=SCRIPT, args=SLOWED, workers=2, spares=1, settings={**WATCHED, "STRAGGLER": "swap"}
    )
    watched(job)
    job.start()
    job.wait_for(
        "scheduler", rf"worker {SLOW} is asked to leave at its next commit, and warm spare 2 takes its place: {NAMED}"
    )
    job.wait_for("scheduler", rf"spare 2 .* takes slot {SLOW} of worker {SLOW}")
    job.gone.add(SLOW)
    job.wait_generation(2, [0, 2])
    step = tell_the_end(job)
    assert job.finish() == undisturbed("--steps", str(step), script=SCRIPT, workers=2)
