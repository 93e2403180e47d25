"""A bit that changes by itself in one replica: found within K steps, named, and all go back to the undisturbed bits.

Each job is of real processes that nobody kills: every one of them is there from the first step to the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.service.events import read_events
from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("flip_script.py")
EVERY = 5
COMPARED = {"CONSISTENCY_EVERY": str(EVERY), "REGISTER_COOLDOWN": "0"}
NAMED = (
    r"rank (\d) \(worker \d, pid \d+ on .*\) differs from rank .* after step (\d+), first in (.*?),? since .* goes back"
)


def repaired(job: Job, rank: int, step: int, what: str) -> None:
    """It was found within EVERY steps, named by rank, tensor and step, and repaired once, in process."""
    (said,) = job.matches("scheduler", NAMED)
    print(said.string)
    assert int(said[1]) == rank and step < int(said[2]) <= step + EVERY
    moment = "exp_avg of " if what == "moment" else ""
    assert said[3].startswith(f"{moment}model.0.weight")


@pytest.mark.parametrize(
    ("workers", "rank", "what"),
    [
        pytest.param(
            *(workers, rank, what),
            marks=() if (workers, rank, what) == (3, 1, "weight") else pytest.mark.thorough,
        )
        for workers, what in itertools.product((3, 4), ("weight", "moment"))
        for rank in range(workers)
    ],
)
def test_a_flipped_bit_is_named_and_the_end_is_the_undisturbed_one(
    workers: int, rank: int, what: str, new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job("--what", what, "--flip", f"{rank}:17", script=SCRIPT, workers=workers, settings=COMPARED)
    job.start()
    end = job.wait_finished()
    assert len(job.matches(rank, "flipped a bit")) == 1
    repaired(job, rank, 17, what)
    assert end == undisturbed(script=SCRIPT, workers=workers)
    (event,) = [one for one in read_events(job.recovery) if one.kind == "rolled back"]
    assert event.more["suspects"] == [str(rank)] and event.more["back_to"] == 15
