"""FSDP2: a model that no rank holds whole goes on after a kill, with the bits of a run that nobody disturbed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.__main__ import main
from tests.system.job import Job
from tests.system.processes import Command, WarmStarter

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("sharded_script.py")
WORKERS = 3


def test_a_killed_worker_takes_all_back_to_the_newest_point_that_all_hold(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    expected = undisturbed(script=SCRIPT, workers=WORKERS)
    job = new_job("--pause-ms", "10", script=SCRIPT, workers=WORKERS)
    job.start()
    job.wait_for_step(13)
    job.kill(1)
    job.start_worker(1)
    assert job.wait_finished() == expected


STRANGER = SCRIPT.with_name("stranger.py")


def test_another_world_size_begins_with_what_a_job_has_exported(
    new_job: Callable[..., Job], warm: WarmStarter, tmp_path: Path
) -> None:
    first = new_job("--steps", "10", script=SCRIPT, workers=WORKERS)
    first.start()
    expected = first.wait_finished()
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
