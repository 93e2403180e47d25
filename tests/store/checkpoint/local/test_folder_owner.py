"""Ownership of points: hashes detect damage, but not who wrote the point."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from samebits.errors import StoreError
from samebits.store.checkpoint.point_store import open_point_store
from tests.store.points import JOB, JOB_NAME

OTHER_USER = 65534


def opened(root: Path) -> None:
    open_point_store(root, 0, job=JOB, job_name=JOB_NAME)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("planted", ["folder", "link"])
def test_points_in_another_users_folder_are_refused(tmp_path: Path, planted: str) -> None:
    root = tmp_path / "ckpt"
    theirs = root / "0" if planted == "folder" else tmp_path / "theirs"
    theirs.mkdir(parents=True)
    os.chown(theirs, OTHER_USER, OTHER_USER)
    if planted == "link":
        root.mkdir()
        (root / "0").symlink_to(theirs)
    with pytest.raises(StoreError, match=r"Fix: .*CHECKPOINT_PATH"):
        opened(root)
    assert not list(theirs.iterdir())


def test_points_in_a_folder_that_others_may_write_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt" / "0"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(StoreError, match=r"other users can write to this folder \(mode 0777\)"):
        opened(tmp_path / "ckpt")


def test_shared_parent_folder_is_accepted(tmp_path: Path) -> None:
    """A project's folder is often writable for a group; the ranks' own folders in it are not."""
    root = tmp_path / "ckpt"
    root.mkdir()
    root.chmod(0o775)
    opened(root)
    opened(root)
