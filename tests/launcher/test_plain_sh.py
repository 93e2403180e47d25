"""``samebits run --plain``: an unmodified script survives kills of itself, its launcher and the scheduler."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from samebits.store.process_identity import ProcessIdentity
from tests.launcher.shell_job import WAIT_S, Shell, ShellJob

SCRIPT = Path(__file__).with_name("plain_script.py")
BEGINS = re.compile(r"begins at (\d+) as (\d) of 2, store (\S+), pid (\d+)")

pytestmark = pytest.mark.system


def started(job: ShellJob, *words: str) -> Shell:
    job.settings["WORKER_NUM"] = "2"
    return job.tool("run", "--plain", str(SCRIPT), *words, **job.settings)


def begun(job: ShellJob, runs: int) -> list[tuple[int, int, str, int]]:
    """Wait for this many script starts in the logs; return them all: step, rank, store, pid."""
    deadline = time.monotonic() + WAIT_S
    while True:
        logs = sorted(job.log_dir.glob("worker_*.log"))
        found = [match for log in logs for match in BEGINS.findall(log.read_text())]
        if len(found) >= runs:
            return [(int(step), int(rank), store, int(pid)) for step, rank, store, pid in found]
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def newest(job: ShellJob, runs: int, known: set[int]) -> dict[int, ProcessIdentity]:
    """Return the scripts of the generation after those in ``known``, by rank."""
    scripts = {rank: pid for _, rank, _, pid in begun(job, runs) if pid not in known}
    assert sorted(scripts) == [0, 1]
    known |= set(scripts.values())
    return {rank: ProcessIdentity.of_child(pid) for rank, pid in scripts.items()}


def launcher_of(script: ProcessIdentity) -> int:
    stat = Path(f"/proc/{script.pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def test_kills_of_script_scheduler_and_launcher_restart_it_everywhere(job: ShellJob) -> None:
    shell, known = started(job), set[int]()
    first = newest(job, 2, known)
    os.kill(first[1].pid, signal.SIGKILL)
    second = newest(job, 4, known)
    assert all(script.wait_for_exit(WAIT_S) for script in first.values())

    job.kill("scheduler")
    shell.wait_for("the scheduler was started again")
    assert all(script.is_alive() for script in second.values()), "the scheduler's death ends no script"

    shell.wait_until((job.folder / "step").exists)
    os.kill(launcher_of(second[0]), signal.SIGKILL)
    third = newest(job, 6, known)
    assert all(script.wait_for_exit(WAIT_S) for script in second.values()), "none outlives its launcher"

    (job.folder / "enough").touch()
    assert shell.end() == 0, shell.text
    assert all(script.wait_for_exit(WAIT_S) for script in third.values())
    beginnings = begun(job, 6)
    assert len({store for _, _, store, _ in beginnings}) == 3, "a store of its own for each generation"
    steps = sorted(step for step, rank, _, _ in beginnings if rank == 0)  # the rank that saves the checkpoint
    assert len(steps) == 3 and steps[0] == 0 and steps[-1] > 0, "its own checkpoint decides"
    assert job.running() == []


# Restarts without a spare: test_kills_of_script_scheduler_and_launcher_restart_it_everywhere.
@pytest.mark.parametrize("spares", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_three_kills_in_a_row_each_restart_it_on_every_seat(spares: int, job: ShellJob) -> None:
    job.settings["SPARE_NUM"] = str(spares)
    shell, known = started(job), set[int]()
    for kill in range(3):
        scripts = newest(job, 2 * (kill + 1), known)
        os.kill(scripts[kill % 2].pid, signal.SIGKILL)
    newest(job, 8, known)
    assert prepared_processes(shell) == [], "a fork of one would run the bare script, without RANK"
    (job.folder / "enough").touch()
    assert shell.end() == 0, shell.text
    assert "3 recoveries" in shell.text and re.search(r"\bsteps? \d|\d steps", shell.text) is None, shell.text
    assert job.running() == []


def prepared_processes(shell: Shell) -> list[int]:
    """Return the children of this supervisor that wait for orders to fork."""
    children = Path(f"/proc/{shell.process.pid}/task/{shell.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"samebits.training.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.thorough
def test_error_in_the_script_ends_the_job_with_its_line(job: ShellJob) -> None:
    shell = started(job, "--fail")
    status = shell.end()
    assert status == 87, shell.text
    assert "ValueError: an error of the script's own" in shell.text
    assert job.running() == []
