"""Ctrl-C ends the whole job in every phase, with the same messages from run.sh and recover.sh."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from samebits.account.job_view import JobView
from tests.launcher.shell_job import ENDLESS, Shell, ShellJob
from tests.mistakes.told import Told

pytestmark = pytest.mark.system

HELD = "held"


def is_filling(view: JobView) -> bool:
    return view.phase == "filling; waiting for 2" and view.alive == 2


def is_forming(view: JobView) -> bool:
    return view.phase.startswith("forming; waiting for") and view.alive == 2


def is_training(view: JobView) -> bool:
    return view.phase == "training" and view.alive == 3 and view.step >= 3


def is_finishing(view: JobView) -> bool:
    return view.training_finished and view.alive == 3


MOMENTS: dict[str, tuple[Callable[[JobView], bool], tuple[str, ...], int]] = {
    "filling": (is_filling, (*ENDLESS, "--not-while", HELD, "--only-node", "2"), 78),
    "forming": (is_forming, ENDLESS, 78),
    "training": (is_training, ENDLESS, 78),
    "finishing": (is_finishing, ("--steps", "5", "--linger-while", HELD), 78),
}


def bring_to(job: ShellJob, shell: Shell, moment: str) -> None:
    if moment == "forming":
        job.wait_view(is_training)
        job.kill("worker_1")
        shell.wait_for(r"worker 1 \(pid \d+\) (was killed by signal 9|is gone)")
    job.wait_view(MOMENTS[moment][0])


@pytest.mark.parametrize(
    ("script", "moment"),
    [
        *(("run.sh", moment) for moment in MOMENTS),
        ("recover.sh", "training"),
        # Both scripts become the same follower.
        *(pytest.param("recover.sh", moment, marks=pytest.mark.thorough) for moment in MOMENTS if moment != "training"),
    ],
)
def test_ctrl_c_ends_the_job(job: ShellJob, told: Told, script: str, moment: str) -> None:
    _, arguments, expected = MOMENTS[moment]
    (job.folder / HELD).touch()
    shell = job.run(*arguments)
    if script == "recover.sh":
        job.wait_view(MOMENTS["filling" if moment == "filling" else moment if moment == "finishing" else "training"][0])
        shell.process.kill()  # kill -9 of the first follower changes nothing
        shell.process.wait()
        shell = job.recover()
        shell.wait_for("nothing to do: every process of the job is there")
        shell.wait_for("· step")  # it follows now; before that Ctrl-C ends the script alone
    bring_to(job, shell, moment)
    told.fact("the key")
    os.killpg(shell.process.pid, signal.SIGINT)  # as a terminal does
    assert shell.end() == expected, shell.text
    assert "samebits: Ctrl-C: ending the job\n" in shell.text
    told.note(f"Ctrl-C in {script}, {moment}", shell, "Ctrl-C: ending the job")
    assert ("the job was stopped" in shell.text) is (expected == 78), shell.text
    assert "job finished" not in shell.text, shell.text
    assert "Traceback" not in shell.text
    assert job.running() == []
