"""The journal while the disk fails or its process is interrupted or killed at any of its calls."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import StoreError
from samebits.store.journal import Journal
from tests.store.disk_faults import (
    NO_SPACE,
    Call,
    Disk,
    InterruptedHere,
    error,
    interposed,
    interrupt,
    names_in,
)
from tests.store.killed_writer import ACTIONS, BATCHES, SNAPSHOT

BEFORE = [payload for batch in BATCHES[:-1] for payload in batch]
AFTER = {"append": [*BEFORE, *BATCHES[-1]], "compact": SNAPSHOT}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A journal of all batches but the last."""
    journal, _ = Journal.open(tmp_path)
    for batch in BATCHES[:-1]:
        journal.append(batch)
    journal.close()
    return tmp_path


def load(folder: Path) -> list[bytes]:
    journal, payloads = Journal.open(folder)
    journal.close()
    return payloads


def calls_of(action: str, folder: Path) -> list[str]:
    with interposed(Disk(), folder) as disk:
        ACTIONS[action](folder)
    return disk.names()


def test_a_batch_is_one_write_and_one_fsync(folder: Path) -> None:
    loading, batch = split_after_opening(calls_of("append", folder))
    assert loading == replacing(folder, loading), (
        "what is loaded is written anew: an fsync of bytes that failed to sync before proves nothing"
    )
    assert batch == ["write journal", "fsync journal"]


def test_an_empty_batch_costs_nothing(folder: Path) -> None:
    journal, _ = Journal.open(folder)
    with interposed(Disk(), folder) as disk:
        journal.append([])
    assert disk.names() == []
    journal.close()


def test_a_compaction_is_synced_before_it_takes_the_name(folder: Path) -> None:
    _, calls = split_after_opening(calls_of("compact", folder))
    assert calls == replacing(folder, calls)


def split_after_opening(calls: list[str]) -> tuple[list[str], list[str]]:
    """What opening the journal did, and what came then."""
    opened = next(at for at, call in enumerate(calls) if call.startswith("rename ")) + 2
    return calls[:opened], calls[opened:]


def replacing(folder: Path, calls: list[str]) -> list[str]:
    """How it is replaced: the old or the new one is there after any crash, and what is appended to is the new one."""
    temporary = calls[0].split()[1]
    return [*(f"{call} {temporary}" for call in ("open", "write", "fsync", "open", "rename")), f"fsync {folder.name}"]


@pytest.mark.parametrize("half_writes", [False, True])
def test_a_full_disk_costs_the_batch_and_nothing_else(folder: Path, half_writes: bool) -> None:
    load(folder)  # what was appended is written anew by the next start, and need not be again
    with interposed(Disk(fail_at=0, failure=NO_SPACE, only=("write",), half_writes=half_writes), folder):
        journal, _ = Journal.open(folder)
        with pytest.raises(StoreError, match="ENOSPC"):
            journal.append(BATCHES[-1])
        size_bytes = journal.size_bytes
        assert (folder / "journal").stat().st_size == size_bytes
        journal.append([b"there is space again"])
        journal.close()
    assert load(folder) == [*BEFORE, b"there is space again"]
    assert names_in(folder) == ["journal"]


def test_an_interrupted_write_is_taken_back(folder: Path) -> None:
    load(folder)
    with interposed(Disk(fail_at=0, failure=interrupt, only=("write",), half_writes=True), folder):
        journal, _ = Journal.open(folder)
        with pytest.raises(InterruptedHere):
            journal.append(BATCHES[-1])
        journal.append([b"next"])
        journal.close()
    assert load(folder) == [*BEFORE, b"next"]


