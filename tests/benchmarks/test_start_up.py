"""The start-up benchmark: when a job has started, and the figures beside torchrun's."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from benchmarks import start_up
from benchmarks.launchers import RUN, RUN_WITHOUT_SPARE, TORCHRUN
from benchmarks.processes import Stage
from benchmarks.report import problems
from benchmarks.start_up import NAMES, first_step_s, people, report

RANK = """
import signal
from benchmarks.moments import Notebook
notebook = Notebook.from_environment()
notebook.note("trains", 0)
notebook.note("stepped", 1)
notebook.note("stepped", 2)
signal.pause()
"""
MEASURED = {TORCHRUN: [4.0, 5.0, 6.0], RUN: [6.0, 5.5, 6.5], RUN_WITHOUT_SPARE: [4.5, 5.0, 9.0]}


def test_job_has_started_when_its_last_rank_has_finished_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "time", SimpleNamespace(monotonic=lambda: 0.0))  # the start is at 0
    stages: list[Stage] = []

    def start(stage: Stage) -> None:
        stages.append(stage)
        for rank in range(2):
            stage.start(f"rank_{rank}", [sys.executable, "-c", RANK], {})

    found_s = first_step_s(start, ranks=2)
    firsts: dict[int, float] = {}
    for one in stages[0].channel.moments:
        if one.name == "stepped":
            firsts.setdefault(one.pid, one.at_s)
    assert len(firsts) == 2 and found_s == max(firsts.values())


def test_job_that_ends_before_its_first_step_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    def start(stage: Stage) -> None:
        stage.start("rank", [sys.executable, "-c", "raise SystemExit('no such model')"], {})

    with pytest.raises(ChildProcessError, match="rank ended with status 1"):
        first_step_s(start, ranks=1)
    assert "no such model" in capfd.readouterr().err


def test_figures_are_medians_and_multiples_of_torchruns() -> None:
    assert tuple(MEASURED) == NAMES
    document = report([1.0, 2.0, 3.0], MEASURED).document()
    assert problems(document) == []
    assert document["floor"] == {"imports_s": 2.0}
    assert document["peers"] == {"torchrun": {"first_step_s": 5.0}}
    assert document["ours"] == {"first_step_s": 6.0, "without_spare_first_step_s": 5.0}
    assert document["ratios"] == {"first_step_vs_torchrun": 1.2, "without_spare_first_step_vs_torchrun": 1.0}
    text = people([1.0, 2.0, 3.0], MEASURED)
    (run,) = [line for line in text.splitlines() if line.startswith(f"{RUN}  ")]
    assert run.split()[-1] == "1.20" and text.endswith("wanted: 1.2 × torchrun's or less")
