"""Jobs in the shell, with a check after each test that no process is left."""

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
    """Return a factory of empty job folders. After a failed test, show their output and logs."""
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
    """Return an empty job folder with a blank in its name."""
    return new_job("a job")
