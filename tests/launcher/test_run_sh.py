"""run.sh through the shell: start, follow, end, refuse. The workers count steps without torch."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits import config
from samebits.account.job_view import PresenceState
from samebits.errors import SettingsError, StoreError
from samebits.launcher.follower import naming_what_runs_on
from samebits.net.address import check_free
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.shell_job import ENDLESS, ROOT, UNTIL_TOLD, WAIT_S, WORKER, Shell, ShellJob, free_port

pytestmark = pytest.mark.system


def run_through_bash(job: ShellJob, line: str) -> Shell:
    """Run this line of bash, in which ``"$@"`` is ``run.sh tiny_worker.py``."""
    words = ("bash", str(ROOT / "scripts" / "run.sh"), str(WORKER), "--steps", "30")
    return job.shell("bash", "-c", line, "bash", *words, **job.settings)


@pytest.mark.parametrize("line", ['"$@" <&- >&- 2>&-', '"$@" | true', '"$@" >/dev/full'])
def test_job_is_followed_to_its_end_whatever_happens_to_the_output(job: ShellJob, line: str) -> None:
    shell = run_through_bash(job, f"set -o pipefail; {line}")
    assert shell.end() == 0, shell.text
    assert "job finished" in job.log("scheduler")
    assert job.running() == []
    assert ("samebits: standard output is lost" in shell.text) == ("2>&-" not in line)
    assert "Traceback" not in shell.text


@pytest.mark.parametrize("limit", [12, 20, 60])
def test_nothing_is_started_without_descriptors(limit: int, job: ShellJob) -> None:
    shell = run_through_bash(job, f'ulimit -n {limit}; "$@"')
    assert shell.end() == SettingsError.exit_code, shell.text
    (said,) = [line for line in shell.all_lines() if line.startswith("samebits: ")]
    assert f"the hard limit of open files is {limit}, and a process of this job needs" in said
    assert "Fix: raise it with `ulimit -n" in said
    assert "Traceback" not in shell.text
    assert not job.log_dir.exists()


def test_low_soft_limit_is_raised(job: ShellJob) -> None:
    shell = run_through_bash(job, 'ulimit -Sn 20; "$@"')
    assert shell.end() == 0, shell.text
    assert "job finished" in job.log("scheduler")


def test_error_of_the_command_itself_names_what_keeps_running(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings, _ = config.read({"ROLE": "scheduler", "WORKER_NUM": "1", "LOG_DIR": str(tmp_path)})
    (tmp_path / "worker_0.pid").write_text(ProcessIdentity.current().to_line())
    with pytest.raises(SystemExit, match="1"), naming_what_runs_on(settings):
        {}["a mistake"]
    said = capfd.readouterr().err
    assert re.search(r"samebits: this command failed: KeyError: 'a mistake' \(test_run_sh\.py, line \d+\)", said)
    assert f"starts nothing again any more: worker 0 (pid {os.getpid()}). Fix: " in said
    with pytest.raises(StoreError, match=r"EMFILE.*\n.*worker 0"), naming_what_runs_on(settings):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc/1/stat")


def test_job_runs_to_its_end_and_the_next_one_moves_it_aside(job: ShellJob) -> None:
    awkward = 'it\'s "$HOME" *'
    first = job.run_sh("--steps", "30", "--say", awkward)
    assert first.end() == 0, first.text
    assert "job finished at step 30" in first.text
    assert "loss 0.0333" in first.text
    assert job.running() == []
    kept = json.loads((job.log_dir / "start.json").read_text())
    assert kept["args"] == ["--steps", "30", "--say", awkward]
    assert (kept["folder"], kept["script"]) == (str(job.folder), str(WORKER))
    assert (job.log_dir / "start.json").stat().st_mode & 0o777 == 0o600
    assert f"says {awkward!r}" in job.log("worker_0")

    stale = job.log_dir / "worker_0.1.report"
    stale.write_bytes(b"the step and the loss of a replacement in the first job")
    second = job.run("--steps", "20")
    assert second.end() == 0, second.text
    assert not stale.exists(), "it would be shown as this job's"
    assert "is finished; its folders are moved aside" in second.text
    assert "final step=30" in job.log("worker_0")  # appended to, never overwritten
    assert "final step=20" in job.log("worker_0")
    moved = sorted(entry.name.split(".")[0] for entry in job.folder.iterdir() if entry.name.endswith(".aside"))
    assert moved == ["ckpt_of_rank", "recovery"]

    third = job.recover()
    assert third.end() == 0
    assert "nothing to do: job" in third.text
    assert "is finished at step 20" in third.text


def test_environment_of_every_process(job: ShellJob) -> None:
    shell = job.run(*ENDLESS, options=("--detach",), MS_NODE_ID="7", MS_ROLE="MS_SCHED", NODE_ID="9", ROLE="bogus")
    assert shell.end() == 0, shell.text
    seen = job.wait_training()
    assert [(worker.node, worker.slot) for worker in seen.workers] == [("0", 0), ("1", 1), ("2", 2)]
    for name in job.identities():
        environment = job.proc_environment(name)
        assert environment["ENABLE_RECOVERY"] == "1"
        assert environment["OMP_NUM_THREADS"] == "1"
        assert environment["JOB_NAME"] == "tiny_worker.py"
        assert environment["ROLE"] == ("scheduler" if name == "scheduler" else "worker")
        assert environment.get("NODE_ID") == (None if name == "scheduler" else name.removeprefix("worker_"))
    assert len({os.getsid(identity.pid) for identity in job.identities().values()}) == 4
    for identity in job.identities().values():
        opened = {link.name: str(link.readlink()) for link in Path(f"/proc/{identity.pid}/fd").iterdir()}
        assert opened["0"] == "/dev/null"
        assert not any("start.lock" in target for target in opened.values())
    stop = job.tool("stop")
    assert stop.end() == 0, stop.text
    assert job.running() == []


def test_users_settings_are_kept(job: ShellJob) -> None:
    job.settings["MS_WORKER_NUM"] = job.settings.pop("WORKER_NUM")
    shell = job.run("--steps", "5", MS_ENABLE_RECOVERY="0", OMP_NUM_THREADS="2", MS_JOB_NAME="mine")
    assert shell.end() == 0, shell.text
    kept = json.loads((job.log_dir / "start.json").read_text())["environment"]
    assert (kept["MS_WORKER_NUM"], kept["MS_ENABLE_RECOVERY"], kept["MS_JOB_NAME"]) == ("3", "0", "mine")
    assert kept["OMP_NUM_THREADS"] == "2"
    assert not {"WORKER_NUM", "ENABLE_RECOVERY", "JOB_NAME", "CLUSTER_SECRET"} & set(kept)
    job.settings["WORKER_NUM"] = "3"


def test_status_while_it_runs_and_afterwards(job: ShellJob) -> None:
    nothing = job.tool("status")
    assert nothing.end() == 80
    assert "there is no journal in RECOVERY_PATH=" in nothing.text
    shell = job.run(*ENDLESS)
    job.wait_training()
    table = job.tool("status")
    assert table.end() == 0, table.text
    assert "training · step" in table.text
    assert f"pid {job.identity('worker_2').pid} on {socket.gethostname()}" in table.text
    told = job.tool("status", "--json")
    assert told.end() == 0
    assert json.loads(told.text)["source"] == "scheduler"
    shell.send(signal.SIGINT)
    assert shell.end() == 78
    stored = job.tool("status")
    assert stored.end() == 0
    assert "this is what the journal in" in stored.text
    assert "stopped by Ctrl-C" in stored.text


@pytest.mark.parametrize(("number", "by"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_signal_to_the_follower_ends_the_whole_job(job: ShellJob, number: signal.Signals, by: str) -> None:
    shell = job.run(*ENDLESS)
    job.wait_training()
    shell.send(number)
    assert shell.end() == 78, shell.text
    assert "the job was stopped at step" in shell.text
    assert f"stopped by {by}" in shell.text
    assert "recover.sh" in shell.text
    assert job.running() == []
    check_free(["127.0.0.1"], job.port)  # the port is free


def test_ctrl_c_while_processes_are_being_started_ends_them(job: ShellJob) -> None:
    job.settings["WORKER_NUM"] = "6"
    shell = job.run(*ENDLESS)
    shell.wait_until(lambda: (job.log_dir / "worker_1.pid").exists())
    os.killpg(shell.process.pid, signal.SIGINT)  # as a terminal does
    assert shell.end() == 78, shell.text
    assert job.running() == []


def test_ctrl_c_works_at_every_point_of_a_start(new_job: Callable[..., ShellJob]) -> None:
    """Before anything is started it ends the script, afterwards it ends what was started."""
    statuses = set()
    for number in range(8):
        job = new_job(f"{number}", WORKER_NUM="6")
        shell = job.run_sh(*ENDLESS)
        time.sleep(number * 0.07)  # some time between the script's first line and the follower's
        os.killpg(shell.process.pid, signal.SIGINT)
        statuses.add(shell.end())
        assert job.running() == [], f"{shell.process.returncode}: {shell.text}"
    assert statuses <= {-signal.SIGINT, 128 + signal.SIGINT, 78}


def test_ctrl_c_is_not_lost_while_the_script_becomes_its_follower(job: ShellJob) -> None:
    slow = job.folder / "slow"
    slow.mkdir()
    (slow / "env").write_text(
        f"""#!/bin/bash
