"""The keys' journal: read by the next scheduler; another job's is set aside; damage ends no training."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from samebits.core.keys.key_store import KeyRecord
from samebits.core.messages import Credential, KeyAnswer, KeyCall, KeyOp, KeyOutcome
from samebits.core.scheduler import SchedulerCore
from samebits.core.state import JobState
from samebits.errors import StoreError
from samebits.service.scheduling import key_file
from samebits.service.scheduling.key_file import KEYS_FOLDER, KeyFile
from samebits.store import durable
from samebits.store.journal import JOURNAL_FILE, read_journal
from tests.core.house import policy

SENDER = Credential("job", "0", "s0", 1)


def core_of(job: str = "job") -> SchedulerCore:
    core = SchedulerCore(policy(1), JobState(), now=0.0, boot_id="boot", new_job_id=job)
    core.start()
    return core


def opened(path: Path, job: str = "job") -> tuple[KeyFile, SchedulerCore]:
    core, file = core_of(job), KeyFile(path)
    file.load(core)
    return file, core


def put(file: KeyFile, core: SchedulerCore, key: bytes, value: bytes, number: int) -> KeyAnswer:
    ready = core.keys.take(KeyCall(SENDER, number, number, KeyOp.PUT, key, value, is_durable=True))
    assert file.append(ready.records, core)
    return ready.answers[0]


def value_of(core: SchedulerCore, key: bytes) -> bytes:
    return core.keys.take(KeyCall(SENDER, 0, 0, KeyOp.GET, key)).answers[0].value


def test_job_without_durable_keys_has_no_folder(tmp_path: Path) -> None:
    file, core = opened(tmp_path)
    file.append(core.keys.take(KeyCall(SENDER, 1, 1, KeyOp.PUT, b"k", b"\x01")).records, core)
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_next_scheduler_reads_the_keys(tmp_path: Path) -> None:
    for number in range(1, 4):
        file, core = opened(tmp_path)
        put(file, core, b"key %d" % number, b"\x0a", number)
        file.close()
    _, core = opened(tmp_path)
    assert [key for key, held in core.keys.keys.items() if held.value == b"\x0a"] == [b"key 1", b"key 2", b"key 3"]
    assert (tmp_path / KEYS_FOLDER).stat().st_mode & 0o777 == 0o700
    assert (tmp_path / KEYS_FOLDER / JOURNAL_FILE).stat().st_mode & 0o777 == 0o600


def test_growing_file_is_compacted_without_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "COMPACT_BYTES", 4096)
    file, core = opened(tmp_path)
    for number in range(1, 200):
        put(file, core, b"k", bytes([number]) * 100, number)
        assert (tmp_path / KEYS_FOLDER / JOURNAL_FILE).stat().st_size < 6000
    file.close()
    assert value_of(opened(tmp_path)[1], b"k") == bytes([199]) * 100


def test_large_append_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "APPEND_BYTES", 300)
    file, core = opened(tmp_path)
    records: list[KeyRecord] = []
    for number in range(1, 12):
        call = KeyCall(SENDER, number, number, KeyOp.PUT, b"%d" % number, b"x" * 90, is_durable=True)
        records += core.keys.take(call).records
    file.append(records, core)
    file.close()
    assert len(opened(tmp_path)[1].keys.keys) == 11


def test_keys_of_another_job_are_set_aside(tmp_path: Path) -> None:
    file, core = opened(tmp_path, "11111111-job")
    put(file, core, b"k", b"\x01", 1)
    file.close()
    file, core = opened(tmp_path, "22222222-job")
    assert dict(core.keys.keys) == {}
    put(file, core, b"k", b"\x02", 1)
    file.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [KEYS_FOLDER, f"{KEYS_FOLDER}.11111111.aside"]
    assert value_of(opened(tmp_path, "22222222-job")[1], b"k") == b"\x02"


def test_folder_with_a_truncated_first_append_starts_over(tmp_path: Path) -> None:
    file, core = opened(tmp_path)
    file.append([], core)
    put(file, core, b"k", b"\x01", 1)
    file.close()
    path = tmp_path / KEYS_FOLDER / JOURNAL_FILE
    path.write_bytes(path.read_bytes()[:-3])
    file, core = opened(tmp_path)
    assert dict(core.keys.keys) == {}
    put(file, core, b"k", b"\x02", 1)
    file.close()
    assert value_of(opened(tmp_path)[1], b"k") == b"\x02"


@pytest.mark.parametrize("damage", ["flip", "unknown"])
def test_damaged_file_refuses_calls_and_ends_nothing(tmp_path: Path, damage: str) -> None:
    file, core = opened(tmp_path)
    for number in range(1, 4):
        put(file, core, b"k%d" % number, b"\x01" * 50, number)
    if damage == "unknown":
        assert file._journal is not None
        file._journal.append([msgspec.msgpack.encode([99, 1])])
    file.close()
    path = tmp_path / KEYS_FOLDER / JOURNAL_FILE
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[120] ^= 1
        path.write_bytes(data)
    file, core = opened(tmp_path)
    answer = put(file, core, b"k", b"\x01", 9)
    assert answer.outcome is KeyOutcome.REFUSED
    assert "the keys cannot be read: " in answer.text
    file.close()
    if damage == "flip":
        assert path.read_bytes() == bytes(data), "nothing was changed"
    else:
        found = read_journal(path.parent)
        assert found is not None
        assert len(found.payloads) == 5, "nothing was lost"


def test_nothing_is_written_with_recovery_off() -> None:
    file, core = KeyFile(None), core_of()
    file.load(core)
    assert put(file, core, b"k", b"\x01", 1).outcome is KeyOutcome.DONE
    assert value_of(core, b"k") == b"\x01"


def test_full_disk_refuses_calls_promises_nothing_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, core = opened(tmp_path)
    put(file, core, b"k", b"\x01", 1)

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "write_all", no_room)
    call = KeyCall(SENDER, 2, 2, KeyOp.PUT, b"k", b"\x02", is_durable=True)
    assert not file.append(core.keys.take(call).records, core)
    assert core.keys.take(call).answers == [], "it is unknown whether this was written"
    refused = core.keys.take(KeyCall(SENDER, 3, 2, KeyOp.GET, b"k")).answers[0]
    assert (
        refused.outcome is KeyOutcome.REFUSED and "No space left" in refused.text and "Fix: make room" in refused.text
    )
    monkeypatch.undo()
    file.close()
    assert value_of(opened(tmp_path)[1], b"k") == b"\x01"


def test_journal_that_cannot_be_compacted_keeps_working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "COMPACT_BYTES", 1000)
    tried = []

    def no_room(path: Path, _: bytes, *, tag: str) -> Path:
        tried.append(path)
        raise StoreError("no room")

    file, core = opened(tmp_path)
    put(file, core, b"k", b"\x01", 1)
    monkeypatch.setattr(durable, "write_temporary", no_room)
    for number in range(2, 40):
        assert put(file, core, b"k", b"x" * 100, number).outcome is KeyOutcome.DONE
    assert 1 <= len(tried) <= 4, "at twice the size, not at each append"
    monkeypatch.undo()
    file.close()
    assert value_of(opened(tmp_path)[1], b"k") == b"x" * 100
