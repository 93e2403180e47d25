"""The page of a rank's generators: entries are complete or absent, whatever is torn, damaged, foreign or old."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest

from samebits.core.point import Point
from samebits.errors import StoreError
from samebits.store.checkpoint.memory_room import SWEPT_AFTER_S, remove_room, room_path, sweep
from samebits.training.checkpoint.kept_generators import (
    ENTRIES_AT,
    ENTRY_BYTES,
    FILE_BYTES,
    MAX_CONTENT_BYTES,
    Content,
    KeptGeneratorStates,
    PageWriter,
    decoded,
    read_page,
)
from tests.store.slots import locked_by_an_ending_process

JOB = "job-1"


def commit(number: int, late: bool = False, state: bytes = b"") -> KeptGeneratorStates:
    return KeptGeneratorStates(True, Point(number, 1), number, 1, 0, late, state or b"commit %d" % number)


def before(number: int, state: bytes = b"before the collectives") -> KeptGeneratorStates:
    return commit(number, state=state)._replace(is_commit=False)


def made(base: Path, slot: int = 0, commits: int = 1, job: str = JOB) -> PageWriter:
    return PageWriter(base, job, Content(slot, tuple(map(commit, range(commits)))))


def read(base: Path, slot: int = 0) -> Content:
    data = read_page(base, JOB, slot)
    assert data is not None
    return decoded(data, JOB, slot, "here")


def states(content: Content) -> list[bytes]:
    return [entry.state for entry in content.entries]


def test_page_is_read_by_another_process(tmp_path: Path) -> None:
    page = made(tmp_path)
    page.add(before(0))
    page.collectives[0] += 2
    page.add(commit(1, late=True))
    assert read(tmp_path) == Content(0, (commit(0), before(0), commit(1, late=True)), 2)


def test_commit_stays_until_two_later_ones_and_the_last_before_a_collective_stays(tmp_path: Path) -> None:
    page = made(tmp_path)
    for number in range(1, 9):
        page.add(before(number - 1, b"first"))
        page.add(before(number - 1, b"last"))
        assert b"commit %d" % (number - 1) in states(read(tmp_path))
        page.add(commit(number))
        assert [entry.commits for entry in read(tmp_path).commits][-2:] == [number - 1, number]
        assert states(read(tmp_path)).count(b"last") >= 1


def test_page_is_private(tmp_path: Path) -> None:
    assert read_page(tmp_path, JOB, 3) is None
    page = made(tmp_path, 3)
    found = page.path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_size) == (0o600, FILE_BYTES)
    assert stat.S_IMODE(page.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("is_commit", [True, False])
def test_entry_torn_at_any_byte_is_absent_and_the_others_stay(tmp_path: Path, is_commit: bool) -> None:
    """A killed process leaves the first bytes of each write, in order."""
    page = made(tmp_path, commits=3)
    page.add(before(2, b"first"))
    page.add(before(2, b"last"))
    complete = read(tmp_path).entries
    old = bytes(page.view)
    page.add(commit(3, state=b"the one that is torn")._replace(is_commit=is_commit))
    new = bytes(page.view)
    overwritten = next(entry for entry in complete if entry.is_commit is is_commit)
    others = tuple(entry for entry in complete if entry is not overwritten)
    start = next(at for at in range(ENTRIES_AT, FILE_BYTES) if old[at] != new[at])
    start = ENTRIES_AT + (start - ENTRIES_AT) // ENTRY_BYTES * ENTRY_BYTES
    seal = range(start, start + 16)
    content = range(start + 16, 1 + max(at for at in range(start, start + ENTRY_BYTES) if old[at] != new[at]))
    torn = bytearray(old)
    order = [(at, 0) for at in seal] + [(at, new[at]) for part in (content, seal) for at in part]
    for count, (at, byte) in enumerate(order):
        torn[at] = byte
        page.path.write_bytes(torn)
        found = read(tmp_path).entries
        if torn == new:
            assert found[:-1] == others
            assert found[-1].state == b"the one that is torn"
        else:
            assert found in (others, complete), f"{count} bytes of {len(order)}"
    assert torn == new


def test_entry_with_any_wrong_bit_is_absent(tmp_path: Path) -> None:
    page = made(tmp_path)
    whole = bytes(page.view)
    last = max(at for at in range(ENTRIES_AT, FILE_BYTES) if whole[at])
    for at in range(ENTRIES_AT, last + 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        page.path.write_bytes(damaged)
        assert read(tmp_path).entries == (), at


def test_page_of_another_job_or_slot_is_refused(tmp_path: Path) -> None:
    foreign, ours = made(tmp_path, job="job-2").path.read_bytes(), made(tmp_path)
    header = ours.path.read_bytes()[:ENTRIES_AT]
    ours.path.write_bytes(foreign)
    with pytest.raises(StoreError, match="another job or slot, expected slot 0 of job job-1"):
        read(tmp_path)
    ours.path.write_bytes(header + foreign[ENTRIES_AT:])
    assert read(tmp_path).entries == ()
    made(tmp_path, slot=1).path.rename(ours.path)
    with pytest.raises(StoreError, match="another job or slot"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"nonsense", bytes(FILE_BYTES), b"x" * (FILE_BYTES + 1), None])
def test_invalid_page_is_refused(tmp_path: Path, content: bytes | None) -> None:
    page = made(tmp_path)
    page.path.write_bytes(bytes(page.view)[:-1] if content is None else content)
    with pytest.raises(StoreError, match="not a page of this version"):
        read(tmp_path)


def test_page_that_others_may_write_is_refused(tmp_path: Path) -> None:
    page = made(tmp_path)
    page.path.parent.chmod(0o755)
    with pytest.raises(StoreError, match="does not belong to this user alone"):
        read_page(tmp_path, JOB, 0)
    with pytest.raises(StoreError, match="does not belong to this user alone"):
        made(tmp_path)
    page.path.parent.chmod(0o700)
    os.link(page.path, tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="not a plain file of this user alone"):
        read_page(tmp_path, JOB, 0)
    page.path.unlink()
    page.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        read_page(tmp_path, JOB, 0)
    page.path.unlink()
    page.path.mkdir()
    with pytest.raises(StoreError, match="not a plain file"):
        read_page(tmp_path, JOB, 0)


def test_page_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    stranger = os.geteuid() + 1
    (tmp_path / f"samebits-{os.geteuid()}").rename(tmp_path / f"samebits-{stranger}")
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(StoreError, match="does not belong to this user alone"):
        read_page(tmp_path, JOB, 0)


def test_superseded_process_writes_where_no_reader_looks(tmp_path: Path) -> None:
    stopped = made(tmp_path)
    made(tmp_path, commits=2)
    stopped.add(before(0, b"of a process that woke again"))
    assert states(read(tmp_path)) == [b"commit 0", b"commit 1"]


def test_failed_creation_leaves_the_predecessors_page(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(StoreError, match=f"of {MAX_CONTENT_BYTES + 1} bytes"):
        PageWriter(tmp_path, JOB, Content(0, (commit(1, state=b"x" * (MAX_CONTENT_BYTES + 1)),)))
    assert states(read(tmp_path)) == [b"commit 0"]
    made(tmp_path, commits=2)
    assert states(read(tmp_path)) == [b"commit 0", b"commit 1"]


def test_oversized_state_is_refused_and_the_page_stays_unchanged(tmp_path: Path) -> None:
    page = made(tmp_path)
    page.add(commit(1, state=b"x" * (MAX_CONTENT_BYTES - 64)))
    with pytest.raises(StoreError, match=f"states of {MAX_CONTENT_BYTES} bytes"):
        page.add(commit(2, state=b"x" * MAX_CONTENT_BYTES))
    assert states(read(tmp_path)) == [b"commit 0", b"x" * (MAX_CONTENT_BYTES - 64)]


def test_page_is_orphaned_once_its_process_has_released_it(tmp_path: Path) -> None:
    page = made(tmp_path)
    assert read_page(tmp_path, JOB, 0, only_orphaned=True) is None
    page.let_go()
    assert read_page(tmp_path, JOB, 0, only_orphaned=True) == read_page(tmp_path, JOB, 0)
    with locked_by_an_ending_process(page.path):
        assert read_page(tmp_path, JOB, 0, only_orphaned=True) is not None


def test_held_page_outlives_its_room_and_another_jobs_sweep(tmp_path: Path) -> None:
    page = made(tmp_path)
    late_s = page.path.stat().st_mtime + SWEPT_AFTER_S + 1
    sweep(tmp_path, "job-2", late_s)
    remove_room(tmp_path, JOB, 0)
    assert states(read(tmp_path)) == [b"commit 0"]
    page.let_go()
    assert sweep(tmp_path, "job-2", late_s) == [room_path(tmp_path, JOB, 0)]
    assert not page.path.exists()


def test_forked_child_does_not_keep_the_page(tmp_path: Path) -> None:
    page = made(tmp_path)
    (told, tell), (heard, say) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.write(say, b".")
        os.read(told, 1)  # even if the test ends
        os._exit(0)
    try:
        assert os.read(heard, 1) == b"."
        page.let_go()
        with page.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if the child has it
    finally:
        for descriptor in (told, tell, heard, say):
            os.close(descriptor)
        assert os.waitpid(child, 0)[1] == 0
