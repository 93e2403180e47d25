"""A new file from bytes in memory, past the page cache where the file system allows it.

Only the writing of one file lives here; what is in it and when it gets its name do not. The one idea: who saves does
not read again soon, so copying gigabytes into the page cache costs a processor and everybody's cached pages for nothing
(O_DIRECT in open(2)); where that is refused, at the start or at any write, the rest goes the ordinary way.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from runtime.store import durable

_WRITE_BYTES = 8 * 1024 * 1024
_BLOCK_BYTES = 4096  # what lengths and offsets must be multiples of, on any file system in use
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def write_new_file(path: Path, data: memoryview) -> None:
    """Create ``path`` with ``data`` and fsync it, but not its directory's entry; raises the bare :class:`OSError`."""
    descriptor, is_direct = _create(path)
    try:
        done = 0
        while done < len(data):
            if is_direct and (done % _BLOCK_BYTES or len(data) - done < _BLOCK_BYTES):
                is_direct = _leave_direct(descriptor)
            end = min(done + _WRITE_BYTES, len(data))
            if is_direct:
                end -= (end - done) % _BLOCK_BYTES
            try:
                done += os.write(descriptor, data[done:end])
            except OSError as error:
                if not is_direct or error.errno != errno.EINVAL:
                    raise
                is_direct = _leave_direct(descriptor)  # a file system with larger blocks, or a mapping it cannot read
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if _O_DIRECT:
        try:
            return os.open(path, flags | _O_DIRECT, durable.FILE_MODE), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some kernels create the file before they refuse
    return os.open(path, flags, durable.FILE_MODE), False


def _leave_direct(descriptor: int) -> bool:
    """The ordinary way from now on; returns what is then true of the descriptor."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_O_DIRECT)
    return False
