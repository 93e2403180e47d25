"""Memory slots: headers after a kill at any byte, ownership, finding and sweeping."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samebits.core.point import Point
from samebits.errors import CheckpointError, LockedError, StoreError
from samebits.store.checkpoint import MemoryRoom, memory_buffer, points_in_memory, read, remove_room, sweep, verify
from samebits.store.checkpoint.memory_buffer import (
    HEADER_BYTES,
    BufferGoneError,
    BufferStage,
    SlotHeader,
    decode_header,
)
from samebits.store.checkpoint.memory_room import SWEPT_AFTER_S, is_being_hashed, is_locked, room_path
from tests.store.points import JOB, change_byte
from tests.store.slots import (
    content_of,
    fill,
    fill_and_hash,
    hash_slot,
    locked_by_an_ending_process,
    on_first_sleep,
)

HEADER = SlotHeader(7, BufferStage.HASHED, 100, 2 * HEADER_BYTES, 5000)
FILE_BYTES = 4 * HEADER_BYTES


def found_steps(base: Path, job: str = JOB) -> list[int]:
    found, _ = points_in_memory(base, job, 0)
    for one in found:
        verify(one)
    return [one.point.step for one in found]


# ---- the header


def test_header_round_trip_and_zeros_are_not_a_header() -> None:
    assert decode_header(HEADER.encode(), FILE_BYTES) == HEADER
    assert decode_header(bytes(len(HEADER.encode())), FILE_BYTES) is None
    assert decode_header(b"", FILE_BYTES) is None


@pytest.mark.parametrize("position", range(len(HEADER.encode())))
def test_header_with_any_changed_byte_is_rejected(position: int) -> None:
    data = bytearray(HEADER.encode())
    data[position] ^= 0x10
    with pytest.raises(CheckpointError, match="torn"):
        decode_header(bytes(data), FILE_BYTES)


@pytest.mark.parametrize("written", range(1, len(HEADER.encode())))
def test_half_written_header_is_rejected(written: int) -> None:
    new, older = HEADER.encode(), SlotHeader(5, BufferStage.SEALED, 90, 3 * HEADER_BYTES, 4000).encode()
    for before in (bytes(len(new)), older):
        torn = new[:written] + before[written:]
        if torn == before:
            continue
        with pytest.raises(CheckpointError, match="torn"):
            decode_header(torn, FILE_BYTES)


@pytest.mark.parametrize(
    "header",
    [
        SlotHeader(1, BufferStage.HASHED, 2 * HEADER_BYTES, 2 * HEADER_BYTES, 10),
        SlotHeader(1, BufferStage.HASHED, 10, 2 * HEADER_BYTES, FILE_BYTES),
        SlotHeader(1, BufferStage.HASHED, 10, HEADER_BYTES + 1000, 10),
        SlotHeader(1, BufferStage.HASHED, 2**40, 2**41, 10),
    ],
)
def test_header_that_exceeds_the_file_is_refused(header: SlotHeader) -> None:
    with pytest.raises(CheckpointError, match="does not describe this file"):
        decode_header(header.encode(), FILE_BYTES)


# ---- two alternating slots


def test_slots_alternate_and_the_newest_comes_first(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    names = [fill_and_hash(room, step) for step in (1, 2, 3)]
    assert names[0] == names[2] != names[1]
    assert found_steps(tmp_path) == [3, 2]
    found, problems = points_in_memory(tmp_path, JOB, 0)
    assert problems == []
    assert bytes(read(found[0]).tensors["weight"].data) == content_of(3)


def test_slot_being_filled_is_empty_and_the_older_one_stays(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    for step in (1, 2):
        fill_and_hash(room, step)
    room.next_slot().open()
    assert found_steps(tmp_path) == [2]
    assert points_in_memory(tmp_path, JOB, 0)[1] == [], "a kill while copying is not reported"


def test_sealed_but_unhashed_slot_is_skipped_and_filled_next(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    fill_and_hash(room, 1)
    unhashed = fill(room, 2)
    assert found_steps(tmp_path) == [1]
    _, (problem,) = points_in_memory(tmp_path, JOB, 0)
    assert "step 2" in problem and "before hashing it" in problem
    room.close()
    room = MemoryRoom(tmp_path, JOB, 0)
    assert fill_and_hash(room, 3) == unhashed, "the usable point must not be overwritten"
    assert found_steps(tmp_path) == [3, 1]


def test_sequence_continues_in_the_next_process(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    for step in (1, 2, 3):
        fill_and_hash(room, step)
    room.close()
    again = MemoryRoom(tmp_path, JOB, 0)
    assert again.sequence == 3
    fill_and_hash(again, 4)
    assert found_steps(tmp_path) == [4, 3]


def test_hashing_again_changes_nothing(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    name = fill_and_hash(room, 1)
    before = (room.path / name).read_bytes()
    hash_slot(room, name)
    assert (room.path / name).read_bytes() == before


@pytest.mark.parametrize("stage", ["sealed", "hashed"])
def test_every_relevant_changed_byte_is_detected(tmp_path: Path, stage: str) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    fill_and_hash(room, 1)
    (found,), _ = points_in_memory(tmp_path, JOB, 0)
    assert found.manifest is not None and found.data_offset is not None
    original = found.path.read_bytes()
    header = decode_header(original, len(original))
    assert header is not None
    spoken = [*range(64), *range(HEADER_BYTES, HEADER_BYTES + header.manifest_bytes)]
    spoken += range(found.data_offset, found.data_offset + header.data_bytes)
    for position in spoken:
        change_byte(found.path, position)
        if stage == "sealed" and position < HEADER_BYTES:
            with pytest.raises(CheckpointError):
                hash_slot(room, found.path.name)
        try:
            again, problems = points_in_memory(tmp_path, JOB, 0)
            assert bool(again) != bool(problems)
            for one in again:
                verify(one)
        except CheckpointError as error:
            assert str(found.path) in str(error)
        else:
            assert problems and str(found.path) in problems[0], f"byte {position} may have any value"
        change_byte(found.path, position)
    assert found.path.read_bytes() == original


@pytest.mark.parametrize("size", [0, 1, 63, 64, HEADER_BYTES, HEADER_BYTES + 10, 3 * HEADER_BYTES])
def test_truncated_slot_is_not_used(tmp_path: Path, size: int) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    name = fill_and_hash(room, 1)
    os.truncate(room.path / name, size)
    assert found_steps(tmp_path) == []


def test_point_that_outgrows_its_slot_gets_new_memory(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    for step, count in ((1, 10), (2, 10), (3, 300_000), (4, 10), (5, 300_000)):
        fill_and_hash(room, step, count=count)
    assert found_steps(tmp_path) == [5, 4]


@pytest.mark.parametrize("count", [96, 40, 200_000], ids=["as large", "smaller", "larger"])
def test_successor_takes_over_the_memory_of_the_older_point(tmp_path: Path, count: int) -> None:
    with contextlib.closing(MemoryRoom(tmp_path, JOB, 0)) as room:
        older = fill_and_hash(room, 10, count=100_000)
        newer = fill_and_hash(room, 20, count=100_000)
        inode = (room.path / older).stat().st_ino
    with contextlib.closing(MemoryRoom(tmp_path, JOB, 0)) as room:
        slot = room.next_slot()
        assert slot.path.name == older
        assert slot.reserve(1000, count)
        assert found_steps(tmp_path) == [20], "nothing of the old content remains"
        assert slot.path.stat().st_ino == inode
        assert slot.path.stat().st_blocks * 512 >= slot.path.stat().st_size > count
        assert fill_and_hash(room, 30, count=count) == older
        assert (room.path / newer).exists()
    assert found_steps(tmp_path) == [30, 20]


def test_unwanted_points_are_forgotten(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    for step in (1, 2):
        fill_and_hash(room, step)
    room.forget(lambda point: point == Point(2, 1))
    assert found_steps(tmp_path) == [1]


def test_unwanted_points_of_a_predecessor_are_forgotten(tmp_path: Path) -> None:
    with contextlib.closing(MemoryRoom(tmp_path, JOB, 0)) as predecessor:
        for step in (1, 2):
            fill_and_hash(predecessor, step)
    room = MemoryRoom(tmp_path, JOB, 0)
    room.forget(lambda point: point == Point(2, 1))
    assert found_steps(tmp_path) == [1]


def test_each_slot_is_known_by_its_latest_point(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    for step in range(1, 6):
        fill_and_hash(room, step)
    asked: list[Point] = []
    room.forget(lambda point: asked.append(point) or point.step == 4)
    assert sorted(asked) == [Point(4, 1), Point(5, 1)]
    assert found_steps(tmp_path) == [5]


def test_unhashed_point_is_not_listed(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    name = fill(room, 1)
    room.forget(lambda point: True)
    hash_slot(room, name)
    assert found_steps(tmp_path) == [1]


# ---- ownership


def test_folders_and_files_are_private(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    name = fill(room, 1)
    folders = [room.path, room.path.parent, room.path.parent.parent]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    assert (room.path / name).stat().st_mode & 0o777 == 0o600


def test_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    room_path(tmp_path, JOB, 0).mkdir(parents=True)
    for folder in (room_path(tmp_path, JOB, 0).parents[1], room_path(tmp_path, JOB, 0)):
        folder.chmod(0o700)
    room_path(tmp_path, JOB, 0).parent.chmod(0o755)
    with pytest.raises(StoreError, match="does not belong to this user alone"):
        MemoryRoom(tmp_path, JOB, 0)
    assert points_in_memory(tmp_path, JOB, 0)[0] == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    path = room_path(tmp_path, JOB, 0)
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    path.symlink_to(elsewhere)
    with pytest.raises(StoreError, match="opening the memory slots"):
        MemoryRoom(tmp_path, JOB, 0)
    path.unlink()
    room = MemoryRoom(tmp_path, JOB, 0)
    for name in ("a", "b"):
        (room.path / name).symlink_to(elsewhere / "target")
    with pytest.raises(StoreError, match="opening the memory slot"):
        fill(room, 1)
    assert list(elsewhere.iterdir()) == []


def test_file_with_two_names_is_refused(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    name = fill_and_hash(room, 1)
    os.link(room.path / name, tmp_path / "second")
    _, (problem,) = points_in_memory(tmp_path, JOB, 0)
    assert "not a plain file of this user alone" in problem


def test_point_of_another_job_or_slot_is_skipped(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    name = fill_and_hash(room, 1)
    room.close()
    for job, slot in (("another", 0), (JOB, 1)):
        other = MemoryRoom(tmp_path, job, slot)
        (other.path / name).write_bytes((room.path / name).read_bytes())
        (other.path / name).chmod(0o600)
        found, (problem,) = points_in_memory(tmp_path, job, slot)
        assert found == [] and f"slot 0 of job {JOB}" in problem


def test_job_name_with_a_path_is_refused(tmp_path: Path) -> None:
    for job in ("../other", "", "a/b", ".."):
        with pytest.raises(StoreError, match="expected a name of letters"):
            MemoryRoom(tmp_path, job, 0)


def test_missing_shared_memory_has_a_message(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="opening the shared memory failed"):
        MemoryRoom(tmp_path / "none", JOB, 0)


def test_room_has_one_live_owner(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    with pytest.raises(LockedError, match="another running process"):
        MemoryRoom(tmp_path, JOB, 0)
    MemoryRoom(tmp_path, JOB, 1).close()
    room.close()
    MemoryRoom(tmp_path, JOB, 0).close()


def test_room_of_an_ending_process_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MemoryRoom(tmp_path, JOB, 0).close()
    with locked_by_an_ending_process(room_path(tmp_path, JOB, 0)) as holder:
        assert holder.stdin is not None
        on_first_sleep(monkeypatch, holder.stdin.close)
        MemoryRoom(tmp_path, JOB, 0).close()


def test_room_at_which_another_process_looks_is_locked_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MemoryRoom(tmp_path, JOB, 0).close()
    room = os.open(room_path(tmp_path, JOB, 0), os.O_RDONLY)
    assert not is_locked(room)  # holds a shared lock until its descriptor is closed
    on_first_sleep(monkeypatch, lambda: os.close(room))
    MemoryRoom(tmp_path, JOB, 0).close()


def test_forked_child_does_not_keep_the_room(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    reading, writing = os.pipe()
    said, saying = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.write(saying, b"forked")
        os.read(reading, 1)  # until the parent releases it
        os._exit(0)
    os.close(reading)
    try:
        assert os.read(said, 6) == b"forked"
        room.close()
        MemoryRoom(tmp_path, JOB, 0).close()
    finally:
        os.close(writing)
        os.waitpid(pid, 0)


def test_sealed_point_of_a_live_process_is_worth_waiting_for(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    assert not is_being_hashed(tmp_path, JOB, 0)
    name = fill(room, 1)
    assert is_being_hashed(tmp_path, JOB, 0)
    hash_slot(room, name)
    assert not is_being_hashed(tmp_path, JOB, 0)
    fill(room, 2)
    room.close()
    assert not is_being_hashed(tmp_path, JOB, 0), "its process is gone"


# ---- memory is freed


def test_room_is_removed_unless_a_live_process_has_it(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    fill_and_hash(room, 1)
    assert not remove_room(tmp_path, JOB, 0)
    assert found_steps(tmp_path) == [1]
    room.close()
    assert remove_room(tmp_path, JOB, 0)
    assert not remove_room(tmp_path, JOB, 0)
    assert list(room.path.parents[1].iterdir()) == []


def test_slots_of_dead_jobs_are_swept_after_an_hour(tmp_path: Path) -> None:
    names = {"dead": "other-1", "alive": "other-2", "mine": JOB}
    rooms = {what: MemoryRoom(tmp_path, job, 0) for what, job in names.items()}
    for room in rooms.values():
        fill_and_hash(room, 1)
    rooms["dead"].close()
    rooms["mine"].close()
    (tmp_path / rooms["dead"].path.parents[1] / "no job of ours!").mkdir()
    assert sweep(tmp_path, JOB) == [], "a job that was just killed may be about to restart"
    later_s = time.time() + SWEPT_AFTER_S + 60.0
    assert sweep(tmp_path, JOB, later_s) == [rooms["dead"].path]
    assert [what for what, room in rooms.items() if room.path.exists()] == ["alive", "mine"]


def test_unavailable_memory_is_refused_and_freed(tmp_path: Path, repository: Path) -> None:
    """The file cannot grow to that size, as with a /dev/shm of 64 MB."""
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from samebits.errors import StoreError\n"
        "from samebits.store.checkpoint import MemoryRoom\n"
        "from tests.store.slots import fill\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n"
        "room = MemoryRoom(Path(sys.argv[1]), 'job', 0)\n"
        "try:\n"
        "    fill(room, 1, count=1_000_000)\n"
        "except StoreError as error:\n"
        "    print(error)\n"
        "print([path.name for path in room.path.iterdir()])\n"
        "fill(room, 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=repository, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert "bytes of memory failed: File too large (EFBIG)" in first
    assert second == "[]"


def test_without_a_sealed_slot_there_is_nothing_to_hash(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    with (
        pytest.raises(CheckpointError, match="no such memory slot"),
        memory_buffer.hashed(room.path / "a", room.descriptor),
    ):
        pass
    name = fill(room, 1)
    room._slots[("a", "b").index(name)].open()
    with (
        pytest.raises(CheckpointError, match="nothing is sealed"),
        memory_buffer.hashed(room.path / name, room.descriptor),
    ):
        pass


# ---- files removed while in use


def test_slot_whose_file_was_removed_cannot_be_sealed(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    fill_and_hash(room, 1)
    (room.path / "a").unlink()
    (room.path / "b").unlink(missing_ok=True)
    slot = room._slots[0]
    with pytest.raises(BufferGoneError, match="was removed while in use"):
        slot.seal(9, b"manifest", 10)
    room.close()


def test_removed_folder_gets_no_slot_until_the_room_is_reopened(tmp_path: Path) -> None:
    room = MemoryRoom(tmp_path, JOB, 0)
    shutil.rmtree(room.path)
    with pytest.raises(BufferGoneError):
        fill(room, 1)
    room.close()
    room = MemoryRoom(tmp_path, JOB, 0)
    fill_and_hash(room, 2)
    room.close()
    assert found_steps(tmp_path) == [2]
