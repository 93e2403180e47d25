"""How long after the fact a person is told of a mistake, measured beside a test; nothing is asserted of it.

Here live the clock and the table's row. The one idea: the fact is what came first, the first line of an error in a
worker's log or the first worker's end, unless the test says when it made one; the sentence's moment is when its line
came out of the script.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from samebits.launcher.processes import process_names, read_pid_files
from tests.launcher.shell_job import Shell, ShellJob

LOOK_S = 0.05
PROPERTY = "told"
"""Under this name a test's report carries its rows (pytest's ``record_property``)."""
_ERROR = re.compile(rb"^\w*(Error|Exception)\b|: error: ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Row:
    """One mistake, and when it was told.

    Attributes:
        after_s: from the fact to the sentence; None where no fact was seen.
        fact: what it is counted from.
        sentence: the line that told it.
    """

    mistake: str
    after_s: float | None
    fact: str
    sentence: str


class Told:
    """Watches a job's folder for the first fact, in a thread of its own.

    Args:
        job: with one script to be called in it.
        record: takes the row's name and the row, as ``record_property`` does.
    """

    def __init__(self, job: ShellJob, record: Callable[[str, object], None]) -> None:
        self._job, self._record = job, record
        self._facts: list[tuple[float, str]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def fact(self, what: str) -> None:
        """It happens now, whatever was seen before."""
        self._facts = [(time.monotonic(), what)]

    def note(self, mistake: str, shell: Shell, pattern: str) -> None:
        """The first line with the pattern was what told it."""
        at = next((one for one in shell.heard if re.search(pattern, one[1], re.MULTILINE)), None)
        assert at is not None, f"{pattern!r} was not said"
        facts = sorted(self._facts)
        after_s = None if not facts else max(0.0, at[0] - facts[0][0])
        row = Row(mistake, after_s, facts[0][1] if facts else "", at[1].strip())
        self._record(PROPERTY, asdict(row))  # reports of several pytest processes carry no classes

    def close(self) -> None:
        """No more is watched."""
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S):
            if not self._facts:
                self._look()

    def _look(self) -> None:
        folder = self._job.log_dir
        logs = sorted(folder.glob("worker_*.log")) if folder.is_dir() else []
        names = process_names(log.stem.removeprefix("worker_") for log in logs)
        with contextlib.suppress(OSError):  # what is being replaced
            for name, identity in read_pid_files(folder, names).items():
                if name.startswith("worker_") and not identity.is_alive():
                    self._facts.append((time.monotonic(), "a worker's end"))
                    return
            if any(_ERROR.search(_content(log)) for log in logs):
                self._facts.append((time.monotonic(), "the error in a worker's log"))


def _content(log: Path) -> bytes:
    with log.open("rb") as file:
        return file.read(1 << 20)
