"""Surveying a folder: what each name is, what all ranks hold, and files that vanish meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from samebits.core.point import Point
from samebits.errors import CheckpointError, StoreError
from samebits.store.checkpoint import (
    EntryState,
    PointHeader,
    folder,
    folders_with_points,
    is_prefix,
    newest_common_point,
    point_in,
    rank_directory,
    slots_in,
    survey,
    tensor_entries,
    write_point,
)
from samebits.store.checkpoint.folder import parse_aside_name, parse_temporary_name
from tests.store.disk_faults import closed
from tests.store.points import CHUNK_BYTES, JOB, LAYOUT, TREE, change_byte, find, one_of_each_dtype, save

DATA = "data.safetensors"


def save_in_world(root: Path, step: int, generation: int, ranks: range, world_size: int) -> None:
    for rank in ranks:
        header = PointHeader(JOB, Point(step, generation), world_size, rank, slot=rank, node=str(rank))
        write_point(root, header, [], TREE, LAYOUT)


def test_newest_point_held_by_all_ranks_of_its_world(tmp_path: Path) -> None:
    assert newest_common_point(survey(tmp_path)) is None
    save_in_world(tmp_path, 10, 1, range(4), 4)
    save_in_world(tmp_path, 30, 1, range(3), 4)
    assert newest_common_point(survey(tmp_path)) == (Point(10, 1), 4)
    save_in_world(tmp_path, 20, 2, range(2), 2)
    assert newest_common_point(survey(tmp_path)) == (Point(20, 2), 2), "the world shrank: two ranks are all"
    save_in_world(tmp_path, 30, 2, range(1, 2), 2)
    assert newest_common_point(survey(tmp_path)) == (Point(20, 2), 2), (
        "the same step of another generation is another point"
    )
    (find(tmp_path, 20, 2, rank=1).path / DATA).write_bytes(b"")
    assert newest_common_point(survey(tmp_path)) == (Point(10, 1), 4)


def test_point_removed_during_the_survey_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    inspect = folder.inspect_point

    def remove_then_inspect(path: Path, point: Point, job: str | None) -> object:
        if point.step == 10:
            shutil.rmtree(path)
        return inspect(path, point, job)

    monkeypatch.setattr(folder, "inspect_point", remove_then_inspect)
    assert [(entry.point, entry.state) for entry in survey(tmp_path)] == [(Point(20, 1), EntryState.WHOLE)]


def test_file_with_the_name_of_a_point_is_a_damaged_point(tmp_path: Path) -> None:
    directory = rank_directory(tmp_path, 0)
    directory.mkdir()
    (directory / "step_0000000010_gen_000001").write_text("x")
    (entry,) = survey(tmp_path)
    assert (entry.state, entry.size_bytes) == (EntryState.DAMAGED, 1)
    assert "manifest" in entry.why


def test_header_is_read_from_its_chunks_alone_and_compared(tmp_path: Path) -> None:
    header = PointHeader(JOB, Point(7, 1), 4, 0, 0, "0")
    write_point(tmp_path, header, one_of_each_dtype(), TREE, LAYOUT, chunk_bytes=CHUNK_BYTES)
    found = find(tmp_path, 7)
    entries = tensor_entries(found)
    assert {entry.name for entry in entries} == {part.name for part in one_of_each_dtype()}
    assert [entry.start for entry in entries] == sorted(entry.start for entry in entries)
    data_start = entries[0].start
    assert data_start > 2 * CHUNK_BYTES
    change_byte(found.path / DATA, -1)
    assert tensor_entries(found) == entries, "tensor data is not read"
    for position in (3, CHUNK_BYTES, data_start - 1):
        change_byte(found.path / DATA, position)
        with pytest.raises(CheckpointError, match=f"chunk {position // CHUNK_BYTES} of "):
            tensor_entries(found)
        change_byte(found.path / DATA, position)


def test_moved_point_is_identified_by_its_manifest(tmp_path: Path) -> None:
    found = save(tmp_path / "job", 7, 3, rank=2)
    copy = shutil.copytree(found.path, tmp_path / "kept for later")
    assert point_in(copy).point == Point(7, 3)
    (copy / DATA).write_bytes(b"12")
    with pytest.raises(CheckpointError, match=rf"{copy}: {DATA} has 2 bytes"):
        point_in(copy)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *(("big", True), ("CKP", True), ("_a-1", True)),
        *(("0", False), ("", False), ("..", False), (".git", False), ("a.aside", False), ("a/b", False), ("ü", False)),
        ("step_0000000010_gen_000001", False),
    ],
)
def test_folder_names_that_contain_ranks(tmp_path: Path, name: str, is_one: bool) -> None:
    assert is_prefix(name) is is_one


def test_folders_with_points_are_the_jobs_own_and_those_with_a_prefix(tmp_path: Path) -> None:
    assert folders_with_points(tmp_path / "gone") == []
    for name in ("big", "small/3", "0", "ckpt.1a2b.aside/0"):
        (tmp_path / name).mkdir(parents=True)
    assert folders_with_points(tmp_path) == [tmp_path, tmp_path / "small"]


def test_unreadable_folder_does_not_pass_for_empty(tmp_path: Path) -> None:
    root = tmp_path / "others" / "ckpt"
    (root / "3").mkdir(parents=True)
    assert slots_in(root) == [3]
    for place in (tmp_path / "others", root):
        with closed(place), pytest.raises(StoreError, match=r"looking for checkpoints failed: .*EACCES.*ls -ld"):
            slots_in(root)
    assert slots_in(tmp_path / "nowhere") == []


def test_names_of_unfinished_and_set_aside_points() -> None:
    writer, point = parse_temporary_name(".tmp-12-345-0-step_0000000010_gen_000002") or (None, None)
    assert writer is not None and (writer.pid, writer.started_at) == (12, 345)
    assert point == Point(10, 2)
    assert parse_temporary_name("step_0000000010_gen_000002") is None
    assert parse_aside_name("damaged-3-step_0000000010_gen_000002") == Point(10, 2)
    assert parse_aside_name("damaged-step_0000000010_gen_000002") is None
