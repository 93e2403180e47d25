"""A bounded log of text lines beside the journal: ``events.jsonl``, and older parts as ``events.1.jsonl`` and so on.

Files live here; what a line says is its writer's and its readers'. The one idea: the log is evidence and no memory.
Nothing waits for it: no line is synced, a write that fails loses that line and says so once, and a reader takes the
lines that are whole, so a torn one costs itself alone. Each part after the first begins with a line that its writer
makes of the part before, so that what falls off the end is not forgotten.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from samebits.errors import StoreError
from samebits.store import durable, private

EVENTS_FILE = "events.jsonl"
PART_BYTES = 512 << 10
MOST_PARTS = 8
MAX_LINE_BYTES = 64 << 10


class EventLog:
    """Appends to the log in a folder; its one writer is whoever holds the folder's lock.

    Args:
        directory: where; it must be there.
        first_line: makes the first line of a part from the lines of the part before.
        on_failure: told once, in a sentence, when a line is lost.
    """

    def __init__(
        self,
        directory: Path,
        first_line: Callable[[list[str]], str],
        on_failure: Callable[[str], object],
        *,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._path = directory / EVENTS_FILE
        self._first_line, self._on_failure, self._part_bytes = first_line, on_failure, part_bytes
        self._descriptor: int | None = None
        self._size_bytes = 0
        self._is_torn = False
        self._has_failed = False

    def append(self, lines: Sequence[str]) -> None:
        """Add whole lines, without their line breaks. A disk that refuses costs the lines and nothing else."""
        try:
            if self._descriptor is not None and self._size_bytes > self._part_bytes:
                self._rotate()
            self._write("".join(f"{line}\n" for line in lines))
        except (OSError, StoreError) as error:
            self.close()
            if not self._has_failed:
                self._has_failed = True
                self._on_failure(f"{self._path}: an event was not written ({error}); the job goes on without it")

    def close(self) -> None:
        """Close the file; ``append`` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, text: str) -> None:
        descriptor = self._opened()
        data = (f"\n{text}" if self._is_torn else text).encode()
        self._is_torn = True
        written = os.write(descriptor, data)
        self._size_bytes += written
        if written < len(data):
            raise OSError(f"{written} of {len(data)} bytes were written")
        self._is_torn = False

    def _opened(self) -> int:
        if self._descriptor is None:
            self._descriptor = private.open_to_append(self._path)
            self._size_bytes = os.fstat(self._descriptor).st_size
            self._is_torn = self._size_bytes > 0 and not _ends_whole(self._path)
        return self._descriptor

    def _rotate(self) -> None:
        self.close()
        first = self._first_line(_lines_of(self._path))
        for number in range(MOST_PARTS - 1, 0, -1):
            older = _part(self._path.parent, number - 1)
            if older.exists():
                older.replace(_part(self._path.parent, number))
        self._write(f"{first}\n")


def read_lines(directory: Path) -> list[str]:
    """Every whole line, the oldest first; none where there is no log.

    Raises:
        StoreError: the disk refuses, or a part is another user's.
    """
    for _ in range(3):  # a part may be moved on while the others are read
        parts = [_part(directory, number) for number in range(MOST_PARTS - 1, -1, -1)]
        before = _inodes(parts)
        lines = [line for part in parts for line in _lines_of(part)]
        if _inodes(parts) == before:
            break
    return lines


class Tail:
    """What is appended to the log from now on, or from its beginning; for one who looks again and again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._inode, self._offset, self._rest = 0, 0, b""

    def new_lines(self) -> tuple[list[str], bool]:
        """The lines since the last call; True with them where they are all of them, from the beginning."""
        path = self._directory / EVENTS_FILE
        try:
            found = path.stat()
        except OSError:
            return [], False
        if found.st_ino != self._inode or found.st_size < self._offset:
            lines = read_lines(self._directory)
            self._inode, self._offset, self._rest = found.st_ino, found.st_size, b""
            return lines, True
        if found.st_size == self._offset:
            return [], False
        with path.open("rb") as file:
            file.seek(self._offset)
            data = self._rest + file.read(found.st_size - self._offset)
        self._offset = found.st_size
        whole, _, self._rest = data.rpartition(b"\n")
        return list(_whole_lines(whole + b"\n")), False


def _part(directory: Path, number: int) -> Path:
    return directory / (EVENTS_FILE if number == 0 else f"events.{number}.jsonl")


def _inodes(parts: Sequence[Path]) -> list[int]:
    return [part.stat().st_ino if part.exists() else 0 for part in parts]


def _lines_of(path: Path) -> list[str]:
    return list(_whole_lines(private.read(path, 2 * PART_BYTES + MAX_LINE_BYTES * 16) or b""))


def _whole_lines(data: bytes) -> Iterator[str]:
    for line in data.split(b"\n")[:-1]:
        if line and len(line) <= MAX_LINE_BYTES:
            yield line.decode(errors="replace")


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


ASKED_FILE = "asked.jsonl"
MOST_LINES = 1000
MAX_ASKED_BYTES = 4096


def append_asked(directory: Path, line: str) -> None:
    """Add one line.

    Raises:
        StoreError: the disk refuses, or the file is another user's.
    """
    path = directory / ASKED_FILE
    descriptor = _locked(path)
    try:
        with durable.disk_errors(path, "writing down what was asked"):
            data = line.encode()[:MAX_ASKED_BYTES].replace(b"\n", b" ")
            os.write(descriptor, b"\n" + data + b"\n")  # whatever a torn line before it has left
            os.fsync(descriptor)
        if len(known := read_asked(directory)) > MOST_LINES:
            durable.replace_note(path, "".join(f"{one}\n" for one in known[-MOST_LINES // 2 :]).encode())
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int:
    """The file, which no other process writes or replaces until it is closed."""
    while True:
        descriptor = private.open_to_append(path)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
        os.close(descriptor)  # somebody has put another one in its place meanwhile


def read_asked(directory: Path) -> list[str]:
    """Return the last lines, the oldest first, MOST_LINES and a few more at most.

    Raises:
        StoreError: the disk refuses, or the file is another user's.
    """
    data = private.read(directory / ASKED_FILE, 2 * MOST_LINES * (MAX_ASKED_BYTES + 2)) or b""
    lines = data.rsplit(b"\n", 2 * MOST_LINES + 2)[-2 * MOST_LINES - 2 :]  # each has an empty one before it
    return [line.decode(errors="replace") for line in lines if line and len(line) <= MAX_ASKED_BYTES]
