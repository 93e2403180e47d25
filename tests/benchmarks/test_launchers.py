"""Checks of ``benchmarks.launchers``: the evaluation of a kill, and rows of launchers that cannot run."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import launchers
from benchmarks.launchers import (
    BEGIN,
    END,
    PORTED_OURS,
    RAY_OURS,
    RUN,
    RUN_WITHOUT_SPARE,
    Launcher,
    Row,
    evaluate,
    fill_pages,
    measure,
    page_table,
    readme_rows,
    recovered,
    report,
    summary,
    wait_until_entered,
    with_modules,
)
from benchmarks.moments import Channel, Moment
from benchmarks.pictures import bars_of
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


def test_worker_that_does_not_know_its_step_when_it_resumes_has_redone_none(tmp_path: Path) -> None:
    resumed = Moment("trains", "torchft_1", 2, 11.0, 0.0, None)
    made = channel(tmp_path, ("stepped", 1, 9.0, 30), ("stepped", 1, 12.0, 31), ("stepped", 2, 12.5, 31))
    made.moments.append(resumed)
    assert evaluate(made, 10.0, frozenset({1, 2})) == (2.5, 0)
    made.close()


def test_job_has_started_when_its_spare_has_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = channel(tmp_path, ("enters", 1, 1.0, 0), ("enters", 1, 1.5, 0))
    looks: list[str] = []

    def wait_for(found: Callable[[], bool], within_s: float, what: str) -> None:
        while not found():
            looks.append(what)
            made.moments.append(Moment("enters", "worker", 2, 2.0, 0.0))

    monkeypatch.setattr(made, "wait_for", wait_for)
    wait_until_entered(made, 2)
    made.close()
    assert looks == ["the start of 2 processes"]


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
    monkeypatch.setattr(launchers, "detection_s", lambda: 0.02)
    arguments = argparse.Namespace(seed=1, only="torch", quick=False, peers=sys.executable)
    undisturbed, rows, detections_s = launchers.measured_rows(arguments)
    names = ("torchft", "torchrun c10d", "torchrun samebits, ported")
    assert (len(undisturbed), [tried.count(name) for name in names]) == (3, [1, 2, 3])
    assert detections_s == [0.02, 0.02, 0.02]
    assert len(rows["torchft"]) == 1


ROWS = {
    "torchrun c10d": [Row(8.0, 3, 2.0, False), Row(6.0, 7, 2.0, False), Row(7.0, 0, 2.0, True)],
    "NVRx": [Row(8.0, 3, 2.0, True), Row(step_ms=2.0, problem="too late")],
    "Ray samebits": [Row(0.1, 0, 1.0, True)],
    "absent": [Row(problem="it needs CUDA | or ROCm")],
}


def test_table_has_every_launcher_and_the_load() -> None:
    made, text = report([Row(step_ms=2.0)], ROWS, (1.0, 2.0, 3.0), [0.02])
    found = made.document()
    assert found["floor"] == {"plain_step_ms": 2.0, "recovered_s": 0.025}
    assert found["peers"]["absent"] == MISSING
    assert found["ours"] == {"Ray samebits": {"recovered_s": 0.1, "steps_redone": 0, "step_ms": 1.0}}
    assert found["ratios"] == {"torchrun c10d speed": 1.0, "NVRx speed": 1.0, "Ray samebits speed": 2.0}
    lines = [line.split("  ") for line in text.splitlines()]
    (torchrun,) = [line for line in lines if line[0] == "torchrun c10d"]
    cells = [cell.strip() for cell in torchrun if cell.strip()]
    assert cells == ["torchrun c10d", "7 s (6–8)", "0–7", "training stops", "1.00"]
    assert [cell.strip() for cell in lines[2] if cell.strip()] == ["floor", "0.025 s", "0", "–", "1.00"]
    assert "it needs CUDA" in text
    assert "1 of 2: too late" in text
    assert text.endswith("load average: 1.0, 2.0, 3.0")


RUN_ROWS = {RUN: [Row(0.0623, 0, 2.0, True)], RUN_WITHOUT_SPARE: [Row(1.41, 0, 2.0, True)], **ROWS}


def stored_run(rows: dict[str, list[Row]]) -> dict[str, Any]:
    head = {"date": "2026-11-27", "cores": 2, "load": 1.04, "torch": "2.13.0", "floor_s": 0.025}
    return {**head, "rows": summary([Row(step_ms=2.0)], rows)}


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Return a folder with the pages that a run fills."""
    folder = tmp_path / "docs" / "explanation"
    folder.mkdir(parents=True)
    shutil.copy(REPOSITORY / "docs" / "until-stepping.json", tmp_path / "docs")
    for name, head in (("README.md", "all ranks step again after"), ("README.zh-CN.md", "到全部 rank 重新迈步")):
        (tmp_path / name).write_text(f"above\n| {head} | 0.06 s | – | – | – | – | – |\n| other | yes |\nbelow\n")
    for name in ("comparison.md", "comparison.zh-CN.md"):
        (folder / name).write_text("above\n<!-- launchers:begin -->\nearlier table\n<!-- launchers:end -->\nbelow\n")
    return tmp_path


