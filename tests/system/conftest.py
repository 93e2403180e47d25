"""Fixtures of the system tests: the warm starter, jobs checked for remains, and undisturbed runs."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest

from tests.system.elastic_job import ElasticJob
from tests.system.job import Job, JobFolder
from tests.system.processes import ColdStarter, WarmStarter
from tests.system.scripted import ScriptJob


@pytest.fixture
def has_relay(request: pytest.FixtureRequest) -> bool:
    """Return whether the test's jobs use a relay: half of the tests, by a hash of the name, or TEST_RELAYS=all, none.

    Such a job has ``relay.log`` among its logs.
    """
    wanted = os.environ.get("TEST_RELAYS", "half")
    is_chosen = hashlib.sha256(request.node.nodeid.encode()).digest()[0] % 2 == 0
    return wanted == "all" or (wanted == "half" and is_chosen)


@pytest.fixture(scope="session")
def cold() -> ColdStarter:
    return ColdStarter()


@pytest.fixture
def watched(has_failed: Callable[[], bool]) -> Iterator[Callable[[JobFolder], None]]:
    """Check after the test that nothing of the job is left; show its logs if the test failed."""
    jobs: list[JobFolder] = []
    yield jobs.append
    failed = has_failed()
    for job in jobs:
        if isinstance(job, Job):
            job.end_relay()
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
def new_job(
    tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None], has_relay: bool
) -> Callable[..., Job]:
    """Return a factory of jobs of the probe (or another ``script``), warm unless another ``starter`` is given."""
    numbers = itertools.count()

    def make(*args: str, starter: Any = None, **options: Any) -> Job:
        folder = tmp_path / f"job{next(numbers)}"
        folder.mkdir()
        job = Job(folder, starter or warm, args=args, relay_starter=warm if has_relay else None, **options)
        watched(job)
        return job

    return make


@pytest.fixture
def script_job(
    tmp_path: Path, warm: WarmStarter, watched: Callable[[JobFolder], None], has_relay: bool
) -> Callable[..., ScriptJob]:
    """Return a factory of jobs that a user starts."""
    numbers = itertools.count()

    def make(*args: str, **options: Any) -> ScriptJob:
        folder = tmp_path / f"scripted{next(numbers)}"
        folder.mkdir()
        job = ScriptJob(folder, warm, args=args, **options)
        if has_relay:
            job.settings.setdefault("SCHED_HOST", "relay:on,127.0.0.1")
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
