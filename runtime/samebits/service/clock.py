"""The clock of all services: seconds since boot, comparable between processes of the same boot.

The boot clock continues while a machine sleeps and never jumps; a journal stores its readings with ``boot_id``. In
containers, the clock may be shifted (time_namespaces(7)); then the containers of one machine have no common clock.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path


def now_s() -> float:
    """Return the boot clock's reading in seconds."""
    return time.clock_gettime(_CLOCK)


def boot_id(process: Path = Path("/proc/self")) -> str:
    """Return an id of the boot and of any clock shift; a unique one if the machine provides none.

    Args:
        process: this process's folder in /proc; another one only in tests.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown-{uuid.uuid4()}"
    return boot + _shift(process / "timens_offsets")


def _shift(offsets: Path) -> str:
    """Return the shift of this process's boot clock; "" without a shift or kernel support."""
    try:
        shifts = {words[0]: words[1:] for words in map(str.split, offsets.read_text().splitlines()) if words}
    except OSError:
        return ""
    shift = shifts.get("boottime", ["0", "0"])
    return "" if shift == ["0", "0"] else f"+{'.'.join(shift)}"


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