@pytest.mark.parametrize("failure", [error(errno.EIO), interrupt])
def test_after_a_failed_fsync_it_refuses_to_go_on(folder: Path, failure: Callable[[Call], None]) -> None:
    with interposed(Disk(), folder) as disk:
        journal, _ = Journal.open(folder)
        disk.only, disk.matching, disk.fail_at, disk.failure = ("fsync",), 0, 0, failure
        with pytest.raises((StoreError, InterruptedHere)):
            journal.append(BATCHES[-1])
        for attempt in (journal.append, journal.compact):
            with pytest.raises(StoreError, match=r"fsync failed.*recover\.sh"):
                attempt([b"next"])
        journal.close()
    assert load(folder) == BEFORE, "a batch that was refused is not found later"


def test_what_cannot_be_taken_back_ends_the_writing(folder: Path) -> None:
    with interposed(Disk(failure=error(errno.EIO), half_writes=True), folder) as disk:
        journal, _ = Journal.open(folder)
        disk.only, disk.matching, disk.fail_at, disk.every_one_after = ("write", "ftruncate"), 0, 0, True
        with pytest.raises(StoreError, match="EIO"):
            journal.append(BATCHES[-1])
        disk.fail_at = -1
        with pytest.raises(StoreError, match="could not be undone"):
            journal.append([b"next"])
        journal.close()
    assert load(folder) == BEFORE
    assert names_in(folder) == ["journal", "journal.torn-1"]


def test_a_failed_compaction_leaves_the_old_journal_going_on(folder: Path) -> None:
    for name in ("open", "write", "fsync"):
        journal, before = Journal.open(folder)
        disk = Disk(fail_at=0, failure=NO_SPACE, only=(name,), half_writes=True)
        with interposed(disk, folder), pytest.raises(StoreError, match="ENOSPC"):
            journal.compact(SNAPSHOT)
        journal.append([name.encode()])
        journal.close()
        assert load(folder) == [*before, name.encode()]
        assert names_in(folder) == ["journal"]


@pytest.mark.parametrize("failing_call", [3, 4, 5])
def test_from_its_rename_on_a_failed_compaction_ends_the_writing(folder: Path, failing_call: int) -> None:
    journal, _ = Journal.open(folder)
    with interposed(Disk(fail_at=failing_call, failure=error(errno.EIO)), folder), pytest.raises(StoreError):
        journal.compact(SNAPSHOT)
    with pytest.raises(StoreError, match="compaction failed"):
        journal.append([b"next"])
    journal.close()
    assert load(folder) == (SNAPSHOT if failing_call == 5 else BEFORE)
    assert names_in(folder) == ["journal"]


def test_without_space_for_the_torn_end_nothing_is_cut(folder: Path) -> None:
    with (folder / "journal").open("ab") as file:
        file.write(b"torn")
    before = (folder / "journal").read_bytes()
    with interposed(Disk(fail_at=0, failure=NO_SPACE), folder), pytest.raises(StoreError, match="ENOSPC"):
        Journal.open(folder)
    assert (folder / "journal").read_bytes() == before
    assert names_in(folder) == ["journal"]


@pytest.mark.parametrize("half_writes", [False, True])
@pytest.mark.parametrize("action", ["append", "compact"])
def test_kill_9_at_any_call_leaves_the_old_or_the_new(
    folder: Path, repository: Path, action: str, half_writes: bool
) -> None:
    whole = (folder / "journal").read_bytes()
    outcomes = set()
    for fail_at in range(100):
        for entry in folder.iterdir():
            entry.unlink()
        (folder / "journal").write_bytes(whole)
        command = [str(folder), action, str(fail_at), "half" if half_writes else "whole"]
        result = subprocess.run(
            [sys.executable, "-m", "tests.store.killed_writer", *command],
            cwd=repository,
            capture_output=True,
            text=True,
        )
        payloads = load(folder)
        assert payloads in (BEFORE, AFTER[action])
        outcomes.add(payloads == AFTER[action])
        assert all(name == "journal" or name.startswith("journal.torn-") for name in names_in(folder))
        if result.stdout == "done\n":
            assert payloads == AFTER[action]
            break
        assert result.returncode == -signal.SIGKILL, result.stderr
    assert outcomes == {False, True}
    assert fail_at >= 5
