"""``samebits ckpt verify``: read every chunk of every point and compare it with what was saved.

Status 0 means that every byte of every requested point was read and is correct.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from samebits.commands.ckpt.addressing import Folder
from samebits.commands.ckpt.wording import size_text
from samebits.errors import CheckpointError, UsageError
from samebits.printable import counted, raw_of
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import EntryState, FoundPoint

TERMINAL_LINE_S = 0.2
PLAIN_LINE_S = 5.0
GIB = 1 << 30
LOOKS = 10
"""How often the points are listed again if pruning removed all of them before they were read."""


class ReadProgress:
    """Shows the progress and speed of a long read: redrawn on a terminal, printed at intervals elsewhere.

    Args:
        total_bytes: bytes to read.
        doing: the activity, shown at the beginning of the line.
    """

    def __init__(
        self,
        total_bytes: int,
        doing: str,
        *,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.done_bytes = 0
        self._total_bytes = total_bytes
        self._doing = doing
        self._out = raw_of(out or sys.stderr)
        self._clock = clock
        self._began_s = self._said_s = clock()
        self._drawn = 0

    def add(self, size_bytes: int) -> None:
        """Count this many more bytes as read."""
        self.done_bytes += size_bytes
        now_s = self._clock()
        if now_s - self._said_s < (TERMINAL_LINE_S if self._out.isatty() else PLAIN_LINE_S):
            return
        self._said_s = now_s
        left_s = (self._total_bytes - self.done_bytes) / max(self.done_bytes, 1) * (now_s - self._began_s)
        text = (
            f"{self._doing}: {size_text(self.done_bytes)} of {size_text(self._total_bytes)}, {self.speed_text()}, "
            f"about {max(0.0, left_s):.0f} s left"
        )
        if self._out.isatty():
            self._out.write(f"\r{text:<{self._drawn}}")
            self._drawn = len(text)
        else:
            self._out.write(f"{text}\n")
        self._out.flush()

    def clear(self) -> None:
        """Erase the drawn line before other lines are printed."""
        if self._drawn:
            self._out.write(f"\r{'':<{self._drawn}}\r")
            self._out.flush()
            self._drawn = 0

    def speed_text(self) -> str:
        """Return the average speed, such as ``1.42 GiB/s``."""
        return f"{self.done_bytes / GIB / max(self._clock() - self._began_s, 1e-9):.2f} GiB/s"


def run(folder: Folder, names: Sequence[str]) -> int:
    """Verify these points, or all. Return 0 if all are complete, otherwise the exit code for a damaged checkpoint.

    Raises:
        UsageError: a name matches no point, or there are no points at all.
    """
    for _ in range(LOOKS):
        found, unreadable = _asked_for(folder, names)
        progress = ReadProgress(sum(one.manifest.data_bytes for one in found if one.manifest is not None), "verifying")
        whole, damaged, gone = _read(found, unreadable, progress)
        if whole or damaged:
            break
    else:
        removed = f"{counted(gone, 'point')} were removed by their writers before they were read"
        raise UsageError(f"{removed}, {LOOKS} times in a row. Fix: try again when the job saves less often")
    print(_summary(progress, whole, damaged, gone))
    if not names:
        _say_what_was_left_out(folder)
    return CheckpointError.exit_code if damaged else 0


def _read(found: Sequence[FoundPoint], unreadable: Sequence[str], progress: ReadProgress) -> tuple[int, int, int]:
    """Return how many points are complete, damaged (each is reported), and were deleted in the meantime."""
    damaged = whole = gone = 0
    for problem in unreadable:
        damaged += 1
        _say_damaged(problem)
    for point in found:
        try:
            checkpoints.verify(point, progress.add)
            whole += 1
        except CheckpointError as error:
            if checkpoints.is_gone(point):
                gone += 1  # its writer has pruned it, since it keeps only the newest points
                continue
            damaged += 1
            progress.clear()
            _say_damaged(str(error))
    progress.clear()
    return whole, damaged, gone


def _asked_for(folder: Folder, names: Sequence[str]) -> tuple[list[FoundPoint], list[str]]:
    """Return the points with these names, each once, and reasons why directories have no readable point."""
    if not names:
        return folder.all(), []
    found: dict[str, FoundPoint] = {}
    unreadable = []
    for name in names:
        try:
            found.update({str(one.path): one for one in folder.named(name)})
        except CheckpointError as error:
            unreadable.append(str(error))
    return list(found.values()), unreadable


def _say_damaged(problem: str) -> None:
    advice = (
        "" if "kept for inspection" in problem else "; whoever restores passes over it, and nothing is to be deleted"
    )
    print(f"damaged: {problem}{advice}", flush=True)


def _summary(progress: ReadProgress, whole: int, damaged: int, gone: int) -> str:
    text = f"{whole} of {counted(whole + damaged, 'point')} whole"
    text += f"; {size_text(progress.done_bytes)} read, {progress.speed_text()}"
    return text + (f"; {gone} removed by their writers meanwhile" if gone else "")


def _say_what_was_left_out(folder: Folder) -> None:
    aside = sum(entry.state is EntryState.MOVED_ASIDE for entry in checkpoints.survey(folder.path))
    if aside:
        print(
            f"{counted(aside, 'damaged point')} that {'was' if aside == 1 else 'were'} moved aside earlier not counted"
        )
