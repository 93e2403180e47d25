"""A kill in each micro-batch of a gradient accumulation window: the window is repeated with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("accumulation_script.py")


_known: list[str] = []


def undisturbed(new_job: Callable[..., Job]) -> str:
    """Return the undisturbed run's sha256, run once."""
    if not _known:
        job = new_job(script=SCRIPT, workers=3)
        job.start()
        _known.append(job.wait_finished())
    return _known[0]


@pytest.mark.parametrize(
    "killed_in",
    [35, *(pytest.param(other, marks=pytest.mark.thorough) for other in (33, 34, 36))],  # each of the window of four
    ids="micro-batch {}".format,
)
def test_kill_in_any_micro_batch_changes_no_bit(new_job: Callable[..., Job], killed_in: int) -> None:
    expected = undisturbed(new_job)
    job = new_job("--kill", f"1:micro:{killed_in}", script=SCRIPT, workers=3)
    job.start()
    job.wait_killed(1)
    job.start_worker(1)
    assert job.wait_finished() == expected
    said = [int(match[1]) for match in job.matches(0, r"^micro (\d+) ")]
    repeated = {one for one in said if said.count(one) > 1}
    # A survivor may not have seen the end of the previous window, and the dead worker cannot report it.
    windows = [set(range(29, 33)), set(range(33, 37))]
    assert any(repeated <= window for window in windows), f"more than one window was repeated: {sorted(repeated)}"


@pytest.mark.thorough  # → the ride with a commit every ten steps, killed between a step and its commit
def test_kill_between_the_windows_step_and_its_commit_changes_no_bit(new_job: Callable[..., Job]) -> None:
    expected = undisturbed(new_job)
    job = new_job("--kill", "0:stepped:36", script=SCRIPT, workers=3)
    job.start()
    job.wait_killed(0)
    job.start_worker(0)
    assert job.wait_finished() == expected
