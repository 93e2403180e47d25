"""This process's own memory in huge pages, so that it goes at once when the process does.

Here lives finding memory that is in full use, and having the kernel move it together (madvise(2), MADV_COLLAPSE). Never
here: when that is done. The one idea: a killed process is not gone before the kernel has taken its memory apart, page
by page: 22 ms of a core that the survivors need, for a rank of 340 MB, and a peer on another host hears of the death
only then. In pages of 2 MiB it takes 5 ms. Contents, addresses and the process's memory policy stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["gather", "gather_aside"]

HUGE_BYTES: Final = 2 * 1024 * 1024
"""Of one huge page (x86-64, and arm64 with pages of 4 KiB); elsewhere they are larger and nothing is done."""
FULL: Final = 7 / 8
"""What this share of is in use is moved together; the rest of it is memory that the process did not have before."""
REST: Final = 19
"""Beside a training it rests this many times as long as it has worked, a twentieth of a core: a page takes 2 ms, in
which nobody else of this process gets new memory."""

_MADV_COLLAPSE = 25  # since Linux 6.1; Python has no name for it
_MAPS, _PAGEMAP = Path("/proc/self/maps"), Path("/proc/self/pagemap")
_OWN_MEMORY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw.p [0-9a-f]+ 00:00 0 *(\[heap\]|\[anon.*)?")
_ENTRY_BYTES = 8
_PAGES = HUGE_BYTES // mmap.PAGESIZE
_NOTHING_HERE = bytes(_PAGES * _ENTRY_BYTES)
_HERE_AND_OURS_ALONE = 1 << 63 | 1 << 56  # Documentation/admin-guide/mm/pagemap.rst: present, exclusively mapped


def gather_aside() -> None:
    """As :func:`gather`, in a thread of its own that leaves the training its core."""
    threading.Thread(target=gather, args=(REST,), name="samebits-huge-pages", daemon=True).start()


def gather(rest: float = 0.0) -> int:
    """Move what this process uses now into huge pages, and say how many it has moved or found there.

    What a forked child shares, what is only reserved, and what the kernel refuses is left as it is; where memory is
    short that is the end of it.

    Args:
        rest: how many times as long as a page took to wait before the next.
    """
    if sys.platform != "linux" or mmap.PAGESIZE != 4096:
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    if madvise(None, 0, _MADV_COLLAPSE) != 0:
        return 0  # the kernel knows no such advice
    with contextlib.suppress(OSError), _PAGEMAP.open("rb", buffering=0) as pages:  # in a sandbox that shows them
        for start in _own_memory():
            began = time.monotonic()
            if not _is_full(pages.fileno(), start):
                continue
            if madvise(start, HUGE_BYTES, _MADV_COLLAPSE) == 0:
                moved += 1
            elif ctypes.get_errno() == errno.ENOMEM:
                break
            if rest:
                time.sleep(rest * (time.monotonic() - began))
    return moved


def _own_memory() -> Iterator[int]:
    """Where each huge page would begin that lies in memory of this process alone, of no file."""
    for line in _MAPS.read_text().splitlines():
        found = _OWN_MEMORY.fullmatch(line)
        if found is not None:
            start, end = int(found[1], 16), int(found[2], 16)
            yield from range(-(-start // HUGE_BYTES) * HUGE_BYTES, end - HUGE_BYTES + 1, HUGE_BYTES)


def _is_full(pages: int, start: int) -> bool:
    entries = os.pread(pages, _PAGES * _ENTRY_BYTES, start // mmap.PAGESIZE * _ENTRY_BYTES)
    if entries == _NOTHING_HERE:  # of much that is only reserved
        return False
    wanted = _HERE_AND_OURS_ALONE
    return sum(entry & wanted == wanted for entry in memoryview(entries).cast("Q")) >= _PAGES * FULL
