"""A supervised job through the shell: everything that is killed is restarted without delay."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from samebits.account.job_view import JobView
from samebits.errors import JobInterruptedError, JobStoppedError
from samebits.launcher.processes import send_signal
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.shell_job import POLL_S, UNTIL_TOLD, WAIT_S, Shell, ShellJob
from tests.service.house import remove_folder

pytestmark = pytest.mark.system

SUPERVISED = {"MAX_RESTARTS": "100", "REGISTER_COOLDOWN": "3600"}


def trains(view: JobView, *nodes: str) -> bool:
    """Return whether these nodes train, in the order of their slots."""
    return (view.phase, view.alive) == ("training", 3) and tuple(worker.node for worker in view.workers) == nodes


def test_everything_killed_is_restarted_automatically(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD, **SUPERVISED)
    job.wait_training()
    job.kill("worker_1")
    shell.wait_for(r"worker 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\); a new process is started in its place\n")
    shell.wait_for(r"worker 1 \(second process, pid \d+\) took the place of pid \d+\n")
    job.wait_view(lambda view: trains(view, "0", "1.1", "2"))
    job.kill("scheduler")
    shell.wait_for(r"the scheduler \(pid \d+\) was killed by signal 9 \(SIGKILL\)\n")
    shell.wait_for(r"the scheduler was started again \(pid \d+\)\n")
    job.wait_view(lambda view: trains(view, "0", "1.1", "2") and view.term == 2)
    job.kill("worker_1.1")
    job.wait_view(lambda view: trains(view, "0", "1.2", "2"))
    assert set(job.identities()) == {"scheduler", "worker_0", "worker_1.2", "worker_2"}

    shell.process.kill()
    shell.process.wait(WAIT_S)
    job.kill("worker_0")
    recover = job.recover()
    job.wait_view(lambda view: trains(view, "0.1", "1.2", "2"))
    job.kill("worker_2")
    recover.wait_for(r"worker 2 \(second process, pid \d+\) took ")
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert "took the place of worker" not in recover.text


def test_stopped_worker_is_named_ended_and_replaced(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD, **SUPERVISED, HANG="end:1")
    job.wait_training()
    stopped = job.kill("worker_1", signal.SIGSTOP)
    said = shell.wait_for(
        rf"worker 1 \(rank 1, pid {stopped.pid}\) is stopped \(SIGSTOP\); its threads: (.+\.txt)\. "
        rf"Fix: kill -CONT {stopped.pid}\n"
    )
    assert "state T" in Path(said[1]).read_text()
    shell.wait_for(rf"worker 1 \(pid {stopped.pid}\) is stopped \(SIGSTOP\), \d+ s after it was lost: it is ended ")
    shell.wait_for(r"worker 1 \(second process, pid \d+\) took the place of pid \d+\n")
    job.wait_view(lambda view: trains(view, "0", "1.1", "2"))
    assert r"it is stopped (SIGSTOP). Fix: kill -CONT" in job.log("scheduler")
    job.let_finish()
    assert shell.end() == 0, shell.text


def test_job_survives_the_removal_of_its_recovery_folder(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD, **SUPERVISED)
    began = job.wait_training()
    remove_folder(job.folder / "recovery")
    job.kill("worker_1")
    job.wait_view(lambda view: trains(view, "0", "1.1", "2") and view.workers[1].step > (view.restore_step or 0))
    assert "This scheduler rewrites everything there from memory" in job.log("scheduler")
    remove_folder(job.folder / "recovery")
    job.kill("scheduler")
    job.wait_view(lambda view: view.job != began.job)  # until the job is rebuilt
    follower = ProcessIdentity.of(shell.process.pid)
    assert follower is not None
    send_signal(follower, signal.SIGSTOP)  # it does not learn that the job is rebuilt before worker 2 has died
    job.wait_view(lambda view: trains(view, "0", "1.1", "2") and (view.job, view.term > 1) == (began.job, True))
    job.kill("worker_2")
    send_signal(follower, signal.SIGCONT)
    job.wait_view(lambda view: trains(view, "0", "1.1", "2.1"))
    job.let_finish()
    assert shell.end() == 0, shell.text


NODE_TIMEOUT_S = 1.0
"""A job without workers is given up after twice this time."""


def kill_all_while_imports_are_slow(job: ShellJob) -> Shell:
    """Kill all workers of a supervised job whose replacements import until ``importing`` is removed."""
    slow = {**SUPERVISED, "NODE_TIMEOUT": str(NODE_TIMEOUT_S)}
    shell = job.run(*UNTIL_TOLD, "--not-while", "importing", **slow)
    job.wait_training()
    (job.folder / "importing").touch()
    job.kill_at_once("worker_0", "worker_1", "worker_2")
    shell.wait_until(lambda: {"worker_0.1", "worker_1.1", "worker_2.1"} <= set(job.running()))
    return shell


def test_replacements_with_long_imports_are_waited_for(job: ShellJob) -> None:
    shell = kill_all_while_imports_are_slow(job)
    time.sleep(4 * NODE_TIMEOUT_S)  # the imports
    assert "scheduler" in job.running(), job.log("scheduler")
    (job.folder / "importing").unlink()
    job.wait_view(lambda view: trains(view, "0.1", "1.1", "2.1"))
    job.let_finish()
    assert shell.end() == 0, shell.text


def test_replacements_starting_when_the_job_ends_are_not_left_behind(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD, "--not-while", "importing", **SUPERVISED, RESET_LIMIT="1")
    job.wait_training()
    job.kill("worker_1")
    job.wait_training(generation=2)
    (job.folder / "importing").touch()
    job.kill_at_once("worker_0", "worker_1.1", "worker_2")
    assert shell.end() == JobInterruptedError.exit_code, shell.text
    assert "training restarted 1 times (RESET_LIMIT)" in shell.text
    assert job.running() == []


@pytest.mark.thorough
def test_everything_dies_with_the_supervisor_on_request(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD, options=(), **SUPERVISED, DIE_WITH_ME="1")
    job.wait_training()
    job.kill("worker_1")
    shell.wait_for(r"worker 1 \(second process, pid \d+\) took the place of pid \d+\n")
    job.wait_view(lambda view: trains(view, "0", "1.1", "2"))
    shell.process.kill()
    shell.process.wait(WAIT_S)
    started = job.identities()
    assert set(started) == {"scheduler", "worker_0", "worker_1.1", "worker_2"}
    assert all(identity.wait_for_exit(WAIT_S) for identity in started.values())


def test_failing_scheduler_start_is_reported_once_and_the_job_can_be_stopped(job: ShellJob) -> None:
    """RECOVERY_PATH is unusable for a while. Training continues, and stop reaches the supervisor."""
    shell = job.run(*UNTIL_TOLD, **SUPERVISED)
    job.wait_training()
    recovery = job.folder / "recovery"
    recovery.chmod(0o1777)
    job.kill("scheduler")
    shell.wait_for(r"the scheduler \(pid \d+\) ended with status 71: .*other users can write to this folder")
    seen = {job.identity("scheduler")}
    deadline = time.monotonic() + WAIT_S
    while len(seen) < 3 and time.monotonic() < deadline:
        seen.add(job.identity("scheduler"))
        time.sleep(POLL_S)
    recovery.chmod(0o700)
    shell.wait_for(r"the scheduler is reachable again\n")
    assert len(seen) == 3 and shell.text.count("ended with status 71") == 1, shell.text
    assert shell.text.count("the scheduler was started again") <= 2, shell.text
    recovery.chmod(0o1777)
    job.kill("scheduler")
    shell.wait_for(r"(?s)reachable again\n.*ended with status 71: .*other users can write to this folder")
    stop = job.tool("stop")
    assert stop.end() == 0, stop.text
    assert f"the command that follows the job (pid {shell.process.pid}" in stop.text
    assert shell.end() == JobStoppedError.exit_code, shell.text
    assert job.running() == []
