"""The form of a report's last line, its statistics and its table."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from benchmarks.report import KEYS, MISSING, Report, median, problems, rounded, spread, table


def whole() -> dict[str, Any]:
    return {
        "benchmark": "formation",
        "machine": {"cores": 2, "processor": "any"},
        "versions": {"python": "3.11.7"},
        "floor": {"fsync_ms": 0.8},
        "peers": {"plain": {"ready_ms": {"2": 6.1, "4": 9.0}}, "never": {"total_s": None}, "torchft": MISSING},
        "ours": {"rank_known_ms": {"2": 5, "4": 7.25}, "redone_steps": 3, "phases": {"notice_ms": 11.0}},
        "ratios": {"ready_vs_plain": {"2": 1.1, "4": None}},
    }


def test_complete_document_has_no_problems() -> None:
    assert problems(whole()) == []


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_required(key: str) -> None:
    document = whole()
    del document[key]
    assert problems(document) == [f"{key} is missing"]


@pytest.mark.parametrize(
    ("section", "figures", "expected"),
    [
        ("ours", {"rank_known": 5.0}, "ours.rank_known names no unit"),
        ("ours", {"total_s": "fast"}, "ours.total_s is 'fast'"),
        ("ours", {"total_s": True}, "ours.total_s is True"),
        ("ours", {"total_s": math.nan}, "ours.total_s is nan"),
        ("ours", {"total_s": math.inf}, "ours.total_s is inf"),
        ("ours", {"total_s": MISSING}, "ours.total_s is 'missing'"),
        ("floor", {"fsync": 0.8}, "floor.fsync names no unit"),
        ("peers", {"torchrun": {"total_s": MISSING}}, "peers.torchrun.total_s is 'missing'"),
        ("peers", {"torchrun": "slow"}, "peers.torchrun is 'slow'"),
        ("ratios", {"total_s": 0.5}, "ratios.total_s is a ratio and has no unit"),
        ("ratios", {"total_vs_torchrun": "half"}, "ratios.total_vs_torchrun is 'half'"),
    ],
)
def test_figure_without_a_unit_is_found(section: str, figures: dict[str, Any], expected: str) -> None:
    (problem,) = problems({**whole(), section: figures})
    assert expected in problem


@pytest.mark.parametrize(
    "name", ["cpu_us_per_registration", "kib_per_worker", "heartbeat_vs_bare", "steps_lost", "hangs"]
)
def test_unit_may_precede_its_subject(name: str) -> None:
    assert problems({**whole(), "ours": {name: 1.5}}) == []
    (problem,) = problems({**whole(), "ours": {"seats_per_worker": 1.5}})
    assert problem.startswith("ours.seats_per_worker names no unit")


def test_unknown_section_is_found() -> None:
    assert problems({**whole(), "theirs": {}}) == ["theirs is unknown"]


def test_last_line_is_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("formation", {"fsync_ms": 0.8}, {"torchft": MISSING}, {"total_s": 1.5}, {"total_vs_floor": 2})
    report.print("a table\nfor people")
    *lines, last = capsys.readouterr().out.splitlines()
    assert "for people" in lines
    document = json.loads(last)
    assert problems(document) == []
    assert (document["benchmark"], document["ours"]) == ("formation", {"total_s": 1.5})
    assert document["machine"]["cores"] >= 1
    assert document["versions"]["torch"].startswith("2.")


def test_malformed_report_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"benchmarks\.formation is malformed: ours\.total names no unit"):
        Report("formation", {}, {}, {"total": 1.5}, {}).print("a table")
    assert capsys.readouterr().out == ""


def test_spread_describes_the_sample() -> None:
    sample = spread([5, 1, 4, 2, 3])
    assert (sample.lowest, sample.lower_quartile, sample.median) == (1, 2, 3)
    assert (sample.upper_quartile, sample.highest) == (4, 5)
    assert str(sample) == "3 (1–5)"
    assert spread([7]).lower_quartile == spread([7]).highest == 7


@pytest.mark.parametrize(("value", "shown"), [(0, 0), (1234.56, 1235), (0.0123456, 0.01235), (-3.14159, -3.142)])
def test_figures_are_rounded_to_four_digits(value: float, shown: float) -> None:
    assert rounded(value) == shown
    assert median([value]) == shown


def test_columns_are_aligned() -> None:
    assert table(["phase", "ms"], [["notice", 1.5], ["break, then wait", 12]]).splitlines() == [
        "phase              ms",
        "----------------  ---",
        "notice            1.5",
        "break, then wait   12",
    ]
