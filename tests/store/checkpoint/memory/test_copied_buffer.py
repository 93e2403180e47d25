"""A slot copied to another host: the same point arrives, or none."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.core.point import Point
from samebits.errors import CheckpointError, LockedError, StoreError
from samebits.store.checkpoint import (
    MemoryRoom,
    copied_slots,
    memory_buffer,
    open_point_store,
    points_in_memory,
    read,
    remove_room,
    sweep,
    verify,
)
from samebits.store.checkpoint.copied_buffer import CopyOffer, IncomingCopy, OutgoingCopy, has_copy, outgoing_copy
from samebits.store.checkpoint.memory_room import SWEPT_AFTER_S, RoomKind
from tests.store.points import CHUNK_BYTES, JOB
from tests.store.slots import content_of, fill, fill_and_hash

COUNT = 5_000


@pytest.fixture
def rooms(tmp_path: Path) -> Iterator[tuple[MemoryRoom, MemoryRoom]]:
    """Return a rank's slots on one host and its buddy's copies on another."""
    for host in ("here", "there"):
        (tmp_path / host).mkdir()
    ours, theirs = MemoryRoom(tmp_path / "here", JOB, 0), MemoryRoom(tmp_path / "there", JOB, 0, kind=RoomKind.COPIED)
    yield ours, theirs
    ours.close()
    theirs.close()


def opened(room: MemoryRoom, name: str) -> OutgoingCopy:
    outgoing = outgoing_copy(room.descriptor, room.path / name)
    assert outgoing is not None
    return outgoing


def send(stream: bytes, offer: CopyOffer, room: MemoryRoom, piece_bytes: int) -> bool:
    incoming = IncomingCopy(room, offer)
    starts = range(0, len(stream), piece_bytes)
    return [incoming.take(stream[start : start + piece_bytes]) for start in starts][-1]


def in_order(outgoing: OutgoingCopy, piece_bytes: int) -> bytes:
    """Return the complete stream in the order a sender reads it."""
    stream = b""
    while len(stream) < outgoing.offer.stream_bytes:
        piece = outgoing.piece(len(stream), piece_bytes)
        assert piece
        stream += piece
    return stream


def copy(ours: MemoryRoom, name: str, theirs: MemoryRoom, piece_bytes: int = 1000) -> None:
    outgoing = opened(ours, name)
    assert send(in_order(outgoing, piece_bytes), outgoing.offer, theirs, piece_bytes)
    outgoing.close()


def steps_there(tmp_path: Path) -> list[int]:
    found, problems = points_in_memory(tmp_path / "there", JOB, 0, kind=RoomKind.COPIED)
    assert problems == []
    for one in found:
        verify(one)
    return [one.point.step for one in found]


@pytest.mark.parametrize("piece_bytes", [1, 64, 1000, 1 << 20])
def test_copy_equals_the_point(rooms: tuple[MemoryRoom, MemoryRoom], tmp_path: Path, piece_bytes: int) -> None:
    ours, theirs = rooms
    copy(ours, fill_and_hash(ours, 3, count=200), theirs, piece_bytes)
    (found,), _ = points_in_memory(tmp_path / "there", JOB, 0, kind=RoomKind.COPIED)
    assert found.point == Point(3, 1)
    assert bytes(read(found).tensors["weight"].data) == content_of(3, 200)
    assert points_in_memory(tmp_path / "there", JOB, 0) == ([], []), "there it is a copy, not the keeper's own point"
    assert copied_slots(tmp_path / "there", JOB) == [0]
    assert copied_slots(tmp_path / "here", JOB) == []


def test_two_newest_copies_stay(rooms: tuple[MemoryRoom, MemoryRoom], tmp_path: Path) -> None:
    for step in (1, 2, 3):
        copy(rooms[0], fill_and_hash(rooms[0], step), rooms[1])
    assert steps_there(tmp_path) == [3, 2]


def test_existing_copy_is_recognised(rooms: tuple[MemoryRoom, MemoryRoom]) -> None:
    ours, theirs = rooms
    outgoing = opened(ours, fill_and_hash(ours, 1))
    assert not has_copy(theirs, outgoing.offer)
    copy(ours, outgoing_name(ours, 1), theirs)
    assert has_copy(theirs, outgoing.offer)
    again = opened(ours, fill_and_hash(ours, 1, count=200))
    assert not has_copy(theirs, again.offer), "the same step with another state"


def outgoing_name(room: MemoryRoom, step: int) -> str:
    return next(found.path.name for found in room.points() if found.point.step == step)


def test_changed_byte_on_the_way_is_detected(rooms: tuple[MemoryRoom, MemoryRoom], tmp_path: Path) -> None:
    ours, theirs = rooms
    copy(ours, fill_and_hash(ours, 1), theirs)
    outgoing = opened(ours, fill_and_hash(ours, 2))
    stream = in_order(outgoing, 1 << 20)
    for position in range(0, len(stream), 7):
        changed = bytearray(stream)
        changed[position] ^= 1
        with pytest.raises(CheckpointError):
            send(bytes(changed), outgoing.offer, theirs, 64)
        assert steps_there(tmp_path) == [1]
    assert send(stream, outgoing.offer, theirs, 64)
    assert steps_there(tmp_path) == [2, 1]


def test_damage_on_the_way_is_named_by_its_bytes(rooms: tuple[MemoryRoom, MemoryRoom]) -> None:
    ours, theirs = rooms
    outgoing = opened(ours, fill_and_hash(ours, 1, count=COUNT))
    stream, end = bytearray(in_order(outgoing, 1 << 20)), outgoing.offer.data_bytes
    stream[-1] ^= 1
    last = (end - 1) // CHUNK_BYTES
    text = f"the copy of slot 0: chunk {last} of {last + 1} (bytes {last * CHUNK_BYTES} to {end}) is not what was saved"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        send(bytes(stream), outgoing.offer, theirs, 1000)


def test_interrupted_stream_leaves_no_copy(rooms: tuple[MemoryRoom, MemoryRoom], tmp_path: Path) -> None:
    ours, theirs = rooms
    copy(ours, fill_and_hash(ours, 1), theirs)
    outgoing = opened(ours, fill_and_hash(ours, 2, count=COUNT))
    assert not send(in_order(outgoing, 1000)[:-1], outgoing.offer, theirs, 1000)
    assert steps_there(tmp_path) == [1]


def test_stream_longer_than_offered_is_refused(rooms: tuple[MemoryRoom, MemoryRoom]) -> None:
    ours, theirs = rooms
    outgoing = opened(ours, fill_and_hash(ours, 1))
    with pytest.raises(CheckpointError, match="more than"):
        send(in_order(outgoing, 1000) + b"x", outgoing.offer, theirs, 1 << 20)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"slot": 1}, "is that of slot 0"),
        ({"job": "another"}, "is that of slot 0 of job"),
        ({"point": Point(9, 1)}, "step 1 of generation 1"),
        ({"manifest_bytes": 0}, "a manifest of 0 bytes"),
        ({"manifest_bytes": 1 << 40}, "a manifest of"),
        ({"data_bytes": -1}, "-1 of data"),
        ({"data_bytes": 2**63 - 1}, "of data"),
        ({"digest": b"short"}, "digest of 5 bytes"),
        ({"digest": b"d" * 16}, "differs from the one that was offered"),
        ({"slot": -1}, "no rank can have saved that"),
        ({"point": Point(-1, 1)}, "no rank can have saved that"),
        ({"point": Point(0, 0)}, "no rank can have saved that"),
        ({"point": Point(0, 2**62)}, "step 1 of generation 1"),
    ],
)
def test_false_offer_is_refused(
    rooms: tuple[MemoryRoom, MemoryRoom], tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    """A false offer destroys none of the existing copies."""
    ours, theirs = rooms
    for step in (2, 1):
        copy(ours, fill_and_hash(ours, step), theirs)
    outgoing = opened(ours, fill_and_hash(ours, 1))
    true = outgoing.offer
    values = {name: getattr(true, name) for name in ("job", "slot", "point", "digest", "manifest_bytes", "data_bytes")}
    with pytest.raises(CheckpointError, match=problem):
        send(in_order(outgoing, 1000), CopyOffer(**(values | changes)), theirs, 1 << 20)
    assert steps_there(tmp_path) == [2, 1]


def test_refilled_slot_gives_no_more_pieces(rooms: tuple[MemoryRoom, MemoryRoom]) -> None:
    ours, _ = rooms
    outgoing = opened(ours, fill_and_hash(ours, 1, count=COUNT))
    data = outgoing.offer.manifest_bytes
    assert outgoing.piece(data, 100) is not None
    fill_and_hash(ours, 2, count=COUNT)
    assert outgoing.piece(data, 100) is not None, "that was the other slot"
    fill_and_hash(ours, 3, count=COUNT)
    assert outgoing.piece(data, 100) is None


def test_rest_of_a_refilled_slot_is_read_from_the_disk(rooms: tuple[MemoryRoom, MemoryRoom], tmp_path: Path) -> None:
    ours, theirs = rooms
    root = tmp_path / "disk"
    name = fill(ours, 1, count=COUNT)
    with memory_buffer.hashed(ours.path / name, ours.descriptor) as point:
        place = open_point_store(root, 0, job=JOB, job_name="j")
        place.claim()
        place.write_prepared(point.header, point.manifest_data, [point.data])
    outgoing = outgoing_copy(ours.descriptor, ours.path / name, root)
    assert outgoing is not None
    incoming = IncomingCopy(theirs, outgoing.offer)
    is_whole = False
    while not is_whole:
        piece = outgoing.piece(incoming.received_bytes, 1000)
        assert piece is not None
        is_whole = incoming.take(piece)
        if incoming.received_bytes == 3000:
            fill_and_hash(ours, 2, count=COUNT)
            fill_and_hash(ours, 3, count=COUNT)
    assert steps_there(tmp_path) == [1]
    outgoing.close()


def test_unhashed_slot_is_not_offered(rooms: tuple[MemoryRoom, MemoryRoom]) -> None:
    ours, _ = rooms
    name = fill(ours, 1)
    assert outgoing_copy(ours.descriptor, ours.path / name) is None
    assert outgoing_copy(ours.descriptor, ours.path / "b") is None


def test_abandoned_point_is_replaced_before_an_older_one(rooms: tuple[MemoryRoom, MemoryRoom], tmp_path: Path) -> None:
    """Generation 2 returned to step 10. Its step 15 replaces the abandoned step 20, not step 10."""
    ours, theirs = rooms
    for step, generation in ((10, 1), (20, 1), (15, 2)):
        copy(ours, fill_and_hash(ours, step, generation), theirs)
    assert steps_there(tmp_path) == [15, 10]


def test_newest_copy_stays_if_memory_is_short(
    rooms: tuple[MemoryRoom, MemoryRoom], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = rooms
    for step in (1, 2):
        copy(ours, fill_and_hash(ours, step), theirs)
    outgoing = opened(ours, fill_and_hash(ours, 3, count=COUNT * 100))
    monkeypatch.setattr(memory_buffer, "available_bytes", lambda: 1000)
    with pytest.raises(StoreError, match="too many of the 1000 that are available"):
        send(in_order(outgoing, 1000), outgoing.offer, theirs, 1 << 20)
    assert steps_there(tmp_path) == [2]


def test_copies_belong_to_one_keeper_and_are_removed_with_the_job(
    rooms: tuple[MemoryRoom, MemoryRoom], tmp_path: Path
) -> None:
    ours, theirs = rooms
    copy(ours, fill_and_hash(ours, 1), theirs)
    there = tmp_path / "there"
    with pytest.raises(LockedError):
        MemoryRoom(there, JOB, 0, kind=RoomKind.COPIED)
    assert not remove_room(there, JOB, 0, kind=RoomKind.COPIED)
    theirs.close()
    newest_s = max(path.stat().st_mtime for path in theirs.path.iterdir())
    assert sweep(there, "another-job", newest_s + SWEPT_AFTER_S - 1) == []
    assert sweep(there, "another-job", newest_s + SWEPT_AFTER_S + 1) == [theirs.path]
    assert copied_slots(there, JOB) == []


def test_failing_disk_ends_only_one_copy(rooms: tuple[MemoryRoom, MemoryRoom], monkeypatch: pytest.MonkeyPatch) -> None:
    outgoing = opened(rooms[0], fill_and_hash(rooms[0], 1, count=COUNT))
    begin = outgoing.offer.manifest_bytes

    def fail(descriptor: int, size_bytes: int, offset: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", fail)
        assert outgoing.piece(begin, 100) is None
    assert outgoing.piece(begin, 100)
    outgoing.close()
