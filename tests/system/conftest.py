"""Fixtures of the system tests: the warm starter, jobs checked for remains, and undisturbed runs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest

from tests.system.elastic_job import ElasticJob
from tests.system.job import Job, JobFolder
from tests.system.processes import ColdStarter, WarmStarter
from tests.system.scripted import ScriptJob


@pytest.fixture(scope="session")
def cold() -> ColdStarter:
    return ColdStarter()


@pytest.fixture
def watched(has_failed: Callable[[], bool]) -> Iterator[Callable[[JobFolder], None]]:
    """Check after the test that nothing of the job is left; show its logs if the test failed."""
    jobs: list[JobFolder] = []
    yield jobs.append
    failed = has_failed()
    if failed:
        for job in jobs:
            print(f"{job.tails()}\n{job.last_look()}")
    else:
        for job in jobs:
            job.wait_for_writers()  # they end by themselves after their worker, with some delay on a busy machine
    left = [one for job in jobs for one in job.end()]
    if not failed:
        assert not left, f"left behind: {left}"


@pytest.fixture
def new_job(tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None]) -> Callable[..., Job]:
    """Return a factory of jobs of the probe (or another ``script``), warm unless another ``starter`` is given."""
    numbers = itertools.count()

    def make(*args: str, starter: Any = None, **options: Any) -> Job:
        folder = tmp_path / f"job{next(numbers)}"
        folder.mkdir()
        job = Job(folder, starter or warm, args=args, **options)
        watched(job)
        return job

    return make


@pytest.fixture
def script_job(tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None]) -> Callable[..., ScriptJob]:
    """Return a factory of jobs that a user starts."""
    numbers = itertools.count()

    def make(*args: str, **options: Any) -> ScriptJob:
        folder = tmp_path / f"scripted{next(numbers)}"
        folder.mkdir()
        job = ScriptJob(folder, warm, args=args, **options)
        watched(job)
        return job

    return make


@pytest.fixture
def elastic_job(tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None]) -> Callable[..., ElasticJob]:
    """Return a job of a script whose world may shrink to one worker and grow again."""
    settings = {"MIN_WORKER_NUM": "1", "GRACE": "shrink=0", "REGISTER_COOLDOWN": "0.5"}

    def make(script: Path, name: str, *args: str, workers: int) -> ElasticJob:
        folder = tmp_path / name
        folder.mkdir()
        job = ElasticJob(folder, warm, script=script, args=args, workers=workers, settings=settings)
        watched(job)
        return job

    return make


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, warm: WarmStarter, request: pytest.FixtureRequest
) -> Callable[..., str]:
    """Return the sha256 of an undisturbed run of the same script and arguments.

    Run once for all test processes: those of xdist save the results in the folder above theirs.
    """
    known = tmp_path_factory.getbasetemp() / "undisturbed"
    if hasattr(request.config, "workerinput"):
        known = known.parents[1] / known.name
    known.mkdir(exist_ok=True)

    def sha256(*args: str, **options: Any) -> str:
        key = hashlib.sha256(repr((args, sorted(options.items()))).encode()).hexdigest()[:16]
        with filelock.FileLock(known / f"{key}.lock"):
            found = known / key
            if not found.exists():
                job = Job(tmp_path_factory.mktemp("undisturbed-run"), warm, args=args, **options)
                try:
                    job.start()
                    found.write_text(job.wait_finished())
                finally:
                    job.end()
            return found.read_text()

    return sha256
