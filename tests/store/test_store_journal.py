from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.errors import JournalDamagedError, StoreError
from samebits.store import journal as journal_module
from samebits.store import journal_format
from samebits.store.journal import Journal, read_journal
from samebits.store.journal_format import FILE_HEAD_BYTES
from tests.store.disk_faults import names_in

BATCHES = [[b"first", b""], [b"x" * 20], [b"the", b"last", b"batch"]]
BEFORE_LAST = [payload for batch in BATCHES[:-1] for payload in batch]
ALL = [payload for batch in BATCHES for payload in batch]


def load(folder: Path) -> list[bytes]:
    journal, payloads = Journal.open(folder)
    journal.close()
    return payloads


def make(folder: Path, batches: list[list[bytes]] = BATCHES, snapshot: list[bytes] | None = None) -> list[int]:
    """Write a journal; return the file's size before the first batch and after each."""
    journal, _ = Journal.open(folder)
    if snapshot is not None:
        journal.compact(snapshot)
    sizes = [journal.size_bytes]
    for batch in batches:
        journal.append(batch)
        sizes.append(journal.size_bytes)
    journal.close()
    return sizes


def rewrite(folder: Path, data: bytes) -> None:
    for entry in folder.iterdir():
        entry.unlink()
    (folder / "journal").write_bytes(data)


