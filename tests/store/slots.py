"""Small points in memory slots, filled as a trainer fills them, without a tensor library."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits.store.checkpoint import Manifest, MemoryRoom, TensorPart, encode_header, encode_manifest, memory_buffer
from tests.store.points import CHUNK_BYTES, LAYOUT, TREE, header_of

COUNT = 96


def content_of(step: int, count: int = COUNT) -> bytes:
    turn = bytes(range(251))
    start = step * 7 % 251
    return (turn[start:] + turn * (count // 251 + 1))[:count]


def fill(
    room: MemoryRoom, step: int, generation: int = 1, *, count: int = COUNT, chunk_bytes: int = CHUNK_BYTES
) -> str:
    """Copy the step's point into the next slot and seal it; return the slot's name."""
    return fill_numbered(room, step, generation, count=count, chunk_bytes=chunk_bytes)[0]


def fill_numbered(
    room: MemoryRoom, step: int, generation: int = 1, *, count: int = COUNT, chunk_bytes: int = CHUNK_BYTES
) -> tuple[str, int]:
    """Like :func:`fill`, but return the slot's name and the point's sequence number."""
    content = content_of(step, count)
    data = encode_header([TensorPart("weight", "U8", (count,), content)]) + content
    chunks = (bytes(16),) * -(-len(data) // chunk_bytes)
    header = header_of(step, generation)
    manifest = encode_manifest(Manifest(header, LAYOUT, {**TREE, "step": step}, len(data), chunk_bytes, chunks))
    slot = room.next_slot()
    slot.reserve(len(manifest), len(data))
    slot.open()
    slot.data(len(data))[:] = data
    return slot.path.name, room.seal(slot, header.point, manifest, len(data))


def hash_slot(room: MemoryRoom, name: str) -> None:
    with memory_buffer.hashed(room.path / name, room.descriptor):
        """Hash the slot, as its writer does first."""


def fill_and_hash(room: MemoryRoom, step: int, generation: int = 1, *, count: int = COUNT) -> str:
    name = fill(room, step, generation, count=count)
    hash_slot(room, name)
    return name


ENDING_HOLDER = """
import ctypes, fcntl, os, sys, threading
room = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(room, fcntl.LOCK_EX)
def end_when_told():
    print(flush=True)
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=end_when_told).start()
exit_of_a_thread = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
ctypes.CDLL(None).syscall(exit_of_a_thread, 0)  # as if the kernel had begun to end this process
"""


@contextlib.contextmanager
def locked_by_an_ending_process(room: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Hold the room's lock in a process whose first thread has ended, until its standard input is closed."""
    command = [sys.executable, "-c", ENDING_HOLDER, str(room)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        while " Z " not in Path(f"/proc/{holder.pid}/stat").read_text():
            assert holder.poll() is None
        try:
            yield holder
        finally:
            holder.stdin.close()


def on_first_sleep(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Have this done when the room's lock is first awaited."""
    sleep, actions = time.sleep, [action]

    def slept(pause_s: float) -> None:
        if actions:
            actions.pop()()
        sleep(pause_s)

    monkeypatch.setattr(time, "sleep", slept)
