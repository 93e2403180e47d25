"""A job in the shell, and the proof after each test that nothing of it is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ops.shell_job import ShellJob


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ShellJob]:
    """A folder with a blank in its name and no job in it yet."""
    folder = tmp_path / "a job"
    folder.mkdir()
    job = ShellJob(folder)
    yield job
    assert job.close() == []
