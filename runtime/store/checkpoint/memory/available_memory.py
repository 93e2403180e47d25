"""How much memory may still be reserved on this machine, or in this container, before the kernel begins to kill.

Only the reading of proc(5) and of the control group's files lives here. The one idea: a file in /dev/shm counts as
memory of whoever fills it, whatever size the file system claims to have, so room in it is not enough.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_RECLAIMABLE = ("inactive_file", "active_file")


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least of what the machine and this process's control groups (version 2) have left; None where none tells."""
    left = [_left_on_machine(proc)]
    with contextlib.suppress(OSError, ValueError):
        line = (proc / "self" / "cgroup").read_text().strip().rpartition("\n")[2]
        group = groups / line.removeprefix("0::").lstrip("/")
        while group != groups.parent:
            left.append(_left_in_group(group))
            group = group.parent
    known = [one for one in left if one is not None]
    return min(known, default=None)


def _left_on_machine(proc: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _left_in_group(group: Path) -> int | None:
    """None where there is no limit (``max``) or no such file."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + sum(int(counts[name]) for name in _RECLAIMABLE if name in counts)
    return None