if [[ "$*" == *"-m samebits"* ]]; then : >'{slow}/becomes'; sleep 2; fi
exec {shutil.which("env")} "$@"
"""
    )
    (slow / "env").chmod(0o755)
    shell = job.run_sh(*ENDLESS, PATH=f"{slow}:{os.environ['PATH']}")
    shell.wait_until(lambda: (slow / "becomes").exists())
    os.killpg(shell.process.pid, signal.SIGINT)
    assert shell.end() in (-signal.SIGINT, 128 + signal.SIGINT), shell.text
    assert "Traceback" not in shell.text
    assert job.running() == []


def environment_in(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # gone, or another user's


def test_hopeless_start_starts_nothing(job: ShellJob) -> None:
    job.log_dir.mkdir(mode=0o700)
    (job.log_dir / "worker_2.log").symlink_to(job.folder / "victim")
    shell = job.run(*ENDLESS)
    assert shell.end() == 71, shell.text
    assert "worker_2.log is a link or a pipe; expected a file. Fix: remove it" in shell.text
    assert job.identities() == {}
    assert not (job.folder / "victim").exists()


def test_failed_start_leaves_nothing_running(job: ShellJob) -> None:
    (job.log_dir / "worker_2.pid").mkdir(parents=True, mode=0o700)
    job.log_dir.chmod(0o700)
    shell = job.run(*ENDLESS)
    assert shell.end() == 71, shell.text
    assert "worker_2.pid: writing the pid file failed: Is a directory" in shell.text
    assert "the start failed: stopping the processes that were started" in shell.text
    (job.log_dir / "worker_2.pid").rmdir()
    assert sorted(job.identities()) == ["worker_0", "worker_1"]
    assert job.running() == []
    words = os.fsencode(str(job.folder))  # of the third, whose pid was not written down
    assert not [one for one in Path("/proc").glob("[0-9]*/environ") if words in environment_in(one)]


def test_stopped_worker_does_not_survive_ctrl_c(job: ShellJob) -> None:
    shell = job.run(*ENDLESS)
    job.wait_training()
    job.kill("worker_1", signal.SIGSTOP)
    shell.send(signal.SIGINT)
    shell.wait_for("ending the job")
    shell.send(signal.SIGINT)  # the impatient user
    assert shell.end() == 78, shell.text
    assert job.running() == []


def test_closed_pipe_leaves_the_job_alone(job: ShellJob) -> None:
    line = f"bash '{ROOT}/scripts/run.sh' '{WORKER}' --steps 60 | head -n 1; exit ${{PIPESTATUS[0]}}"
    shell = job.shell("bash", "-c", line, **job.settings)
    assert shell.end() == 0, shell.text
    assert "final step=60" in job.log("worker_2")


def test_second_run_in_the_same_folder_is_refused_by_name(job: ShellJob) -> None:
    shell = job.run(*ENDLESS)
    job.wait_training()
    before = job.identities()
    same = job.run(*ENDLESS)
    assert same.end() == 73
    assert f"worker 1 (pid {before['worker_1'].pid})" in same.text
    fresh = job.run(*ENDLESS, options=("--fresh",))
    assert fresh.end() == 73
    elsewhere = str(job.folder / "elsewhere")
    other = job.run(*ENDLESS, SCHED_PORT=str(free_port()), RECOVERY_PATH=elsewhere, JOB_NAME="another")
    assert other.end() == 72
    for word in ("tiny_worker.py", str(job.folder / "recovery"), "'another'", elsewhere):
        assert word in other.text
    assert job.identities() == before
    assert len(job.running()) == 4
    shell.send(signal.SIGINT)
    assert shell.end() == 78


def test_unfinished_job_blocks_a_start_until_it_is_moved_on_request(job: ShellJob) -> None:
    shell = job.run(*ENDLESS)
    job.wait_training()
    shell.send(signal.SIGINT)
    assert shell.end() == 78
    refused = job.run("--steps", "10")
    assert refused.end() == 71
    for word in ("tiny_worker.py", "unfinished at step", "3 workers", "recover.sh", "--fresh"):
        assert word in refused.text
    assert job.running() == []
    fresh = job.run_sh("--steps", "10", options=("--fresh",))
    assert fresh.end() == 0, fresh.text
    assert "is unfinished; its folders are moved aside, nothing is deleted" in fresh.text
    assert "job finished at step 10" in fresh.text


def test_job_that_never_began_blocks_no_start(job: ShellJob) -> None:
    """The job's script had an error, or the job was stopped while it formed."""
    shell = job.run("--fail-before")
    assert shell.end() != 0
    (job.folder / "slow").touch()
    second = job.run("--not-while", "slow", *ENDLESS)
    job.wait_view(lambda view: view.phase != "ended")
    second.send(signal.SIGINT)
    assert second.end() == 78, second.text
    assert "never began; its folders are moved aside, nothing is deleted" in second.text
    third = job.run("--steps", "5")
    assert third.end() == 0, third.text
    assert "never began; its folders are moved aside, nothing is deleted" in third.text
    assert "final step=5" in job.log("worker_0")


