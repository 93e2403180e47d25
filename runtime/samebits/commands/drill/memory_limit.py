"""Limit one worker's memory with its own control group if this user may create one, otherwise with RLIMIT_AS.

Control groups of version 2 (the kernel's ``admin-guide/cgroup-v2``) are folders. Their files show whether a group can
be created and whether it counts memory.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

RLIMIT_AS = "RLIMIT_AS"
LEFT_BYTES = 64 << 20


class MemoryLimit:
    """A memory limit for one process.

    Args:
        pid: the process.
        proc: the ``/proc`` folder; a different one in tests.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        above = group_above(pid, proc)
        self._group = self._made(above, pid) if above is not None else None
        self.name = RLIMIT_AS if self._group is None else f"memory.max of {self._group}"

    def _made(self, above: Path, pid: int) -> Path | None:
        group = above / f"samebits-drill-{pid}"
        try:
            group.mkdir()
            (group / "memory.max").write_text(str(LEFT_BYTES))
            with contextlib.suppress(OSError):  # a kernel without swap has no such file
                (group / "memory.swap.max").write_text("0")
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            return None
        return group

    def close(self) -> None:
        """Remove the group, unless it still contains a process."""
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.rmdir()


def group_above(pid: int, proc: Path = Path("/proc")) -> Path | None:
    """Return the control group below which a group for this process can be created, or None."""
    try:
        rows = [line.split() for line in (proc / "self/mounts").read_text().splitlines()]
        own = next(line for line in (proc / f"{pid}/cgroup").read_text().splitlines() if line.startswith("0::/"))
        root = next(Path(row[1]) for row in rows if row[2] == "cgroup2")
        group = root / own.removeprefix("0::/").strip()
        above = group if group == root else group.parent
        counted = (above / "cgroup.subtree_control").read_text().split()
    except (OSError, StopIteration, IndexError):
        return None
    may = os.access(above, os.W_OK) and os.access(above / "cgroup.procs", os.W_OK)
    return above if "memory" in counted and may else None
