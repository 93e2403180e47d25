"""One job with random faults, different each day; ``python -m tests.system --soak 50`` runs more."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest

from tests.system import soak
from tests.system.job import Job

CALM_STEPS, CHAOS_S = 80, (5.0, 10.0)  # a campaign's jobs are longer and are disturbed longer


@pytest.mark.system
@pytest.mark.thorough  # → the kill list and the matrix: each signal to each process
def test_job_ends_with_the_same_bits_whatever_happens_when(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    seed = datetime.datetime.now(datetime.UTC).date().toordinal()
    expected = undisturbed(*soak.trained(seed, CALM_STEPS))
    job = new_job(*soak.disturbed(seed, CALM_STEPS), settings=soak.settings_of(seed))
    one = soak.Soak(job, seed, CALM_STEPS, CHAOS_S)
    sha256 = one.run()
    print(one.story())
    assert sha256 == expected


def test_seed_determines_the_job() -> None:
    jobs = [(soak.disturbed(seed), soak.settings_of(seed)) for seed in range(200)]
    assert jobs == [(soak.disturbed(seed), soak.settings_of(seed)) for seed in range(200)]
    assert len({str(one) for one in jobs}) == 24, "3 models, 2 ways with random numbers, 4 settings"
