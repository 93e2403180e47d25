"""Small points in an object store whose content follows from their step, and checks of them."""

from __future__ import annotations

from typing import Any

from samebits.core.point import Point
from samebits.store.checkpoint import LoadedPoint, Pruning, Retention, TensorPart
from samebits.store.checkpoint.remote_points import RemotePoint, RemotePointStore
from tests.store.points import LAYOUT, header_of

CHUNK_BYTES = 100


def tensors_of(step: int, size_bytes: int = 960) -> list[TensorPart]:
    pattern = bytes((step * 7 + index) % 251 for index in range(251))
    data = (pattern * (size_bytes // 251 + 1))[:size_bytes]
    return [TensorPart("weight", "U8", (size_bytes,), data), TensorPart("bias", "BF16", (3,), bytes(range(6)))]


def save(place: RemotePointStore, step: int, generation: int = 1, *, rank: int = 0, **more: Any) -> None:
    size_bytes, more["chunk_bytes"] = more.pop("size_bytes", 960), more.get("chunk_bytes", CHUNK_BYTES)
    tensors = tensors_of(step, size_bytes)
    place.write(header_of(step, generation, rank=rank), tensors, {"lr": 0.5 * step}, LAYOUT, **more)


def find(place: RemotePointStore, step: int, generation: int = 1) -> RemotePoint:
    (found,) = [found for found in place.scan() if found.point == Point(step, generation)]
    return found


def prune(place: RemotePointStore, keep: int) -> list[Point]:
    newest = max((found.point for found in place.scan()), default=Point(0, 1))
    return list(place.prune(Pruning(newest, Retention(keep))).gone)


def points(place: RemotePointStore) -> list[tuple[int, int]]:
    return [(found.point.step, found.point.generation) for found in place.scan() if found.is_usable]


def assert_is(found: LoadedPoint, step: int, size_bytes: int = 960) -> None:
    assert found.header.point.step == step
    assert found.tree == {"lr": 0.5 * step}
    assert found.layout == LAYOUT
    expected = {part.name: part.data for part in tensors_of(step, size_bytes)}
    assert {name: bytes(part.data) for name, part in found.tensors.items()} == expected
