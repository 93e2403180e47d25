"""Tune this process for recoveries: huge pages, the interpreter while all ranks wait, and a spare's warm-up.

**Huge pages.** The kernel itself collects small pages into a huge one (madvise(2), MADV_COLLAPSE). A killed process is
gone only when the kernel has freed its memory page by page. For a rank of 340 MB, this takes 22 ms of a core that the
survivors need, and a peer on another host learns of the death only afterwards. With pages of 2 MiB it takes 5 ms.
Contents, addresses and the process's memory policy stay as they are.

**Warm-up.** Most of a process's first step is spent on imports and first uses: of torch's compiler package, an
optimizer, autograd, DistributedDataParallel's reducer, and this package's own code for saving a state. A spare has time
for these while it waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import nn

from samebits.core.point import Point
from samebits.errors import CheckpointError, UsageError
from samebits.store import checkpoint as checkpoints
from samebits.training.group import ddp
from samebits.training.group.group import Group
from samebits.training.state import rng, snapshot
from samebits.training.state.base_state import State

HUGE_BYTES: Final = 2 * 1024 * 1024
"""Size of a huge page in bytes (x86-64, and arm64 with pages of 4 KiB); if pages are larger, nothing is done."""
FULL: Final = 7 / 8
"""Share of a huge page that must be in use for the memory to be moved; the rest is additional memory use."""
REST: Final = 19
"""Pause after each page, as a multiple of the time that the page took: moving uses one twentieth of a core.

A page takes 2 ms, during which no other thread of this process gets new memory.
"""

_MADV_COLLAPSE = 25  # since Linux 6.1; Python has no name for it
_MAPS, _PAGEMAP = Path("/proc/self/maps"), Path("/proc/self/pagemap")
_OWN_MEMORY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw.p [0-9a-f]+ 00:00 0 *(\[heap\]|\[anon.*)?")
_ENTRY_BYTES = 8
_PAGES = HUGE_BYTES // mmap.PAGESIZE
_NOTHING_HERE = bytes(_PAGES * _ENTRY_BYTES)
_HERE_AND_OURS_ALONE = 1 << 63 | 1 << 56  # present and exclusively mapped (Documentation/admin-guide/mm/pagemap.rst)


def gather_aside() -> None:
    """Run :func:`gather` in a separate thread, with pauses that leave the core to training."""
    threading.Thread(target=gather, args=(REST,), name="samebits-huge-pages", daemon=True).start()


def gather(rest: float = 0.0) -> int:
    """Move the memory in use now into huge pages, and return how many are huge pages afterwards.

    Memory that is shared with a forked child, only reserved, or refused by the kernel stays as it is. If memory is
    short, moving stops.

    Args:
        rest: pause after each page, as a multiple of the time it took.
    """
    if mmap.PAGESIZE != 4096:
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    if madvise(None, 0, _MADV_COLLAPSE) != 0:
        return 0  # the kernel lacks this advice
    with contextlib.suppress(OSError), _PAGEMAP.open("rb", buffering=0) as pages:  # a sandbox may deny it
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
    """Yield the addresses in this process's private anonymous memory at which a huge page could begin."""
    for line in _MAPS.read_text().splitlines():
        found = _OWN_MEMORY.fullmatch(line)
        if found is not None:
            start, end = int(found[1], 16), int(found[2], 16)
            yield from range(-(-start // HUGE_BYTES) * HUGE_BYTES, end - HUGE_BYTES + 1, HUGE_BYTES)


def _is_full(pages: int, start: int) -> bool:
    entries = os.pread(pages, _PAGES * _ENTRY_BYTES, start // mmap.PAGESIZE * _ENTRY_BYTES)
    if entries == _NOTHING_HERE:  # true for most memory that is only reserved
        return False
    wanted = _HERE_AND_OURS_ALONE
    return sum(entry & wanted == wanted for entry in memoryview(entries).cast("Q")) >= _PAGES * FULL


HAND_OVER_S = 0.0005
"""Switch interval during a recovery.

Several of our threads hand work to each other then, and each hand-over may take one interval. With Python's default of
5 ms, hand-overs would take most of a recovery.
"""


class InterpreterTuning:
    """Shortens the thread switch interval and disables garbage collection, which can take longer than a recovery.

    The user's settings are restored afterwards; garbage collection stays off if the user disabled it.
    """

    def __init__(self) -> None:
        self._hand_over_s: float | None = None  # the user's interval while tuning; None otherwise
        self._collects = False

    def begin(self) -> None:
        """Begin tuning. Further calls do nothing."""
        if self._hand_over_s is None:
            self._hand_over_s, self._collects = sys.getswitchinterval(), gc.isenabled()
            sys.setswitchinterval(HAND_OVER_S)
            gc.disable()

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Context manager that allows garbage collection while this process waits for others.

        A spare may wait for days.
        """
        if self._collects:
            gc.enable()
        try:
            yield
        finally:
            gc.disable()

    def end(self) -> None:
        """End tuning. Further calls do nothing."""
        if self._hand_over_s is not None:
            sys.setswitchinterval(self._hand_over_s)
            self._hand_over_s = None
            if self._collects:
                gc.enable()


def warm_up(state: State, device: torch.device, alone: Group | None) -> None:
    """Use everything once that a member of a generation uses.

    The state, its weights and random numbers do not change.

    Args:
        state: the user's state, with its model and optimizers built.
        device: the device this process will train on; its context is created.
        alone: the group of one, on which the wrappers' reducers are built once.
    """
    before = rng.capture()
    layer = nn.Linear(2, 2, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(2, 2, device=device)).sum().backward()
        optimizer.step()
    if alone is not None:
        ddp.attach_all(alone, None)
        ddp.generation_ended()
    try:
        tree, parts = snapshot.split(state.contents(), "state")
    except CheckpointError as error:
        raise UsageError(str(error).replace("state.shared.values.", "state.")) from None
    outgoing = checkpoints.Outgoing.of_state(checkpoints.PointHeader("", Point(0, 1), 1, 0, 0, ""), parts, tree, {})
    incoming = checkpoints.IncomingPoint(memoryview(outgoing.preface), "", {})
    for size_bytes in checkpoints.sizes_of(outgoing.data_bytes):
        piece = memoryview(bytearray(size_bytes))
        outgoing.fill(piece)
        incoming.take(piece)
    found = incoming.point()
    state.load(snapshot.join(found.tree, found.tensors), own=True)
    rng.restore(before)
    gc.collect()  # otherwise a recovery would have to collect this garbage
    gather()
