from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from samebits.errors import StoreError
from samebits.store import durable
from tests.store.disk_faults import NO_SPACE, Disk, InterruptedHere, error, interposed, interrupt, names_in


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_file_is_synced_before_its_rename_and_the_folder_after(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with interposed(Disk(), tmp_path) as disk:
        durable.write_file_atomically(target, b"new")
    temporary = disk.calls[0].target
    assert disk.names() == [
        f"open {temporary}",
        f"write {temporary}",
        f"fsync {temporary}",
        f"rename {temporary}",
        f"fsync {tmp_path.name}",
    ]
    assert target.read_bytes() == b"new"
    assert mode_of(target) == 0o600


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: original(descriptor, bytes(data)[:3]))
    durable.write_file_atomically(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


@pytest.mark.parametrize("failing_call", range(5))
@pytest.mark.parametrize("half_writes", [False, True])
def test_full_disk_leaves_only_the_old_file(tmp_path: Path, failing_call: int, half_writes: bool) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    disk = Disk(fail_at=failing_call, failure=NO_SPACE, half_writes=half_writes)
    with interposed(disk, tmp_path), pytest.raises(StoreError) as caught:
        durable.write_file_atomically(target, b"new contents")
    assert str(target) in str(caught.value) or str(tmp_path) in str(caught.value)
    assert "No space left on device (ENOSPC)" in str(caught.value)
    assert "df -h" in str(caught.value)
    renamed = failing_call == 4  # only the folder's fsync failed: the name may or may not survive a crash
    assert target.read_bytes() == (b"new contents" if renamed else b"old")
    assert names_in(tmp_path) == ["file"]


def test_interrupt_removes_the_temporary_file(tmp_path: Path) -> None:
    with interposed(Disk(fail_at=2, failure=interrupt), tmp_path), pytest.raises(InterruptedHere):
        durable.write_file_atomically(tmp_path / "file", b"new")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EROFS, "remount"),
        (errno.EIO, "dmesg"),
        (errno.EACCES, "ls -ld"),
        (errno.EDQUOT, "quota"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENXIO, "may read and write it"),
    ],
)
def test_message_has_the_reason_and_the_fix(tmp_path: Path, number: int, fix: str) -> None:
    with (
        interposed(Disk(fail_at=0, failure=error(number)), tmp_path),
        pytest.raises(StoreError, match=fix) as caught,
    ):
        durable.write_file_atomically(tmp_path / "file", b"new")
    assert errno.errorcode[number] in str(caught.value)
    assert str(tmp_path / "file") in str(caught.value)


def test_folder_is_made_with_its_parents_each_synced(tmp_path: Path) -> None:
    with interposed(Disk(), tmp_path) as disk:
        durable.make_directory(tmp_path / "a" / "b")
    assert disk.names() == ["mkdir a", f"fsync {tmp_path.name}", "mkdir b", "fsync a"]
    assert mode_of(tmp_path / "a" / "b") == 0o700
    (tmp_path / "a").chmod(0o755)
    durable.make_directory(tmp_path / "a")
    assert mode_of(tmp_path / "a") == 0o755, "an existing folder is the user's"


def test_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="ENOTDIR"):
            durable.make_directory(path)


def test_file_is_created_once(tmp_path: Path) -> None:
    assert durable.create_file_atomically(tmp_path / "file", b"first")
    assert not durable.create_file_atomically(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert names_in(tmp_path) == ["file"]


def test_file_is_created_without_hard_links(tmp_path: Path) -> None:
    no_links = Disk(fail_at=0, failure=error(errno.EPERM), only=("link",), every_one_after=True)
    with interposed(no_links, tmp_path):
        assert durable.create_file_atomically(tmp_path / "file", b"first")
        assert not durable.create_file_atomically(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert names_in(tmp_path) == ["file"]


def test_unsupported_folder_sync_is_accepted_and_a_failing_one_is_not(tmp_path: Path) -> None:
    with interposed(Disk(fail_at=0, failure=error(errno.EINVAL)), tmp_path):
        durable.fsync_dir(tmp_path)
    with interposed(Disk(fail_at=0, failure=error(errno.EIO)), tmp_path), pytest.raises(StoreError, match="EIO"):
        durable.fsync_dir(tmp_path)


def test_killed_writers_temporary_file_is_found_by_its_owner_only(tmp_path: Path) -> None:
    left = durable.write_temporary(tmp_path / "file", b"half")
    durable.write_temporary(tmp_path / "file2", b"other")
    assert list(tmp_path.glob(".file.tmp-*")) == [left]


def test_new_file_gets_its_name_when_it_is_complete_and_durable(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with interposed(Disk(), tmp_path) as disk, durable.new_file(target, replace=True) as descriptor:
        durable.write_all(descriptor, b"one ")
        assert not target.exists()
        durable.write_all(descriptor, b"two")
    temporary = disk.calls[0].target
    assert disk.names()[-3:] == [f"fsync {temporary}", f"rename {temporary}", f"fsync {tmp_path.name}"]
    assert target.read_bytes() == b"one two"
    assert mode_of(target) == 0o600
    assert names_in(tmp_path) == ["file"]


def test_failing_new_file_leaves_nothing_and_harms_no_other(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    for replace in (True, False):
        with pytest.raises(ValueError), durable.new_file(target, replace=replace) as descriptor:
            durable.write_all(descriptor, b"half")
            raise ValueError
        assert (names_in(tmp_path), target.read_bytes()) == (["file"], b"old")
    with (
        pytest.raises(StoreError, match="remove the existing file"),
        durable.new_file(target, replace=False) as descriptor,
    ):
        durable.write_all(descriptor, b"new")
    assert (names_in(tmp_path), target.read_bytes()) == (["file"], b"old")
    with durable.new_file(target, replace=True) as descriptor:
        durable.write_all(descriptor, b"new")
    assert (names_in(tmp_path), target.read_bytes()) == (["file"], b"new")
    with durable.new_file(tmp_path / "other", replace=False) as descriptor:
        durable.write_all(descriptor, b"other")
    assert names_in(tmp_path) == ["file", "other"]
