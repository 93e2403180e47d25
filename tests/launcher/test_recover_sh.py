"""recover.sh through the shell: restarts exactly what was killed, from the folder alone."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from samebits import config
from samebits.account.job_view import PresenceState
from samebits.config import fixed_settings
from samebits.core.messages import PROTOCOL, SCHEMA, Admitted, Credential, Leave, Process, Refused, Register
from samebits.store.process_identity import ProcessIdentity, host_id
from tests.hostile.attackers import dealers
from tests.launcher.shell_job import ENDLESS, ROOT, UNTIL_TOLD, WAIT_S, WORKER, ShellJob

pytestmark = pytest.mark.system

WORKERS = ("worker_0", "worker_1", "worker_2")
ALL_THERE = "nothing to do: every process of the job is there"


def test_killed_worker_is_restarted_while_run_sh_stays(job: ShellJob) -> None:
    shell = job.run_sh(*UNTIL_TOLD, "--say", "a 'b' $c")
    job.wait_training()
    before = job.identities()
    job.kill("worker_1")
    shell.wait_for(r"worker 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\).*Fix: bash .*recover\.sh brings it back")
    recover = job.recover_sh()
    job.wait_training(generation=2)
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert shell.end() == 0, shell.text
    assert "starting worker 1\n" in recover.text
    assert "worker 1 was started again (pid" in shell.text
    after = job.identities()
    assert {name for name in after if after[name] != before[name]} == {"worker_1"}
    assert job.log("worker_1").count("says \"a 'b' $c\"") == 2  # same arguments, same log
    for name in WORKERS:
        assert "final step=" in job.log(name)


def test_detached_recovery_leaves_the_job_running(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    job.kill_everything(shell)
    recover = job.recover("--detach")
    assert recover.end() == 0, recover.text
    assert re.search(r"the job runs without this command; `.*samebits follow` follows it\n", recover.text)
    assert sorted(job.running()) == ["scheduler", *WORKERS]
    job.wait_training(generation=2)
    follower = job.tool("follow")
    follower.wait_for(r" · 1 recovery, \d")  # as in the history, which numbers the next one 2
    job.let_finish()
    assert follower.end() == 0, follower.text


def test_environment_is_the_jobs_not_the_shells(job: ShellJob) -> None:
    shell = job.run(*ENDLESS, OMP_NUM_THREADS="3", DATA_PATH="/a folder/with 'quotes'")
    job.wait_training()
    job.kill("worker_0")
    recover = job.recover(
        OMP_NUM_THREADS="7", CUDA_VISIBLE_DEVICES="1", NODE_TIMEOUT="99", MS_NODE_ID="sched", MS_WORKER_NUM="9"
    )
    job.wait_training(generation=2)
    words = job.proc_environment("worker_0")
    assert (words["OMP_NUM_THREADS"], words["NODE_TIMEOUT"], words["NODE_ID"]) == ("3", "3", "0")
    assert words["DATA_PATH"] == "/a folder/with 'quotes'"
    assert not {"CUDA_VISIBLE_DEVICES", "MS_NODE_ID", "MS_WORKER_NUM"} & set(words)
    recover.send(signal.SIGINT)
    assert recover.end() == 78
    assert shell.end() == 78  # the job was ended for all its followers
    assert job.running() == []


def test_only_a_killed_scheduler_is_restarted(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    before = job.identities()
    job.kill("scheduler")
    shell.wait_for(
        r"the scheduler \(pid \d+\) was killed by signal 9 \(SIGKILL\); the ranks go on until one of them is lost"
    )
    recover = job.recover()
    seen = job.wait_view(lambda view: view.term == 2 and view.alive == 3)
    assert seen.generation == 1
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert shell.end() == 0, shell.text
    assert "starting the scheduler\n" in recover.text
    after = job.identities()
    assert {name for name in after if after[name] != before[name]} == {"scheduler"}


def test_scheduler_that_returned_and_finished_between_two_checks_is_accepted(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    job.kill("scheduler")
    shell.wait_for(r"the ranks go on until one of them is lost")
    shell.send(signal.SIGSTOP)
    recover = job.recover()
    job.wait_view(lambda view: view.term == 2 and view.alive == 3)
    job.let_finish()
    assert recover.end() == 0, recover.text
    shell.send(signal.SIGCONT)
    assert shell.end() == 0, shell.text
    assert "samebits: job finished at step" in shell.text


def test_everything_killed_is_restarted(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    for name in ("scheduler", *WORKERS):
        job.kill(name)
    assert shell.end() == 77, shell.text
    assert "continues from there" in shell.text
    assert "the job was interrupted at step" not in shell.text, "the step is unknown"
    recover = job.recover()
    job.wait_training(generation=2)
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert "starting the scheduler, worker 0, worker 1, worker 2" in recover.text


def test_job_resumes_after_ctrl_c_without_a_cool_down(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD, REGISTER_COOLDOWN="3600")
    job.wait_training()
    shell.send(signal.SIGINT)
    assert shell.end() == 78
    job.let_finish()
    recover = job.recover()
    assert recover.end() == 0, recover.text


def test_stopped_worker_that_counts_as_lost_is_ended_and_replaced(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    stopped = job.kill("worker_2", signal.SIGSTOP)
    job.wait_view(lambda view: view.workers[2].presence is PresenceState.LOST)
    assert stopped.is_alive()  # run.sh's follower ends no process on its own
    recover = job.recover()
    job.wait_training(generation=2)
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert f"ending worker 2 (pid {stopped.pid}), which counts as lost" in recover.text
    assert not stopped.is_alive()
    assert shell.end() == 0, shell.text


def test_two_simultaneous_calls_start_one_replacement(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    job.kill("worker_1")
    both = [job.recover(), job.recover()]
    for one in both:
        one.wait_for("starting worker 1|nothing to do")
    job.wait_training(generation=2)
    job.let_finish()
    assert [one.end() for one in both] == [0, 0], both[0].text + both[1].text
    assert sum("starting worker 1" in one.text for one in both) == 1
    assert sum(ALL_THERE in one.text for one in both) == 1
    assert shell.end() == 0


def test_scheduler_that_gave_up_while_the_workers_started_is_started_too(job: ShellJob) -> None:
    """All workers die, and their replacements take longer to start than the scheduler waits."""
    shell = job.run(*UNTIL_TOLD, "--not-while", "slow")
    job.wait_training()
    slow = job.folder / "slow"
    slow.touch()
    for name in WORKERS:
        job.kill(name)
    recover = job.recover()
    recover.wait_for("the scheduler gave up")
    slow.unlink()
    job.wait_training(generation=2)
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert "starting worker 0, worker 1, worker 2\n" in recover.text
    assert "the scheduler gave up while the workers were starting" in recover.text
    assert "starting the scheduler\n" in recover.text
    assert shell.end() in (0, 77), shell.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_job_outlives_its_followers(job: ShellJob, number: signal.Signals) -> None:
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    before = job.identities()
    shell.send(number)
    assert shell.process.wait(WAIT_S) == -number
    assert len(job.running()) == 4
    first = job.recover()
    first.wait_for(ALL_THERE)
    first.wait_for(r"· step [1-9]")
    first.send(number)
    assert first.process.wait(WAIT_S) == -number
    second = job.recover()
    second.wait_for(ALL_THERE)
    job.let_finish()
    assert second.end() == 0, second.text
    assert "job finished at step" in second.text
    assert job.identities() == before


def test_pid_file_of_a_foreign_process_does_no_harm(job: ShellJob) -> None:
    """The pid has been reused. Its new process is neither taken for the worker nor signalled."""
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    job.kill("worker_1")
    stranger = job.shell("sleep", "600")
    (job.log_dir / "worker_1.pid").write_text(f"{stranger.process.pid} 1\n")
    recover = job.recover()
    job.wait_training(generation=2)
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert shell.end() == 0
    assert ProcessIdentity.of(stranger.process.pid) is not None
    stranger.send(signal.SIGKILL)
    stranger.process.wait(WAIT_S)


def test_other_jobs_scheduler_on_the_same_port_is_ignored(job: ShellJob, new_job: Callable[..., ShellJob]) -> None:
    """Ctrl-C in the first job's follower must not end the second job."""
    shell = job.run(*ENDLESS)
    job.wait_training()
    job.kill("scheduler")
    shell.wait_for("the ranks go on until one of them is lost")
    second = new_job("second", SCHED_PORT=str(job.port))
    other = second.run(*UNTIL_TOLD, JOB_NAME="second")
    second.wait_training()
    shell.wait_for(f"the scheduler at .*SCHED_PORT={job.port} runs another job: job .* \\(second\\)")
    status = job.tool("status")
    assert status.end() == 0
    assert "(second)" not in status.text, "the other's processes would be taken for this job's"
    assert "no scheduler answers at" in status.text
    recover = job.recover()
    recover.wait_for("the scheduler at SCHED_PORT=.* serves job .*, but this folder belongs to job")
    recover.wait_for("the scheduler .* ended with status 75: .*; the ranks go on until one of them is lost")
    recover.send(signal.SIGINT)
    assert recover.end() == 78, recover.text
    assert "runs another job" not in recover.text, "reported already"
    assert shell.end() != 0
    assert job.running() == []
    assert len(second.running()) == 4
    second.let_finish()
    assert other.end() == 0, other.text


