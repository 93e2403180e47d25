"""Local SGD: a worker lost between two averages costs the others no step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("local_sgd_script.py")
EACH = [str(step) for step in range(1, 65)]


@pytest.mark.parametrize(
    "args", [pytest.param((), marks=pytest.mark.thorough, id="average"), pytest.param(("--diloco",), id="diloco")]
)
def test_worker_lost_between_averages_costs_the_others_no_step(
    new_job: Callable[..., Job], args: tuple[str, ...]
) -> None:
    job = new_job(*args, "--gate", "22", script=SCRIPT, workers=3)
    job.start()
    job.wait_for(1, r"own step 20 ")
    job.kill(1)
    job.open_gates(22)
    job.start_worker(1)
    job.wait_finished()  # all ranks end with the same weights
    for survivor in (0, 2):
        assert [match[1] for match in job.matches(survivor, r"^own step (\d+) ")] == EACH
        kept = job.matches(survivor, r"begins at own step (\d+), local (\d+), average 2$")
        assert [int(match[1]) - int(match[2]) for match in kept] == [16], "it continues in the middle of a round"
        assert int(kept[0][2]) > 0
    assert job.matches(1, r"begins at own step 16, local 0, average 2$")


@pytest.mark.thorough  # → all ranks of the test before end with the same weights
def test_undisturbed_runs_end_with_the_same_bits(new_job: Callable[..., Job]) -> None:
    digests = set()
    for _ in range(2):
        job = new_job("--pause-ms", "0", script=SCRIPT, workers=3)
        job.start()
        digests.add(job.wait_finished())
    assert len(digests) == 1
