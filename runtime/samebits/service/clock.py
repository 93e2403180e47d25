"""The one clock of the services: seconds since boot, comparable across restarts of a process on the same boot.

The boot clock goes on while a machine sleeps and never jumps; a journal keeps its readings together with ``boot_id``.
Containers of one machine may each see it shifted (time_namespaces(7)): then they have no clock in common.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path


def now_s() -> float:
    """Seconds of the boot clock."""
    return time.clock_gettime(_CLOCK)


def boot_id(process: Path = Path("/proc/self")) -> str:
    """Which boot, and as shifted by how much, ``now_s`` counts from; equals no other where the machine does not say.

    Args:
        process: of which clock; this one's, but for tests.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown-{uuid.uuid4()}"
    return boot + _shift(process / "timens_offsets")


def _shift(offsets: Path) -> str:
    """Of this process's boot clock; empty where there is none, or the kernel knows of no such thing."""
    try:
        shifts = {words[0]: words[1:] for words in map(str.split, offsets.read_text().splitlines()) if words}
    except OSError:
        return ""
    shift = shifts.get("boottime", ["0", "0"])
    return "" if shift == ["0", "0"] else f"+{'.'.join(shift)}"


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
