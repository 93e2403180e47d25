"""The page of a rank's generators: complete entries or none, whatever is torn, damaged, another's or older."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest

from samebits.core.point import Point
from samebits.errors import StoreError
from samebits.store.checkpoint.memory import generator_page
from samebits.store.checkpoint.memory.generator_page import (
    ENTRY_BYTES,
    FILE_BYTES,
    MAX_STATE_BYTES,
    PAGE_BYTES,
    EntryKind,
    PageContent,
    PageEntry,
    PageWriter,
    decode_page,
    orphaned_pages,
    read_page,
)
from samebits.store.checkpoint.memory.memory_room import SWEPT_AFTER_S, remove_room, room_path, sweep

COMMIT, BEFORE = EntryKind.COMMIT, EntryKind.BEFORE_COLLECTIVE
JOB = "job-1"


def commit(page: PageWriter, number: int, late: int = 0) -> None:
    page.write(COMMIT, Point(number, 1), number, 1, late, b"commit %d" % number)


def before(page: PageWriter, number: int, text: bytes = b"") -> None:
    page.write(BEFORE, Point(number, 1), number, 1, 0, text or b"before the collectives after %d" % number)


def published(base: Path, slot: int = 0, commits: int = 1) -> PageWriter:
    page = PageWriter(base, JOB, slot)
    for number in range(commits):
        commit(page, number)
    page.publish()
    return page


def read(base: Path, slot: int = 0) -> PageContent:
    data = read_page(base, JOB, slot)
    content = None if data is None else decode_page(data, JOB, slot, "here")
    assert content is not None
    return content


def states(content: PageContent) -> list[bytes]:
    return [entry.state for entry in content.entries]


def test_what_was_written_is_read_by_another_process(tmp_path: Path) -> None:
    page = published(tmp_path)
    before(page, 0)
    page.launching()
    page.launching()
    commit(page, 1, late=1)
    assert read(tmp_path) == page.content()
    assert read(tmp_path) == PageContent(
        (
            PageEntry(1, COMMIT, Point(0, 1), 0, 1, 0, 0, b"commit 0"),
            PageEntry(2, BEFORE, Point(0, 1), 0, 1, 0, 0, b"before the collectives after 0"),
            PageEntry(3, COMMIT, Point(1, 1), 1, 1, 2, 1, b"commit 1"),
        ),
        collectives=2,
    )


def test_a_commit_stands_until_two_later_ones_do_and_the_last_before_a_collective_stands(tmp_path: Path) -> None:
    page = published(tmp_path)
    for number in range(1, 9):
        before(page, number - 1, b"first")
        before(page, number - 1, b"last")
        assert b"commit %d" % (number - 1) in states(read(tmp_path))
        commit(page, number)
        kept = [entry.commits for entry in read(tmp_path).entries if entry.kind is COMMIT]
        assert kept[-2:] == [number - 1, number]
        assert states(read(tmp_path)).count(b"last") >= 1


def test_the_page_is_found_from_its_first_commit_on_and_is_its_users_alone(tmp_path: Path) -> None:
    page = PageWriter(tmp_path, JOB, 3)
    commit(page, 0)
    assert read_page(tmp_path, JOB, 3) is None
    page.publish()
    assert states(read(tmp_path, 3)) == [b"commit 0"]
    found = page.path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_size) == (0o600, FILE_BYTES)
    assert stat.S_IMODE(page.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", EntryKind)
def test_an_entry_torn_at_any_byte_is_not_there_and_the_others_are(tmp_path: Path, kind: EntryKind) -> None:
    """Whichever bytes have arrived when the process is killed: the first so many of every write, in their order."""
    page = published(tmp_path, commits=3)
    before(page, 2)
    before(page, 2)
    complete = read(tmp_path)
    old = bytes(page._view)
    page.write(kind, Point(3, 1), 3, 1, 0, b"the one that is torn")
    new = bytes(page._view)
    place = next(at for at in range(PAGE_BYTES, FILE_BYTES) if old[at] != new[at])
    start = PAGE_BYTES + (place - PAGE_BYTES) // ENTRY_BYTES * ENTRY_BYTES
    written = generator_page._PAYLOAD_AT + len(b"the one that is torn")
    digest, fields, state = (
        range(start, start + 16),
        range(start + 16, start + generator_page._PAYLOAD_AT),
        range(start + generator_page._PAYLOAD_AT, start + written),
    )
    overwritten = min((one for one in complete.entries if one.kind is kind), key=lambda one: one.sequence)
    others = tuple(one for one in complete.entries if one is not overwritten)
    order = [(at, 0) for at in digest] + [(at, new[at]) for part in (state, fields, digest) for at in part]
    torn = bytearray(old)
    for count, (at, byte) in enumerate(order):
        torn[at] = byte
        page.path.write_bytes(torn)
        found = read(tmp_path).entries
        if count == len(order) - 1:
            assert found[:-1] == others
            assert found[-1].state == b"the one that is torn"
        else:
            assert found in (others, complete.entries), f"{count} bytes of {len(order)}"
    assert bytes(torn) == new


def test_any_bit_of_an_entry_that_is_wrong_makes_it_not_there(tmp_path: Path) -> None:
    page = published(tmp_path)
    whole = bytes(page._view)
    for at in range(PAGE_BYTES, PAGE_BYTES + generator_page._PAYLOAD_AT + len(b"commit 0")):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        page.path.write_bytes(damaged)
        assert read(tmp_path).entries == (), at


def test_another_jobs_and_another_slots_page_is_refused_and_its_entries_are_worth_nothing(tmp_path: Path) -> None:
    others = PageWriter(tmp_path, "job-2", 0)
    others.write(COMMIT, Point(0, 1), 0, 1, 0, b"another job's")
    others.publish()
    ours = published(tmp_path)
    foreign, header = others.path.read_bytes(), ours.path.read_bytes()[:PAGE_BYTES]
    ours.path.write_bytes(foreign)
    with pytest.raises(StoreError, match="another job or slot, expected slot 0 of job job-1"):
        read_page(tmp_path, JOB, 0)
    ours.path.write_bytes(header + foreign[PAGE_BYTES:])
    assert read(tmp_path).entries == ()
    published(tmp_path, slot=1).path.rename(ours.path)
    with pytest.raises(StoreError, match="another job or slot"):
        read_page(tmp_path, JOB, 0)


@pytest.mark.parametrize("content", [b"", b"nonsense", bytes(FILE_BYTES), b"x" * (FILE_BYTES + 1), None])
def test_what_is_no_page_is_refused(tmp_path: Path, content: bytes | None) -> None:
    page = published(tmp_path)
    page.path.write_bytes(bytes(page._view)[:-1] if content is None else content)
    with pytest.raises(StoreError, match="no page of this version"):
        read_page(tmp_path, JOB, 0)


def test_what_is_not_this_users_alone_is_refused(tmp_path: Path) -> None:
    page = published(tmp_path)
    page.path.parent.chmod(0o755)
    with pytest.raises(StoreError, match="not this user's alone"):
        read_page(tmp_path, JOB, 0)
    with pytest.raises(StoreError, match="not this user's alone"):
        PageWriter(tmp_path, JOB, 0)
    page.path.parent.chmod(0o700)
    os.link(page.path, tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="no plain file of this user's alone"):
        read_page(tmp_path, JOB, 0)
    page.path.unlink()
    page.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        read_page(tmp_path, JOB, 0)
    page.path.unlink()
    page.path.mkdir()
    with pytest.raises(StoreError, match="no plain file"):
        read_page(tmp_path, JOB, 0)


def test_another_users_page_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = published(tmp_path)
    stranger = os.geteuid() + 1
    (tmp_path / f"samebits-{os.geteuid()}").rename(tmp_path / f"samebits-{stranger}")
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(StoreError, match="not this user's alone"):
        read_page(tmp_path, JOB, 0)
    assert page.content().entries


def test_a_successor_begins_with_what_its_predecessor_kept(tmp_path: Path) -> None:
    first = published(tmp_path, commits=3)
    first.launching()
    before(first, 2)
    kept = states(read(tmp_path))
    second = PageWriter(tmp_path, JOB, 0)
    assert states(second.content()) == kept
    assert second.collectives == 1
    assert states(read(tmp_path)) == kept  # a successor that is killed now leaves its predecessor's
    commit(second, 3)
    assert b"commit 3" not in states(read(tmp_path))
    second.publish()
    assert states(read(tmp_path))[-1] == b"commit 3"
    assert b"commit 2" in states(read(tmp_path))


def test_a_process_that_was_given_up_writes_where_nobody_reads(tmp_path: Path) -> None:
    stopped = published(tmp_path)
    successor = published(tmp_path)
    before(stopped, 0, b"of a process that woke again")
    commit(stopped, 1)
    assert b"of a process that woke again" not in states(read(tmp_path))
    stopped.discard()
    assert states(read(tmp_path)) == states(successor.content())


def test_a_predecessor_that_died_before_it_was_found_is_in_nobodys_way(tmp_path: Path) -> None:
    PageWriter(tmp_path, JOB, 0)
    published(tmp_path)
    assert states(read(tmp_path)) == [b"commit 0"]


def test_a_damaged_predecessor_is_not_begun_with(tmp_path: Path) -> None:
    page = published(tmp_path)
    page.path.write_bytes(b"nonsense")
    assert PageWriter(tmp_path, JOB, 0).content().entries == ()


def test_a_state_that_is_too_large_is_refused_and_the_largest_is_kept(tmp_path: Path) -> None:
    page = published(tmp_path)
    page.write(COMMIT, Point(1, 1), 1, 1, 0, b"x" * MAX_STATE_BYTES)
    with pytest.raises(StoreError, match="have 16297 bytes, at most 16296 are kept"):
        page.write(COMMIT, Point(2, 1), 2, 1, 0, b"x" * (MAX_STATE_BYTES + 1))
    assert read(tmp_path).entries[-1].state == b"x" * MAX_STATE_BYTES


def test_pages_that_nobody_writes_any_more_are_listed(tmp_path: Path) -> None:
    kept = published(tmp_path, slot=0)
    published(tmp_path, slot=2).close()
    assert list(orphaned_pages(tmp_path, JOB)) == [2]
    assert list(orphaned_pages(tmp_path, "job-2")) == []
    kept.close()
    assert list(orphaned_pages(tmp_path, JOB)) == [0, 2]


def test_a_held_page_outlives_its_room_and_another_jobs_sweep(tmp_path: Path) -> None:
    page = published(tmp_path)
    late_s = page.path.stat().st_mtime + SWEPT_AFTER_S + 1
    sweep(tmp_path, "job-2", late_s)
    remove_room(tmp_path, JOB, 0)
    assert states(read(tmp_path)) == [b"commit 0"]
    page.close()
    assert sweep(tmp_path, "job-2", late_s) == [room_path(tmp_path, JOB, 0)]
    assert not page.path.exists()


def test_a_job_that_ended_well_leaves_nothing(tmp_path: Path) -> None:
    page = published(tmp_path)
    page.discard()
    remove_room(tmp_path, JOB, 0)
    assert not page.path.parent.exists()


def test_a_forked_child_does_not_keep_the_page(tmp_path: Path) -> None:
    page = published(tmp_path)
    (told, tell), (heard, say) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.write(say, b".")
        os.read(told, 1)  # also where the test ends
        os._exit(0)
    try:
        assert os.read(heard, 1) == b"."
        page.close()
        with page.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else the child has it
    finally:
        for descriptor in (told, tell, heard, say):
            os.close(descriptor)
        assert os.waitpid(child, 0)[1] == 0