def test_process_killed_while_run_sh_is_gone_is_found(job: ShellJob) -> None:
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    shell.send(signal.SIGKILL)
    shell.process.wait(WAIT_S)
    job.kill("worker_0")
    job.kill("scheduler")
    recover = job.recover()
    job.wait_training(generation=2)
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert "starting the scheduler, worker 0\n" in recover.text


def test_log_folder_elsewhere_is_found_again(job: ShellJob) -> None:
    elsewhere = job.folder.parent / "logs of all jobs"
    shell = job.run(*UNTIL_TOLD, LOG_DIR=str(elsewhere))
    job.wait_training()
    shell.send(signal.SIGKILL)
    shell.process.wait(WAIT_S)
    again = job.recover()
    again.wait_for(ALL_THERE)
    job.let_finish()
    assert again.end() == 0, again.text
    assert "final step=" in (elsewhere / "worker_0.log").read_text()
    assert [entry.name for entry in job.log_dir.iterdir()] == ["elsewhere"]


def give_itself_out_for(job: ShellJob, node: str, victim: ProcessIdentity) -> None:
    """Let a stranger register under this node id with another process's identity, get the seat, and leave."""
    settings, _ = config.read({**job.settings, "ROLE": "scheduler", "ENABLE_RECOVERY": "1"})
    session = "s" * 32
    process = Process(host_id(), victim.pid, victim.started_at, "cpu")
    asking = Register(PROTOCOL, "", WORKER.name, node, session, 0, process, fixed_settings(settings))
    with dealers(job.port, [session.encode()]) as (stranger,):
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            stranger.send(SCHEMA.pack(asking))
            assert stranger.poll(int(WAIT_S * 1000))
            answer = SCHEMA.unpack(stranger.recv(), 1 << 20)
            if isinstance(answer, Refused):
                time.sleep(answer.retry_after_s)
            elif isinstance(answer, Admitted):
                sender = Credential(answer.job, node, session, answer.incarnation)
                stranger.send(SCHEMA.pack(Leave(sender, False, "gone")))
                job.wait_view(lambda view: view.workers[1].presence is not PresenceState.ALIVE)
                return
    raise AssertionError("the stranger was not seated")


