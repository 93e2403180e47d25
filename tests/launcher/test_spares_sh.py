"""Spares and elastic worlds through the shell: replacements, growth, shrinking and returning nodes."""

from __future__ import annotations

import json
import signal

import pytest

from samebits.account.job_view import JobView, PresenceState
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.shell_job import ENDLESS, ROOT, UNTIL_TOLD, WAIT_S, WORKER, Shell, ShellJob

pytestmark = pytest.mark.system

WITH_SPARE = {"SPARE_NUM": "1"}
ELASTIC = {"WORKER_NUM": "2", "MIN_WORKER_NUM": "1", "MAX_WORKER_NUM": "4", "GRACE": "shrink=0"}


def is_warm(view: JobView) -> bool:
    """Return whether three workers train and a spare waits."""
    waiting = [spare.node for spare in view.spares if spare.activity == "waiting"]
    return view.phase == "training" and view.alive == 3 and view.step >= 3 and len(waiting) == view.spares_alive == 1


def trains(view: JobView, size: int, nodes: set[str]) -> bool:
    """Return whether these workers train in a generation of this size."""
    members = {worker.node for worker in view.workers if not worker.is_joining}
    return (view.phase, view.world_size, view.alive, members) == ("training", size, size, nodes)


def changed(job: ShellJob, before: dict[str, ProcessIdentity]) -> set[str]:
    after = job.identities()
    return {name for name in after if after[name] != before.get(name)}


def add(job: ShellJob, *words: str) -> Shell:
    """Call ``add.sh``."""
    return job.shell("bash", str(ROOT / "scripts" / "add.sh"), *words)


def test_spare_takes_a_dead_workers_place_without_delay(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD, REGISTER_COOLDOWN="3600", **WITH_SPARE)
    shell.wait_for("3 workers, 1 spare and a scheduler of .* started")
    job.wait_view(is_warm)
    before = job.identities()
    assert set(before) == {"scheduler", "worker_0", "worker_1", "worker_2", "worker_3"}
    job.kill("worker_1")
    shell.wait_for(r"worker 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\).*Fix: bash .*recover\.sh brings it back")
    shell.wait_for(
        rf"spare 3 \(pid {before['worker_3'].pid}\) took the place of worker 1; "
        "worker 1 becomes a spare once it is restarted"
    )
    seen = job.wait_view(lambda view: view.generation == 2 and trains(view, 3, {"0", "2", "3"}))
    assert [(worker.slot, worker.node) for worker in seen.workers] == [(0, "0"), (1, "3"), (2, "2")]
    assert [(node.node, node.presence) for node in seen.retired] == [("1", PresenceState.LOST)]
    status = job.tool("status")
    assert status.end() == 0
    assert "3/3 workers ·" in status.text
    job.let_finish()
    assert shell.end() == 0, shell.text
    assert changed(job, before) == set()
    assert "final step=" in job.log("worker_3")


def test_samebits_run_keeps_a_spare_by_default(job: ShellJob) -> None:
    """The spare starts after the training, and takes a lost worker's place."""
    shell = job.tool("run", "--", str(WORKER), *UNTIL_TOLD, **job.settings)
    shell.wait_for("3 workers and a scheduler of .* started")
    job.wait_view(is_warm)
    before = job.identities()
    job.kill("worker_1")
    shell.wait_for(r"worker 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\); .*spare")
    job.wait_view(lambda view: view.generation == 2 and trains(view, 3, {"0", "2", "3"}))
    job.wait_view(is_warm)
    assert changed(job, before) == {"worker_1.1"}
    job.let_finish()
    assert shell.end() == 0, shell.text


def test_dead_worker_returns_as_a_spare_and_takes_the_next_place(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD, **WITH_SPARE)
    job.wait_view(is_warm)
    before = job.identities()
    job.kill("worker_1")
    job.wait_view(lambda view: view.generation == 2 and trains(view, 3, {"0", "2", "3"}))
    recover = job.recover()
    recover.wait_for("starting worker 1\n")
    recover.wait_for("the slot of worker 1 was given away: it comes back as a spare")
    shell.wait_for("worker 1 is back as a spare")
    job.wait_view(is_warm)
    assert changed(job, before) == {"worker_1"}
    job.kill("worker_3")
    shell.wait_for(r"spare 1 \(pid \d+\) took the place of worker 3")
    job.wait_view(lambda view: view.generation == 3 and trains(view, 3, {"0", "1", "2"}))
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert shell.end() == 0, shell.text


def test_spares_death_does_not_affect_the_job(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD, **WITH_SPARE)
    job.wait_view(is_warm)
    before = job.identities()
    job.kill("worker_3")
    shell.wait_for(r"spare 3 \(pid \d+\) was killed by signal 9")
    job.wait_view(lambda view: view.spares_alive == 0)
    recover = job.recover()
    recover.wait_for("starting spare 3\n")
    seen = job.wait_view(is_warm)
    assert seen.generation == 1
    assert changed(job, before) == {"worker_3"}
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert shell.end() == 0, shell.text


