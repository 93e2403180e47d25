from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.core.point import Point
from samebits.errors import StoreError
from samebits.store.checkpoint import prune, pruning, rank_directory, scan, verify
from tests.store import killed_writer
from tests.store.disk_faults import Disk, error, interposed, names_in
from tests.store.points import JOB, change_byte, find, save


def points_in(root: Path) -> list[tuple[int, int]]:
    return [(found.point.step, found.point.generation) for found in scan(rank_directory(root, 0), JOB)]


def damage(root: Path, step: int, name: str = "data.safetensors", generation: int = 1) -> None:
    change_byte(find(root, step, generation).path / name, 30)


@pytest.mark.parametrize(("keep", "left"), [(5, 5), (3, 3), (2, 2), (1, 2), (0, 2), (-1, 2), (9, 6)])
def test_oldest_points_beyond_the_number_are_removed_but_two_always_stay(tmp_path: Path, keep: int, left: int) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
    gone = prune(rank_directory(tmp_path, 0), JOB, keep).gone
    assert points_in(tmp_path) == [(step, 1) for step in range(6, 6 - left, -1)]
    assert sorted(gone) == [Point(step, 1) for step in range(1, 7 - left)]
    assert len(names_in(tmp_path / "0")) == left


@pytest.mark.parametrize("name", ["data.safetensors", "manifest.msgpack"])
def test_damaged_point_is_neither_counted_nor_deleted(tmp_path: Path, name: str) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
    damage(tmp_path, 6, name)
    damage(tmp_path, 1, name)
    assert sorted(prune(rank_directory(tmp_path, 0), JOB, keep=2).gone) == [Point(2, 1), Point(3, 1)]
    assert points_in(tmp_path) == [(6, 1), (5, 1), (4, 1), (1, 1)]


def test_protected_points_stay(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    prune(rank_directory(tmp_path, 0), JOB, keep=2, keep_points={Point(2, 1), Point(77, 1)})
    assert points_in(tmp_path) == [(5, 1), (4, 1), (2, 1)]


def test_verified_point_is_not_read_again(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step)
    damage(tmp_path, 4)
    prune(rank_directory(tmp_path, 0), JOB, keep=2, verified={Point(4, 1)})
    assert points_in(tmp_path) == [(4, 1), (3, 1)], "the caller vouches for it"


def test_abandoned_line_does_not_displace_the_live_one(tmp_path: Path) -> None:
    """Generation 1 reached step 50; generation 2 resumed from (20, 1) and is only at step 30."""
    directory = rank_directory(tmp_path, 0)
    for step in (10, 20, 40, 50):
        save(tmp_path, step, 1)
    abandoned = {Point(40, 1), Point(50, 1)}
    assert prune(directory, JOB, 2, abandoned=abandoned).gone == []
    assert points_in(tmp_path) == [(50, 1), (40, 1), (20, 1), (10, 1)], "no point of the new line is durable yet"
    save(tmp_path, 30, 2)
    assert sorted(prune(directory, JOB, 2, abandoned=abandoned).gone) == [Point(10, 1), Point(40, 1), Point(50, 1)]
    assert points_in(tmp_path) == [(30, 2), (20, 1)]


def test_abandoned_line_stays_while_the_new_lines_only_point_is_damaged(tmp_path: Path) -> None:
    for step, generation in ((10, 1), (20, 1), (40, 1), (30, 2)):
        save(tmp_path, step, generation)
    damage(tmp_path, 30, generation=2)
    assert prune(rank_directory(tmp_path, 0), JOB, 2, abandoned={Point(40, 1)}).gone == []


def test_nothing_to_prune(tmp_path: Path) -> None:
    assert prune(rank_directory(tmp_path, 0), JOB, keep=2).gone == []
    save(tmp_path, 1, job="another job")
    save(tmp_path, 2, job="another job")
    save(tmp_path, 3, job="another job")
    assert prune(rank_directory(tmp_path, 0), JOB, keep=2).gone == []
    assert len(points_in(tmp_path)) == 3


@settings(max_examples=40, deadline=None)
@given(
    st.sets(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=8),
    st.sets(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=4),
    st.sets(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=4),
    st.integers(0, 4),
)
def test_all_rules_together(
    tmp_path_factory: pytest.TempPathFactory,
    saved: set[tuple[int, int]],
    damaged: set[tuple[int, int]],
    protected: set[tuple[int, int]],
    keep: int,
) -> None:
    root = tmp_path_factory.mktemp("prune")
    for step, generation in saved:
        save(root, step, generation)
    for step, generation in damaged & saved:
        damage(root, step, generation=generation)
    prune(rank_directory(root, 0), JOB, keep, keep_points={Point(*point) for point in protected})
    whole = sorted(saved - damaged, reverse=True)
    found_damaged = {point for point in damaged if len(whole) < 2 or point > whole[1]}  # points that are read
    newest = sorted(saved - found_damaged, reverse=True)[: max(keep, 2)]
    left = set(points_in(root))
    assert left == set(newest) | (damaged & saved) | (protected & saved)
    assert left >= set(whole[:2])


def test_only_points_that_must_stay_or_go_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 8):
        save(tmp_path, step)
    read: list[int] = []
    monkeypatch.setattr(pruning, "verify", lambda found: read.append(found.point.step))
    prune(rank_directory(tmp_path, 0), JOB, keep=5, verified={Point(7, 1)})
    assert sorted(read) == [1, 2, 6]
    assert points_in(tmp_path) == [(step, 1) for step in (7, 6, 5, 4, 3)]


def test_point_loses_its_name_before_anything_of_it_is_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    with interposed(Disk(), tmp_path) as disk:
        prune(rank_directory(tmp_path, 0), JOB, keep=2)
    assert disk.names()[:2] == ["rename step_0000000001_gen_000001", "fsync 0"]


def test_failing_removal_is_an_error(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    with (
        interposed(Disk(fail_at=0, failure=error(5), only=("rename",)), tmp_path),
        pytest.raises(StoreError, match="EIO"),
    ):
        prune(rank_directory(tmp_path, 0), JOB, keep=2)
    assert len(points_in(tmp_path)) == 3


def test_kill_9_while_deleting_leaves_complete_points_only(tmp_path: Path, repository: Path) -> None:
    for fail_at in range(100):
        for step in (1, 2, 3, 4):
            killed_writer.save(tmp_path, step)
        result = subprocess.run(
            [sys.executable, "-m", "tests.store.killed_writer", str(tmp_path), "prune", str(fail_at), "whole"],
            cwd=repository,
            capture_output=True,
            text=True,
        )
        for found in scan(rank_directory(tmp_path, 0), JOB):
            verify(found)
        assert points_in(tmp_path)[:2] == [(4, 1), (3, 1)]
        if result.stdout == "done\n":
            break
        assert result.returncode == -signal.SIGKILL, result.stderr
    assert fail_at >= 3
