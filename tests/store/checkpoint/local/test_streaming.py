"""Streamed points: one arrives complete, in the tensors that wait for it, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from samebits.errors import CheckpointError
from samebits.store.checkpoint import (
    IncomingPoint,
    LoadedPoint,
    Outgoing,
    TensorPart,
    read,
    sizes_of,
    streaming,
    write_point,
)
from tests.store.points import JOB, LAYOUT, find, header_of, one_of_each_dtype

TREE = {"lr": 0.5, "betas": (0.9, 0.999), "names": ["weight", "bias"]}
Change = Callable[[bytes], bytes]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PIECE_BYTES", 100)


def messages_of(outgoing: Outgoing) -> Iterator[bytes]:
    """Return the preface and every piece."""
    yield outgoing.preface
    for size_bytes in sizes_of(outgoing.data_bytes):
        piece = memoryview(bytearray(size_bytes))
        outgoing.fill(piece)
        yield bytes(piece)


def arrived(messages: Iterator[bytes], job: str = JOB, targets: Mapping[str, TensorPart] | None = None) -> LoadedPoint:
    incoming = IncomingPoint(memoryview(next(messages)), job, targets or {})
    for _ in sizes_of(incoming.data_bytes):
        incoming.take(memoryview(next(messages)))
    return incoming.point()


def live(parts: list[TensorPart] | None = None) -> Outgoing:
    return Outgoing.of_state(header_of(7), one_of_each_dtype() if parts is None else parts, TREE, LAYOUT)


def assert_whole(found: LoadedPoint, parts: list[TensorPart]) -> None:
    assert found.header == header_of(7)
    assert (found.tree, found.layout) == (TREE, LAYOUT)
    assert {name: (part.dtype, part.shape, bytes(part.data)) for name, part in found.tensors.items()} == {
        part.name: (part.dtype, part.shape, bytes(part.data)) for part in parts
    }


@pytest.mark.parametrize("from_disk", [False, True])
def test_point_arrives_complete(tmp_path: Path, from_disk: bool) -> None:
    parts = one_of_each_dtype()
    outgoing = live(parts)
    if from_disk:
        write_point(tmp_path, header_of(7), parts, TREE, LAYOUT)
        outgoing = Outgoing.of_point(read(find(tmp_path, 7)))
    assert outgoing.data_bytes > 2 * streaming.PIECE_BYTES
    assert_whole(arrived(messages_of(outgoing)), parts)


def test_received_point_can_be_saved(tmp_path: Path) -> None:
    parts = one_of_each_dtype()
    received = arrived(messages_of(live(parts)))
    assert not memoryview(received.tensors["a scalar"].data).readonly
    write_point(tmp_path, header_of(7, rank=2), received.tensors.values(), received.tree, received.layout)
    own = read(find(tmp_path, 7, rank=2))
    assert {name: bytes(part.data) for name, part in own.tensors.items()} == {
        part.name: bytes(part.data) for part in parts
    }


@pytest.mark.parametrize("size_bytes", [0, 1, 99, 100, 101, 200])
def test_last_piece_may_be_of_any_size(size_bytes: int) -> None:
    parts = [TensorPart("weight", "U8", (size_bytes,), bytes(range(size_bytes)))]
    assert_whole(arrived(messages_of(live(parts))), parts)


def test_state_without_tensors_is_a_preface() -> None:
    messages = list(messages_of(live([])))
    assert len(messages) == 1
    assert_whole(arrived(iter(messages)), [])


def test_matching_tensors_are_filled_in_place() -> None:
    parts = one_of_each_dtype()
    fitting = parts[0]
    targets = {
        fitting.name: TensorPart(fitting.name, fitting.dtype, fitting.shape, bytearray(len(fitting.data))),
        parts[1].name: TensorPart(parts[1].name, "U8", (3,), bytearray(3)),
    }
    found = arrived(messages_of(live(parts)), targets=targets)
    assert_whole(found, parts)
    assert found.tensors[fitting.name] is targets[fitting.name]
    assert bytes(targets[parts[1].name].data) == bytes(3)


def test_any_changed_byte_is_detected() -> None:
    messages = list(messages_of(live()))
    for number, message in enumerate(messages):
        for position in range(len(message)):
            changed = message[:position] + bytes([message[position] ^ 0x40]) + message[position + 1 :]
            with pytest.raises(CheckpointError, match="received from another rank"):
                arrived(iter([*messages[:number], changed, *messages[number + 1 :]]))


def test_preface_of_the_wrong_length_is_refused() -> None:
    preface = live().preface
    for end in range(len(preface)):
        with pytest.raises(CheckpointError, match="received from another rank"):
            arrived(iter([preface[:end]]))
    with pytest.raises(CheckpointError, match="are not the start of a point"):
        arrived(iter([preface + b"\x00"]))


def test_reordered_pieces_are_detected() -> None:
    preface, first, second, *rest = messages_of(live())
    assert len(first) == len(second)
    with pytest.raises(CheckpointError, match="piece 0 is not what was sent"):
        arrived(iter([preface, second, first, *rest]))


def test_point_of_another_job_is_refused() -> None:
    with pytest.raises(CheckpointError, match=f"it belongs to job {JOB}, but this is job other"):
        arrived(messages_of(live()), job="other")