@pytest.mark.parametrize("by", ["Ctrl-C", "samebits stop"])
def test_end_of_a_job_ends_its_spares(job: ShellJob, by: str) -> None:
    shell = job.run(*ENDLESS, **WITH_SPARE)
    job.wait_view(is_warm)
    if by == "Ctrl-C":
        shell.send(signal.SIGINT)
    else:
        stop = job.tool("stop")
        assert stop.end() == 0, stop.text
    assert shell.end() == 78, shell.text
    assert job.running() == []
    assert "stopped by" in job.log("worker_3")


def test_world_that_grows_shrinks_and_is_recovered(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD, **ELASTIC)
    job.wait_view(lambda view: trains(view, 2, {"0", "1"}))
    more = add(job, "2")
    assert more.end() == 0, more.text
    assert "starting worker 2, 3:" in more.text
    job.wait_view(lambda view: trains(view, 4, {"0", "1", "2", "3"}))
    shell.wait_for(r"workers? (2|3|2 and 3) joined: \d workers")
    full = add(job)
    assert full.end() == 80
    assert "MAX_WORKER_NUM=4: 0 node ids below it are free, but 1 are needed" in full.text

    leaving = job.tool("scale", "--remove", "3")
    assert leaving.end() == 0, leaving.text
    shell.wait_for(r"worker 3 \(pid \d+\), which was removed, ")
    job.wait_view(lambda view: trains(view, 3, {"0", "1", "2"}))
    shell.wait_for("the job continues without worker 3: 3 workers")
    job.kill("worker_0")
    job.wait_view(lambda view: trains(view, 2, {"1", "2"}))
    shell.wait_for("the job continues without worker 0: 2 workers")
    before = job.identities()
    recover = job.recover()
    recover.wait_for("starting worker 0\n")
    job.wait_view(lambda view: trains(view, 3, {"0", "1", "2"}))
    assert changed(job, before) == {"worker_0"}
    for size, nodes in ((4, {"0", "1", "2", "3"}), (3, {"0", "1", "2"}), (4, {"0", "1", "2", "3"})):
        scaled = job.tool("scale", str(size))
        assert scaled.end() == 0, scaled.text
        job.wait_view(lambda view, size=size, nodes=nodes: trains(view, size, nodes))  # type: ignore[misc]
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert shell.end() == 0, shell.text
    assert json.loads((job.log_dir / "start.json").read_text())["nodes"] == ["0", "1", "2", "3"]


def test_needed_worker_is_not_removed(job: ShellJob) -> None:
    shell = job.run(*ENDLESS)
    job.wait_training()
    for words, said in (
        (
            ("scale", "--remove", "1"),
            "MIN_WORKER_NUM=3: without worker 1 the job has 2 workers and 0 spares, and would wait",
        ),
        (("scale", "--remove", "9"), "no worker 9 of this job runs here; expected one or more of 0, 1, 2"),
    ):
        refused = job.tool(*words)
        assert refused.end() == 80
        assert said in refused.text
    assert len(job.running()) == 4
    shell.send(signal.SIGINT)
    assert shell.end() == 78
    assert add(job).end() == 80


def test_added_worker_is_recovered_without_a_follower(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD, **ELASTIC)
    job.wait_view(lambda view: trains(view, 2, {"0", "1"}))
    assert add(job).end() == 0
    job.wait_view(lambda view: trains(view, 3, {"0", "1", "2"}))
    shell.send(signal.SIGKILL)
    shell.process.wait(WAIT_S)
    for name in ("scheduler", "worker_0", "worker_1", "worker_2"):
        job.kill(name)
    recover = job.recover()
    recover.wait_for("starting the scheduler, worker 0, worker 1, worker 2\n")
    job.wait_view(lambda view: trains(view, 3, {"0", "1", "2"}))
    job.let_finish()
    assert recover.end() == 0, recover.text


def test_incomplete_world_starts_after_its_grace(job: ShellJob) -> None:
    held = job.folder / "held"
    held.touch()
    shell = job.run(
        *UNTIL_TOLD,
        "--not-while",
        "held",
        "--only-node",
        "2",
        MIN_WORKER_NUM="2",
        MAX_WORKER_NUM="3",
        GRACE="start=0.5",
    )
    job.wait_view(lambda view: trains(view, 2, {"0", "1"}))
    shell.wait_for(r"· step [\d,]+ .*2/2 workers \(3 wanted\)")
    held.unlink()
    job.wait_view(lambda view: trains(view, 3, {"0", "1", "2"}))
    shell.wait_for("worker 2 joined: 3 workers")
    job.let_finish()
    assert shell.end() == 0, shell.text
