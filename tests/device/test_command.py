"""``python -m tests.device --card`` reports every check, whatever one of them or the device does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.device.here import ROOT, SOURCES, reason

DRIVER = """
import sys, time
from tests.device import __main__ as command
from tests.device.checks import Found, Verdict
from tests.device.here import Here

def fails(here, folder, extent):
    (folder / "job").mkdir(parents=True)
    (folder / "job" / "worker_1.log").write_text("its last line\\n")
    raise KeyError("held")
    yield

def hangs(here, folder, extent):
    yield Found("half", Verdict.PASSED, "")
    print("hanging", flush=True)
    time.sleep(600)

def passes(here, folder, extent):
    yield Found("passes", Verdict.PASSED, "", {"here_s": 1.0}, "gloo")

def no_card(*args, **options):
    raise RuntimeError("CUDA driver error: forward compatibility was attempted")

found = Here("cpu", "a card", "1.0", {}, frozenset({"sharing"}))
command.look = no_card if sys.argv[1] == "no-card" else lambda *args, **options: found
command.connected = lambda here, folder, within_s: (here, "somehow")
command.CARD_CHECKS = {one.__name__: one for one in (fails, hangs, passes)}
command.CHECKS = {}
sys.argv[1:] = ["--card", "--within", sys.argv[1] if sys.argv[1] != "no-card" else "60"]
sys.exit(command.main())
"""


def started(within: str) -> subprocess.Popen[str]:
    """Start the command with a check that raises, one that hangs, and one that passes."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, within],
        env=os.environ | {"PYTHONPATH": SOURCES},
        stdout=subprocess.PIPE,
        text=True,
    )


def reported(lines: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(lines.splitlines()[-1])
    return report


def verdicts(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["check"], one["verdict"]) for one in report["checks"]]


def test_checks_that_raise_or_hang_do_not_stop_the_others() -> None:
    with started("6") as process:
        report = reported(process.communicate(timeout=120)[0])
    assert verdicts(report) == [("fails", "FAILED"), ("half", "passed"), ("hangs", "FAILED"), ("passes", "passed")]
    raised, _, hung, _ = (one["text"] for one in report["checks"])
    assert raised.startswith("KeyError: 'held'") and "its last line" in raised
    assert hung.startswith("not done within 2 s")
    assert (report["failed"], report["connected"], process.returncode) == (2, "somehow", 1)
    assert set(report["spent"]) == {"fails", "hangs", "passes"}
    assert [one["backend"] for one in report["checks"]] == ["", "", "", "gloo"] and "backend" not in report


def test_command_that_is_stopped_still_prints_its_report() -> None:
    with started("600") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "hanging\n":
                process.send_signal(signal.SIGTERM)
                break
        report = reported(process.communicate(timeout=120)[0])
    found = [("fails", "FAILED"), ("half", "passed"), ("hangs", "not reached"), ("passes", "not reached")]
    assert verdicts(report) == found and process.returncode == 128 + signal.SIGTERM


def test_device_that_cannot_be_used_is_reported() -> None:
    with started("no-card") as process:
        report = reported(process.communicate(timeout=120)[0])
    assert verdicts(report)[0] == ("the command", "FAILED") and "forward compatibility" in report["checks"][0]["text"]
    assert (report["device"], report["not_reached"], process.returncode) == ("none", 3, 1)


def test_children_import_this_checkout_and_no_installed_package(tmp_path: Path) -> None:
    (tmp_path / "samebits").mkdir()
    (tmp_path / "samebits" / "__init__.py").write_text("")
    ran = subprocess.run(
        [sys.executable, "-c", "import samebits; print(samebits.__file__)"],
        env=os.environ | {"PYTHONPATH": f"{SOURCES}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(ran.stdout.strip()) == ROOT / "runtime" / "samebits" / "__init__.py"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            [
                "[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, invalid usage",
                "[rank1]: Last error:",
                "[rank1]: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 65010",
                "[rank1]:[W1127 12:00:00 ProcessGroupNCCL.cpp:1250] Warning: destroy_process_group() was not called",
            ],
            "[rank1]: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 65010",
        ),
        (
            [
                "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, invalid usage",
                "[rank0]: Last error:",
                "[rank0]: Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1",
                "[rank0]: Error in a destructor",
            ],
            "[rank0]: Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1",
        ),
        (["Traceback", "RuntimeError: CUDA error: busy", "a warning"], "RuntimeError: CUDA error: busy"),
        ([], "no reason given"),
    ],
)
def test_reason_is_found_among_warnings(said: list[str], why: str) -> None:
    assert reason(said) == why
