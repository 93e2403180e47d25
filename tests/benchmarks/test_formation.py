"""Figures of the formation benchmark, and one real formation of each kind, without timing."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from benchmarks.formation import Formation, PlainFormation, Trials, form_ours, form_plain, people, report
from benchmarks.report import problems


def test_report() -> None:
    trials = Trials(
        ours={size: [Formation(1, 2, 4 * size, 5, ready_ms, 9, 3) for ready_ms in (20, 24, 99)] for size in (2, 4)},
        plain={size: [PlainFormation(10, ready_ms) for ready_ms in (11, 12, 13)] for size in (2, 4)},
        fsync_ms=[0.5],
        round_trip_ms=[0.01],
    )
    document = report(trials).document()
    assert problems(document) == []
    assert document["ours"]["rank_known_ms"] == {"2": 8, "4": 16}
    assert document["ours"]["group_ready_ms"] == {"2": 24, "4": 24}
    assert document["peers"]["init_process_group"]["group_ready_ms"] == {"2": 12, "4": 12}
    assert document["ratios"]["group_ready_vs_plain"] == {"2": 2, "4": 2}
    assert document["ratios"]["group_after_rank_vs_plain"] == {"2": pytest.approx(1.333), "4": pytest.approx(0.6667)}
    assert len(people(trials).splitlines()) == 5


@pytest.mark.thorough
@pytest.mark.system
def test_real_formations_pass_all_points_in_order() -> None:
    *points, from_init_ms = astuple(form_ours(2))
    assert from_init_ms > 0
    assert points[0] > 0
    assert points == sorted(points)
    formed_ms, ready_ms = astuple(form_plain(2))
    assert 0 < formed_ms < ready_ms
