"""A job whose hosts come and go, through the shell: template starts, leaving, a killed driver.

Other hosts exist in name only: the template starts the worker here under that name.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from samebits.account.job_view import JobView
from tests.launcher.shell_job import UNTIL_TOLD, WAIT_S, WORKER, Shell, ShellJob
from tests.system.samples_probe import BATCH, SAMPLES

pytestmark = pytest.mark.system

PROBE = Path(__file__).parents[1] / "system" / "samples_probe.py"
STEPS_OF_TWO, STEPS_OF_THREE = (math.ceil(math.ceil(SAMPLES / size) / BATCH) for size in (2, 3))
ON_HOST = """\
#!/bin/sh
if [ -e "no-way-to-$1" ]; then echo "no route to host $1" >&2; exit 255; fi
ON_HOST=$1 exec sh -c "$2"
"""


def hosts(job: ShellJob, *lines: str) -> None:
    """Set what the script prints from now on."""
    (job.folder / "hosts.new").write_text("".join(f"{line}\n" for line in lines))
    (job.folder / "hosts.new").rename(job.folder / "hosts")


def drive(job: ShellJob, *words: str, script: tuple[str, ...] = (str(WORKER), *UNTIL_TOLD)) -> Shell:
    """Start ``samebits run`` with discovery."""
    launch = job.folder / "on-host.sh"
    launch.write_text(ON_HOST)
    launch.chmod(0o700)
    found = ("--host-discovery-script", "cat hosts", "--launch", "./on-host.sh {host} {command}", "--nnodes", "1:4")
    settings = {name: text for name, text in job.settings.items() if name != "WORKER_NUM"}
    return job.tool("run", *found, *words, *script, **settings, GRACE="shrink=0.5")


def trains(view: JobView, *nodes: str) -> bool:
    workers = tuple(worker.node for worker in view.workers if not worker.is_joining)
    return (view.phase, view.alive) == ("training", len(nodes)) and workers == nodes


def test_workers_follow_hosts_that_come_and_go(job: ShellJob) -> None:
    hosts(job, "localhost:2")
    first = drive(job)
    job.wait_view(lambda view: trains(view, "0", "1"))
    hosts(job, "localhost:2", "b:1")
    job.wait_view(lambda view: trains(view, "0", "1", "2"))
    first.wait_for(r"host b is there, with 1 slot\n")
    assert job.proc_environment("worker_2")["ON_HOST"] == "b"
    assert "ON_HOST" not in job.proc_environment("worker_1")

    first.process.kill()  # the job continues, and the next driver finds out what has changed
    first.process.wait(WAIT_S)
    hosts(job, "localhost:1", "b:1", "c:1")
    second = drive(job)
    second.wait_for("the job is already running: this command follows it")
    job.wait_view(lambda view: trains(view, "0", "2", "3"))
    second.wait_for(r"worker 1 leaves at the next commit: host localhost has 1 slot\n")
    hosts(job, "localhost:1", "c:1")
    job.wait_view(lambda view: trains(view, "0", "3"))
    second.wait_for(r"worker 2 leaves at the next commit: host b is gone\n")
    assert "was asked before" not in job.log("worker_2") and "asked to leave" in job.log("worker_2")

    drained = job.tool("drain", "c")
    assert drained.end() == 0, drained.text
    assert "worker 3 has left" in drained.text
    job.wait_view(lambda view: trains(view, "0"))
    undone = job.tool("drain", "--undo", "c")
    assert undone.end() == 0, undone.text
    job.wait_view(lambda view: trains(view, "0", "1"))
    scaled = job.tool("scale", "1")
    assert scaled.end() == 0, scaled.text
    job.wait_view(lambda view: trains(view, "0"))

    job.let_finish()
    assert second.end() == 0, second.text
    history = job.tool("history", "--json")
    assert history.end() == 0
    decided = [event["text"] for event in json.loads(history.text)["events"] if event["kind"] == "decided"]
    for part in (
        "host b is there",
        "starting 1 on b",
        "host b is gone",
        "drained by hand (c)",
        "by hand",
        "1 worker is",
    ):
        assert any(part in text for text in decided), (part, decided)


def test_host_on_which_nothing_starts_rests_and_is_tried_again(job: ShellJob) -> None:
    (job.folder / "no-way-to-b").touch()
    hosts(job, "localhost:1")
    shell = drive(job, "--host-rest", "0.2:600")
    job.wait_view(lambda view: trains(view, "0"))
    hosts(job, "localhost:1", "b:1")
    why = "worker 1: what starts it there ended with status 255"
    shell.wait_for(rf"host b is not used for 0\.2 s: {why}\n")
    shell.wait_for(rf"host b is used again\n(.*\n)*.*host b is not used for 0\.4 s: {why}\n")
    (job.folder / "no-way-to-b").unlink()
    job.wait_view(lambda view: trains(view, "0", "1"))
    job.let_finish()
    assert shell.end() == 0, shell.text


@pytest.mark.thorough
def test_job_that_resizes_with_its_host_sees_every_sample_once(job: ShellJob) -> None:
    hosts(job, "localhost:2")
    gated = [word for epoch in (1, 2) for word in ("--gate", str(epoch))]
    shell = drive(job, script=(str(PROBE), "--epochs", "3", "--pause-ms", "0", *gated))
    job.wait_view(lambda view: trains(view, "0", "1"))
    hosts(job, "localhost:3")
    job.wait_view(lambda view: trains(view, "0", "1", "2") and all(one.activity == "training" for one in view.workers))
    (job.folder / "gate-1").touch()
    job.wait_view(lambda view: view.step >= STEPS_OF_TWO + STEPS_OF_THREE)
    hosts(job, "localhost:2")
    job.wait_view(lambda view: trains(view, "0", "1") and all(one.activity == "training" for one in view.workers[:2]))
    (job.folder / "gate-2").touch()
    assert shell.end() == 0, shell.text
    took = [
        (int(found[1]), int(found[2]), found[3].split(","))
        for node in "012"
        for found in re.finditer(r"epoch (\d+) step \d+ of (\d+) lr \S+ samples (\S+)", job.log(f"worker_{node}"))
    ]
    assert {(epoch, size) for epoch, size, _ in took} == {(0, 2), (1, 3), (2, 2)}
    for epoch in range(3):
        seen = Counter(int(sample) for of, _, samples in took if of == epoch for sample in samples)
        assert set(seen) == set(range(SAMPLES)) and seen.total() - SAMPLES < 3, f"epoch {epoch}: {seen.most_common(4)}"
    finals = [re.findall(r"final step=(\d+) sha256=(\w+)", job.log(f"worker_{node}")) for node in "01"]
    assert finals[0] == finals[1] and finals[0][0][0] == str(2 * STEPS_OF_TWO + STEPS_OF_THREE)
    assert "final" not in job.log("worker_2")
