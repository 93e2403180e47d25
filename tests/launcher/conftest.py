"""Jobs in the shell, and the proof after each test that nothing of them is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.last_look import last_look
from tests.launcher.shell_job import WAIT_S, ShellJob
from tests.system.processes import WarmStarter


@pytest.fixture
def new_job(
    tmp_path: Path, has_failed: Callable[[], bool], warm_commands: WarmStarter
) -> Iterator[Callable[..., ShellJob]]:
    """Makes folders with no job in them yet; after a test that failed, what was said in them is shown."""
    jobs: list[ShellJob] = []

    def make(name: str, *, starter: WarmStarter | None = warm_commands, **settings: str) -> ShellJob:
        folder = tmp_path / name
        folder.mkdir()
        jobs.append(ShellJob(folder, starter, **settings))
        return jobs[-1]

    yield make
    failed = has_failed()
    if failed:
        for job in jobs:
            print(f"{job.tails()}\n{last_look(job.folder, job.bare_environment() | job.settings)}")
    left = [one for job in jobs for one in job.close(patience_s=0.0 if failed else WAIT_S)]
    if not failed:
        assert not left, f"left behind: {left}"


@pytest.fixture
def job(new_job: Callable[..., ShellJob]) -> ShellJob:
    """A folder with a blank in its name and no job in it yet."""
    return new_job("a job")
