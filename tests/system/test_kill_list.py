"""Whatever is killed, whenever: the same bits, and nobody is replaced who was not killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system.job import Job
from tests.system.kill_list import CASES, Case

pytestmark = pytest.mark.system


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_kill_changes_no_bit(case: Case, new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    expected = undisturbed(*case.trained)
    job = new_job(*case.arguments)
    case.disturb(job)
    assert job.wait_finished() == expected
    assert job.restarted, "nothing was killed"
