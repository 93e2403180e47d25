"""Figures of jobs with and without virtual workers."""

from __future__ import annotations

import pytest

from benchmarks.report import problems
from benchmarks.steady_state import Window
from benchmarks.turns import Turns
from benchmarks.virtual_workers import AGAIN, DDP, VIRTUAL, people, report


def test_a_slower_step_has_a_ratio_above_1() -> None:
    turns = Turns(DDP)
    for rate in (1.0, 2.0, 4.0):
        windows = {DDP: Window(rate, 10.0), AGAIN: Window(rate, 10.0), VIRTUAL: Window(rate / 1.25, 11.0)}
        for name, window in windows.items():
            turns.windows.setdefault(name, []).append(window)
    document = report({"mlp": turns}).document()
    assert document["ratios"]["step_vs_ddp_mlp"] == pytest.approx(1.25)
    assert document["ratios"]["cpu_vs_ddp_mlp"] == pytest.approx(1.1, abs=1e-3)
    assert document["ratios"]["ddp_vs_ddp_mlp"] == 1.0 and not problems(document)
    assert "1.250 times as long" in people({"mlp": turns})
