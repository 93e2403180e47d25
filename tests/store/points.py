"""Small points for tests of the checkpoint format."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from samebits.core.point import Point
from samebits.store.checkpoint import (
    BITS_BY_DTYPE,
    FoundPoint,
    PointHeader,
    TensorPart,
    rank_directory,
    scan,
    write_point,
)

JOB = "6a1f0c1e-0000-4000-8000-000000000001"
JOB_NAME = "digits"
CHUNK_BYTES = 100
TREE = {"lr": 0.1, "betas": (0.9, 0.999), "seed": 2**100, "names": ["a", b"\x00"], "none": None, 3: True}
LAYOUT = {"buckets": [[0, 1], [2]], "rebuilt": False}


def header_of(step: int, generation: int = 1, *, rank: int = 0, job: str = JOB) -> PointHeader:
    return PointHeader(job, Point(step, generation), world_size=4, rank=rank, slot=rank, node=str(rank))


def one_of_each_dtype() -> list[TensorPart]:
    """Return a tensor of every dtype with distinct bytes, plus a scalar and an empty tensor."""
    parts = []
    for number, (dtype, bits) in enumerate(BITS_BY_DTYPE.items()):
        nbytes = 2 * 12 * bits // 8
        data = bytes((number * 31 + index) % (2 if dtype == "BOOL" else 251) for index in range(nbytes))
        parts.append(TensorPart(f"all.{dtype}", dtype, (2, 12), data))
    return [
        *parts,
        TensorPart("a scalar", "F64", (), bytes(range(8))),
        TensorPart("ein leerer Tensor: 空", "F32", (3, 0), b""),
    ]


def save(root: Path, step: int, generation: int = 1, *, rank: int = 0, job: str = JOB) -> FoundPoint:
    """Save a small point and find it."""
    tensors = [
        TensorPart("weight", "F32", (8, 3), bytes((step + generation + index) % 256 for index in range(96))),
        TensorPart("bias", "BF16", (3,), bytes(range(6))),
    ]
    header = header_of(step, generation, rank=rank, job=job)
    write_point(root, header, tensors, TREE, LAYOUT, chunk_bytes=CHUNK_BYTES)
    return find(root, step, generation, rank=rank, job=job)


def find(root: Path, step: int, generation: int = 1, *, rank: int = 0, job: str = JOB) -> FoundPoint:
    (found,) = [found for found in scan(rank_directory(root, rank), job) if found.point == Point(step, generation)]
    return found


def change_byte(path: Path, position: int, mask: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def each_change(found: FoundPoint, name: str, change: Callable[[bytes, int], bytes]) -> Callable[[int], None]:
    """Apply ``change`` repeatedly to the original bytes of one file of a point."""
    original = (found.path / name).read_bytes()

    def apply(number: int) -> None:
        (found.path / name).write_bytes(change(original, number))

    return apply


def copy_point(found: FoundPoint, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(found.path, target)
