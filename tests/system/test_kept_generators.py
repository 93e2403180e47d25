"""With the default rng="saved" no step is lost: a dead rank's generators are restored from its page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.elastic_job import ElasticJob
from tests.system.job import Job, JobFolder
from tests.system.kill_list import MIDDLE
from tests.system.processes import WarmStarter

pytestmark = pytest.mark.system

STEPS = 40
TRAINED = ("--steps", str(STEPS), "--interval", "1000", "--rng", "saved")  # only memory to resume from
BY_PAGE = r"the generators of ranks? {} are restored from pages in memory"


@pytest.fixture
def new_spare_job(tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None]) -> Callable[..., ElasticJob]:
    def make(*args: str) -> ElasticJob:
        job = ElasticJob(tmp_path, warm, args=(*TRAINED, *args), spares=1, settings={"REGISTER_COOLDOWN": "3600"})
        watched(job)
        return job

    return make


def require_none_lost(job: JobFolder, rank: int, survivors: set[int]) -> None:
    for survivor in survivors:
        numbers = [step.number for step in job.steps(survivor)]
        assert numbers == sorted(set(numbers)), f"rank {survivor} took a step twice: {numbers}"
        assert len(numbers) >= STEPS - 1
    assert job.matches("scheduler", BY_PAGE.format(rf"[0-9, and]*{rank}[0-9, and]*"))


# Every order of draws, collectives, commits and the kill: tests/training/checkpoint/test_kept_generators.py.
@pytest.mark.parametrize(
    ("model", "kill"),
    [
        ("ddp", "stepped"),
        ("by-hand", "backward"),
        *(
            pytest.param(*other, marks=pytest.mark.thorough)
            for other in (("ddp", "backward"), ("ddp", "committed"), ("by-hand", "stepped"), ("by-hand", "committed"))
        ),
    ],
)
def test_spare_continues_with_the_dead_ranks_generators(
    model: str, kill: str, new_spare_job: Callable[..., ElasticJob], undisturbed: Callable[..., str]
) -> None:
    job = new_spare_job("--model", model, "--kill", f"2:{kill}:{MIDDLE}")
    job.start()
    job.wait_warm(4)
    job.wait_died(2)
    assert job.finish() == undisturbed(*TRAINED, "--model", model)
    require_none_lost(job, 2, {0, 1, 3})


@pytest.mark.parametrize(
    "kill", ["committed", *(pytest.param(other, marks=pytest.mark.thorough) for other in ("backward", "stepped"))]
)
def test_restarted_process_continues_with_its_own_generators(
    kill: str, new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    job = new_job(*TRAINED, "--kill", f"0:{kill}:{MIDDLE}")
    job.start()
    job.wait_killed(0)
    job.start_worker(0)
    assert job.wait_finished() == undisturbed(*TRAINED)
    require_none_lost(job, 0, {1, 2, 3})
