"""Figures of jobs with and without comparisons."""

from __future__ import annotations

import pytest

from benchmarks.consistency import AGAIN, EVERY, LOADS, OFF, ON, ORDERS, QUICK, ROUNDS_QUICK, USUAL, people, report
from benchmarks.report import problems
from benchmarks.steady_state import Window
from benchmarks.turns import Turns
from samebits.settings_table import VARIABLES


def measured(rate: float, cpu_ms: float) -> Turns:
    turns = Turns(OFF)
    for step in (1.0, 2.0, 4.0):
        for who, window in ((OFF, Window(step, 10.0)), (AGAIN, Window(step, 10.0)), (ON, Window(step * rate, cpu_ms))):
            turns.windows.setdefault(who, []).append(window)
    return turns


def test_all_orders_are_used_and_smaller_models_compare_at_the_default_interval() -> None:
    assert all(rounds % len(ORDERS) == 0 for rounds in (ROUNDS_QUICK, *(load.rounds for load in LOADS.values())))
    assert f"majority:{EVERY}" == next(one.default for one in VARIABLES if one.name == "CONSISTENCY")
    assert LOADS["mlp"].every == LOADS["wide"].every == EVERY
    assert {*USUAL, *QUICK} == LOADS.keys()


def test_ratios_are_of_windows_of_one_round_and_computed_ones_are_marked() -> None:
    both = {"mlp": measured(0.99, 10.1), "transformer": measured(0.9, 12.5)}
    document = report(both).document()
    ratios = document["ratios"]
    assert ratios["compared_vs_not_mlp_every_50"] == pytest.approx(0.99)
    assert ratios["compared_vs_not_cpu_mlp_every_50"] == pytest.approx(10 / 10.1, abs=1e-3)
    assert ratios["compared_vs_not_transformer_every_5"] == pytest.approx(0.9)
    assert ratios["worked_out_compared_vs_not_transformer_every_50"] == pytest.approx(
        1 / (1 + (1 / 0.9 - 1) / 10), abs=1e-3
    )
    assert ratios["not_vs_not_mlp"] == 1.0 and not problems(document)
    text = people(both)
    assert "mlp, every 50 steps" in text and "transformer, every 5 steps" in text and "0.98" in text
