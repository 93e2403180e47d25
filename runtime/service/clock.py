"""The one clock of the services: seconds since boot, comparable across restarts of a process on the same boot.

The boot clock goes on while a machine sleeps and never jumps; a journal keeps its readings together with ``boot_id``.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path


def now_s() -> float:
    """Seconds of the boot clock."""
    return time.clock_gettime(_CLOCK)


def boot_id() -> str:
    """Which boot ``now_s`` counts from; one that equals no other where the machine does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown-{uuid.uuid4()}"


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
