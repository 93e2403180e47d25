"""The cache of compiled code: private, one folder per version, bounded, never fatal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from samebits.errors import StoreError
from samebits.training.process.compiled_code import KEPT_FOR_S, folder_of, prune

NOW_S = 2_000_000_000.0


def put(path: Path, size: int, age_s: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path


def test_each_version_has_its_own_folder(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    first = folder_of(root, ["torch-2.13.0", "cpu"])
    assert folder_of(root, ["torch-2.13.0", "cpu"]) == first
    assert folder_of(root, ["torch-2.13.0", "cuda"]) != first
    assert folder_of(root, ["torch-2.13.0c", "pu"]) != first
    assert first.name.startswith("torch-2.13.0-") and first.parent == root
    assert [path.stat().st_mode & 0o777 for path in (root, first)] == [0o700, 0o700]


@pytest.mark.parametrize("which", ["root", "version"])
def test_folder_that_others_may_write_is_not_used(tmp_path: Path, which: str) -> None:
    root = tmp_path / "cache"
    folder = folder_of(root, ["torch"])
    (root if which == "root" else folder).chmod(0o777)
    with pytest.raises(StoreError, match=r"other users can write to this folder \(mode 0777\)"):
        folder_of(root, ["torch"])


def test_remedy_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(StoreError, match="export COMPILE_CACHE_PATH=<a folder of your own>"):
        folder_of(tmp_path / "cache", ["torch"])


def test_least_recently_used_is_removed_first(tmp_path: Path) -> None:
    old, older = (
        put(tmp_path / "a" / "old", 10, 2 * KEPT_FOR_S),
        put(tmp_path / "b" / "c" / "older", 10, 3 * KEPT_FOR_S),
    )
    young = put(tmp_path / "young", 10, 60)
    assert prune(tmp_path, NOW_S, 30) == 0
    assert prune(tmp_path, NOW_S, 20) == 10
    assert (old.exists(), older.exists(), young.exists()) == (True, False, True)
    assert prune(tmp_path, NOW_S, 0) == 10
    assert (old.exists(), young.exists()) == (False, True)


def test_missing_folder_has_nothing_to_remove(tmp_path: Path) -> None:
    assert prune(tmp_path / "nowhere", NOW_S, 0) == 0
