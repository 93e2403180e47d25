"""Jobs in the shell, and the proof after each test that nothing of them is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ops.shell_job import ShellJob


@pytest.fixture
def new_job(tmp_path: Path, has_failed: Callable[[], bool]) -> Iterator[Callable[..., ShellJob]]:
    """Makes folders with no job in them yet; after a test that failed, what was said in them is shown."""
    jobs: list[ShellJob] = []

    def make(name: str, **settings: str) -> ShellJob:
        folder = tmp_path / name
        folder.mkdir()
        jobs.append(ShellJob(folder, **settings))
        return jobs[-1]

    yield make
    left = [one for job in jobs for one in job.close()]
    if has_failed():
        print(f"left: {left}\n" + "\n".join(job.tails() for job in jobs))
    else:
        assert not left, f"left behind: {left}"


@pytest.fixture
def job(new_job: Callable[..., ShellJob]) -> ShellJob:
    """A folder with a blank in its name and no job in it yet."""
    return new_job("a job")
