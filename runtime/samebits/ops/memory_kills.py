"""Whether the kernel killed a process for want of memory: by its control group's own count, or not at all.

Reading that count lives here (cgroup v2: ``oom_kill`` in memory.events, v1: in memory.oom_control; see the kernel's
admin-guide). The one idea: SIGKILL has no sender's name, so only a count that rose while the process died is believed,
each kill once; where there is none nothing is said.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
OUT_OF_MEMORY = "out of memory"
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
SETTLED_S = 5.0  # from the count of a kill to the end of its victim, whose memory has to be freed first
_NO_LIMIT_BYTES = 1 << 60  # v1 writes a number near 2^63 where v2 writes "max"


@dataclass(slots=True)
class _Group:
    kills: Path
    limit: Path
    seen: int  # of those that are explained, or were too long ago to explain anything
    newest: int = 0
    newest_at: float = 0.0


class MemoryKills:
    """The counts of the control groups that watched processes are in."""

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._groups: dict[Path, _Group] = {}
        self._of: dict[str, Path] = {}

    def watch(self, name: str, pid: int) -> None:
        """From now on kills in this process's group count; it is known under this name."""
        self._of.pop(name, None)
        for kills, limit in self._files(pid):
            count = _count(kills)
            if count is not None:
                self._groups.setdefault(kills, _Group(kills, limit, count))
                self._of[name] = kills
                return

    def look(self, now: float) -> None:
        """Called again and again: a kill that was counted a while ago is not about who dies from now on."""
        for group in self._groups.values():
            count = _count(group.kills) or 0
            if count != group.newest:
                group.newest, group.newest_at = count, now
            elif now - group.newest_at >= SETTLED_S:
                group.seen = max(group.seen, count)

    def cause(self, name: str) -> str:
        """Why SIGKILL ended this process, where its group has counted one kill more than was explained."""
        group = self._groups.get(self._of.get(name, Path()))
        if group is None or (_count(group.kills) or 0) <= group.seen:
            return ""
        group.seen += 1
        limit = _limit_bytes(group.limit)
        if limit:
            return f"{OUT_OF_MEMORY} (the kernel's limit for its control group, {limit / 2**30:.2f} GiB)"
        return f"{OUT_OF_MEMORY} (the kernel's choice: its control group has no limit of its own)"

    def _files(self, pid: int) -> list[tuple[Path, Path]]:
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            _, controllers, path = line.split(":", 2)
            inside = path.lstrip("/")
            if controllers == "":
                folder = self._cgroups / inside
                found.append((folder / "memory.events", folder / "memory.max"))
            elif "memory" in controllers.split(","):
                folder = self._cgroups / "memory" / inside
                found.append((folder / "memory.oom_control", folder / "memory.limit_in_bytes"))
        return found


def _count(file: Path) -> int | None:
    try:
        found = _KILLS.search(file.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def _limit_bytes(file: Path) -> int:
    """0 where the group itself has no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT_BYTES else 0
