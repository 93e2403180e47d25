"""Whether a folder's disk keeps what is written to it, and how fast: a file that is written, read back and removed.

Here lives one look. Never here: what follows from it. The one idea: what was just written lies in the kernel's memory,
so the file is dropped from there before it is read.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from pathlib import Path

from samebits.errors import StoreError
from samebits.store import durable

SIZE = 16 << 20
_PART = 1 << 20


def write_and_read(folder: Path) -> float:
    """MB a second that are durable there, or in the folder above it that is there already.

    Raises:
        StoreError: it cannot be written, or something else is read.
    """
    there = next((one for one in (folder, *folder.absolute().parents) if one.exists()), folder)
    path, part = there / f".preflight-{uuid.uuid4().hex}", os.urandom(_PART)
    with durable.disk_errors(path, "writing a test file"):
        descriptor = durable.create(path, is_read_too=True)
    try:
        with durable.disk_errors(path, "writing a test file"):
            began_s = time.monotonic()
            for _ in range(SIZE // _PART):
                _write(descriptor, part)
            os.fsync(descriptor)
            took_s = time.monotonic() - began_s
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(descriptor, 0, os.SEEK_SET)
            same = all(_digest(_read(descriptor)) == _digest(part) for _ in range(SIZE // _PART))
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    if not same:
        raise StoreError(f"{folder}: what was written is not what is read. Fix: check this disk, or use another")
    return SIZE / 1e6 / max(took_s, 1e-9)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int) -> bytes:
    parts, left = [], _PART
    while left and (part := os.read(descriptor, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
