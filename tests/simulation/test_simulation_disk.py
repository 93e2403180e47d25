"""The simulated disk loses exactly what fsync(2) lets a disk lose; the real journal runs on it."""

from __future__ import annotations

import errno
import random

import pytest

from samebits.errors import StoreError
from samebits.store.journal import Journal
from tests.simulation.disk import Disk, Killed
from tests.simulation.recovery_path import RecoveryPath
from tests.simulation.trace import Violation


def reopened(disk: Disk) -> list[bytes]:
    disk.begin_process()
    with disk.mounted():
        return Journal.open(disk.folder)[1]  # type: ignore[arg-type]


def journal_on(disk: Disk) -> Journal:
    with disk.mounted():
        return Journal.open(disk.folder)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_synced_appends_survive_power_loss_and_others_are_whole_or_gone(seed: int) -> None:
    disk = Disk(random.Random(seed))
    journal = journal_on(disk)
    with disk.mounted():
        journal.append([b"one", b"two"])
        disk.light_fuse(seed % 2)
        with pytest.raises(Killed):
            journal.append([b"three" * 300, b"four"])
    disk.lose_power()
    assert reopened(disk) in ([b"one", b"two"], [b"one", b"two", b"three" * 300, b"four"])


def test_both_outcomes_and_a_torn_end_occur() -> None:
    found: set[tuple[int, bool]] = set()
    for seed in range(60):
        disk = Disk(random.Random(seed))
        journal = journal_on(disk)
        with disk.mounted():
            disk.light_fuse(seed % 2)
            with pytest.raises(Killed):
                journal.append([b"three" * 300, b"four"])
        disk.lose_power()
        payloads = reopened(disk)
        found.add((len(payloads), any(name.startswith("journal.torn-") for name in disk.names())))
    assert found == {(0, False), (0, True), (2, False)}


def test_kill_leaves_the_page_cache() -> None:
    disk = Disk(random.Random(1))
    journal = journal_on(disk)
    with disk.mounted():
        disk.light_fuse(1)
        with pytest.raises(Killed):
            journal.append([b"written, not synced"])
    assert reopened(disk) == [b"written, not synced"]


def test_dead_process_changes_nothing_more() -> None:
    disk = Disk(random.Random(1))
    journal = journal_on(disk)
    with disk.mounted():
        disk.light_fuse(0)
        with pytest.raises(Killed):
            journal.append([b"lost"])
        before = disk.names()
        with pytest.raises(Killed):
            journal.append([b"of a dead process"])
    assert disk.names() == before


@pytest.mark.parametrize("calls", [0, 1])
def test_refused_append_is_the_stores_error_and_leaves_the_old_state(calls: int) -> None:
    disk = Disk(random.Random(calls))
    journal = journal_on(disk)
    with disk.mounted():
        journal.append([b"one"])
        disk.light_fuse(calls, errno.ENOSPC)
        with pytest.raises(StoreError, match="ENOSPC"):
            journal.append([b"two"])
    disk.lose_power()
    assert reopened(disk) == [b"one"]


def test_unsimulated_call_is_an_error() -> None:
    disk = Disk(random.Random(1))
    with pytest.raises(AttributeError, match=r"os\.symlink is not simulated"):
        _ = disk.os.symlink


def test_lock_ends_with_its_holder() -> None:
    path = RecoveryPath(random.Random(1), 1 << 20)
    assert path.take_lock(1)
    assert not path.take_lock(2)
    path.process_died(2)
    assert not path.take_lock(2)
    path.process_died(1)
    assert path.take_lock(2)


def test_records_that_were_never_written_are_a_violation() -> None:
    path = RecoveryPath(random.Random(1), 1 << 20)
    path.take_lock(1)
    path.open(1)
    journal = journal_on(path.disk)
    with path.disk.mounted():
        journal.append([b"forged"])
    path.process_died(1)
    path.disk.begin_process()
    with pytest.raises(Violation, match=r"S4: .*forged"):
        path.open(2)
