"""The fleet simulation agrees with its formula, and its check with a real job under kills."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks import fleet
from benchmarks.fleet import DAY_S, RANKS_PER_RACK, Checked, Fleet, expected, fleets, people, report, simulate
from benchmarks.report import problems

LARGE = Fleet(131_072, 10.0, 0.05, fleet.NCCLX_PER_RANK_S)


@pytest.mark.parametrize("ranks", [1024, 16_384, 131_072])
@pytest.mark.parametrize("recovery", [0.0, 50 / 131_072])
def test_simulation_agrees_with_the_formula(ranks: int, recovery: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "REPAIR_S", 0.0)  # the formula has no waits for spares
    job = Fleet(ranks, 10.0, 0.05, recovery)
    found = simulate(job, 300 * DAY_S, seed=1)
    assert found.waited_s == 0
    assert found.failures == pytest.approx(300 * DAY_S * (job.node_rate + job.rack_rate), rel=0.2)
    assert found.effective == pytest.approx(expected(job), abs=2e-3)


def test_published_rates_give_the_published_time_to_failure() -> None:
    for ranks, hours in ((16_384, 1.8), (131_072, 0.23)):
        assert 1 / LARGE.node_rate * LARGE.ranks / ranks / 3600 == pytest.approx(hours, rel=0.05)


def test_job_without_spares_waits_for_repairs() -> None:
    some = simulate(replace(LARGE, spare_share=0.05), 5 * DAY_S, seed=1)
    none = simulate(replace(LARGE, spare_share=0.0), 5 * DAY_S, seed=1)
    assert replace(LARGE, spare_share=0.0).spares == RANKS_PER_RACK
    assert some.waited_s == 0 < none.waited_s
    assert none.effective < some.effective


def test_half_a_step_is_lost_per_failure() -> None:
    found = simulate(Fleet(16_384, 10.0, 0.05), 300 * DAY_S, seed=1)
    assert found.steps_lost / found.failures == pytest.approx(0.5, rel=0.05)


def test_report_has_the_agreed_form() -> None:
    made = report(fleets(10.0, 0.01, (64, 128)), DAY_S, 1, [Checked(4, 3, 0.9, 0.95, 0.06)])
    assert problems(made.document()) == []
    assert made.ratios["checked"]["4"]["measured_vs_formula"] == pytest.approx(0.9 / 0.95, rel=1e-3)
    assert made.ours["control_plane"]["128"]["journal_per_recovery_bytes"] > 128
    assert "4 real ranks, 3 kills: goodput 0.9, by formula 0.95" in people(made)


@pytest.mark.system
@pytest.mark.thorough
def test_check_kills_real_ranks() -> None:
    found = fleet.check(2, 8.0, 3.0, seed=1)
    assert found.kills >= 1
    assert found.recovery_s > 0 and math.isfinite(found.predicted) and found.measured > 0
