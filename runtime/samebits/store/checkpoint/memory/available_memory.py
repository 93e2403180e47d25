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
    return min((left for left, _ in _rooms(proc, groups)), default=None)


def taken_share(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The greatest share that is taken of the machine's memory or of a limit of this process's control groups.

    None where nothing tells.
    """
    return max((max(0.0, 1 - left / limit) for left, limit in _rooms(proc, groups) if limit > 0), default=None)


def _rooms(proc: Path, groups: Path) -> list[tuple[int, int]]:
    """What is left and the limit, of the machine and of each control group that has one."""
    rooms = [_on_machine(proc)]
    with contextlib.suppress(OSError, ValueError):
        line = (proc / "self" / "cgroup").read_text().strip().rpartition("\n")[2]
        group = groups / line.removeprefix("0::").lstrip("/")
        while group != groups.parent:
            rooms.append(_in_group(group))
            group = group.parent
    return [one for one in rooms if one is not None]


def _on_machine(proc: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        found = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("MemTotal:", "MemAvailable:")}
        if "MemAvailable:" in found:
            return found["MemAvailable:"], found.get("MemTotal:", 0)
    return None


def _in_group(group: Path) -> tuple[int, int] | None:
    """None where there is no limit (``max``) or no such file."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + sum(int(counts[name]) for name in _RECLAIMABLE if name in counts), limit
    return None