def test_stranger_cannot_choose_a_process_to_be_ended(job: ShellJob) -> None:
    """A stranger registers with the pid and start time of one of this user's processes, and leaves."""
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    victim = ProcessIdentity.of(bystander.pid)
    assert victim is not None
    try:
        shell = job.run(*UNTIL_TOLD)
        job.wait_training()
        job.kill("worker_1")
        give_itself_out_for(job, "1", victim)
        recover = job.recover()
        job.wait_training(generation=2)
        job.let_finish()
        assert recover.end() == 0, recover.text
        assert shell.end() == 0, shell.text
        assert f"registered as pid {victim.pid}, which no command started here" in recover.text
        assert "ending worker 1" not in recover.text
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(WAIT_S)


def test_full_log_folder_ends_no_process_of_a_healthy_job(job: ShellJob) -> None:
    """A file size limit (setrlimit(2)) imitates a full disk: no new file gets a byte."""
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    job.kill("worker_1")
    before = job.identities()
    script = str(ROOT / "scripts" / "recover.sh")
    full = job.shell(
        "bash", "-c", f"trap '' XFSZ; ulimit -f 0; exec bash '{script}' 2>&1 | cat; exit ${{PIPESTATUS[0]}}"
    )
    assert full.end() == 71, full.text
    assert "worker_1.pid: writing 64 bytes failed: File too large (EFBIG)" in full.text
    assert job.identities() == before
    assert sorted(job.running()) == ["scheduler", "worker_0", "worker_2"]
    recover = job.recover()
    job.wait_training(generation=2)
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert shell.end() == 0, shell.text
