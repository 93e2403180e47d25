"""Points in an object store: saved, found, read, sent and pruned, in memory:// and in a real S3 server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors

from samebits.core.point import Point
from samebits.errors import CheckpointError, ForeignFolderError, StoreError
from samebits.store.checkpoint import Pruning, Retention, object_store
from samebits.store.checkpoint.remote_points import slots_at
from tests.store.checkpoint.conftest import Folder
from tests.store.checkpoint.remote.remote_points import CHUNK_BYTES, assert_is, find, points, prune, save
from tests.store.checkpoint.remote.s3_server import S3Server
from tests.store.points import JOB, LAYOUT, header_of, one_of_each_dtype

OTHER = "6a1f0c1e-0000-4000-8000-000000000002"


def test_saved_point_is_read_back(folder: Folder) -> None:
    save(folder.place(), 7)
    place = folder.place()
    found = find(place, 7)
    place.verify(found)
    assert_is(place.read(found), 7)


def test_every_dtype_is_supported(folder: Folder) -> None:
    folder.place().write(header_of(1), one_of_each_dtype(), {}, LAYOUT, chunk_bytes=CHUNK_BYTES)
    place = folder.place()
    read = place.read(find(place, 1))
    assert {name: bytes(part.data) for name, part in read.tensors.items()} == {
        part.name: bytes(part.data) for part in one_of_each_dtype()
    }


def test_data_is_a_safetensors_file(folder: Folder, tmp_path: Path) -> None:
    save(folder.place(), 3)
    (name,) = [name for name in folder.names() if name.endswith(".safetensors")]
    (tmp_path / "copy").write_bytes(folder.get(name))
    with safetensors.safe_open(tmp_path / "copy", framework="numpy") as file:
        assert "weight" in file.keys()  # noqa: SIM118 - it is no mapping


def test_multipart_upload(bucket: Folder, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 * 1024 * 1024)
    size_bytes = 11 * 1024 * 1024
    save(bucket.place(), 1, size_bytes=size_bytes, chunk_bytes=1024 * 1024)
    assert sum(request.startswith("PUT") and "data" in request for request in s3.requests) >= 2
    assert_is(bucket.place().read(find(bucket.place(), 1)), 1, size_bytes)


def test_points_are_listed_newest_first_and_other_names_ignored(folder: Folder) -> None:
    place = folder.place()
    for step, generation in ((10, 1), (20, 1), (15, 2)):
        save(place, step, generation)
    for name in (
        "0/notes.txt",
        "0/step_0000000030_gen_000002",
        "0/step_1_gen_1.0001-0000000000000000.manifest.msgpack",
    ):
        folder.put(name, b"?")
    assert [found.point for found in place.scan()] == [Point(20, 1), Point(15, 2), Point(10, 1)]


def test_missing_folder_is_empty(folder: Folder) -> None:
    assert folder.place().scan() == []
    assert prune(folder.place(), 2) == []
    assert slots_at(folder.url) == []


def test_slots_with_a_folder_are_listed(folder: Folder) -> None:
    for slot in (0, 2, 11):
        save(folder.place(slot), 1, rank=slot) if slot < 4 else folder.put(f"{slot}/x", b"")
    assert slots_at(folder.url) == [0, 2, 11]


def test_saving_the_same_point_again_changes_nothing(folder: Folder) -> None:
    save(folder.place(), 5)
    before = folder.names()
    save(folder.place(), 5)
    assert folder.names() == before


def test_damaged_point_is_saved_again_beside_it(folder: Folder) -> None:
    save(folder.place(), 5)
    (data,) = [name for name in folder.names() if name.endswith(".safetensors")]
    content = folder.get(data)
    folder.put(data, content[:-1] + bytes([content[-1] ^ 1]))
    save(folder.place(), 5)
    assert folder.get(data) == content[:-1] + bytes([content[-1] ^ 1]), "a damaged point was overwritten"
    assert_is(folder.place().read(find(folder.place(), 5)), 5)


# --- ownership


def test_folder_of_another_job_is_refused_with_both_names(folder: Folder) -> None:
    save(folder.place(), 5)
    other = folder.place(job=OTHER)
    before = folder.names()
    for attempt in (lambda: save(other, 9), other.scan, lambda: prune(other, 2)):
        with pytest.raises(ForeignFolderError, match=rf"belongs to job {JOB} \(digits\), but this is job {OTHER}"):
            attempt()
    assert folder.names() == before


def test_one_of_two_simultaneous_claims_wins(folder: Folder) -> None:
    first, second = folder.place(), folder.place(job=OTHER)
    original = second._read_owner
    asked = []

    def read_owner_late() -> object:
        """Let the other job claim between the check and the claim."""
        found = original()
        if not asked:
            asked.append(found)
            first.claim()
        return found

    second._read_owner = read_owner_late  # type: ignore[method-assign, assignment]
    with pytest.raises(ForeignFolderError):
        second.claim()
    assert asked == [None]
    first.claim()


def test_unreadable_owner_is_reported(folder: Folder) -> None:
    folder.put("0/owner.json", b"[]")
    with pytest.raises(StoreError, match=r"owner\.json names no job as the folder's owner"):
        save(folder.place(), 1)


def test_writer_of_an_older_generation_is_refused(folder: Folder) -> None:
    save(folder.place(), 10, 1)
    save(folder.place(), 11, 2)
    before = folder.names()
    with pytest.raises(StoreError, match="generation 2 already saves here, so this process of generation 1"):
        save(folder.place(), 12, 1)
    assert folder.names() == before


def test_writer_that_becomes_stale_during_its_upload_leaves_no_point(folder: Folder) -> None:
    stale = folder.place()

    class Overtaken(object_store.ObjectStore):
        def upload(self, name: str, pieces: Sequence[memoryview]) -> None:
            super().upload(name, pieces)
            if name.endswith(".safetensors"):
                save(folder.place(), 11, 2)

    stale._store = Overtaken(folder.url)
    with pytest.raises(StoreError, match="generation 2 already saves"):
        save(stale, 12, 1)
    assert points(folder.place()) == [(11, 2)]


# --- pruning


@pytest.mark.parametrize(("keep", "left"), [(5, 5), (2, 2), (0, 2)])
def test_oldest_points_beyond_the_number_are_removed_but_two_always_stay(folder: Folder, keep: int, left: int) -> None:
    place = folder.place()
    for step in range(1, 7):
        save(place, step)
    assert sorted(prune(place, keep)) == [Point(step, 1) for step in range(1, 7 - left)]
    assert points(place) == [(step, 1) for step in range(6, 6 - left, -1)]
    assert len(folder.names()) == 2 * left + 1


def test_damaged_point_is_neither_counted_nor_deleted(folder: Folder) -> None:
    for step in range(1, 6):
        save(folder.place(), step)
    (data,) = [name for name in folder.names() if "005_gen" in name and name.endswith(".safetensors")]
    content = folder.get(data)
    folder.put(data, b"?" + content[1:])
    assert sorted(prune(folder.place(), 2)) == [Point(1, 1), Point(2, 1)]
    assert points(folder.place()) == [(5, 1), (4, 1), (3, 1)]


def test_abandoned_line_is_removed_once_the_new_one_has_a_point(folder: Folder) -> None:
    place = folder.place()
    for step in (10, 20, 40, 50):
        save(place, step, 1)
    save(place, 30, 2)
    gone = place.prune(Pruning(Point(30, 2), Retention(2))).gone
    assert sorted(gone) == [Point(10, 1), Point(40, 1), Point(50, 1)]


def test_committed_points_stay_and_uncommitted_ones_are_replaced(folder: Folder) -> None:
    """``pruning`` is tested elsewhere; this tests that it is used."""
    place = folder.place()
    for step in range(1, 7):
        save(place, step)
    told = frozenset({Point(3, 1), Point(4, 1)})
    gone = place.prune(Pruning(Point(6, 1), Retention(2, committed=Point(2, 1), told=told))).gone
    assert sorted(gone) == [Point(1, 1), Point(5, 1)]
    assert points(place) == [(6, 1), (4, 1), (3, 1), (2, 1)]


def leave_half_an_upload(folder: Folder, step: int, generation: int, unique: str = "0001-00000000deadbeef") -> str:
    name = f"0/step_{step:010d}_gen_{generation:06d}.{unique}.data.safetensors"
    folder.put(name, b"half")
    return name


def test_partial_upload_does_not_count_as_a_point_and_stays_while_its_writer_may_live(folder: Folder) -> None:
    half = leave_half_an_upload(folder, 9, 1)
    assert folder.place().scan() == []
    save(folder.place(leftover_age_s=0), 10, 1)
    assert half in folder.names(), "of this generation: its writer may be alive"
    save(folder.place(), 11, 2)
    assert half in folder.names(), "it is too recent"
    save(folder.place(leftover_age_s=0), 12, 2)
    assert half not in folder.names()
    assert points(folder.place()) == [(12, 2), (11, 2), (10, 1)]


def test_own_leftovers_are_removed_by_the_next_save(folder: Folder) -> None:
    place = folder.place()
    half = leave_half_an_upload(folder, 9, 1, f"0001-{place._session}")
    save(place, 10)
    assert half not in folder.names()


def test_manifests_are_deleted_before_their_data(bucket: Folder, s3: S3Server) -> None:
    place = bucket.place()
    for step in range(1, 5):
        save(place, step)
    s3.requests.clear()
    prune(place, 2)
    deleted = [request.rpartition(".")[2] for request in s3.requests if request.startswith("DELETE")]
    assert deleted == ["msgpack"] * 2 + ["safetensors"] * 2


def test_restart_reads_at_most_two_points_to_prune(bucket: Folder, s3: S3Server) -> None:
    for step in range(1, 6):
        save(bucket.place(), step)
    s3.requests.clear()
    prune(bucket.place(), 4)
    read = {request for request in s3.requests if request.startswith("GET") and request.endswith(".safetensors")}
    assert len(read) == 2


# --- damage


def names_of(folder: Folder, step: int) -> tuple[str, str]:
    """Return the names of a point's data and manifest."""
    data, manifest = sorted(name for name in folder.names() if f"{step:010d}_gen" in name)
    return data, manifest


