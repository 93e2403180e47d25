"""What carries out a size that was decided: workers of this machine, discovered hosts, or a StatefulSet's pods.

Here lives which of them a job has; ``resizing`` starts and releases workers here, the driver (``discovery``) elsewhere.
The one idea: each is told a size and why, does its part, and has the job's history keep both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from samebits.config import Settings
from samebits.ops.discovery_script import ask, words_of
from samebits.ops.host_launch import is_here
from samebits.ops.kept_start import KeptStart
from samebits.ops.resizing import bring_to
from samebits.ops.scheduler_link import decide_once
from samebits.ops.spawning import StartLock
from samebits.ops.statefulset import StatefulSet

BringTo = Callable[[int, str], None]
"""Takes a size and the reason for it."""


def of_folder(log_dir: Path) -> BringTo:
    """For the job that was started in this folder: its workers here, or on the hosts that are discovered."""

    def carry_out(size: int, why: str) -> None:
        with StartLock(log_dir):
            bring_to(log_dir, size, why)

    return carry_out


def of_statefulset(found: StatefulSet, settings: Settings) -> BringTo:
    """For a job whose workers are this StatefulSet's pods."""

    def carry_out(size: int, why: str) -> None:
        before = found.size()
        if before != size:
            found.scale(size)
            decide_once(settings, f"statefulset {found.name}: {before} → {size} pods: {why}")

    return carry_out


def room_for(kept: KeptStart, settings: Settings, devices: int) -> int | None:
    """How many workers there is room for: on the hosts that are named now, else on this machine's accelerators.

    None where nobody can tell: the script has not answered, or there is neither a script nor an accelerator.
    """
    if settings.host_discovery_script is None:
        return devices or None
    answer = ask(words_of(settings.host_discovery_script, kept.folder), kept.folder, settings.host_slots)
    if isinstance(answer, str):
        return None
    usable = (one for one in answer if one.name not in kept.drained)
    return sum(one.slots for one in usable if settings.host_launch is not None or is_here(one.name))
