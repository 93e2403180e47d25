"""Checks of ``benchmarks.launchers``: the evaluation of a kill, and rows of launchers that cannot run."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks import launchers
from benchmarks.launchers import (
    BEGIN,
    END,
    Launcher,
    Row,
    evaluate,
    fill_pages,
    measure,
    page_table,
    recovered,
    report,
    summary,
    with_modules,
)
from benchmarks.moments import Channel, Moment
from benchmarks.processes import REPOSITORY, Stage
from benchmarks.report import MISSING


def channel(folder: Path, *events: tuple[str, int, float, int]) -> Channel:
    made = Channel(folder / "moments", lambda: None)
    made.moments = [Moment(name, "worker", pid, at_s, 0.0, step) for name, pid, at_s, step in events]
    return made


def test_a_rank_has_recovered_with_a_step_that_no_rank_had_finished(tmp_path: Path) -> None:
    survivor = [("stepped", 1, 9.0, 30), ("trains", 1, 11.0, 28), ("stepped", 1, 12.0, 29), ("stepped", 1, 13.5, 31)]
    newcomer = [("trains", 2, 11.5, 28), ("stepped", 2, 12.5, 30), ("stepped", 2, 14.0, 31), ("stepped", 2, 15.0, 32)]
    made = channel(tmp_path, *survivor, *newcomer)
    assert evaluate(made, 10.0, frozenset({1, 2})) == (4.0, 2)
    made.close()


def test_a_step_before_the_kill_whose_report_comes_late_is_no_recovery(tmp_path: Path) -> None:
    late = ("stepped", 1, 9.9, 31)
    made = channel(tmp_path, ("stepped", 1, 9.0, 30), ("stepped", 2, 9.0, 30), late, ("stepped", 2, 12.0, 31))
    made.reached = {1: 31, 2: 31}
    assert recovered(made, 10.0, victim=3) == frozenset()
    made.close()


def test_launcher_that_lacks_a_module_or_fails_is_a_row_with_its_line() -> None:
    def fails(stage: Stage, python: str) -> object:
        stage.start("job", [python, "-c", "print(1); raise ValueError('this needs an accelerator')"], {})
        return lambda: 0

    lacking = Launcher("absent", fails, lambda python: with_modules(python, "no_such_module"))
    assert measure(lacking, sys.executable, random.Random(1)).problem == (
        "ModuleNotFoundError: No module named 'no_such_module'"
    )
    failed = measure(Launcher("failing", fails), sys.executable, random.Random(1))
    assert failed == Row(problem="ValueError: this needs an accelerator")


def test_launcher_that_failed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def measured(launcher: Launcher, python: str, rng: random.Random) -> Row:
        tried.append(launcher.name)
        return Row(problem="no accelerator") if launcher.name == "torchft" else Row(step_ms=1.0)

    monkeypatch.setattr(launchers, "measure", measured)
    arguments = argparse.Namespace(seed=1, only="torch", quick=False, peers=sys.executable)
    undisturbed, rows = launchers.measured_rows(arguments)
    assert (len(undisturbed), tried.count("torchft"), tried.count("torchrun c10d")) == (3, 1, 3)
    assert len(rows["torchft"]) == 1


ROWS = {
    "torchrun c10d": [Row(8.0, 3, 2.0, False), Row(6.0, 7, 2.0, False), Row(7.0, 0, 2.0, True)],
    "Ray samebits": [Row(0.1, 0, 1.0, True)],
    "absent": [Row(problem="it needs CUDA | or ROCm")],
}


def test_table_has_every_launcher_and_the_load() -> None:
    made, text = report([Row(step_ms=2.0)], ROWS, (1.0, 2.0, 3.0))
    found = made.document()
    assert found["peers"]["absent"] == MISSING
    assert found["ours"] == {"Ray samebits": {"recovered_s": 0.1, "steps_redone": 0, "step_ms": 1.0}}
    assert found["ratios"] == {"torchrun c10d speed": 1.0, "Ray samebits speed": 2.0}
    lines = [line.split("  ") for line in text.splitlines()]
    (torchrun,) = [line for line in lines if line[0] == "torchrun c10d"]
    cells = [cell.strip() for cell in torchrun if cell.strip()]
    assert cells == ["torchrun c10d", "7 s (6–8)", "0–7", "training stops", "1.00"]
    assert "it needs CUDA" in text
    assert text.endswith("load average: 1.0, 2.0, 3.0")


def test_pages_have_the_table_of_the_stored_run(tmp_path: Path) -> None:
    stored = {"date": "2026-11-27", "cores": 2, "load": 1.04, "rows": summary([Row(step_ms=2.0)], ROWS)}
    folder = tmp_path / "docs" / "explanation"
    folder.mkdir(parents=True)
    for name in ("comparison.md", "comparison.zh-CN.md"):
        (folder / name).write_text("above\n<!-- launchers:begin -->\nearlier table\n<!-- launchers:end -->\nbelow\n")
    fill_pages(stored, tmp_path)
    once = (folder / "comparison.md").read_text()
    fill_pages(stored, tmp_path)
    assert (folder / "comparison.md").read_text() == once
    above, about, _, _, _, *rows, end, below = once.splitlines()[0:1] + once.splitlines()[2:]
    assert (above, end, below) == ("above", "<!-- launchers:end -->", "below")
    assert about == "[Measured](../launchers.json) on 2026-11-27: 2 cores, load 1.0, at most 3 trials a row."
    assert rows == [
        "| torchrun c10d | 7 s (6–8) | 0–7 | training stops | 1.00 |  |",
        "| Ray samebits | 0.1 s | 0 | training continues | 2.00 |  |",
        "| absent | – | – | – | – | it needs CUDA \\| or ROCm |",
    ]
    assert "| Ray samebits | 0.1 s | 0 | 训练继续 | 2.00 |  |" in (folder / "comparison.zh-CN.md").read_text()


def test_comparison_shows_the_stored_run() -> None:
    docs = REPOSITORY / "docs"
    file = docs / "launchers.json"
    for name, is_chinese in (("comparison.md", False), ("comparison.zh-CN.md", True)):
        table = page_table(json.loads(file.read_text()), is_chinese=is_chinese) if file.exists() else ""
        assert f"{BEGIN}{table}{END}" in (docs / "explanation" / name).read_text()
