"""Run a script unchanged, count its executed lines, and end the process at one of them.

``at_line.py SCRIPT FOLDER [NODE:LINE:NUMBER] -- [the script's own arguments]``. The process of that node dies by kill
-9 when it is about to execute the line for that time, once; FOLDER keeps the mark. A process that finishes the script
leaves in FOLDER how often it executed each line.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

MARK = "killed-at-line"


def counts_path(folder: Path, node: str) -> Path:
    """Return the file with how often this node executed each line."""
    return folder / f"lines-of-{node}.json"


class Lines:
    """The executed lines of one script in one process."""

    def __init__(self, script: str, node: str, mark: Path, kill: str) -> None:
        self.counts: collections.Counter[int] = collections.Counter()
        self._script = script
        self._mark = mark
        self._pid = os.getpid()  # a loader's process inherits the trace function
        at, line, number = kill.split(":") if kill else ("", "0", "0")
        self._line, self._number = (int(line), int(number)) if at == node else (0, 0)

    def enter(self, frame: FrameType, event: str, _: Any) -> Any:
        """Trace the lines of frames of the script."""
        return self._here if frame.f_code.co_filename == self._script else None

    def _here(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.counts[frame.f_lineno] += 1
            if frame.f_lineno == self._line and self.counts[self._line] == self._number and os.getpid() == self._pid:
                self._die()
        return self._here

    def _die(self) -> None:
        with contextlib.suppress(FileExistsError), self._mark.open("x"):
            os.kill(self._pid, signal.SIGKILL)


def main() -> None:
    script, folder, *rest = sys.argv[1:]
    split = rest.index("--")
    node = os.environ.get("NODE_ID", "scheduler")
    lines = Lines(script, node, Path(folder, MARK), "".join(rest[:split]))
    sys.argv = [script, *rest[split + 1 :]]
    sys.path[0] = str(Path(script).parent)
    sys.settrace(lines.enter)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.settrace(None)
        counts_path(Path(folder), node).write_text(json.dumps(lines.counts))


if __name__ == "__main__":
    main()
