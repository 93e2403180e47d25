"""No detector costs a healthy job on a busy machine a step; hasty detectors do, so this test can fail.

A million hours: ``python -m tests.simulation --hours 1000000``.
"""

from __future__ import annotations

import pytest

from tests.simulation.hours import KINDS, run_hours

HOURS = 4_000


def test_no_alarm_costs_a_step() -> None:
    done = run_hours(HOURS)
    assert done.costs == []
    assert set(done.episodes) == {*KINDS, "scheduler stands still"} and min(done.episodes.values()) > 100
    assert done.named > 0 and done.full_looks > 0 and done.told_losses > 0, "noise without any effect proves nothing"


@pytest.mark.parametrize(
    ("changes", "cost"),
    [
        ({"step_timeout_s": 3.0}, "it held the others up for"),
        ({"step_timeout_s": 2.0, "node_timeout_s": 60.0}, "all workers wait in the same collective"),
        ({"node_timeout_s": 2.5}, "silent for 2.5 s"),
    ],
    ids=["a hang", "a collective", "a lease"],
)
def test_hasty_detector_is_caught(changes: dict[str, float], cost: str) -> None:
    assert any(cost in one for one in run_hours(2_000, changes=dict(changes)).costs)


def test_single_reading_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samebits.core.watch.health_limits.LOOKS", 1)
    assert any("full look" in one for one in run_hours(200).costs)


def test_seed_determines_the_noise() -> None:
    assert run_hours(300, seed=7) == run_hours(300, seed=7) != run_hours(300, seed=8)
