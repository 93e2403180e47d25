"""Keep a bounded log of events beside the journal, and a log of operators' requests.

``events.jsonl`` has the newest lines; older parts are ``events.1.jsonl`` and so on. The log is informational and not
needed for recovery. So lines are not synced, a failed write loses its lines with one warning, and readers skip torn
lines.

Each part after the first begins with a line that its writer derives from the part before, so that a summary survives
when old parts are dropped.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from samebits.errors import StoreError
from samebits.store import durable, private
from samebits.store.etcd.event_copy import EventCopier, copied_lines
from samebits.store.etcd.gateway import EtcdGateway

EVENTS_FILE = "events.jsonl"
PART_BYTES = 512 << 10
MOST_PARTS = 8
MAX_LINE_BYTES = 64 << 10


class EventLog:
    """The event log in a folder; only the holder of the folder's lock writes it.

    Args:
        directory: an existing folder.
        first_line: returns the first line of a part, given the lines of the previous part.
        on_failure: called once, with a sentence, when a line is lost.
        gateway: a client of etcd that holds a copy of the log, if there is one; used by this log only.
        part_bytes: the size at which a new part begins.
    """

    def __init__(
        self,
        directory: Path,
        first_line: Callable[[list[str]], str],
        on_failure: Callable[[str], object],
        *,
        gateway: EtcdGateway | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._path = directory / EVENTS_FILE
        self._first_line, self._on_failure, self._part_bytes = first_line, on_failure, part_bytes
        self._descriptor: int | None = None
        self._size_bytes = 0
        self._is_torn = False
        self._has_failed = False
        self._copier = None if gateway is None else EventCopier(gateway, read_lines(directory), on_failure)

    def append(self, lines: Sequence[str]) -> None:
        """Append complete lines, given without line breaks; on a disk error, they are lost."""
        if self._copier is not None:
            self._copier.put(lines)
        try:
            if self._descriptor is not None and self._size_bytes > self._part_bytes:
                self._rotate()
            self._write("".join(f"{line}\n" for line in lines))
        except (OSError, StoreError) as error:
            self.close()
            if not self._has_failed:
                self._has_failed = True
                self._on_failure(f"{self._path}: an event was not written ({error}); the job continues without it")

    def end(self) -> None:
        """Close the file and the copy; nothing can be appended afterwards."""
        self.close()
        if self._copier is not None:
            self._copier.close()

    def close(self) -> None:
        """Close the file; ``append`` reopens it."""
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
        if self._copier is not None:
            self._copier.put([first])
        self._write(f"{first}\n")


def refresh_copy(directory: Path, gateway: EtcdGateway) -> None:
    """Copy the log in etcd to the folder, unless the folder's is as new or newer.

    The caller holds the folder's lock.

    Raises:
        StoreError: etcd or the disk reports an error.
    """
    lines = copied_lines(gateway)
    if lines and lines[-1] not in read_lines(directory):
        durable.make_directory(directory)
        for number in range(1, MOST_PARTS):
            _part(directory, number).unlink(missing_ok=True)
        durable.write_file_atomically(directory / EVENTS_FILE, "".join(f"{line}\n" for line in lines).encode())


def read_lines(directory: Path) -> list[str]:
    """Return every complete line, oldest first; empty if there is no log.

    Raises:
        StoreError: the disk reports an error, or a part belongs to another user.
    """
    for _ in range(3):  # a rotation may move a part while the others are read
        parts = [_part(directory, number) for number in range(MOST_PARTS - 1, -1, -1)]
        before = _inodes(parts)
        lines = [line for part in parts for line in _lines_of(part)]
        if _inodes(parts) == before:
            break
    return lines


class Tail:
    """Polls for lines appended to the log since the last call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._inode, self._offset, self._rest = 0, 0, b""

    def new_lines(self) -> tuple[list[str], bool]:
        """Return the new lines, and whether they are the entire log from its beginning."""
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
    """Append one line to the log of requests, durably.

    Raises:
        StoreError: the disk reports an error, or the file belongs to another user.
    """
    path = directory / ASKED_FILE
    descriptor = _locked(path)
    try:
        with durable.disk_errors(path, "recording a request"):
            data = line.encode()[:MAX_ASKED_BYTES].replace(b"\n", b" ")
            os.write(descriptor, b"\n" + data + b"\n")  # the first line break ends a torn line, if any
            os.fsync(descriptor)
        if len(known := read_asked(directory)) > MOST_LINES:
            durable.replace_note(path, "".join(f"{one}\n" for one in known[-MOST_LINES // 2 :]).encode())
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Open and lock the file; until it is closed, no other process writes or replaces it."""
    while True:
        descriptor = private.open_to_append(path)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
        os.close(descriptor)  # the file was replaced meanwhile


def read_asked(directory: Path) -> list[str]:
    """Return the last lines of the log of requests, oldest first.

    About MOST_LINES lines are returned at most.

    Raises:
        StoreError: the disk reports an error, or the file belongs to another user.
    """
    data = private.read(directory / ASKED_FILE, 2 * MOST_LINES * (MAX_ASKED_BYTES + 2)) or b""
    lines = data.rsplit(b"\n", 2 * MOST_LINES + 2)[-2 * MOST_LINES - 2 :]  # an empty line precedes each line
    return [line.decode(errors="replace") for line in lines if line and len(line) <= MAX_ASKED_BYTES]
