"""The floor of a save's cost to training beside it: a process that only writes the bytes.

``<bytes> <file>``. For every line of standard input the file is recreated with O_DIRECT, if the file system allows it,
and fsynced; then a line is printed. The process ends when its standard input does.
"""

from __future__ import annotations

import mmap
import os
import sys

PIECE_BYTES = 8 * 1024 * 1024


def main() -> None:
    size_bytes, path = int(sys.argv[1]), sys.argv[2]
    memory = mmap.mmap(-1, size_bytes)  # aligned to a page, as O_DIRECT requires
    data = memoryview(memory)
    for start in range(0, size_bytes, mmap.PAGESIZE):
        data[start] = 1  # touched before it is measured
    print(flush=True)
    for _ in sys.stdin:
        write(data, path)
        print(flush=True)


def write(data: memoryview, path: str) -> None:
    """Write the bytes, in whole pages, durably to a new file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
    except OSError:  # open(2): EINVAL if the file system lacks it
        descriptor = os.open(path, flags)
    os.posix_fallocate(descriptor, 0, len(data))
    for start in range(0, len(data), PIECE_BYTES):
        os.pwrite(descriptor, data[start : start + PIECE_BYTES], start)
    os.fsync(descriptor)
    os.close(descriptor)


if __name__ == "__main__":
    main()
