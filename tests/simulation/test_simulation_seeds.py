"""At least two thousand schedules, other ones every day: DESIGN section 9 holds in each."""

from __future__ import annotations

import pytest

from tests.simulation.runs import first_seed_of_today, run_seeds

SEEDS = 2_000
PART = 100
FIRST = first_seed_of_today()


@pytest.mark.parametrize("start", range(FIRST, FIRST + SEEDS, PART))
def test_every_promise_is_kept(start: int) -> None:
    tally = run_seeds(start, PART)
    print(f"seeds {start}..{start + PART - 1}: {tally.events} events, {dict(tally.faults)}")
    assert not tally.failures, "\n\n".join(tally.failures[:3])
    assert tally.seeds == PART


def test_the_faults_really_happen() -> None:
    """A simulation that has become gentle proves nothing."""
    tally = run_seeds(0, 150)
    assert tally.failures == []
    assert tally.generations > 150
    assert tally.terms > 300
    for kind in (
        "worker killed",
        "two workers killed",
        "scheduler killed",
        "everything killed",
        "scheduler crash-loops",
        "scheduler dies before fsync",
        "scheduler dies while it speaks",
        "worker stopped",
        "scheduler stopped",
        "connection broken",
        "duplicate started",
        "exception raised",
        "worker terminated",
        "stop asked for",
        "disk lost",
        "message dropped",
        "message delayed",
        "message duplicated",
        "message echoed",
        "job finished",
    ):
        assert tally.faults[kind] >= 5, (kind, dict(tally.faults))
