"""The simulated device is no CPU in disguise: its memory, streams and random numbers are separate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import backend
from tests.device.here import SOURCES

ROOT = Path(__file__).resolve().parents[2]
BUILD_S = 900.0

SHOWN = """
import ctypes, sys
import torch
device = torch.device("trial", 0)
rows = torch.arange(12.0, device=device).reshape(3, 4)
try: rows.numpy()
except TypeError: print("numpy refused")
try: rows + torch.ones(3, 4)
except RuntimeError as error: print("mixed refused:", "same device" in str(error))
try: torch.empty(1 << 40, device=device)
except torch.OutOfMemoryError as error: print("full:", "Device 0" in str(error))
stream, target = torch.Stream(device), torch.zeros(3, 4)
stream.wait_stream(torch.accelerator.current_stream(device))
with stream: target.copy_(rows, non_blocking=True)
print("before it is waited for:", target.sum().item())
stream.synchronize()
print("after:", torch.equal(target, rows.cpu()))
torch.manual_seed(3)
host, first = torch.get_rng_state(), torch.rand(3, device=device).cpu()
print("the host's numbers are its own:", torch.equal(host, torch.get_rng_state()))
torch.manual_seed(3)
print("seeded:", torch.equal(first, torch.rand(3, device=device).cpu()))
from samebits.training.process.device_view import DeviceView
view = DeviceView(device, 60.0)
view.committed()
seen, watched = view.watched().memory(), view.watched()
print("seen:", seen.total - seen.free == seen.held == seen.used == torch.trial.memory_allocated() > 0, watched.name)
held = torch.trial.memory_allocated()
del rows
print("freed:", torch.trial.memory_allocated() < held)
kept = torch.ones(4, device=device)
sys.stdout.flush()
ctypes.string_at(kept.data_ptr(), 4)
"""


@pytest.mark.thorough
@pytest.mark.timeout(BUILD_S)
def test_memory_streams_and_numbers_are_separate(tmp_path: Path) -> None:
    path = f"{backend.autoload_folder(tmp_path)}{os.pathsep}{SOURCES}"
    ran = subprocess.run(
        [sys.executable, "-c", SHOWN],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert ran.stdout.splitlines() == [
        *("numpy refused", "mixed refused: True", "full: True", "before it is waited for: 0.0", "after: True"),
        *("the host's numbers are its own: True", "seeded: True", "seen: True trial:0", "freed: True"),
    ], ran.stderr
    assert ran.returncode == -signal.SIGSEGV, "the host reads the device's memory as if it were its own"


@pytest.mark.thorough
@pytest.mark.timeout(BUILD_S)
@pytest.mark.parametrize("way", [["--simulated"], ["--stops"]], ids=["aborted", "stopped"])
def test_command_finds_that_everything_holds(way: list[str]) -> None:
    # Ended by SIGTERM if it takes too long, so that its jobs end with it.
    command = ["timeout", f"{BUILD_S - 30:g}", sys.executable, "-m", "tests.device", "--quick", *way]
    environment = os.environ | {"PYTHONPATH": SOURCES}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert (told["failed"], told["device"]) == (0, backend.NAME) and told["passed"] >= 9
    assert told["not_here"] == 3, "a feature of cards was counted as shown"