def take_port(holder: socket.socket, port: int) -> None:
    """Listen on the port, waiting if another process holds it, so that it cannot become free during the test."""
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            holder.bind(("127.0.0.1", port))
            holder.listen()
            return
        except OSError:
            assert time.monotonic() < deadline, f"port {port} was never free"
            time.sleep(0.2)


def test_free_port_is_chosen_and_saved_by_default(job: ShellJob) -> None:
    with socket.socket() as holder:
        take_port(holder, 8118)
        del job.settings["SCHED_PORT"]
        shell = job.run(*UNTIL_TOLD)
        port = shell.wait_for(
            r"the default SCHED_PORT=8118 is in use; this job's scheduler listens on port (\d+)"
        ).group(1)
        assert json.loads((job.log_dir / "start.json").read_text())["environment"]["SCHED_PORT"] == port
        job.settings["SCHED_PORT"] = port
        job.wait_training()
        job.kill("scheduler")
        recover = job.recover()
        job.wait_view(lambda view: view.term == 2)
        job.let_finish()
        assert recover.end() == 0, recover.text
        assert shell.end() == 0, shell.text


def test_port_of_another_jobs_scheduler_names_that_job_and_its_folder(
    job: ShellJob, new_job: Callable[..., ShellJob]
) -> None:
    shell = job.run(*ENDLESS)
    job.wait_training()
    second = new_job("second", SCHED_PORT=str(job.port))
    refused = second.run(*ENDLESS)
    assert refused.end() == 75, refused.text
    (line,) = [line for line in refused.text.splitlines() if "is the scheduler's of" in line]
    assert re.search(rf"SCHED_PORT={job.port} is the scheduler's of job \S+ \(tiny_worker.py\), started in ", line)
    assert str(job.folder) in line
    assert "End it" not in line
    assert len(job.running()) == 4
    shell.send(signal.SIGINT)
    assert shell.end() == 78


