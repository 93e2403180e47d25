"""The order of the windows, and the sums over them."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.report import problems
from benchmarks.steady_state import AGAIN, BLOCKS, CONTESTANTS, OURS, PLAIN, ROUNDS, Window, Windows, people, report


def test_everybody_runs_once_in_a_round_and_equally_often_in_every_place() -> None:
    assert all(sorted(order) == sorted(CONTESTANTS) for order in ROUNDS)
    for place in range(len(CONTESTANTS)):
        assert set(Counter(order[place] for order in ROUNDS).values()) == {len(ROUNDS) / len(CONTESTANTS)}


def test_there_are_enough_pairs() -> None:
    assert BLOCKS * len(ROUNDS) >= 11


def test_the_report_compares_windows_of_one_round() -> None:
    windows = Windows()
    for plain, ours, again in ((100, 98, 100), (50, 45, 55), (200, 200, 190), (10, 9.9, 10), (80, 80, 80)):
        windows.by_contestant[PLAIN].append(Window(plain, 16))
        windows.by_contestant[OURS].append(Window(ours, 18))
        windows.by_contestant[AGAIN].append(Window(again, 17))
    windows.alone.append(Window(300, 8))
    assert windows.ratios(OURS) == pytest.approx([0.98, 0.9, 1.0, 0.99, 1.0])
    document = report(windows).document()
    assert problems(document) == []
    assert document["ours"] == {"steps_per_s": 80, "cpu_per_step_ms": 18}
    assert document["floor"]["without_communication_steps_per_s"] == 300
    ratios = document["ratios"]
    assert ratios["steps_vs_plain_ddp"] == pytest.approx(0.98)
    assert ratios["plain_ddp_vs_plain_ddp"] == pytest.approx(1.0)
    assert ratios["steps_vs_plain_ddp_of_plain_ddp"] == pytest.approx(0.98)
    assert ratios["cpu_vs_plain_ddp"] == pytest.approx(1.125)
    assert "0.980 (wanted: 0.98 or more)" in people(windows)
