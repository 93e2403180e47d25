"""Plain mode with a real DDP script and its own ``torch.save``: killed repeatedly, it ends with the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samebits.launcher.processes import read_pid_files
from tests.launcher.shell_job import free_port
from tests.system.processes import PATIENCE, environment_of_tests

SCRIPT = Path(__file__).with_name("plain_ddp_script.py")
KILLS = 20
STEPS = 400
WAIT_S = 120 * PATIENCE

pytestmark = [pytest.mark.system, pytest.mark.thorough, pytest.mark.timeout(3600)]


def run(folder: Path, *, hurry: bool = False) -> subprocess.Popen[str]:
    folder.mkdir()
    if hurry:
        (folder / "hurry").touch()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "samebits", "run", "--plain", "-n", "2", str(SCRIPT), str(STEPS)],
        cwd=folder,
        env=environment_of_tests() | {"SCHED_PORT": str(free_port())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def logs(folder: Path) -> str:
    return "\n".join(log.read_text() for log in sorted((folder / "device").glob("worker_*.log")))


def finals(folder: Path) -> set[str]:
    return set(re.findall(r"^final .*", logs(folder), re.MULTILINE))


def wait_for_scripts(folder: Path, known: set[int]) -> list[int]:
    """Return the pids of two scripts that have started and are not known yet."""
    deadline = time.monotonic() + WAIT_S
    while True:
        text = logs(folder) if (folder / "device").exists() else ""
        found = [int(pid) for pid in re.findall(r"begins at \d+ as \d, pid (\d+)", text)]
        fresh = [pid for pid in found if pid not in known]
        if len(fresh) >= 2:
            known |= set(fresh)
            return fresh[-2:]
        assert time.monotonic() < deadline, text[-2000:]
        time.sleep(0.1)


def test_twenty_kills_and_a_new_scheduler_keep_the_bits(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "undisturbed", hurry=True)
    assert undisturbed.wait(WAIT_S) == 0, undisturbed.stdout and undisturbed.stdout.read()
    folder = tmp_path / "killed"
    job, known = run(folder), set[int]()
    try:
        for kill in range(KILLS):
            scripts = wait_for_scripts(folder, known)
            if kill == KILLS // 2:
                identity = read_pid_files(folder / "device", ["scheduler"])["scheduler"]
                os.kill(identity.pid, signal.SIGKILL)
            os.kill(scripts[kill % 2], signal.SIGKILL)
        wait_for_scripts(folder, known)
        (folder / "hurry").touch()
        status = job.wait(WAIT_S)
        assert status == 0, job.stdout and job.stdout.read()
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.wait(WAIT_S)
    assert len(finals(folder)) == 1
    assert finals(folder) == finals(tmp_path / "undisturbed")
