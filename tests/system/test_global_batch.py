"""A fixed global batch: a world that shrinks and grows has the same losses and weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.system.elastic_job import ElasticJob

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("global_batch_script.py")
STEPS, SHRINKS_AT, GROWS_AT = 24, 7, 15  # within epochs of four steps


@pytest.fixture
def new_job(elastic_job: Callable[..., ElasticJob]) -> Callable[..., ElasticJob]:
    return partial(elastic_job, SCRIPT)


def curve(job: ElasticJob, node: int) -> dict[int, tuple[int, str]]:
    """Return for each step the world size and the loss's bits, as this node printed last."""
    found = job.matches(node, r"^step (\d+) of (\d+) loss (\S+)")
    return {int(one[1]): (int(one[2]), one[3]) for one in found}


@pytest.mark.parametrize("workers", [3, pytest.param(4, marks=pytest.mark.thorough)])
def test_world_that_resizes_has_the_bits_of_a_constant_one(workers: int, new_job: Callable[..., ElasticJob]) -> None:
    alone = new_job("alone", workers=1)
    alone.start()
    expected = alone.finish()
    undisturbed = {step: loss for step, (_, loss) in curve(alone, 0).items()}
    assert list(undisturbed) == list(range(1, STEPS + 1))

    job = new_job("elastic", "--gate", str(SHRINKS_AT), "--gate", str(GROWS_AT), workers=workers)
    job.start()
    job.wait_until(lambda: SHRINKS_AT in curve(job, 0) or None, "the first gate")
    job.kill(1)
    job.wait_generation(2, [0, 2])
    job.open_gates(SHRINKS_AT)
    job.wait_until(lambda: GROWS_AT in curve(job, 0) or None, "the second gate")
    job.start_worker(1)
    job.wait_for(1, rf"generation 3: rank 1 of {workers}")
    job.open_gates(GROWS_AT)
    assert job.finish() == expected
    told = curve(job, 0)
    assert {step: loss for step, (_, loss) in told.items()} == undisturbed
    sizes = [size for size, _ in told.values()]
    assert sizes == [workers] * SHRINKS_AT + [workers - 1] * (GROWS_AT - SHRINKS_AT) + [workers] * (STEPS - GROWS_AT)
