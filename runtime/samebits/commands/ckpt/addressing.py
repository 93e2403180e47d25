"""Resolve ``SLOT/STEP``, a checkpoint's name on the command line, to directories.

If a name matches nothing, the error lists the names that exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import UsageError
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import FoundPoint

_SLOT_AND_STEP = re.compile(r"(\d{1,9})/(\d{1,19})", re.ASCII)
SHOWN_STEPS = 8


@dataclass(frozen=True, slots=True)
class Folder:
    """The checkpoint folder of a job, as an absolute path.

    Attributes:
        is_given: whether it was named on the command line rather than found from the environment.
        is_plain: whether the job's script is not ported and saves its own checkpoints.
    """

    path: Path
    is_given: bool = False
    is_plain: bool = False

    def named(self, name: str) -> list[FoundPoint]:
        """Return all points that ``name`` matches, newest first. Several generations may have a point of the same step.

        Raises:
            UsageError: there is none.
            CheckpointError: the name is a directory without a readable manifest.
        """
        match = _SLOT_AND_STEP.fullmatch(name)
        if match is None:
            return [_in_directory(Path(name))]
        slot, step = int(match[1]), int(match[2])
        directory = checkpoints.rank_directory(self.path, slot)
        there = checkpoints.scan(directory, checkpoints.job_of(directory))
        found = [one for one in there if one.point.step == step]
        if not found:
            raise UsageError(f"no point {name} in {self.path}: {self._what_there_is(slot, there)}")
        return sorted(found, key=lambda one: one.point, reverse=True)

    def the_one_named(self, name: str) -> FoundPoint:
        """Return the newest usable point among those that :meth:`named` returns."""
        found = self.named(name)
        return next((one for one in found if one.is_usable), found[0])

    def all(self) -> list[FoundPoint]:
        """Return every point of every slot.

        Raises:
            UsageError: there is none.
        """
        found = []
        for slot in checkpoints.slots_in(self.path):
            directory = checkpoints.rank_directory(self.path, slot)
            found += checkpoints.scan(directory, checkpoints.job_of(directory))
        if not found:
            raise UsageError(f"no points in {self.path}{self.elsewhere()}")
        return found

    def elsewhere(self) -> str:
        """Return the end of a sentence that says where else the user can look."""
        below = [str(one) for one in checkpoints.folders_with_points(self.path) if one != self.path]
        if below:
            return f"; look into {' or '.join(below)} with --folder"
        if self.is_plain:
            return ": the script of this job saves its own checkpoints, which `samebits ckpt` does not read"
        if self.is_given:
            return ": --folder names a job's checkpoint folder, below which each rank has a folder with its number"
        return ". Fix: change to the folder the job was started in, or name its checkpoint folder with --folder"

    def _what_there_is(self, slot: int, there: list[FoundPoint]) -> str:
        if there:
            steps = sorted({one.point.step for one in there}, reverse=True)
            more = f" and {len(steps) - SHOWN_STEPS} older ones" if len(steps) > SHOWN_STEPS else ""
            return f"slot {slot} has those of step {', '.join(map(str, steps[:SHOWN_STEPS]))}{more}"
        slots = checkpoints.slots_in(self.path)
        if slots:
            return f"slot {slot} has none there; slots with a folder are {', '.join(map(str, slots))}"
        return f"it has no slot's folder{self.elsewhere()}"


def _in_directory(path: Path) -> FoundPoint:
    if not path.is_dir():
        raise UsageError(
            f"{path} is neither SLOT/STEP (such as 0/120) nor a directory. Fix: choose a point that `samebits ckpt ls` "
            "lists"
        )
    directory = path.resolve()
    point = checkpoints.parse_point_name(directory.name)
    if point is not None and directory.parent.name.isdecimal():
        return checkpoints.inspect_point(directory, point, checkpoints.job_of(directory.parent))
    return checkpoints.point_in(directory)
