"""What becomes of a process whose group is broken on an accelerator, when the device or its backend misbehaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.errors import AbortHungError, StuckError
from tests.device.test_backend import BUILD_S, ROOT

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(BUILD_S)]


def run(case: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of the cases to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tests.device.breaks", case],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )


def test_a_result_that_is_read_after_an_abort_is_not_believed() -> None:
    ran = run("undefined", TRIAL_ABORT="undefined")
    assert (ran.stdout, ran.returncode) == ("refused\n", 0), ran.stderr


def test_a_commit_behind_a_break_is_none_and_no_graph_holds_a_step_or_a_collective(tmp_path: Path) -> None:
    ran = run("alone", folder=tmp_path)
    step = ["forward refused True", "step refused True"]
    assert ran.stdout.splitlines() == ["from 0", *step, *step, "from 1", *step, *step, "ended at 3"], ran.stderr


def test_an_abort_that_hangs_ends_the_process_with_its_own_status() -> None:
    ran = run("hanging_abort", TRIAL_ABORT="hangs")
    assert (ran.stdout, ran.returncode) == ("returned True\n", AbortHungError.exit_code), ran.stderr
    assert "did not return within" in ran.stderr and "Fix:" in ran.stderr


def test_a_scripts_own_read_that_no_abort_ends_is_found() -> None:
    ran = run("hanging_item", TRIAL_ABORT="unheard")
    assert (ran.stdout, ran.returncode) == ("", StuckError.exit_code), ran.stderr
    assert "hanging_item" in ran.stderr, "the place is named"


@pytest.mark.parametrize("how", ["failing", "hanging"])
def test_a_lost_context_is_no_lost_peer(how: str) -> None:
    ran = run(f"{how}_context")
    assert ran.returncode == 1 and "DeviceLostError" in ran.stderr.splitlines()[-1], ran.stderr


def test_a_replacement_waits_for_memory_that_is_freed_late(tmp_path: Path) -> None:
    ran = run("late_memory", folder=tmp_path, TRIAL_HELD=str(tmp_path / "held"))
    assert (ran.stdout, ran.returncode) == ("waited True\ngot True\n", 0), ran.stderr


def test_nothing_grows_over_a_hundred_generations() -> None:
    """Threads, descriptors, the host's memory and the device's, with an abort at the end of each generation."""
    command = [sys.executable, "-m", "tests.device", "--made-up", "--only", "groups"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S, check=False)
    told = json.loads(ran.stdout.splitlines()[-1])
    assert (told["passed"], ran.returncode) == (2, 0), ran.stdout + ran.stderr
    assert "100 times" in told["checks"][0]["check"]
