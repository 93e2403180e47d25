"""Jobs of framework scripts: undisturbed, killed and restarted, killed and replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.system.conftest import watched
from tests.system.elastic_job import ElasticJob
from tests.system.job import JobFolder
from tests.system.processes import REPOSITORY, WarmStarter

__all__ = ["watched"]

EXAMPLES = REPOSITORY / "examples" / "frameworks"
KILLED = Path(__file__).with_name("killed.py")

Started = Callable[..., ElasticJob]


@pytest.fixture
def start(tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None]) -> Started:
    """Return a factory of jobs of two workers that run an example and are killed at the given steps."""
    numbers = itertools.count()

    def start(
        script: Path, *args: str, kills: Sequence[str] = (), workers: int = 2, spares: int = 0, **settings: str
    ) -> ElasticJob:
        folder = tmp_path / f"job{next(numbers)}"
        folder.mkdir()
        job = ElasticJob(
            folder,
            warm,
            script=KILLED,
            args=(str(script), str(folder), *kills, "--", *args),
            workers=workers,
            spares=spares,
            settings={"REGISTER_COOLDOWN": "0" if not spares else "3600", **settings},
        )
        watched(job)
        job.start()
        return job

    return start


@pytest.fixture
def ends_with_the_undisturbed_bits(start: Started) -> Callable[..., None]:
    """Run undisturbed, with restarted ranks, and with a spare; check for one hash and all steps."""

    def check(script: Path, *args: str, steps: int, kills: Sequence[str], **settings: str) -> None:
        expected = final(start(script, *args, **settings), steps)
        restarted = start(script, *args, kills=kills, **settings)
        for kill in kills:
            rank = int(kill.partition(":")[0])
            restarted.wait_died(rank)
            restarted.start_worker(rank)
        assert final(restarted, steps) == expected
        replaced = start(script, *args, kills=kills[:1], spares=1, **settings)
        rank = int(kills[0].partition(":")[0])
        replaced.wait_died(rank)
        assert final(replaced, steps) == expected
        replaced.wait_for("scheduler", rf"spare 2 .* takes slot {rank} of worker {rank}")

    return check


def final(job: ElasticJob, steps: int) -> str:
    """Return the common hash of all workers that finished, each with this number of steps."""
    sha256 = job.finish()
    for node in job.nodes:
        assert job.matches(node, rf"^final step={steps} .*sha256={sha256}"), job.tails()
    return sha256
