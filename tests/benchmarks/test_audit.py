"""Figures of windows with and without an audited step."""

from __future__ import annotations

import pytest

from benchmarks.audit import EVERY, INTERVALS, QUICK, STEPS, USUAL, Measured, people, report
from benchmarks.report import problems
from benchmarks.steady_state import Window


def measured(audited_s: float) -> Measured:
    """Return windows of 0.1 s steps and a longer audited one."""
    one = Measured()
    for _ in range(3):
        one.quiet.append((Window(9.9, 1.0), Window(10.0, 1.0)))
        one.audited.append((Window(STEPS / audited_s, 1.0), Window(10.0, 1.0)))
    return one


def test_cost_of_an_audit_is_spread_over_its_interval() -> None:
    one = measured(STEPS * 0.1 + 0.25)
    assert one.audit_ms() == pytest.approx(250)
    assert one.ratio() == pytest.approx(EVERY * 0.1 / (EVERY * 0.1 + 0.25))
    assert one.quiet_ratio() == pytest.approx(0.99)
    document = report({"wide": one}).document()
    assert not problems(document)
    assert document["ratios"]["worked_out_audited_vs_none_wide_every_50"] == pytest.approx(one.ratio(), abs=1e-3)
    assert "wide" in people({"wide": one}) and "0.95" in people({"wide": one})


def test_window_ends_with_the_audited_step() -> None:
    assert EVERY % STEPS == 0 and EVERY > 2 * STEPS
    assert {*USUAL, *QUICK} == INTERVALS.keys()
