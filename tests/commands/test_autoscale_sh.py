"""``samebits autoscale`` beside a job of real workers whose queue fills and empties."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from tests.launcher.shell_job import UNTIL_TOLD, ShellJob

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parents[1] / "system" / "work_queue_script.py"
ITEMS, PER_WORKER = 1200, 300
BOUNDS = {"WORKER_NUM": "1", "MIN_WORKER_NUM": "1", "MAX_WORKER_NUM": "4", "HEALTH": "every=0.5"}
RHYTHM = ("--every", "0.3", "--settle", "1", "--shrink-after", "3", "--least-gain", "0")


def waits(job: ShellJob, count: int) -> None:
    """Set the queue length that the workers report from now on."""
    (job.folder / "queue.new").write_text(str(count))
    (job.folder / "queue.new").rename(job.folder / "queue")


def decisions(job: ShellJob) -> list[str]:
    history = job.tool("history", "--json")
    assert history.end() == 0
    return [one["text"] for one in json.loads(history.text)["events"] if one["kind"] == "decided"]


def test_job_of_one_grows_to_two_and_back_by_its_reports(job: ShellJob) -> None:
    waits(job, 10)
    shell = job.run("--reports", "queue", *UNTIL_TOLD, **BOUNDS | {"MAX_WORKER_NUM": "2"})
    job.wait_view(lambda view: view.alive == 1 and view.workers[0].figures.get("queue") == 10)
    scaler = job.tool("autoscale", "--queue-per-worker", "10", *RHYTHM, "--shrink-after", "1")
    waits(job, 19)
    scaler.wait_for(r"1 → 2 workers: the queue is 190% of its target\n")
    job.wait_view(lambda view: view.alive == view.world_size == 2)
    waits(job, 0)
    scaler.wait_for(r"2 → 1 workers: 1 worker would have been enough for 1 s: the queue is 0% of its target\n")
    job.wait_view(lambda view: view.alive == view.world_size == 1)
    job.let_finish()
    assert shell.end() == 0, shell.text
    scaler.wait_for("the job has finished")
    assert scaler.end() == 0
    assert [text[:15] for text in decisions(job)] == ["1 → 2 workers: ", "2 → 1 workers: "], "each once"


@pytest.mark.thorough
def test_job_grows_from_one_to_four_and_back_with_its_queue(job: ShellJob) -> None:
    words = ("--items", str(ITEMS), "--step-s", "0.02", "--not-before", "four", *UNTIL_TOLD)
    shell = job.run(*words, worker=SCRIPT, **BOUNDS)
    job.wait_view(lambda view: view.phase == "training" and view.alive == 1)
    scaler = job.tool("autoscale", "--queue-per-worker", str(PER_WORKER), *RHYTHM)
    scaler.wait_for(r"1 → 4 workers: the queue is \d+% of its target\n")
    for size in (2, 3, 4):  # start times differ
        job.wait_view(lambda view, size=size: view.alive == view.world_size >= size)
    (job.folder / "four").touch()
    scaler.wait_for(r"→ 1 workers: 1 worker would have been enough for 3 s: the queue is \d+% of its target\n")
    last = job.wait_view(lambda view: view.alive == view.world_size == 1)
    job.let_finish()
    assert shell.end() == 0, shell.text
    scaler.wait_for("the job has finished")
    assert scaler.end() == 0

    (left,) = [one.node for one in last.workers if one.presence.value == "alive"]
    assert re.findall(r"counts from (\d+) to (\d+)", job.log(f"worker_{left}")) == [("1", "1")], "each item once"
    decided = decisions(job)
    sizes = [int(found[1]) for text in decided if (found := re.search(r"→ (\d+) workers: .*the queue is", text))]
    assert sizes[0] == 4 and sizes[-1] == 1, decided
    steps = [now - before for before, now in itertools.pairwise([1, *sizes])]
    turns = sum((now < 0) != (before < 0) for before, now in itertools.pairwise(steps))
    assert turns == 1 and 0 not in steps, decided
