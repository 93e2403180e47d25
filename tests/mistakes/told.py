"""How soon after its cause the user sees the message on a mistake, measured beside a test and not asserted.

The cause is whichever comes first, the first line of an error in a worker's log or the first worker's end, unless the
test sets the time. The message's time is when its line was printed by the script.
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
"""The name under which a test's report carries its rows (pytest's ``record_property``)."""
_ERROR = re.compile(rb"^\w*(Error|Exception)\b|: error: ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Row:
    """One mistake, and when it was reported.

    Attributes:
        after_s: from the cause to the message; None if no cause was seen.
        fact: the cause.
        sentence: the message.
    """

    mistake: str
    after_s: float | None
    fact: str
    sentence: str


class Told:
    """Watches a job's folder for the first cause, in a thread of its own.

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
        """Set the cause's time to now, whatever was seen before."""
        self._facts = [(time.monotonic(), what)]

    def note(self, mistake: str, shell: Shell, pattern: str) -> None:
        """Record the first line with the pattern as the message."""
        at = next((one for one in shell.heard if re.search(pattern, one[1], re.MULTILINE)), None)
        assert at is not None, f"{pattern!r} was not printed"
        facts = sorted(self._facts)
        after_s = None if not facts else max(0.0, at[0] - facts[0][0])
        row = Row(mistake, after_s, facts[0][1] if facts else "", at[1].strip())
        self._record(PROPERTY, asdict(row))  # reports of several pytest processes carry no classes

    def close(self) -> None:
        """Stop watching."""
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
        with contextlib.suppress(OSError):  # a file that is being replaced
            for name, identity in read_pid_files(folder, names).items():
                if name.startswith("worker_") and not identity.is_alive():
                    self._facts.append((time.monotonic(), "a worker's end"))
                    return
            if any(_ERROR.search(_content(log)) for log in logs):
                self._facts.append((time.monotonic(), "the error in a worker's log"))


def _content(log: Path) -> bytes:
    with log.open("rb") as file:
        return file.read(1 << 20)
