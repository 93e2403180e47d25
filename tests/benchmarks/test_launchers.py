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


@pytest.mark.parametrize(
    ("survivor", "newcomer", "redone"),
    [
        ([29, 30, 31], [29, 30, 31, 32], 2),  # both went back to step 28
        ([31, 32], [31, 32], 0),  # a newcomer that copies the survivor's step
        ([30, 31], [31, 32], 0),  # the survivor was still in step 30
    ],
)
def test_a_rank_has_recovered_with_a_step_that_no_rank_had_finished(
    survivor: list[int], newcomer: list[int], redone: int, tmp_path: Path
) -> None:
    before = [("stepped", 3, 9.0, 30), ("stepped", 1, 9.0, survivor[0] - 1 if redone == 0 else 30)]
    after = [("stepped", 1, 12.0 + at, step) for at, step in enumerate(survivor)]
    replaced = [("trains", 2, 11.0, 0), *(("stepped", 2, 12.5 + at, step) for at, step in enumerate(newcomer))]
    made = channel(tmp_path, *before, *after, *replaced)
    last_s = 12.5 + newcomer.index(31)
    assert evaluate(made, 10.0, frozenset({1, 2})) == (max(last_s, 12.0 + survivor.index(31)) - 10.0, redone)
    made.close()


def test_only_a_step_after_the_kill_is_a_recovery(tmp_path: Path) -> None:
    late = ("stepped", 1, 9.9, 31)  # its report arrives after the kill
    restored = ("trains", 2, 11.0, 32)  # a step that was committed, and not reported
    made = channel(
        tmp_path, ("stepped", 1, 9.0, 30), late, restored, ("stepped", 2, 12.0, 33), ("stepped", 3, 12.0, 33)
    )
    assert recovered(made, 10.0, victim=3) == frozenset({2})
    made.moments = [one for one in made.moments if one.step != 33]
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


def test_launcher_that_cannot_train_is_tried_once_and_one_that_cannot_recover_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def measured(launcher: Launcher, python: str, rng: random.Random) -> Row:
        tried.append(launcher.name)
        failed = {"torchft": Row(problem="no accelerator"), "torchrun c10d": Row(step_ms=1.0, problem="too late")}
        return failed.get(launcher.name, Row(step_ms=1.0))

    monkeypatch.setattr(launchers, "measure", measured)
    arguments = argparse.Namespace(seed=1, only="torch", quick=False, peers=sys.executable)
    undisturbed, rows = launchers.measured_rows(arguments)
    names = ("torchft", "torchrun c10d", "torchrun samebits, ported")
    assert (len(undisturbed), [tried.count(name) for name in names]) == (3, [1, 2, 3])
    assert len(rows["torchft"]) == 1


ROWS = {
    "torchrun c10d": [Row(8.0, 3, 2.0, False), Row(6.0, 7, 2.0, False), Row(7.0, 0, 2.0, True)],
    "NVRx": [Row(8.0, 3, 2.0, True), Row(step_ms=2.0, problem="too late")],
    "Ray samebits": [Row(0.1, 0, 1.0, True)],
    "absent": [Row(problem="it needs CUDA | or ROCm")],
}


def test_table_has_every_launcher_and_the_load() -> None:
    made, text = report([Row(step_ms=2.0)], ROWS, (1.0, 2.0, 3.0))
    found = made.document()
    assert found["peers"]["absent"] == MISSING
    assert found["ours"] == {"Ray samebits": {"recovered_s": 0.1, "steps_redone": 0, "step_ms": 1.0}}
    assert found["ratios"] == {"torchrun c10d speed": 1.0, "NVRx speed": 1.0, "Ray samebits speed": 2.0}
    lines = [line.split("  ") for line in text.splitlines()]
    (torchrun,) = [line for line in lines if line[0] == "torchrun c10d"]
    cells = [cell.strip() for cell in torchrun if cell.strip()]
    assert cells == ["torchrun c10d", "7 s (6–8)", "0–7", "training stops", "1.00"]
    assert "it needs CUDA" in text
    assert "1 of 2: too late" in text
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
        "| NVRx | 8 s | 3 | training continues | 1.00 | 1 of 2: too late |",
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