def assert_damaged(folder: Folder, step: int) -> str:
    """Check that the damage is found without any other exception; return the reason."""
    place = folder.place()
    with pytest.raises(CheckpointError, match=f"step_{step:010d}") as verified:
        place.verify(find(place, step))
    with pytest.raises(CheckpointError):
        place.read(find(place, step))
    return str(verified.value)


@pytest.mark.parametrize("which", [0, 1])
def test_flip_in_every_chunk_and_truncation_at_every_boundary(folder: Folder, which: int) -> None:
    """In memory every case runs. In S3, where a case takes ten requests, only the first, a middle and the last one."""
    save(folder.place(), 1)
    save(folder.place(), 2)
    name = names_of(folder, 2)[which]
    content = folder.get(name)
    starts = range(0, len(content), CHUNK_BYTES)
    for start in starts if folder.url.startswith("memory") else {starts[0], starts[len(starts) // 2], starts[-1]}:
        flipped = bytearray(content)
        flipped[start] ^= 0x10
        for changed in (bytes(flipped), content[:start]):
            folder.put(name, changed)
            assert_damaged(folder, 2)
    folder.put(name, content + b"\0")
    assert_damaged(folder, 2)
    assert_is(folder.place().read(find(folder.place(), 1)), 1)
    folder.put(name, content)
    assert_is(folder.place().read(find(folder.place(), 2)), 2)


def test_missing_data(folder: Folder) -> None:
    save(folder.place(), 2)
    folder.delete(names_of(folder, 2)[0])
    assert "is missing, though its manifest is there" in assert_damaged(folder, 2)


def test_data_that_vanishes_or_shrinks_while_it_is_read(folder: Folder) -> None:
    save(folder.place(), 2)
    place = folder.place()
    found, (data, _) = find(place, 2), names_of(folder, 2)
    content = folder.get(data)
    for change in (lambda: folder.put(data, content[:350]), lambda: folder.delete(data)):
        change()
        with pytest.raises(CheckpointError, match=r"data\.safetensors"):
            place.read(found)


def test_manifest_of_another_slot_step_or_job_is_reported(folder: Folder) -> None:
    save(folder.place(0), 2)
    save(folder.place(1), 2, rank=1)
    data, manifest = names_of(Folder(f"{folder.url}/1"), 2)
    for name in (data, manifest):
        folder.put(f"0/{name.replace('000002_gen', '000003_gen')}", folder.get(f"1/{name}"))
        folder.put(f"0/{name.replace('.0001-', '.0002-')}", folder.get(f"1/{name}"))
    assert "its manifest is that of step 2" in assert_damaged(folder, 3)
    (
        assert_is(folder.place().read(find(folder.place(), 2)), 2),
        "the own attempt is taken, not the newer of another slot",
    )
