"""Fifos, sockets, directories, devices and links in place of our files: reported at once, never waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import CheckpointError, StoreError
from samebits.store import durable
from samebits.store.checkpoint import scan, verify
from samebits.store.journal import JOURNAL_FILE, Journal, read_journal
from samebits.store.lock import HOLDER_FILE, read_holder
from samebits.store.owner import OWNER_FILE, read_owner
from tests.store.points import JOB, save


def a_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    try:  # its full path may be too long for a socket's name
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


Make = Callable[[Path], object]
OTHERS: dict[str, Make] = {
    "fifo": os.mkfifo,
    "socket": a_socket,
    "directory": Path.mkdir,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a fifo": lambda path: (os.mkfifo(f"{path}.fifo"), path.symlink_to(f"{path}.fifo")),
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.fixture(params=OTHERS, ids=str)
def other(request: pytest.FixtureRequest) -> Make:
    return OTHERS[request.param]


def test_only_a_plain_file_is_opened(tmp_path: Path, other: Make) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"words")
    descriptor = durable.open_regular(plain)
    assert os.read(descriptor, 9) == b"words"
    os.close(descriptor)
    other(tmp_path / "other")
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(OSError, match="it is not a plain file"):
        durable.open_regular(tmp_path / "other")
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    with pytest.raises(FileNotFoundError):
        durable.open_regular(tmp_path / "nothing")


def test_point_without_a_plain_manifest_is_skipped(tmp_path: Path, other: Make) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    manifest = bad.path / "manifest.msgpack"
    manifest.unlink()
    other(manifest)
    found = scan(bad.path.parent, JOB)
    assert [one.point.step for one in found if one.manifest is not None] == [good.point.step]
    (problem,) = [one.problem for one in found if one.manifest is None]
    assert problem is not None
    assert "not a plain file" in problem


def test_point_without_plain_data_is_not_verified(tmp_path: Path, other: Make) -> None:
    found = save(tmp_path, 1)
    found.data_file.unlink()
    other(found.data_file)
    with pytest.raises(CheckpointError, match="not a plain file"):
        verify(found)


def test_ownership_file_must_be_a_plain_file(tmp_path: Path, other: Make) -> None:
    readers: dict[str, Callable[[Path], object]] = {
        OWNER_FILE: read_owner,
        HOLDER_FILE: read_holder,
        JOURNAL_FILE: read_journal,
    }
    for name, read in readers.items():
        other(tmp_path / name)
        with pytest.raises(StoreError, match="it is not a plain file"):
            read(tmp_path)
    with pytest.raises(StoreError, match="it is not a plain file"):
        Journal.open(tmp_path)
