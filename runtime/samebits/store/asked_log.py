"""What somebody has asked of a job from outside of its scheduler, line by line: ``asked.jsonl`` beside the journal.

The file lives here; what a line says is its writer's. The one idea: whoever is about to do something to a job writes
first, and does nothing where that fails; so what is done by hand is in the history as what happens by itself is. Lines
are appended whole, by any process of the job's user, and the older half goes where there are too many.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from samebits.store import durable, private

ASKED_FILE = "asked.jsonl"
MOST_LINES = 1000
MAX_LINE_BYTES = 4096


def append(directory: Path, line: str) -> None:
    """Add one line.

    Raises:
        StoreError: the disk refuses, or the file is another user's.
    """
    path = directory / ASKED_FILE
    descriptor = _locked(path)
    try:
        with durable.disk_errors(path, "writing down what was asked"):
            data = line.encode()[:MAX_LINE_BYTES].replace(b"\n", b" ")
            os.write(descriptor, b"\n" + data + b"\n")  # whatever a torn line before it has left
            os.fsync(descriptor)
        if len(known := read(directory)) > MOST_LINES:
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


def read(directory: Path) -> list[str]:
    """Return the last lines, the oldest first, MOST_LINES and a few more at most.

    Raises:
        StoreError: the disk refuses, or the file is another user's.
    """
    data = private.read(directory / ASKED_FILE, 2 * MOST_LINES * (MAX_LINE_BYTES + 2)) or b""
    lines = data.rsplit(b"\n", 2 * MOST_LINES + 2)[-2 * MOST_LINES - 2 :]  # each has an empty one before it
    return [line.decode(errors="replace") for line in lines if line and len(line) <= MAX_LINE_BYTES]
