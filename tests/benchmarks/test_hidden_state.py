"""Figures of the hidden-state benchmark: differences within pairs of jobs."""

from __future__ import annotations

from benchmarks.hidden_state import report
from benchmarks.report import problems


def test_report_uses_differences_within_a_pair() -> None:
    swaps = {"step_ms": 4.0, "swap_ms": 9.0, "bare_ms": 2.0}
    document = report([50.0, 80.0, 20.0], [70.0, 90.0, 60.0], swaps).document()
    assert problems(document) == []
    assert document["ours"] == {"tell_extra_ms": 20.0, "tell_extra_highest_ms": 40.0, "copies_of_a_swap_ms": 3.0}
    assert document["ratios"] == {"tell_vs_promised": 0.4}
