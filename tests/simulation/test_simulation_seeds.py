"""docs/contributors/invariants.md holds in two thousand schedules per run, twenty thousand in a thorough one.

The seeds change daily. ``SIMULATION_SEEDS`` in the environment sets their number; campaigns use ``python -m
tests.simulation``.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.mix import LATER_EVERY_S, USUALLY_EVERY_S
from tests.simulation.runs import first_seed_of_today, run_seeds

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "20000"))
EVERY_RUN = 2_000
PART = 250
FIRST = first_seed_of_today()

# Besides the planned faults: those of the network, the disk and the job's own course.
HAPPENINGS = (
    "message dropped",
    "message delayed",
    "message duplicated",
    "message echoed",
    "partition, both ways",
    "partition, one way",
    "scheduler dies in a disk call",
    "scheduler dies while it speaks",
    "scheduler's disk refuses",
    "second scheduler refused",
    "job finished",
    "key call answered",
    "worker asked to leave",
    "worker ended for a hang",
    "lost points brought back",
    "lost points given up",
)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start, marks=[pytest.mark.thorough] if start >= FIRST + EVERY_RUN else [])
        for start in range(FIRST, FIRST + SEEDS, PART)
    ],
)
def test_every_promise_is_kept(start: int) -> None:
    seeds = min(PART, FIRST + SEEDS - start)
    tally = run_seeds(start, seeds)
    print(f"seeds {start}..{start + seeds - 1}: {tally.events} events, {dict(tally.faults)}")
    assert not tally.failures, "\n\n".join(tally.failures[:3])
    assert tally.seeds == seeds


def test_every_fault_occurs() -> None:
    """A simulation without faults proves nothing."""
    tally = run_seeds(0, 300)
    assert tally.failures == []
    assert tally.generations > 300
    assert tally.terms > 450
    for kind in (*USUALLY_EVERY_S, *LATER_EVERY_S, *HAPPENINGS):
        assert tally.faults[kind] >= 2, (kind, dict(tally.faults))
