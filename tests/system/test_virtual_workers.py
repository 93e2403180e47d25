"""Virtual workers: an ordinary script that shrinks and grows ends with the bits of an undisturbed job of any size."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.system.elastic_job import ElasticJob

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("virtual_script.py")
STEPS = 14


@pytest.fixture
def new_job(elastic_job: Callable[..., ElasticJob]) -> Callable[..., ElasticJob]:
    return partial(elastic_job, SCRIPT)


def sizes(job: ElasticJob) -> list[int]:
    """Return the world size of each step, as node 0 printed last."""
    return list({int(one[1]): int(one[2]) for one in job.matches(0, r"^step (\d+) of (\d+)")}.values())


def at_gate(job: ElasticJob, step: int) -> Callable[[], object]:
    return lambda: len(sizes(job)) >= step or None


def undisturbed(new_job: Callable[..., ElasticJob], *workers: int) -> set[str]:
    """Return the final hashes of jobs of these sizes."""
    hashes = set()
    for number in workers:
        job = new_job(f"of-{number}", workers=number)
        job.start()
        hashes.add(job.finish())
    return hashes


@pytest.mark.thorough
def test_jobs_of_any_size_end_with_equal_bits(new_job: Callable[..., ElasticJob]) -> None:
    assert len(undisturbed(new_job, 1, 2, 3, 8)) == 1


@pytest.mark.parametrize(
    ("inner", "replicas"),
    [
        pytest.param(("2",), (1, 2, 3), id="hsdp"),
        pytest.param(("1", "2"), (1, 2), id="replicas of tensor parallel ranks"),
        pytest.param(("2", "2"), (1, 2), id="hsdp and tensor parallel", marks=pytest.mark.thorough),
    ],
)
def test_mesh_job_that_loses_a_replica_ends_with_the_bits_of_any_number_of_replicas(
    inner: tuple[str, ...], replicas: tuple[int, ...], elastic_job: Callable[..., ElasticJob]
) -> None:
    size = math.prod(map(int, inner))

    def new_job(name: str, *args: str, count: int) -> ElasticJob:
        job = elastic_job(SCRIPT, name, "--mesh", str(count), *inner, *args, workers=count * size)
        job.settings["MIN_WORKER_NUM"] = str(size)
        job.start()
        return job

    expected = {new_job(f"of-{count}", count=count).finish() for count in replicas}
    assert len(expected) == 1, "undisturbed jobs of different numbers of replicas"

    # At each gate, every rank that is left has computed one micro-batch of a step that it has not finished.
    job, lost = new_job("disturbed", "--gate", "4", "--gate", "7", count=2), 2 * size - 1
    job.wait_until(at_gate(job, 4), "the first gate")
    job.kill(lost)
    job.wait_generation(2, range(size))
    job.open_gates(4)
    job.wait_until(at_gate(job, 7), "the second gate")
    job.start_worker(lost)
    for node in range(2 * size):
        job.wait_for(node, rf"generation 3: rank \d of {2 * size} continues from step 7")
    job.open_gates(7)
    assert {job.finish()} == expected
    assert sizes(job) == [2 * size] * 4 + [size] * 3 + [2 * size] * (STEPS - 7)
    assert job.seated_once(*range(lost))


def test_4_3_2_4_workers_end_with_the_bits_of_1_and_of_4(new_job: Callable[..., ElasticJob]) -> None:
    expected = undisturbed(new_job, 1, 4)
    assert len(expected) == 1, "undisturbed jobs of different sizes"

    # At each gate, every rank that is left has computed one micro-batch of a step that it has not finished.
    job = new_job("disturbed", "--gate", "4", "--gate", "7", "--gate", "10", workers=4)
    job.start()
    job.wait_until(at_gate(job, 4), "the first gate")
    job.kill(3)
    job.wait_generation(2, [0, 1, 2])
    job.open_gates(4)
    job.wait_until(at_gate(job, 7), "the second gate")
    job.kill(1)
    job.wait_generation(3, [0, 2])
    job.open_gates(7)
    job.wait_until(at_gate(job, 10), "the third gate")
    job.start_worker(1)
    job.start_worker(3)
    for node in (1, 3):
        job.wait_for(node, r"generation [45]: rank \d of 4")
    job.open_gates(10)
    assert {job.finish()} == expected
    assert sizes(job) == [4] * 4 + [3] * 3 + [2] * 3 + [4] * (STEPS - 10)
