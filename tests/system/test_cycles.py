"""Repeated losses of a rank leak nothing in a survivor and change no bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system import cycles
from tests.system.cycles import Holding
from tests.system.job import Job

CYCLES = 4  # `python -m tests.system --cycles 100` runs more of them


@pytest.mark.system
def test_survivor_of_many_losses_leaks_nothing(new_job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    expected = undisturbed(*cycles.arguments(CYCLES), "--pause-ms", "0")
    job = new_job(*cycles.disturbed(CYCLES), settings=cycles.SETTINGS)
    held = cycles.Cycles(job).run(CYCLES, print)
    assert set(job.wait_ended().values()) == {0}
    assert job.sha256() == expected
    kept = cycles.groups_kept(held[1:])
    assert kept <= CYCLES // 2, "a leak keeps every one"
    assert max(one.descriptors for one in held[1:]) <= held[1].descriptors + 1 + kept * cycles.GROUP.descriptors
    assert max(one.threads for one in held[1:]) <= held[1].threads + 1 + kept * cycles.GROUP.threads
    seen = job.matches("scheduler", r"is lost: its process ended \(seen by worker \d on the same host\)")
    assert seen, "in none of the cycles"


def test_continuous_growth_is_a_leak() -> None:
    steady = [Holding(20, 7, 1000 + (500 if cycle > 3 else 0)) for cycle in range(101)]
    assert cycles.leaks(steady) == []
    assert cycles.leaks([Holding(20 + cycle // 10, 7, 1000) for cycle in range(101)]) == ["descriptors"]
    assert cycles.leaks([Holding(20, 7 + cycle, 1000) for cycle in range(101)]) == ["threads"]
    assert cycles.groups_kept(steady) == 0
    assert cycles.groups_kept([Holding(20 + 5 * cycle, 7 + 4 * cycle, 1000) for cycle in range(7)]) == 6
    assert cycles.leaks([Holding(20, 7, 1000 + 100 * cycle) for cycle in range(101)]) == ["memory, 101 KiB a cycle"]