# ---- undamaged journals -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.binary(max_size=40), max_size=5)), max_size=12))
def test_appended_and_compacted_records_are_loaded(script: list[tuple[bool, list[bytes]]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected: list[bytes] = []
        for compacts, payloads in script:
            journal, loaded = Journal.open(folder)
            assert loaded == expected
            assert journal.torn_tail is None
            if compacts:
                journal.compact(payloads)
                expected = payloads
                assert journal.compacted_bytes == journal.size_bytes
            else:
                journal.append(payloads)
                expected = expected + payloads
            assert journal.size_bytes == (folder / "journal").stat().st_size
            journal.append([b"more"])
            expected = [*expected, b"more"]
            journal.close()
        assert load(folder) == expected


def test_new_journal_is_empty_and_private(tmp_path: Path) -> None:
    assert load(tmp_path / "recovery") == []
    assert (tmp_path / "recovery" / "journal").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "recovery").stat().st_mode & 0o777 == 0o700
    assert names_in(tmp_path / "recovery") == ["journal"]


def test_ten_thousand_records_survive_in_one_batch_and_singly(tmp_path: Path) -> None:
    payloads = [number.to_bytes(80, "little") for number in range(10_000)]
    make(tmp_path / "one", [payloads])
    assert load(tmp_path / "one") == payloads
    make(tmp_path / "many", [[payload] for payload in payloads[:300]])
    assert load(tmp_path / "many") == payloads[:300]


def test_reading_needs_no_lock_and_changes_nothing(tmp_path: Path) -> None:
    assert read_journal(tmp_path) is None
    sizes = make(tmp_path)
    os.truncate(tmp_path / "journal", sizes[-1] - 1)
    contents = read_journal(tmp_path)
    assert contents is not None
    assert contents.payloads == BEFORE_LAST
    assert contents.torn_tail is not None
    assert contents.torn_tail.kept_in is None
    assert (tmp_path / "journal").stat().st_size == sizes[-1] - 1
    assert names_in(tmp_path) == ["journal"]


def test_closed_journal_refuses(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path)
    with journal:
        pass
    journal.close()
    for attempt in (journal.append, journal.compact):
        with pytest.raises(StoreError, match="closed"):
            attempt([b"x"])


def test_oversized_append_is_refused_and_a_large_snapshot_is_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = Journal.open(tmp_path)
    monkeypatch.setattr(journal_format, "MAX_BODY_BYTES", 100)
    with pytest.raises(StoreError, match="exceeds the limit of 100 bytes"):
        journal.append([b"x" * 97])
    journal.append([b"x" * 96])
    snapshot = [bytes([number]) * number for number in range(96)]
    journal.compact(snapshot)
    journal.append([b"more"])
    journal.close()
    assert load(tmp_path) == [*snapshot, b"more"]


# ---- torn ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshot", [None, [b"state", b"so far"]])
def test_file_truncated_anywhere_in_its_last_batch(tmp_path: Path, snapshot: list[bytes] | None) -> None:
    sizes = make(tmp_path, snapshot=snapshot)
    whole = (tmp_path / "journal").read_bytes()
    before_last = [*(snapshot or []), *BEFORE_LAST]
    for end in range(sizes[-2] + 1, sizes[-1]):
        rewrite(tmp_path, whole[:end])
        journal, payloads = Journal.open(tmp_path)
        assert payloads == before_last
        tail = journal.torn_tail
        assert tail is not None
        assert (tail.offset, tail.size_bytes) == (sizes[-2], end - sizes[-2])
        assert tail.kept_in is not None
        assert tail.kept_in.read_bytes() == whole[sizes[-2] : end], "nothing is deleted to make it load"
        assert "journal.torn-1" in str(tail)
        journal.append([b"after"])
        journal.close()
        assert load(tmp_path) == [*before_last, b"after"]


def test_truncated_file_holds_complete_batches_only(tmp_path: Path) -> None:
    sizes = make(tmp_path)
    whole = (tmp_path / "journal").read_bytes()
    for end in range(FILE_HEAD_BYTES, len(whole) + 1):
        rewrite(tmp_path, whole[:end])
        batches = sum(size <= end for size in sizes) - 1
        assert load(tmp_path) == [payload for batch in BATCHES[:batches] for payload in batch]


@pytest.mark.parametrize("lost", [slice(0, None), slice(0, 10), slice(-6, None)])
def test_last_batch_with_pages_that_never_reached_the_disk(tmp_path: Path, lost: slice) -> None:
    sizes = make(tmp_path)
    whole = (tmp_path / "journal").read_bytes()
    batch = bytearray(whole[sizes[-2] :])
    batch[lost] = bytes(len(batch[lost]))
    rewrite(tmp_path, whole[: sizes[-2]] + batch)
    assert load(tmp_path) == BEFORE_LAST


def test_payload_that_looks_like_a_batch_does_not_turn_a_torn_end_into_damage(tmp_path: Path) -> None:
    make(tmp_path)
    image = (tmp_path / "journal").read_bytes()
    journal, _ = Journal.open(tmp_path)
    before = journal.size_bytes
    journal.append([image, image[FILE_HEAD_BYTES:]])
    end = journal.size_bytes
    journal.close()
    for cut in (1, 30, 100):
        os.truncate(tmp_path / "journal", end - cut)
        contents = read_journal(tmp_path)
        assert contents is not None
        assert contents.payloads == ALL
        assert contents.torn_tail is not None
        assert contents.torn_tail.offset == before


def test_only_the_newest_torn_ends_are_kept(tmp_path: Path) -> None:
    for number in range(journal_module.MAX_TORN_FILES + 3):
        make(tmp_path, [[b"kept %d" % number]])
        with (tmp_path / "journal").open("ab") as file:
            file.write(b"torn %d" % number)
    load(tmp_path)
    names = [f"journal.torn-{number}" for number in range(4, journal_module.MAX_TORN_FILES + 4)]
    assert names_in(tmp_path) == sorted(["journal", *names])
    assert (tmp_path / names[-1]).read_bytes() == b"torn 10"


# ---- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshot", [None, [b"state", b"so far"]])
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_changed_byte_is_never_loaded(tmp_path: Path, snapshot: list[bytes] | None, mask: int) -> None:
    sizes = make(tmp_path, snapshot=snapshot)
    whole = (tmp_path / "journal").read_bytes()
    before_last = [*(snapshot or []), *BEFORE_LAST]
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= mask
        rewrite(tmp_path, bytes(data))
        if position >= sizes[-2]:
            assert load(tmp_path) == before_last
            continue
        with pytest.raises(JournalDamagedError) as caught:
            load(tmp_path)
        starts = [0, FILE_HEAD_BYTES, *sizes]
        start = max(start for start in starts if start <= position)
        assert f"byte {start}:" in str(caught.value), "it names the place"
        assert str(tmp_path / "journal") in str(caught.value)
        assert "run --fresh" in str(caught.value)
        assert (tmp_path / "journal").read_bytes() == data, "and changes nothing"
        assert names_in(tmp_path) == ["journal"]


def test_snapshot_never_passes_for_a_torn_end(tmp_path: Path) -> None:
    make(tmp_path, [], snapshot=[b"all", b"that there is"])
    whole = (tmp_path / "journal").read_bytes()
    for position in range(len(whole)):
        for data in (whole[:position], whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :]):
            rewrite(tmp_path, data)
            with pytest.raises(JournalDamagedError):
                load(tmp_path)


