"""Staging: reuse between saves, and slots that hold a data file exactly as on disk."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.store.checkpoint import MemoryRoom, PointHeader, memory_buffer, points_in_memory
from samebits.store.checkpoint.point_format import decode_manifest
from samebits.training.checkpoint import staging as staging_module
from samebits.training.checkpoint.staging import Staging
from samebits.training.state.snapshot import NamedTensors

JOB = "a-job"


@pytest.fixture
def room(tmp_path: Path) -> Iterator[MemoryRoom]:
    room = MemoryRoom(tmp_path, JOB, 0)
    yield room
    room.close()


def tensors_of(step: int, count: int = 30) -> NamedTensors:
    generator = torch.Generator().manual_seed(step)
    return [
        named
        for number in range(count)
        for named in (
            (f"step.{number}", torch.tensor(float(step))),
            (f"weight.{number}", torch.randn(16, 4, generator=generator)),
            (f"half.{number}", torch.randn(5, generator=generator).bfloat16()),
        )
    ]


def stage(staging: Staging, room: MemoryRoom, step: int, tensors: NamedTensors) -> bytes:
    """Return the data file that the slot then holds."""
    header = PointHeader(JOB, Point(step, 1), 1, 0, 0, "0")
    name, _ = staging.stage(header, tensors, {"step": step}, {})
    with memory_buffer.hashed(room.path / name, room.descriptor) as point:
        assert decode_manifest(point.manifest_data()).tree == {"step": step}
        return bytes(point.data)


def test_slot_holds_a_safetensors_file(room: MemoryRoom) -> None:
    staging = Staging(room)
    for step in (1, 2, 3, 4):
        tensors = tensors_of(step)
        loaded = load(stage(staging, room, step, tensors))
        assert loaded.keys() == {name for name, _ in tensors}
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors)


def test_nothing_is_rebuilt_while_shapes_and_dtypes_stay(room: MemoryRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(room)
    for step in (1, 2):
        stage(staging, room, step, tensors_of(step))
    monkeypatch.setattr(staging_module, "encode_header", lambda parts: pytest.fail("a plan was made again"))
    monkeypatch.setattr(staging_module, "_views", lambda data, plan: pytest.fail("views were made again"))
    for step in (3, 4, 5):
        stage(staging, room, step, tensors_of(step))
    assert [found.point.step for found in points_in_memory(room.path.parents[2], JOB, 0)[0]] == [5, 4]


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "fewer", "more"])
def test_any_change_of_shape_or_dtype_is_noticed(room: MemoryRoom, change: str) -> None:
    staging = Staging(room)
    for step in (1, 2):
        stage(staging, room, step, tensors_of(step))
    tensors = tensors_of(3, {"fewer": 29, "more": 2000}.get(change, 30))
    name, tensor = tensors[1]
    if change == "name":
        tensors[1] = ("renamed", tensor)
    elif change == "dtype":
        tensors[1] = (name, tensor.to(torch.int32))
    elif change == "shape":
        tensors[1] = (name, tensor.reshape(4, 16))
    loaded = load(stage(staging, room, 3, tensors))
    assert loaded.keys() == {name for name, _ in tensors}
    for name, tensor in tensors:
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)


def test_memory_freed_and_prepared_again_is_new(room: MemoryRoom) -> None:
    staging = Staging(room)
    for step in (1, 2):
        stage(staging, room, step, tensors_of(step))
    room.forget(lambda point: True)
    staging.prepare(PointHeader(JOB, Point(2, 1), 1, 0, 0, "0"), tensors_of(2), {"step": 2}, {})
    wait(staging._reserving.values())
    for step in (3, 4, 5):
        loaded = load(stage(staging, room, step, tensors_of(step)))
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors_of(step))
    staging.close()


def test_duplicate_name_is_refused_and_the_older_point_stays(room: MemoryRoom) -> None:
    staging = Staging(room)
    stage(staging, room, 1, tensors_of(1))
    with pytest.raises(CheckpointError, match="the name is already used"):
        stage(staging, room, 2, [*tensors_of(2), ("step.0", torch.zeros(3))])
    assert [found.point.step for found in points_in_memory(room.path.parents[2], JOB, 0)[0]] == [1]


def test_order_of_the_state_does_not_matter(room: MemoryRoom) -> None:
    staging = Staging(room)
    for order in (1, -1, 1):
        tensors = tensors_of(1)[::order]
        loaded = load(stage(staging, room, 1, tensors))
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors)
