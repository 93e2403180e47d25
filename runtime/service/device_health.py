"""What the vendors' own tools say of this machine's accelerators: ``nvidia-smi`` and ``npu-smi``, where they are there.

Here lives the reading of their output. Never here: torch, or what follows. The one idea: a tool that is not there,
hangs or says something else is no fault of the device; only a device that its tool calls unhealthy is.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

TIMEOUT_S = 10.0
MOST_DEVICES = 64
_NVIDIA = ("index", "name", "temperature.gpu", "memory.used", "memory.total", "ecc.errors.uncorrected.volatile.total")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: what its tool says of it, and what is wrong with it, if anything."""

    name: str
    found: str
    problem: str = ""


def devices() -> list[Device]:
    """Those of this machine; none where no tool is there."""
    return [*_nvidia(), *_ascend()]


def _nvidia() -> list[Device]:
    text = _told("nvidia-smi", f"--query-gpu={','.join(_NVIDIA)}", "--format=csv,noheader,nounits")
    found = []
    for line in text.splitlines()[:MOST_DEVICES]:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != len(_NVIDIA) or not parts[0].isdigit():
            continue
        index, name, celsius, used, total, errors = parts
        problem = f"{errors} uncorrected memory errors since it was started" if errors.isdigit() and int(errors) else ""
        found.append(Device(f"NVIDIA {index}", f"{name}, {celsius} °C, {used} of {total} MiB taken", problem))
    return found


def _ascend() -> list[Device]:
    numbers = re.findall(r"^\s*NPU ID\s*:\s*([0-9]{1,4})\s*$", _told("npu-smi", "info", "-l"), re.MULTILINE)
    found = []
    for number in numbers[:MOST_DEVICES]:
        text = _told("npu-smi", "info", "-t", "health", "-i", number)
        states = re.findall(r"^\s*Health(?: Status)?\s*:\s*(\w+)\s*$", text, re.MULTILINE)
        codes = re.findall(r"^\s*Error Code\s*:\s*([0-9A-Fa-fx]+)\s*$", text, re.MULTILINE)
        sick = [state for state in states if state.upper() != "OK"]
        what = f"health {', '.join(dict.fromkeys(states)) or 'not told'}"
        code = f", error code {', '.join(codes)}" if codes else ""
        found.append(Device(f"Ascend {number}", what, f"its health is {sick[0]}{code}" if sick else ""))
    return found


def _told(*command: str) -> str:
    """What a tool prints; nothing where it is not there, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[: 1 << 20].decode(errors="replace") if done.returncode == 0 else ""
