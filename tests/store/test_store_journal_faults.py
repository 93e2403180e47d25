"""The journal with failing disks, interrupts and kills at any of its calls."""

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
    """Return a folder with a journal of all batches but the last."""
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


def test_batch_is_one_write_and_one_fsync(folder: Path) -> None:
    loading, batch = split_after_opening(calls_of("append", folder))
    assert loading == replacing(folder, loading), (
        "loaded bytes are rewritten: an fsync after a failed one proves nothing about them"
    )
    assert batch == ["write journal", "fsync journal"]


def test_empty_batch_costs_nothing(folder: Path) -> None:
    journal, _ = Journal.open(folder)
    with interposed(Disk(), folder) as disk:
        journal.append([])
    assert disk.names() == []
    journal.close()


def test_compaction_is_synced_before_it_takes_the_name(folder: Path) -> None:
    _, calls = split_after_opening(calls_of("compact", folder))
    assert calls == replacing(folder, calls)


def split_after_opening(calls: list[str]) -> tuple[list[str], list[str]]:
    """Split the calls into those of opening the journal and the later ones."""
    opened = next(at for at, call in enumerate(calls) if call.startswith("rename ")) + 2
    return calls[:opened], calls[opened:]


def replacing(folder: Path, calls: list[str]) -> list[str]:
    """Return the calls of a replacement, after which any crash leaves the old journal or the new one."""
    temporary = calls[0].split()[1]
    return [*(f"{call} {temporary}" for call in ("open", "write", "fsync", "open", "rename")), f"fsync {folder.name}"]


@pytest.mark.parametrize("half_writes", [False, True])
def test_full_disk_costs_only_the_batch(folder: Path, half_writes: bool) -> None:
    load(folder)  # the next start rewrites what was appended, so it need not be appended again
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


def test_interrupted_write_is_undone(folder: Path) -> None:
    load(folder)
    with interposed(Disk(fail_at=0, failure=interrupt, only=("write",), half_writes=True), folder):
        journal, _ = Journal.open(folder)
        with pytest.raises(InterruptedHere):
            journal.append(BATCHES[-1])
        journal.append([b"next"])
        journal.close()
    assert load(folder) == [*BEFORE, b"next"]


@pytest.mark.parametrize("failure", [error(errno.EIO), interrupt])
def test_no_append_is_accepted_after_a_failed_fsync(folder: Path, failure: Callable[[Call], None]) -> None:
    with interposed(Disk(), folder) as disk:
        journal, _ = Journal.open(folder)
        disk.only, disk.matching, disk.fail_at, disk.failure = ("fsync",), 0, 0, failure
        with pytest.raises((StoreError, InterruptedHere)):
            journal.append(BATCHES[-1])
        for attempt in (journal.append, journal.compact):
            with pytest.raises(StoreError, match=r"fsync failed.*samebits recover"):
                attempt([b"next"])
        journal.close()
    assert load(folder) == BEFORE, "a refused batch is not found later"


def test_write_that_cannot_be_undone_ends_writing(folder: Path) -> None:
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


def test_failed_compaction_leaves_the_old_journal_in_use(folder: Path) -> None:
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
def test_compaction_that_fails_after_its_rename_ends_writing(folder: Path, failing_call: int) -> None:
    journal, _ = Journal.open(folder)
    with interposed(Disk(fail_at=failing_call, failure=error(errno.EIO)), folder), pytest.raises(StoreError):
        journal.compact(SNAPSHOT)
    with pytest.raises(StoreError, match="compaction failed"):
        journal.append([b"next"])
    journal.close()
    assert load(folder) == (SNAPSHOT if failing_call == 5 else BEFORE)
    assert names_in(folder) == ["journal"]


def test_nothing_is_cut_without_space_for_the_torn_end(folder: Path) -> None:
    with (folder / "journal").open("ab") as file:
        file.write(b"torn")
    before = (folder / "journal").read_bytes()
    with interposed(Disk(fail_at=0, failure=NO_SPACE), folder), pytest.raises(StoreError, match="ENOSPC"):
        Journal.open(folder)
    assert (folder / "journal").read_bytes() == before
    assert names_in(folder) == ["journal"]


@pytest.mark.parametrize("half_writes", [False, True])
@pytest.mark.parametrize("action", ["append", "compact"])
def test_kill_9_at_any_call_leaves_the_old_or_the_new_journal(
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
