"""The jobs of the launcher tests: a folder, the scripts called in it, and a check that nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.launcher.conftest import job, new_job
from tests.launcher.shell_job import ShellJob
from tests.mistakes.told import Told

__all__ = ["job", "new_job", "told"]


@pytest.fixture
def told(job: ShellJob, record_property: Callable[[str, object], None]) -> Iterator[Told]:
    """The clock of this test's mistake."""
    clock = Told(job, record_property)
    yield clock
    clock.close()
