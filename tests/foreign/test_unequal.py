"""Ranks that do not hold the same state end the job, with a sentence and a status of its own; what may differ does not.

Each script is the README's recipe with one mistake, run as real processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.errors import UnequalError
from tests.system.job import Job

SCRIPT = Path(__file__).with_name("unequal_script.py")
NOT_EQUAL = r"the ranks are not equal after step (\d+): rank (\S+) differs from rank (\S+), first in (.*)"


@pytest.fixture
def recipe(new_job: Callable[..., Job]) -> Callable[..., Job]:
    """A job of two workers that run the script, begun."""

    def begin(wrong: str, *args: str) -> Job:
        job = new_job("--wrong", wrong, *args, script=SCRIPT, workers=2)
        job.start()
        return job

    return begin


def ended_unequal(job: Job) -> list[str]:
    """Every process leaves with the status, and says the sentence; what follows "the ranks are not equal" in it."""
    statuses = job.wait_ended()
    assert set(statuses.values()) == {UnequalError.exit_code}, f"{statuses}\n{job.tails()}"
    (scheduler,) = {match[0] for match in job.matches("scheduler", NOT_EQUAL)}
    for rank in job.ranks:
        assert {match[0] for match in job.matches(rank, NOT_EQUAL)} == {scheduler}
        assert not job.finals_of(job.log(rank)), "no rank returns from elastic.run"
    assert not job.matches("scheduler", "training is finished")
    print(scheduler)
    return [*job.matches("scheduler", NOT_EQUAL)[0].groups()]


@pytest.mark.system
def test_a_recipe_without_ddp_ends_within_three_steps(recipe: Callable[..., Job]) -> None:
    step, odd, alike, rest = ended_unequal(recipe("no-ddp"))
    assert int(step) <= 3
    assert (odd, alike) == ("1", "0")
    assert rest.startswith("model.linear.weight and ")
    assert "most likely no DistributedDataParallel is in use" in rest
    assert "Fix: wrap the model in DistributedDataParallel before runtime.elastic.run" in rest


@pytest.mark.system
def test_a_sampler_that_somebody_moves_ends_the_job(recipe: Callable[..., Job]) -> None:
    step, _, _, rest = ended_unequal(recipe("sampler"))
    assert int(step) <= 3
    assert rest.startswith("sampler (seed 1, epoch 0, 64 consumed on rank 0, seed 1, epoch 0, 72 consumed on rank 1)")
    assert "somebody else than the state has moved a sampler. Fix: " in rest


@pytest.mark.system
def test_a_parameter_outside_the_optimizer_ends_the_job(recipe: Callable[..., Job]) -> None:
    step, _, _, rest = ended_unequal(recipe("outside"))
    assert int(step) <= 3
    assert rest.startswith("model.scale: most likely this parameter is in no optimizer of the state")
    assert "Fix: " in rest
