"""Files that another user may have left: owner, mode and kind are checked before a byte is read or written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import StoreError
from samebits.store import private

SOMEBODY = 54321  # no user has this number


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "logs"
    private.make_folder(made)
    return made


def test_created_files_are_private(folder: Path) -> None:
    os.close(private.open_to_append(folder / "log"))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "log").stat().st_mode & 0o777 == 0o600
    private.make_folder(folder)


def test_file_is_read_and_appended_to(folder: Path) -> None:
    assert private.read(folder / "log", 10) is None
    for _ in range(2):
        descriptor = private.open_to_append(folder / "log")
        os.write(descriptor, b"abc")
        os.close(descriptor)
    assert private.read(folder / "log", 10) == b"abcabc"
    assert private.read(folder / "log", 2) == b"ab"


def test_file_that_others_may_only_read_is_accepted(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "log").write_bytes(b"abc")
    (folder / "log").chmod(0o644)
    private.check_folder(folder)
    assert private.read(folder / "log", 10) == b"abc"


def test_missing_folder_passes_and_an_own_link_is_followed(folder: Path, tmp_path: Path) -> None:
    private.check_folder(tmp_path / "missing")
    (tmp_path / "link").symlink_to(folder)
    private.make_folder(tmp_path / "link")


Use = Callable[[Path], object]


def read_log(folder: Path) -> object:
    return private.read(folder / "log", 10)


def append(folder: Path) -> object:
    return private.open_to_append(folder / "log")


PLANTED: list[tuple[str, Callable[[Path], object], Use, str]] = [
    (
        "a folder others write",
        lambda at: at.chmod(0o777),
        private.check_folder,
        "other users can write to this folder (mode 0777)",
    ),
    (
        "a folder a group writes",
        lambda at: at.chmod(0o770),
        private.make_folder,
        "other users can write to this folder (mode 0770)",
    ),
    ("a link to nowhere", lambda at: (at.rmdir(), at.symlink_to("/nowhere")), private.check_folder, "checking"),
    ("a file for a folder", lambda at: (at.rmdir(), at.touch()), private.make_folder, "expected a folder"),
    ("a link for a file, read", lambda at: (at / "log").symlink_to("/etc/passwd"), read_log, "a link or a pipe"),
    ("a link for a file, written", lambda at: (at / "log").symlink_to(at.parent / "x"), append, "a link or a pipe"),
    ("a pipe, read", lambda at: os.mkfifo(at / "log"), read_log, "expected a file"),
    ("a pipe, written", lambda at: os.mkfifo(at / "log"), append, "a link or a pipe"),
    ("a folder for a file", lambda at: (at / "log").mkdir(), read_log, "expected a file"),
    (
        "a file others write",
        lambda at: ((at / "log").touch(), (at / "log").chmod(0o666)),
        read_log,
        "other users can write",
    ),
]


@pytest.mark.parametrize(("name", "plant", "use", "words"), PLANTED, ids=[case[0] for case in PLANTED])
def test_file_that_others_may_write_is_refused(
    folder: Path, name: str, plant: Callable[[Path], object], use: Use, words: str
) -> None:
    plant(folder)
    with pytest.raises(StoreError) as caught:
        use(folder)
    assert words in str(caught.value)
    assert not (folder.parent / "x").exists()


@pytest.mark.parametrize("use", [private.check_folder, read_log, append])
def test_file_of_another_user_is_refused_with_both_names(
    folder: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "log").write_bytes(b"abc")
    mine = private.user(os.geteuid())
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    with pytest.raises(StoreError, match=rf"belongs to {mine}, and this is user {SOMEBODY}; other users"):
        use(folder)
    assert (folder / "log").read_bytes() == b"abc"


def test_folder_link_planted_by_another_user_is_not_followed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "device"
    link.symlink_to(folder)
    if os.geteuid() == 0:
        os.lchown(link, SOMEBODY, SOMEBODY)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    with pytest.raises(StoreError, match=r"a link that belongs to .*, so it is not followed"):
        private.check_folder(link)
