"""Which settings are off in the other jobs, and the figures of their windows."""

from __future__ import annotations

import pytest

from benchmarks.defaults import AGAIN, BLOCKS, OFF, ON, ORDERS, QUICK, USUAL, WATCHERS, all_off, people, report, starts
from benchmarks.report import problems
from benchmarks.steady_state import Window
from benchmarks.turns import Turns
from samebits.settings_table import VARIABLES

WATCH = ("the watch over progress", "the watch over hosts", "the comparison of the ranks")


def test_everything_that_can_be_off_is_off() -> None:
    variables = {one.name: one for one in VARIABLES}
    for name, value in all_off().items():
        variables[name].kind.parse(value)
        assert variables[name].default not in (value, None)
    watching = [one for one in VARIABLES if one.capability in WATCH]
    may_be_off = {one.name for one in watching if " or off" in one.kind.expected or one.default == "1"}
    assert may_be_off <= all_off().keys()
    assert all_off("consistency").keys() == all_off().keys() - {"CONSISTENCY"}
    assert WATCHERS["health"] == {"HEALTH": "off"}


def test_workloads_are_known_and_have_enough_windows() -> None:
    assert len(ORDERS) >= 5 and all(set(order) == set(starts(2)) for order in ORDERS)
    assert {*USUAL, *QUICK} == BLOCKS.keys()


def test_report_uses_windows_of_one_round() -> None:
    turns = Turns(OFF)
    for rate in (100.0, 50.0, 200.0, 10.0, 80.0):
        turns.windows.setdefault(OFF, []).append(Window(rate, 10.0))
        turns.windows.setdefault(ON, []).append(Window(rate * 0.99, 10.2))
        turns.windows.setdefault(AGAIN, []).append(Window(rate, 10.0))
    document = report({"wide": turns}).document()
    assert problems(document) == []
    assert document["floor"] == {"wide_steps_per_s": 80.0, "wide_cpu_per_step_ms": 10.0}
    ratios = document["ratios"]
    assert ratios["defaults_vs_all_off_wide"] == pytest.approx(0.99)
    assert ratios["defaults_vs_all_off_wide_lower_quartile"] == pytest.approx(0.99)
    assert ratios["all_off_vs_all_off_wide"] == 1.0
    assert ratios["defaults_vs_all_off_wide_cpu"] == pytest.approx(10 / 10.2, abs=1e-3)
    assert "0.990, of CPU time 0.980 (wanted: 0.99 or more)" in people({"wide": turns}, "2 ranks, all watchers on")
