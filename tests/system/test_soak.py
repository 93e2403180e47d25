"""One job of random faults, another one every day; ``python -m tests.system --soak 50`` runs more of them."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest

from tests.system import soak
from tests.system.job import Job

CALM_STEPS, CHAOS_S = 80, (5.0, 10.0)  # a campaign's jobs are longer, and are disturbed longer


@pytest.mark.system
@pytest.mark.thorough  # → the kill list and the matrix: each signal to each process by itself
def test_whatever_happens_when_it_happens_the_job_ends_with_the_same_bits(
    new_job: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    seed = datetime.datetime.now(datetime.UTC).date().toordinal()
    expected = undisturbed(*soak.trained(seed, CALM_STEPS))
    job = new_job(*soak.disturbed(seed, CALM_STEPS), settings=soak.settings_of(seed))
    one = soak.Soak(job, seed, CALM_STEPS, CHAOS_S)
    sha256 = one.run()
    print(one.story())
    assert sha256 == expected


def test_a_seed_is_one_job() -> None:
    jobs = [(soak.disturbed(seed), soak.settings_of(seed)) for seed in range(200)]
    assert jobs == [(soak.disturbed(seed), soak.settings_of(seed)) for seed in range(200)]
    assert len({str(one) for one in jobs}) == 24, "3 models, 2 ways with random numbers, 4 settings"
