"""Huge pages: what is moved into them, what is left alone, and that no content changes.

Each test maps its own memory and asks the kernel (``/proc/self/smaps``) for the result.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.training.run import process_tuning
from samebits.training.run.process_tuning import HUGE_BYTES

PIECES = 4
MADV_NOHUGEPAGE = 15


def knows_collapse() -> bool:
    """Return whether this kernel supports the advice; without it nothing may be moved."""
    return bool(ctypes.CDLL(None).madvise(None, 0, 25) == 0)


def small_pages() -> mmap.mmap:
    """Map private memory for several huge pages that the kernel fills with small ones."""
    memory = mmap.mmap(-1, (PIECES + 1) * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(MADV_NOHUGEPAGE)
    return memory


def touch(memory: mmap.mmap, every: int = mmap.PAGESIZE) -> None:
    for start in range(0, len(memory), every):
        memory[start] = 1 + start // every % 250
    memory.madvise(mmap.MADV_HUGEPAGE)  # undoes the advice above


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def huge_kib_at(address: int) -> int:
    """Return how much of the mapping around that address is in huge pages."""
    is_in = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_in = int(found[1], 16) <= address < int(found[2], 16)
        elif is_in and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    raise AssertionError("the memory is not mapped")


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    yield small_pages()


def test_used_memory_is_moved_and_keeps_its_content(memory: mmap.mmap) -> None:
    touch(memory)
    before = bytes(memory)
    moved = process_tuning.gather()
    assert bytes(memory) == before
    if knows_collapse():
        assert moved >= PIECES
        assert huge_kib_at(address_of(memory)) >= PIECES * HUGE_BYTES // 1024
    else:
        assert moved == 0


def test_mostly_reserved_memory_does_not_grow(memory: mmap.mmap) -> None:
    touch(memory, every=2 * mmap.PAGESIZE)
    process_tuning.gather()
    assert huge_kib_at(address_of(memory)) == 0


def test_memory_shared_with_a_forked_child_is_not_duplicated(memory: mmap.mmap) -> None:
    touch(memory)
    waiting, let_go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(let_go)
        os.read(waiting, 1)
        os._exit(0)
    os.close(waiting)
    process_tuning.gather()
    shared = huge_kib_at(address_of(memory))
    os.close(let_go)
    os.waitpid(child, 0)
    assert shared == 0


def test_machine_without_page_information_is_left_alone(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(memory)
    monkeypatch.setattr(process_tuning, "_PAGEMAP", Path("/proc/self/there is no such file"))
    assert process_tuning.gather() == 0
    assert huge_kib_at(address_of(memory)) == 0
