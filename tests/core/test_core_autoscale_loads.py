"""Autoscaling under many loads: no oscillation, and no more cost than a fixed size.

The loads and the player are the benchmark's (``benchmarks.autoscale``). Two earlier builds with known faults show that
these tests can fail.
"""

from __future__ import annotations

import pytest

from benchmarks.autoscale import FIXED, MOST, POLICIES, play, report, rows, run_all
from benchmarks.loads import LOOK_S, Load, all_loads, bursty, constant, noisy, ramp
from samebits.hosts.autoscale import Autoscaler, Limits, LoadReading, ScalingDecision

LOADS = all_loads(Limits(1, MOST).settle_s, Limits(1, MOST).shrink_after_s)
MOST_WAIT_S = 90.0
"""Holds on average, if the work does not all arrive at once."""


@pytest.mark.parametrize("way", POLICIES)
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_direction_turns_at_most_once_per_change_of_load(load: Load, way: str) -> None:
    assert play(load, POLICIES[way]).turns <= load.changes


@pytest.mark.parametrize("way", POLICIES)
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_autoscaling_is_as_fast_as_the_largest_size_and_costs_less(load: Load, way: str) -> None:
    ours, largest = play(load, POLICIES[way]), play(load, None, MOST)
    assert ours.time_s <= 1.01 * largest.time_s
    assert ours.core_s < largest.core_s
    if load.name != "batch":
        assert ours.wait_s <= MOST_WAIT_S


@pytest.mark.parametrize("seed", range(10))
def test_random_loads(seed: int) -> None:
    for load in (noisy(seed), bursty(seed)):
        for limits in POLICIES.values():
            run = play(load, limits)
            assert run.turns <= load.changes and run.wait_s <= MOST_WAIT_S, (load.name, run.turns, run.wait_s)


def test_all_work_is_done_at_any_size() -> None:
    for size in FIXED.values():
        run = play(constant(), None, size)
        assert run.core_s >= sum(constant().busy) * LOOK_S - 1e-6


def test_empty_queue_stays_empty_with_the_size_that_can_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Autoscaler, "_keeps_up", lambda scaler, queue, speed, size: 1)
    assert play(constant(), POLICIES["by queue"]).turns > 10


def test_growth_that_has_met_its_load_has_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged_always(scaler: Autoscaler, reading: LoadReading) -> ScalingDecision | None:
        before, scaler._before = scaler._before, None
        if before is None or reading.speed is None or reading.speed >= 1.3 * before[1]:
            return None
        scaler._enough_at = (before[0], 1e9)
        return ScalingDecision(before[0], "it brought nothing")

    monkeypatch.setattr(Autoscaler, "_judge_growth", judged_always)
    assert play(ramp(), POLICIES["by CPU"]).wait_s > 1000


def test_report_has_a_row_for_each_load_and_size_in_the_agreed_form() -> None:
    loads = [constant(), ramp()]
    found = run_all(loads)
    assert len(rows(loads, found)) == 2 * (len(POLICIES) + len(FIXED))
    document = report(loads, found).document()
    assert document["ours"]["by queue"]["constant"]["core_s"] < document["peers"]["8 fixed"]["constant"]["core_s"]
