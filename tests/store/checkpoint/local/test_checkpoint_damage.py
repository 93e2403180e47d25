from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from samebits.core.point import Point
from samebits.errors import CheckpointError, StoreError
from samebits.store.checkpoint import FoundPoint, rank_directory, read, scan, verify
from samebits.store.checkpoint.point_format import decode_manifest
from tests.store.disk_faults import names_in
from tests.store.points import CHUNK_BYTES, JOB, change_byte, copy_point, each_change, find, save

DATA, MANIFEST = "data.safetensors", "manifest.msgpack"


@pytest.fixture
def found(tmp_path: Path) -> FoundPoint:
    return save(tmp_path, 7)


def again(found: FoundPoint) -> FoundPoint:
    return find(found.path.parent.parent, found.point.step, found.point.generation)


def refused(found: FoundPoint) -> str:
    """Return the reason, which must be the same for reading and verifying."""
    reasons = set()
    for attempt in (read, verify):
        with pytest.raises(CheckpointError) as caught:
            attempt(found)
        reasons.add(str(caught.value))
    (reason,) = reasons
    assert str(found.path) in reason
    return reason


def test_truncated_point_is_found_by_scanning(found: FoundPoint) -> None:
    size_bytes = (found.path / DATA).stat().st_size
    cut = each_change(found, DATA, lambda data, end: data[:end])
    for end in range(size_bytes):
        cut(end)
        damaged = again(found)
        assert not damaged.is_usable
        assert f"{DATA} has {end} bytes, {size_bytes} were saved" in refused(damaged)
        refused(found)  # the point was found before it was cut


def test_file_that_grew_is_found_by_scanning(found: FoundPoint) -> None:
    each_change(found, DATA, lambda data, number: data + bytes(number))(1)
    assert not again(found).is_usable
    assert "were saved" in refused(found), "even if it grew after it was found"


def test_changed_byte_in_the_data_names_its_chunk(found: FoundPoint) -> None:
    manifest = found.require_manifest()
    assert len(manifest.chunks) >= 3
    flip = each_change(found, DATA, lambda data, at: data[:at] + bytes([data[at] ^ 0x01]) + data[at + 1 :])
    for position in range(manifest.data_bytes):
        flip(position)
        damaged = again(found)
        assert damaged.is_usable, "scanning does not read the data"
        reason = refused(damaged)
        assert f"chunk {position // CHUNK_BYTES} of {len(manifest.chunks)}" in reason
        assert DATA in reason
    flip_back = each_change(found, DATA, lambda data, at: data[:at] + bytes([data[at] ^ 0x01]) + data[at + 1 :])
    flip_back(manifest.data_bytes - 1)
    verify(again(found))


def test_changed_byte_in_the_manifest_is_found(found: FoundPoint) -> None:
    original = (found.path / MANIFEST).read_bytes()
    for mask in (0x01, 0x80):
        for position in range(len(original)):
            data = bytearray(original)
            data[position] ^= mask
            with pytest.raises(CheckpointError, match="hash differs"):
                decode_manifest(bytes(data))
    change_byte(found.path / MANIFEST, len(original) // 2)
    assert "hash differs" in refused(again(found))


def test_truncated_manifest_is_found(found: FoundPoint) -> None:
    size_bytes = (found.path / MANIFEST).stat().st_size
    cut = each_change(found, MANIFEST, lambda data, end: data[:end])
    for end in range(size_bytes):
        cut(end)
        refused(again(found))


@pytest.mark.parametrize("name", [DATA, MANIFEST])
def test_missing_file_is_named(found: FoundPoint, name: str) -> None:
    (found.path / name).unlink()
    assert f"{name}: " in refused(again(found))
    assert "ENOENT" in refused(again(found))


def test_point_that_vanishes_after_it_was_found_is_refused(found: FoundPoint) -> None:
    shutil.rmtree(found.path)
    assert "ENOENT" in refused(found)


def test_file_with_the_name_of_a_point_is_listed_as_unusable(found: FoundPoint) -> None:
    shutil.rmtree(found.path)
    found.path.write_bytes(b"")
    assert "ENOTDIR" in refused(again(found))


def test_oversized_manifest_is_not_read(found: FoundPoint) -> None:
    with (found.path / MANIFEST).open("r+b") as file:
        file.truncate(2**40)
    assert "a manifest has at most" in refused(again(found))


def test_point_of_another_rank_is_refused(tmp_path: Path) -> None:
    copy_point(save(tmp_path, 7, rank=1), rank_directory(tmp_path, 0) / "step_0000000007_gen_000001")
    assert "names slot 1, but it is in the folder 0" in refused(find(tmp_path, 7, rank=0))


@pytest.mark.parametrize("name", ["step_0000000008_gen_000001", "step_0000000007_gen_000002"])
def test_point_of_another_step_is_refused(found: FoundPoint, name: str) -> None:
    found.path.rename(found.path.with_name(name))
    (renamed,) = scan(found.path.parent, JOB)
    assert "its manifest is that of step 7 of generation 1" in refused(renamed)


def test_point_of_another_job_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 7, job="another job")
    assert f"was saved by job another job, but this is job {JOB}" in refused(find(tmp_path, 7))


def test_data_of_another_point_with_the_same_size_is_refused(tmp_path: Path) -> None:
    first, second = save(tmp_path, 7), save(tmp_path, 8)
    shutil.copy(second.path / DATA, first.path / DATA)
    assert again(first).is_usable
    assert "is not what was saved" in refused(again(first))


def test_later_version_is_named(found: FoundPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(found.path)
    with monkeypatch.context() as patched:
        patched.setattr("samebits.store.checkpoint.point_format.VERSION", 2)
        save(found.path.parent.parent, 7)
    assert "format version 2, but this program reads 1" in refused(again(found))


# ---- scanning -----------------------------------------------------------------------------------------------------


def test_points_are_listed_newest_first_and_other_names_are_ignored(tmp_path: Path) -> None:
    directory = rank_directory(tmp_path, 0)
    assert scan(directory, JOB) == []
    for step, generation in ((5, 1), (20, 1), (10, 3), (10, 2)):
        save(tmp_path, step, generation)
    for name in ("step_7_gen_1", "step_00000000007_gen_000001", "step_0000000007_gen_000000", ".tmp-1-1-1-x", "notes"):
        (directory / name).mkdir()
    (directory / "lock").touch()
    change_byte(directory / "step_0000000010_gen_000003" / MANIFEST, 5)
    listed = scan(directory, JOB)
    assert [found.point for found in listed] == [Point(20, 1), Point(10, 3), Point(10, 2), Point(5, 1)]
    assert [found.is_usable for found in listed] == [True, False, True, True]
    assert listed[1].problem is not None
    assert "step_0000000010_gen_000003" in listed[1].problem


def test_unlistable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "0").touch()
    with pytest.raises(StoreError, match="ENOTDIR"):
        scan(tmp_path / "0", JOB)


def test_very_large_step_has_a_name(tmp_path: Path) -> None:
    save(tmp_path, 2**63 - 1, 10**7)
    assert names_in(tmp_path / "0") == ["step_9223372036854775807_gen_10000000"]
