"""A kill changes no bit, layout or type of a state's values, wherever the replacement gets them from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("values_script.py")
_known: list[str] = []


def undisturbed(new_job: Callable[..., Job]) -> str:
    """Return the undisturbed run's sha256, run once."""
    if not _known:
        job = new_job(script=SCRIPT, workers=2)
        job.start()
        _known.append(job.wait_finished())
    return _known[0]


@pytest.mark.parametrize("killed", [0, 1])
def test_replacement_gets_every_value_unchanged(new_job: Callable[..., Job], killed: int) -> None:
    expected = undisturbed(new_job)
    job = new_job("--kill", f"{killed}:forward:13", script=SCRIPT, workers=2)
    job.start()
    job.wait_killed(killed)
    job.start_worker(killed)
    assert job.wait_finished() == expected


def test_checkpoint_restores_every_value_unchanged(new_job: Callable[..., Job]) -> None:
    expected = undisturbed(new_job)
    job = new_job("--gate", "12", script=SCRIPT, workers=2)
    job.start()
    job.wait_for_step(12)
    job.kill_everything()
    job.open_gates(12)
    job.start()
    job.restarted.update(job.ranks)
    assert job.wait_finished() == expected
