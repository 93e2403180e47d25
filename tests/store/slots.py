"""Small points in memory slots, filled as a trainer fills them, without a tensor library."""

from __future__ import annotations

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
