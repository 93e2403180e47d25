"""The history of a real job: a kill, its recovery, its end, and exact sums."""

from __future__ import annotations

import json

import pytest

from tests.launcher.shell_job import UNTIL_TOLD, ShellJob

pytestmark = pytest.mark.system


def test_kill_is_one_recovery_in_the_history_and_in_the_followers_summary(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    killed = job.kill("worker_1")
    back = job.recover()
    job.wait_view(lambda view: view.generation > 1 and view.phase == "training" and view.alive == 3)
    job.let_finish()
    assert (shell.end(), back.end()) == (0, 0), shell.text
    assert "1 recovery" in shell.text and "time: productive " in shell.text

    history = job.tool("history", "--json")
    assert history.end() == 0, history.text
    told = json.loads(history.text)
    (row,) = told["recoveries"]
    assert str(killed.pid) in row["cause"] or "worker 1" in row["cause"]
    assert sum(row["phases_ms"].values()) == pytest.approx(row["total_ms"], abs=0.5)
    assert sum(told["buckets_s"].values()) == pytest.approx(told["wall_s"], abs=1e-5)
    kinds = [event["kind"] for event in told["events"]]
    assert kinds[0] == "job" and kinds[-1] == "finished"
    assert {"seated", "round", "generation", "training", "lost", "trained"} <= set(kinds)
    assert [event["at"] for event in told["events"]] == sorted(event["at"] for event in told["events"])

    lines = job.tool("history", "--last", "3")
    assert lines.end() == 0
    assert "the job is finished" in lines.text and "earlier events" in lines.text


def test_without_a_job_it_says_what_to_do(job: ShellJob) -> None:
    for tool in (["history"], ["history", "--html"]):
        shell = job.tool(*tool)
        assert shell.end() != 0
        assert "holds no events. Fix: change to the folder the job was started in" in shell.text
