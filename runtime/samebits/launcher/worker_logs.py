"""Read a process's log: its new lines, and the error that ended the process.

The last line alone does not show a cause. A cause is a traceback, a SameBits message, or a line that names an error,
and must come from the process itself. Lines that were in the log when the process was found belong to an earlier
process.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from samebits.launcher.processes import Death
from samebits.printable import IN_LOGS, printable
from samebits.store import durable
from samebits.tracebacks import Failure, failure_in, place_in_dump

_TAIL_BYTES = 65536
READ_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 16
_SHOWN_CHARACTERS = 300
_OURS = re.compile(r"^samebits: (.+)$", re.MULTILINE)
_ERROR = re.compile(
    r"(?i)\b(\w*error|\w*exception|fatal|errno \d+|not found|no such|cannot|can't|failed|aborted)\b|^usage:"
)
_CRASH = re.compile(r"^(?:Fatal Python error: (.+)|terminate called after .+|  what\(\):  (.+))$", re.MULTILINE)
_OTHER_SIZE = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_SPOKEN = re.compile(r"^[\d-]+ [\d:]+ samebits (?:worker|spare) ", re.MULTILINE)


class LogEnds:
    """The logs of one folder, each read from the position where its current process began to write."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._began: dict[str, int] = {}

    def begin(self, name: str) -> None:
        """Skip this log's current content, because it belongs to an earlier process."""
        self._began[name] = size_of(self._path(name))

    def begin_all(self) -> None:
        """Skip the current content of all existing logs."""
        for log in self._log_dir.glob("*.log"):
            self.begin(log.stem)

    def has_spoken(self, name: str) -> bool:
        """Return whether the process has called ``samebits.init()``, which immediately logs a line."""
        return _SPOKEN.search(self._text(name)) is not None

    def cause(self, name: str, death: Death, folder: Path) -> Failure | str:
        """Return why the process ended according to its log, or "" if the log does not show it."""
        if death.status == 0:
            return ""
        text = self._text(name)
        if death.signal is not None:
            return _cause_of_crash(text, folder)
        said, failure = _OURS.findall(text), failure_in(text, folder)
        if said and (failure is None or death.status != 1):
            return str(said[-1])
        if failure is not None:
            return failure
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines or death.status is None or _SPOKEN.match(lines[-1]):  # a SameBits warning does not end a process
            return ""
        return printable(lines[-1], _SHOWN_CHARACTERS, IN_LOGS) if _ERROR.search(lines[-1]) else ""

    def _text(self, name: str) -> str:
        try:
            with os.fdopen(durable.open_regular(self._path(name)), "rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                began = self._began.get(name, 0)
                file.seek(max(began if began <= size_bytes else 0, size_bytes - _TAIL_BYTES))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _path(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log, or none if there is no log."""
    with contextlib.suppress(FileNotFoundError), os.fdopen(durable.open_regular(log), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - READ_BYTES))
        return [line.decode(errors="replace") for line in file.read().splitlines()[-count:]] if count else []
    return []


class LogLines:
    """The lines that some processes write to their logs from now on."""

    def __init__(self, log_dir: Path, names: Iterable[str]) -> None:
        self._logs = {name: log_dir / f"{name}.log" for name in names}
        self._offsets = {name: size_of(log) for name, log in self._logs.items()}
        self._rests: dict[str, bytes] = {}

    def take(self) -> Iterator[tuple[str, str]]:
        """Yield the lines since the last call without line ends, each with the process's name."""
        for name, log in self._logs.items():
            offset = self._offsets[name]
            if size_of(log) < offset:
                offset, self._rests[name] = 0, b""  # the log was truncated
            with contextlib.suppress(OSError), os.fdopen(durable.open_regular(log), "rb") as file:
                file.seek(offset)
                data = file.read(READ_BYTES)
                self._offsets[name] = offset + len(data)
                *lines, rest = (self._rests.get(name, b"") + data).split(b"\n")
                if len(rest) > _LONGEST_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                self._rests[name] = rest
                yield from ((name, line.decode(errors="replace")) for line in lines)


def _cause_of_crash(text: str, folder: Path) -> str:
    """Return the last message of compiled code before a crash, with the script's line.

    If there is none, return Python's own message. One such crash: gloo ends the process from its own thread if a peer
    sends more data than this rank expects.
    """
    crash = _CRASH.findall(text)
    if not crash:
        return ""
    said = next((what for _, what in reversed(crash) if what), crash[-1][0])
    if sizes := _OTHER_SIZE.search(said):
        said = (
            f"a collective received {sizes[1]} bytes where this rank expects {sizes[2]}: the ranks call different "
            "collectives there, or give tensors of different sizes"
        )
    place = place_in_dump(text[text.rfind("Fatal Python error: ") :], folder) if "Fatal Python error: " in text else ""
    return f"at {place}: {said}" if place else said


def size_of(log: Path) -> int:
    """Return the size of this log in bytes, or 0 if there is none."""
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0