def test_batch_is_valid_only_at_its_own_position(tmp_path: Path) -> None:
    sizes = make(tmp_path)
    whole = (tmp_path / "journal").read_bytes()
    rewrite(tmp_path, whole[: sizes[1]] + whole[sizes[2] :])
    assert load(tmp_path) == BATCHES[0]
    rewrite(tmp_path, whole + whole[sizes[1] : sizes[2]])
    assert load(tmp_path) == ALL


def test_batch_missing_from_the_middle_is_damage(tmp_path: Path) -> None:
    sizes = make(tmp_path)
    whole = (tmp_path / "journal").read_bytes()
    rewrite(tmp_path, whole[: sizes[0]] + bytes(sizes[1] - sizes[0]) + whole[sizes[1] :])
    with pytest.raises(JournalDamagedError, match=f"good batch follows at byte {sizes[1]}"):
        load(tmp_path)


@pytest.mark.parametrize(("changed", "left_of_the_last"), [("head", -1), ("payload", -1), ("payload", 5)])
def test_bad_batch_before_a_torn_one_is_damage(tmp_path: Path, changed: str, left_of_the_last: int) -> None:
    sizes = make(tmp_path)
    end = sizes[-2] + left_of_the_last if left_of_the_last > 0 else sizes[-1] + left_of_the_last
    data = bytearray((tmp_path / "journal").read_bytes()[:end])
    data[sizes[1] if changed == "head" else sizes[2] - 1] ^= 1
    rewrite(tmp_path, bytes(data))
    with pytest.raises(JournalDamagedError, match=f"byte {sizes[1]}:"):
        load(tmp_path)


def test_remains_of_an_older_journal_on_the_disk_are_ignored(tmp_path: Path) -> None:
    sizes = make(tmp_path / "old")
    assert make(tmp_path / "new") == sizes
    old, new = ((tmp_path / name / "journal").read_bytes() for name in ("old", "new"))
    rewrite(tmp_path / "new", new[: sizes[-2]] + old[sizes[-2] :])
    assert load(tmp_path / "new") == BEFORE_LAST


@pytest.mark.parametrize("content", [b"", b"\x93SBJ", b"{}", b"x" * 1000, bytes(1000)])
def test_foreign_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(JournalDamagedError, match=r"is not a journal.*run --fresh"):
        load(tmp_path)
    assert (tmp_path / "journal").read_bytes() == content


def test_other_version_is_named(tmp_path: Path) -> None:
    make(tmp_path)
    data = bytearray((tmp_path / "journal").read_bytes())
    struct.pack_into("<I", data, 8, 2)
    struct.pack_into("<Q", data, 32, xxhash.xxh3_64_intdigest(bytes(data[:32])))
    rewrite(tmp_path, bytes(data))
    with pytest.raises(
        JournalDamagedError, match=r"format version 2, but this program reads 1.*run the version that wrote"
    ):
        load(tmp_path)


def test_oversized_file_is_not_read(tmp_path: Path) -> None:
    make(tmp_path)
    os.truncate(tmp_path / "journal", journal_format.MAX_JOURNAL_BYTES + 1)
    with pytest.raises(StoreError, match="at most"):
        load(tmp_path)


def test_folder_in_the_journals_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    with pytest.raises(StoreError, match="not a plain file"):
        load(tmp_path)
