"""docs/contributors/invariants.md holds in a thousand schedules per run, twenty thousand in a thorough one.

The seeds change daily. ``SIMULATION_SEEDS`` in the environment sets their number; campaigns use ``python -m
tests.simulation``.
"""

from __future__ import annotations

import os

import pytest

from samebits.core.records import SeatGranted
from samebits.core.replacement_names import replaces
from samebits.core.scheduler import SchedulerEvent
from tests.simulation.mix import LATER_EVERY_S, USUALLY_EVERY_S
from tests.simulation.mutants.of_points import SHARDED
from tests.simulation.runs import first_seed_of_today, run_seeds
from tests.simulation.world import World

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "20000"))
EVERY_RUN = 1_000
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


def test_replacement_after_training_has_no_cool_down() -> None:
    """Rule 1b: it runs the rest of the lost rank's script, so it is seated at once in its own line's slot."""
    world = World(16, changes=SHARDED)
    seated: list[SeatGranted] = []

    def watch(_: SchedulerEvent | None, record: SeatGranted) -> None:
        witness = world.witness
        lost = [old for old in witness.retired if old.slot == record.slot and replaces(record.node, old.node)]
        if any(world.host.clock - old.quiet_since < world.policy.cool_down_s for old in lost):
            assert witness.disk.final is not None
            seated.append(record)

    world.when_recorded[SeatGranted].append(watch)
    world.run()
    assert [record.node for record in seated] == ["2.1", "2.2"]
