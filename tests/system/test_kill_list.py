"""The kill list: whatever is killed and whenever, the bits are the same and only the killed are replaced."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system.job import Job
from tests.system.kill_list import CASES, Case

pytestmark = pytest.mark.system


# Another case shows the same and more: the one after the arrow.
THOROUGH = {
    "scheduler, a worker 5 s later",  # → the matrix's "scheduler and worker": the worker goes while it is away
    "rank 0",  # → rank 0 between steps 1 and 2, as it takes over the restore point, and at its end
    "two workers, gradients reduced by hand",  # → the matrix's "two at once, exception, restart"
    "two workers",  # → the matrix's "two at once"
    "two workers, batch norm",  # → the ride of mixed precision and batch norm
    "two workers, saved RNG",  # → while it writes a checkpoint, saved RNG; test_kept_generators
    "while it writes a checkpoint",  # → with saved RNG, where the point of every rank matters
    "when its checkpoint has its name",  # → while it writes one; tests/store kills at every system call of a save
    "a newcomer while it receives the state",  # → the matrix's "the successor during the recovery"
    "while the initial state is saved",  # → with saved RNG
    "between the first and the second step",  # → between steps 1 and 2, saved each step
    "after the optimizer's step, before the commit",  # → after the optimizer's last step
    "in the backward pass of the last step",  # → after its optimizer's step; the matrix's "two at once"
    "between the return of train and exit",  # → rank 0 between the return of train and exit
    "before the first checkpoint",  # → between steps 1 and 2; the matrix's "during the first step"
    "another while others recover",  # → the matrix's "another during the recovery"
    "three in a row",  # → test_cycles
}
LISTED = [
    pytest.param(case, id=name, marks=[pytest.mark.thorough] if name in THOROUGH else [])
    for name, case in CASES.items()
]


def test_thorough_cases_are_in_the_list() -> None:
    assert set(CASES) > THOROUGH


@pytest.mark.parametrize("case", LISTED)
def test_kill_changes_no_bit(case: Case, new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    expected = undisturbed(*case.trained)
    job = new_job(*case.arguments)
    case.disturb(job)
    assert job.wait_finished() == expected
    assert job.restarted, "nothing was killed"
