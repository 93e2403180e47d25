"""Worlds that resize: every sample of an epoch once, all nodes equal, and a learning rate that follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.elastic_job import SAMPLES_PROBE, ElasticJob
from tests.system.job import FINISH_S, JobFolder
from tests.system.processes import WarmStarter
from tests.system.samples_probe import RATE, SAMPLES

pytestmark = pytest.mark.system

LAST_EPOCH = 3
SHRINKS = {"MIN_WORKER_NUM": "1", "GRACE": "shrink=0", "REGISTER_COOLDOWN": "0.5"}


class GatedJob(ElasticJob):
    """A job that waits before its last epoch until the test lets it finish."""

    def finish(self, timeout_s: float = FINISH_S) -> str:
        self.open_gates(LAST_EPOCH)
        return super().finish(timeout_s)


@pytest.fixture
def new_job(tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None]) -> Callable[..., ElasticJob]:
    def make(*args: str, settings: dict[str, str] | None = None, **options: object) -> ElasticJob:
        given, gated = {**SHRINKS, **(settings or {})}, (*args, "--gate", str(LAST_EPOCH))
        job = GatedJob(tmp_path, warm, script=SAMPLES_PROBE, args=gated, settings=given, **options)
        watched(job)
        return job

    return make


def require_whole(job: ElasticJob, most: int, epochs: int = 4) -> None:
    """Check that no sample was skipped or repeated, and that every step had the rate of its world size."""
    job.require_each_sample_once(SAMPLES, most, lambda epoch: epoch < epochs)
    kept = job.kept()
    assert list(kept) == list(range(1, len(kept) + 1))
    assert sorted({one.epoch for all_ in kept.values() for one in all_}) == list(range(epochs))
    wrong = [one for all_ in kept.values() for one in all_ if abs(one.rate - RATE * one.world_size) > 1e-9]
    assert not wrong, wrong[:3]


def test_world_shrinks_when_a_worker_dies_and_grows_when_it_returns(new_job: Callable[..., ElasticJob]) -> None:
    job = new_job("--pause-ms", "60", "--die", "1:8", workers=3)
    job.start()
    job.wait_died(1)
    job.wait_for("scheduler", "the world continues without worker 1: 2 are left")
    job.wait_generation(2, [0, 2])
    job.start_worker(1)
    job.wait_for(1, r"generation 3: rank 1 of 3")
    job.finish()
    assert job.sizes() == [3, 2, 3]
    require_whole(job, most=3)
    assert job.matches(0, "leaves its generation at its next commit")  # growing interrupts no step


@pytest.mark.parametrize("node", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_worker_asked_to_leave_does_so_between_two_steps(node: int, new_job: Callable[..., ElasticJob]) -> None:
    job = new_job(workers=3)
    job.start()
    job.wait_for_step(8, rank=1)
    assert job.terminate(node) == 143
    job.finish()
    assert job.sizes() == [3, 2]
    require_whole(job, most=3)
    last = job.taken(node)[-1].step
    assert all(one.generation == 1 for one in job.kept()[last]), "its last step was abandoned"


def test_newcomer_joins_at_a_commit(new_job: Callable[..., ElasticJob]) -> None:
    job = new_job("--pause-ms", "60", workers=2, most=4)
    job.start()
    job.wait_for_step(5)
    job.start_worker(2)
    job.start_worker(3)
    job.wait_for(2, r"generation \d+: rank 2 of \d")
    job.wait_for(3, r"generation \d+: rank 3 of 4")
    job.finish()
    assert job.sizes()[0] == 2
    assert job.sizes()[-1] == 4
    require_whole(job, most=4)


@pytest.mark.thorough  # → the first test here; the matrix's shrinks
def test_death_after_a_commit_loses_and_repeats_nothing(new_job: Callable[..., ElasticJob]) -> None:
    job = new_job("--die", "2:9", "--die", "0:14", workers=4)
    job.start()
    for node in (2, 0):
        job.wait_died(node)
    job.finish()
    assert job.sizes() == [4, 3, 2]
    require_whole(job, most=4)


def test_world_starts_with_fewer_after_its_grace_and_admits_the_last(new_job: Callable[..., ElasticJob]) -> None:
    held = {"GRACE": "start=0.5", "MIN_WORKER_NUM": "2"}
    job = new_job("--node", "2", "--not-while", "held", "--pause-ms", "60", workers=3, settings=held)
    (job.folder / "held").touch()
    job.start()
    job.wait_for("scheduler", r"2 of 3 workers are registered after 0.5 s \(start in GRACE\)")
    job.wait_for_step(5)
    (job.folder / "held").unlink()
    job.wait_for(2, r"generation 2: rank 2 of 3")
    job.finish()
    assert job.sizes() == [2, 3]
    job.require_each_sample_once(SAMPLES, 3, lambda _: True)


def test_below_the_minimum_all_wait_and_say_what_for(new_job: Callable[..., ElasticJob]) -> None:
    job = new_job("--die", "1:5", workers=2, most=3, settings={"MIN_WORKER_NUM": "2"})
    job.start()
    job.wait_died(1)
    job.wait_for(0, r"waiting for 1; 1 of at least 2 \(MIN_WORKER_NUM\) are here")
    job.start_worker(1)
    job.finish()
    assert job.sizes() == [2]
    require_whole(job, most=2)