def test_pages_have_the_table_of_the_stored_run(docs: Path) -> None:
    folder, stored = docs / "docs" / "explanation", stored_run(RUN_ROWS)
    fill_pages(stored, docs)
    once = (folder / "comparison.md").read_text()
    fill_pages(stored, docs)
    assert (folder / "comparison.md").read_text() == once
    above, about, _, _, _, *rows, end, below = once.splitlines()[0:1] + once.splitlines()[2:]
    assert (above, end, below) == ("above", "<!-- launchers:end -->", "below")
    assert about == "[Measured](../launchers.json) on 2026-11-27: 2 cores, load 1.0, at most 3 trials a row."
    assert rows == [
        "| floor: the kernel reports the death, then 2.5 steps of plain DDP | 0.025 s | 0 | – | 1.00 |  |",
        "| samebits run | 0.0623 s | 0 | training continues | 1.00 |  |",
        "| samebits run --spares 0 | 1.41 s | 0 | training continues | 1.00 |  |",
        "| torchrun c10d | 7 s (6–8) | 0–7 | training stops | 1.00 |  |",
        "| NVRx | 8 s | 3 | training continues | 1.00 | 1 of 2: too late |",
        "| Ray samebits | 0.1 s | 0 | training continues | 2.00 |  |",
        "| absent | – | – | – | – | it needs CUDA \\| or ROCm |",
    ]
    assert "| Ray samebits | 0.1 s | 0 | 训练继续 | 2.00 |  |" in (folder / "comparison.zh-CN.md").read_text()


def test_readme_and_its_chart_show_the_same_run(docs: Path) -> None:
    fill_pages(stored_run(RUN_ROWS), docs)
    shown = "0.0623 s with a spare, 1.41 s without | 7 s (6–8) | – | – | – | – |"
    lines = (docs / "README.md").read_text().splitlines()
    assert lines == ["above", f"| all ranks step again after | {shown}", "| other | yes |", "below"]
    assert "有热备 0.0623 s，无热备 1.41 s | 7 s (6–8) |" in (docs / "README.zh-CN.md").read_text()
    _, bars = bars_of((docs / "docs" / "until-stepping.json").read_text())
    assert [one.seconds for one in bars] == [0.062, 1.4, 7.0]
    assert "0.062 s" in (docs / "docs" / "until-stepping.svg").read_text()


def test_readme_shows_the_samebits_rows_that_there_are(docs: Path) -> None:
    rows = {**ROWS, RAY_OURS: [Row(0.1, 0, 2.0, True)], PORTED_OURS: [Row(2.42, 1, 2.0, True)]}
    found = readme_rows(stored_run(rows), is_chinese=False)
    assert found["| steps redone"].startswith("| steps redone | 0; 1 without a spare | 0–7 |")
    fill_pages(stored_run(rows), docs)
    assert "| 0.1 s with a spare, 2.42 s without | 7 s (6–8) |" in (docs / "README.md").read_text()
    _, bars = bars_of((docs / "docs" / "until-stepping.json").read_text())
    assert [(one.seconds, one.ours) for one in bars] == [(0.1, True), (2.4, True), (7.0, False)]


def test_docs_show_the_stored_run() -> None:
    stored = json.loads((REPOSITORY / "docs" / "launchers.json").read_text())
    for name, is_chinese in ((".md", False), (".zh-CN.md", True)):
        page = (REPOSITORY / "docs" / "explanation" / f"comparison{name}").read_text()
        assert f"{BEGIN}{page_table(stored, is_chinese=is_chinese)}{END}" in page
        readme = (REPOSITORY / f"README{name}").read_text()
        assert all(line in readme for line in readme_rows(stored, is_chinese=is_chinese).values())
    _, bars = bars_of((REPOSITORY / "docs" / "until-stepping.json").read_text())
    measured = [figures["recovered_s"][1] for figures in stored["rows"].values() if "recovered_s" in figures]
    assert {one.seconds for one in bars} <= {float(f"{one:.2g}") for one in measured}