def test_used_port_names_its_holder(job: ShellJob) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", job.port))
        holder.listen()
        shell = job.run("--steps", "5")
        assert shell.end() == 75
    assert f"SCHED_PORT={job.port}" in shell.text
    assert f"pid {os.getpid()}" in shell.text
    assert not (job.folder / "recovery").exists()


def test_every_wrong_setting_is_reported_at_once_and_nothing_is_started(job: ShellJob) -> None:
    shell = job.run(WORKER_NUM="0", SCHED_PORT="99999")
    assert shell.end() == 64
    assert "WORKER_NUM=0" in shell.text
    assert "SCHED_PORT=99999" in shell.text
    assert not list(job.log_dir.glob("*.log"))


def test_script_that_cannot_run_is_reported(job: ShellJob) -> None:
    script = str(ROOT / "scripts" / "run.sh")
    for words, expected, status in (
        (["nowhere.py"], "there is no script 'nowhere.py'", 64),
        (["--fest"], "unknown option '--fest'", 64),
        (["--help"], "usage: run.sh", 0),
    ):
        shell = job.shell("bash", script, *words)
        assert shell.end() == status
        assert expected in shell.text
    recover = job.recover_sh()
    assert recover.end() == 80
    assert "no job was started in" in recover.text


def test_death_with_recovery_off_ends_the_job_and_blocks_no_next_one(job: ShellJob) -> None:
    shell = job.run(*ENDLESS, ENABLE_RECOVERY="0")
    job.wait_training()
    pid = job.kill("worker_1").pid
    assert shell.end() == 76, shell.text
    assert f"worker 1 (pid {pid}) was killed by signal 9 (SIGKILL)" in shell.text
    assert "the job failed" in shell.text
    assert job.running() == []
    for name in ("worker_0", "worker_2", "scheduler"):
        assert "worker 1" in job.log(name).splitlines()[-1]
    refused = job.recover()
    assert refused.end() == 76
    assert "ENABLE_RECOVERY=0" in refused.text
    again = job.run("--steps", "5", ENABLE_RECOVERY="0")
    assert again.end() == 0, again.text


