"""``samebits ckpt`` beside a running job: points being written or deleted are not called damaged."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from samebits.__main__ import main
from tests.system.job import Job

pytestmark = pytest.mark.system

STEPS, GATE = 40, 30


def test_ls_and_verify_beside_a_training_that_saves_every_step(
    new_job: Callable[..., Job], undisturbed: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    job = new_job("--steps", str(STEPS), "--interval", "1", "--gates", str(GATE), workers=2)
    folder = ["--folder", str(job.checkpoints)]
    job.start()
    job.open_gates(0)
    for rank in job.ranks:  # a slow disk may have no point yet, which is no damage but would test nothing
        job.wait_until(lambda rank=rank: any((job.checkpoints / str(rank)).glob("step_*")) or None, "point on a disk")  # type: ignore[misc]
    looks = 0
    while job.worker(0).is_alive() and looks < 100:
        if looks > 3 and any(step.number == GATE for step in job.steps(0)):
            job.open_gates(GATE)
        assert main(["ckpt", "verify", *folder]) == 0, capsys.readouterr()
        capsys.readouterr()
        assert main(["ckpt", "ls", "--json", *folder]) == 0
        listed = json.loads(capsys.readouterr().out)["points"]
        assert {one["state"] for one in listed} <= {"whole", "being written"}, listed
        looks += 1
    job.open_gates(GATE)
    assert looks > 3
    assert job.wait_finished() == undisturbed("--steps", str(STEPS), workers=2)
    assert main(["ckpt", "ls", "--json", *folder]) == 0
    assert json.loads(capsys.readouterr().out)["newest_common"] == {"step": STEPS, "generation": 1, "world_size": 2}
