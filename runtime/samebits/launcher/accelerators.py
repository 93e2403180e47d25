"""Count the accelerators that a job may use on this machine, without importing torch.

As in CUDA, a list of visible devices ends at the first entry that names no device, such as -1 or NoDevFiles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_NAMES_A_DEVICE = re.compile(r"\s*([0-9]|GPU-|MIG-)")


def device_files(folder: Path = Path("/dev")) -> int:
    """Return the number of this machine's NVIDIA devices, or of its Ascend devices if there are none."""
    for kind in ("nvidia", "davinci"):
        count = sum(re.fullmatch(rf"{kind}[0-9]+", entry.name) is not None for entry in folder.glob(f"{kind}*"))
        if count:
            return count
    return 0


def usable(environment: Mapping[str, str], devices: int) -> int:
    """Return how many of the machine's ``devices`` a job with this environment may use."""
    if (environment.get("DEVICE") or environment.get("MS_DEVICE")) == "cpu" or not devices:
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES", environment.get("ASCEND_RT_VISIBLE_DEVICES", "all"))
    if visible == "all":
        return devices
    count = 0
    for device in visible.split(","):
        if not _NAMES_A_DEVICE.match(device):
            break
        count += 1
    return count