def test_schedulers_death_with_recovery_off_ends_everything(job: ShellJob) -> None:
    shell = job.run(*ENDLESS, ENABLE_RECOVERY="0")
    job.wait_training()
    job.kill("scheduler")
    assert shell.end() == 76, shell.text
    assert "the scheduler (pid" in shell.text
    assert job.running() == []


def test_error_in_every_worker_ends_the_job_with_its_text(job: ShellJob) -> None:
    shell = job.run("--steps", "100", "--fail-at", "20")
    assert shell.end() == 87, shell.text
    ends = shell.text.split("the job was ended by its script")[1]
    assert "ValueError: a loss that is no number" in ends
    assert re.search(r"workers? [012].* failed at .*tiny_worker.py:\d+: ValueError", shell.text), shell.text
    assert "Fix: correct the script, then bash" in ends and "recover.sh continues from there" in ends
    again = job.recover()
    assert again.end() == 87, again.text
    assert "ValueError: a loss that is no number" in again.text.split("the job was ended by its script")[1]
    assert "failed twice" not in again.text


def test_script_that_cannot_start_ends_the_job(job: ShellJob) -> None:
    shell = job.run("--fail-before")
    assert shell.end() == 87
    assert "this script cannot even start" in shell.text.split("the job was ended by its script")[1]
    assert job.running() == []


def test_module_names_of_a_project_do_not_interfere(job: ShellJob) -> None:
    """The user has a ``runtime`` package and modules named like ours beside the script."""
    shutil.copy(ROOT / "tests/launcher/tiny_worker.py", job.folder / "train.py")
    (job.folder / "runtime").mkdir()
    (job.folder / "runtime" / "__init__.py").write_text("WHOSE = 'own'\n")
    (job.folder / "core.py").write_text("import runtime\nprint('runtime is', runtime.WHOSE, flush=True)\n")
    for name in ("config", "errors", "commands"):
        (job.folder / f"{name}.py").write_text("raise SystemExit('another module')\n")
    text = (job.folder / "train.py").read_text()
    (job.folder / "train.py").write_text(
        text.replace("from samebits import config\n", "import core\nfrom samebits import config\n")
    )
    shell = job.shell("bash", str(ROOT / "scripts/run.sh"), "train.py", "--steps", "5", **job.settings)
    assert shell.end() == 0, shell.text
    assert "runtime is own" in job.log("worker_0")
    assert "final step=5" in job.log("worker_0")


def test_followers_report_lost_workers_like_the_scheduler(job: ShellJob) -> None:
    shell = job.run(*ENDLESS)
    job.wait_training()
    pid = job.kill("worker_2").pid
    shell.wait_for(
        rf"worker 2 \(pid {pid}\) was killed by signal 9 \(SIGKILL\).*Fix: bash .*recover\.sh brings it back"
    )
    lost = job.wait_view(lambda view: any(worker.presence is PresenceState.LOST for worker in view.workers))
    assert lost.alive == 2
    shell.send(signal.SIGINT)
    assert shell.end() == 78
