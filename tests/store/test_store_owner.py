from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from samebits.errors import ForeignFolderError, StoreError
from samebits.store.owner import FolderOwner, claim_folder, make_claim_durable, read_owner
from tests.store.disk_faults import names_in


def test_folder_is_claimed_once_and_recognised(tmp_path: Path) -> None:
    folder = tmp_path / "recovery"
    assert read_owner(folder) is None
    claim_folder(folder, "job-1", "digits")
    claim_folder(folder, "job-1", "digits")
    assert read_owner(folder) == FolderOwner("job-1", "digits")
    assert names_in(folder) == ["owner.json"]


def test_folder_of_another_job_is_refused_with_both_names(tmp_path: Path) -> None:
    claim_folder(tmp_path, "job-1", "digits")
    with pytest.raises(ForeignFolderError) as caught:
        claim_folder(tmp_path, "job-2", "llama")
    for word in (str(tmp_path), "job-1", "digits", "job-2", "llama", "run --fresh"):
        assert word in str(caught.value)
    assert read_owner(tmp_path) == FolderOwner("job-1", "digits")


def test_one_of_many_simultaneous_jobs_gets_the_folder(tmp_path: Path) -> None:
    start = threading.Barrier(8)
    refused: list[ForeignFolderError] = []
    got: list[str] = []

    def claim(job: str) -> None:
        start.wait()
        try:
            claim_folder(tmp_path / "recovery", job, "digits")
        except ForeignFolderError as error:
            refused.append(error)
        else:
            got.append(job)

    threads = [threading.Thread(target=claim, args=(f"job-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    assert len(refused) == 7
    owner = read_owner(tmp_path / "recovery")
    assert owner is not None
    assert owner.job == got[0]


@pytest.mark.parametrize(
    "content", [b"[]", b'{"job": "x"}', b'{"job": 1, "job_name": "x"}', b"\xff", b"[" * 20_000, b"x" * 100_000]
)
def test_unreadable_marker_is_named_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "owner.json").write_bytes(content)
    for attempt in (lambda: read_owner(tmp_path), lambda: claim_folder(tmp_path, "job", "digits")):
        with pytest.raises(StoreError, match=r"owner\.json.*run --fresh"):
            attempt()
    assert (tmp_path / "owner.json").read_bytes() == content


def test_claim_that_never_became_durable_is_void(tmp_path: Path) -> None:
    (tmp_path / "owner.json").touch()
    assert read_owner(tmp_path) is None
    claim_folder(tmp_path, "job-1", "digits")
    assert read_owner(tmp_path) == FolderOwner("job-1", "digits")


def test_claim_may_wait_for_the_disk_until_something_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    rank = tmp_path / "ckpt" / "0"
    claim_folder(rank, "job-1", "digits", sync=False)
    assert not synced
    make_claim_durable(rank)
    paths = (rank / "owner.json", rank, rank.parent, tmp_path)
    assert synced == [path.stat().st_ino for path in paths]
