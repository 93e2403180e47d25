"""Mistakes in the environment: messages of ``run.sh`` and of a script started by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tests.launcher.shell_job import ROOT, ShellJob
from tests.mistakes.mistake import RECOVER, Mistake
from tests.mistakes.told import Told

pytestmark = pytest.mark.system

PYTHON = str(ROOT / ".venv" / "bin" / "python")
INIT = "import samebits\n\nsamebits.init()\n"


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable with its wrong value, the message, and the exit status."""

    name: str
    value: str
    says: str
    status: int = 64


SETTINGS = (
    Setting("LOG_DIR", "/dev/null/logs", r"LOG_DIR: /dev/null is not a folder\. Fix: export LOG_DIR=<a folder>"),
    Setting("RECOVERY_PATH", "/dev/null/r", r"RECOVERY_PATH: /dev/null is not a folder\. Fix: export RECOVERY_PATH=<a"),
    Setting("CHECKPOINT_PATH", "/dev/null/c", r"CHECKPOINT_PATH: /dev/null is not a folder\. Fix: export CHECKPOINT"),
)


@pytest.mark.parametrize("setting", SETTINGS, ids=[one.name for one in SETTINGS])
def test_unwritable_folder_is_reported_before_anything_is_started(setting: Setting, job: ShellJob, told: Told) -> None:
    told.fact("the script's call")
    shell = job.run("--steps", "5", **{setting.name: setting.value})
    status = shell.end()
    Mistake("", "", (setting.says,), setting.status, never=("Traceback", "mkdir", "started")).judge(
        status, shell.text, ""
    )
    assert not list(job.folder.rglob("*.pid"))
    told.note(f"{setting.name} cannot be a folder", shell, setting.says)


def test_misspelt_variable_is_reported_on_the_terminal_and_the_job_runs(job: ShellJob, told: Told) -> None:
    told.fact("the script's call")
    shell = job.run("--steps", "5", WORKER_NUMS="8", MS_SCHED_PROT="9")
    assert shell.end() == 0, shell.text
    assert shell.text.count("WORKER_NUMS=8 is not a known variable: did you mean WORKER_NUM? Fix: ") == 1
    assert "MS_SCHED_PROT=9 is not a known variable: did you mean MS_SCHED_PORT? Fix: " in shell.text
    told.note("a misspelt variable", shell, "is not a known variable")


def test_script_started_by_hand_gets_one_line_on_how_to_start_it(job: ShellJob, told: Told) -> None:
    (job.folder / "train.py").write_text(INIT)
    told.fact("the script's call")
    shell = job.shell(PYTHON, "train.py", RANK="0")  # as torchrun would
    assert shell.end() == 64
    lines = shell.text.splitlines()
    assert len(lines) == 1, shell.text
    assert lines[0].startswith("samebits: ROLE and WORKER_NUM are not set")
    assert re.search(r"Fix: start the script with `\S*samebits run train\.py`", lines[0]), lines[0]
    told.note("a script that is started by hand", shell, "Fix")


def test_no_message_mentions_recover_sh_with_recovery_off(job: ShellJob, told: Told) -> None:
    shell = job.run("--steps", "100000000", ENABLE_RECOVERY="0")
    job.wait_training()
    told.fact("the kill")
    pid = job.kill("worker_1").pid
    status = shell.end()
    death = rf"worker 1 \(pid {pid}\) was killed by signal 9 \(SIGKILL\)"
    said = (
        # whichever saw it first
        rf"^samebits: ({death} \(ENABLE_RECOVERY=0: the job ends\)|the first process to end: {death})$"
    )
    Mistake("", "", (said,), 76, never=(RECOVER, "brings it back")).judge(status, shell.text, job.tails())
    for name in ("worker_0", "worker_2", "scheduler"):
        assert "recover.sh" not in job.log(name)
    told.note("a lost worker with ENABLE_RECOVERY=0", shell, said)


def test_killed_worker_and_spare_are_reported_without_their_logs(job: ShellJob, told: Told) -> None:
    shell = job.run("--steps", "100000000", SPARE_NUM="1")
    job.wait_view(lambda view: view.phase == "training" and view.spares_alive == 1 and view.step >= 3)
    told.fact("the kill")
    spare = job.kill("worker_3").pid
    said = shell.wait_for(rf"samebits: spare 3 \(pid {spare}\) .*\n")[0]
    assert said.startswith(f"samebits: spare 3 (pid {spare}) was killed by signal 9 (SIGKILL). Fix: bash ")
    told.note("a spare that is killed", shell, rf"spare 3 \(pid {spare}\)")
    told.fact("the kill")
    worker = job.kill("worker_1").pid
    said = shell.wait_for(rf"samebits: worker 1 \(pid {worker}\) .*\n")[0]
    assert "(SIGKILL); the others wait for it until" in said
    told.note("a worker that is killed", shell, rf"worker 1 \(pid {worker}\)")
    assert "loss" not in said and "epoch" not in said
    shell.process.send_signal(2)
    assert shell.end() == 78, shell.text
    status = job.tool("status")
    assert status.end() == 0
    assert "2 processes were lost so far; the last: worker 3: its connection closed" in status.text
