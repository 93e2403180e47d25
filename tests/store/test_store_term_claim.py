"""Claims of a term: a scheduler that wakes up after being superseded has no effect."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.core.keys.key_store import KeyStore
from samebits.core.records import MAX_TERM
from samebits.errors import ClaimRemovedError, StoreError, SupersededError
from samebits.store import durable
from samebits.store.journal import Journal, read_journal
from samebits.store.term_claim import TermClaim, highest_claim, impossible_claims
from tests.store.disk_faults import Call, Disk, interposed, names_in
from tests.store.two_schedulers import APPEND, CLAIM, CLAIMS, FOLDER, NEW, OLD, REPLACE, SHORT, violation

# ---- one claim


def test_each_claim_exceeds_all_earlier_ones_and_the_journals_term(tmp_path: Path) -> None:
    assert highest_claim(tmp_path / "recovery") == 0
    first = TermClaim.take(tmp_path / "recovery", "scheduler")
    assert first.number == highest_claim(tmp_path / "recovery") == 1
    assert TermClaim.take(tmp_path / "recovery", "scheduler", lambda: 7).number == 8
    assert TermClaim.take(tmp_path / "recovery", "scheduler", lambda: 7).number == 9
    assert names_in(tmp_path / "recovery") == ["term.9"]
    assert (tmp_path / "recovery" / "term.9").stat().st_mode & 0o777 == 0o600


def test_superseded_scheduler_learns_which_one_has_the_job(tmp_path: Path) -> None:
    old = TermClaim.take(tmp_path, "scheduler on port 1")
    old.require()
    TermClaim.take(tmp_path, "scheduler on port 2")
    with pytest.raises(SupersededError, match=rf"scheduler on port 2 \(pid {os.getpid()} on .*\) has claimed term 2"):
        old.require()
    assert SupersededError.exit_code == 91


def test_removed_claim_does_not_hold(tmp_path: Path) -> None:
    claim = TermClaim.take(tmp_path, "scheduler")
    (tmp_path / "term.1").unlink()
    with pytest.raises(ClaimRemovedError, match=r"this scheduler's claim, term\.1, was removed"):
        claim.require()


def test_another_claim_with_the_same_number_is_foreign(tmp_path: Path) -> None:
    old = TermClaim.take(tmp_path, "scheduler")
    (tmp_path / "term.1").unlink()
    new = TermClaim.take(tmp_path, "scheduler")
    assert (old.number, new.number) == (1, 1)
    new.require()
    with pytest.raises(SupersededError, match="has claimed term 1, so this scheduler, of term 1, has stopped"):
        old.require()


@pytest.mark.parametrize("note", [b"", b"\xff" * 100, b"[" * 70_000, b'{"pid": 1}'])
def test_claim_counts_whatever_its_content(tmp_path: Path, note: bytes) -> None:
    old = TermClaim.take(tmp_path, "scheduler")
    (tmp_path / "term.5").write_bytes(note)
    (tmp_path / "term.1").unlink()
    with pytest.raises(SupersededError, match="another scheduler has claimed term 5"):
        old.require()
    assert TermClaim.take(tmp_path, "scheduler").number == 6


def test_other_file_names_are_left_alone(tmp_path: Path) -> None:
    others = [
        "term.",
        "term.0",
        "term.01",
        "term.-3",
        "term.9x",
        "term." + "9" * 30,
        f"term.{2**40}",
        f"term.{2**40 - 1}",
    ]
    for name in others:
        (tmp_path / name).touch()
    assert TermClaim.take(tmp_path, "scheduler").number == 1
    assert names_in(tmp_path) == sorted([*others, "term.1"])
    assert impossible_claims(tmp_path) == [f"term.{2**40 - 1}", f"term.{2**40}"]


def test_highest_number_is_recognised_and_never_exceeded(tmp_path: Path) -> None:
    (tmp_path / f"term.{MAX_TERM - 1}").touch()
    last = TermClaim.take(tmp_path, "scheduler")
    assert (last.number, highest_claim(tmp_path)) == (MAX_TERM, MAX_TERM)
    assert names_in(tmp_path) == [f"term.{MAX_TERM}"]
    for floor in (0, MAX_TERM + 5):
        with pytest.raises(StoreError, match=rf"the last term there is {max(floor, MAX_TERM)}, .* Fix: remove"):
            TermClaim.take(tmp_path, "scheduler", lambda floor=floor: floor)
    last.require()
    KeyStore(MAX_TERM)
    assert ((MAX_TERM + 1) << 32) < 2**63, "the versions of its keys are numbers of 64 bits"


def test_one_of_two_simultaneous_claims_gives_up(tmp_path: Path) -> None:
    """The second claims at any call of the first."""
    outcomes = set()
    for at in range(20):
        folder = tmp_path / str(at)
        TermClaim.take(folder, "old")
        second: list[TermClaim] = []

        def take(_: Call, folder: Path = folder, second: list[TermClaim] = second) -> None:
            second.append(TermClaim.take(folder, "second"))

        try:
            with interposed(Disk(at, take), folder):
                first: TermClaim | None = TermClaim.take(folder, "first")
        except SupersededError:
            first = None
        if not second:
            break
        standing = [claim.number for claim in (first, *second) if claim is not None and _stands(claim)]
        assert standing == [highest_claim(folder)], at
        outcomes.add(first is None)
    assert outcomes == {True, False}, "it is too late for the first, or the second has removed its claim"


def test_nothing_is_sent_if_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = TermClaim.take(tmp_path, "scheduler")
    journal, _ = Journal.open(tmp_path, claim)

    def chmod(path: str, mode: int, *, dir_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "chmod", chmod)
        with pytest.raises(StoreError, match=r"claim failed: .*EIO.*Fix: "):
            journal.append([b"x"])
    assert not journal.goes_on
    with pytest.raises(StoreError, match="nothing more is written"):
        journal.append([b"y"])


def test_claim_holds_after_its_folder_was_moved(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "recovery"
    claim = TermClaim.take(folder, "scheduler")
    journal, _ = Journal.open(folder, claim)
    moved = folder.parent.rename(tmp_path / "moved away") / "recovery"
    TermClaim.take(folder, "another job's scheduler, in a folder where the first one lay")
    journal.append([b"x"])
    assert TermClaim.take(moved, "scheduler").number == claim.number + 1
    with pytest.raises(SupersededError):
        journal.append([b"y"])
    journal.close()


def test_claim_is_checked_without_a_free_descriptor(tmp_path: Path) -> None:
    claim = TermClaim.take(tmp_path, "a scheduler")
    path = tmp_path / "term.1"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        claim.require()
        note = path.stat()
        path.rename(tmp_path / "moved")
        with pytest.raises(StoreError):
            claim.require()
        (tmp_path / "moved").rename(path)
        os.utime(path, ns=(note.st_atime_ns, note.st_mtime_ns + 1))
        with pytest.raises(StoreError, match="Too many open files"):
            claim.require()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_stale_nfs_handle_means_the_claim_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = TermClaim.take(tmp_path, "scheduler")

    def chmod(path: str, mode: int, *, dir_fd: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "chmod", chmod)
    with pytest.raises(SupersededError):
        claim.require()


def _stands(claim: TermClaim) -> bool:
    try:
        claim.require()
    except SupersededError:
        return False
    return True


# ---- the superseded scheduler wakes up: the code, on real files


def _append(journal: Journal) -> None:
    journal.append([b"old 2", b"old 3"])


def _compact(journal: Journal) -> None:
    journal.compact([b"old 1", b"snapshot"])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("act", [_append, _compact])
def test_superseded_scheduler_that_wakes_up_has_no_effect(
    tmp_path: Path, act: Callable[[Journal], None], when: str
) -> None:
    """At each call of the old scheduler a new one takes over, serves and sends; then the old one continues."""
    told, refused = 0, 0
    for at in range(40):
        folder = tmp_path / str(at)
        new: list[Journal] = []
        read: list[bytes] = []

        def take_over(_: Call, folder: Path = folder, new: list[Journal] = new, read: list[bytes] = read) -> None:
            journal, payloads = Journal.open(folder, TermClaim.take(folder, "new"))
            journal.append([b"new 1"])
            new.append(journal)
            read += payloads

        is_told, disk = True, Disk()
        with interposed(disk, folder):
            old, _ = Journal.open(folder, TermClaim.take(folder, "old"))
            old.append([b"old 1"])
            _arm(disk, when, at, take_over)
            try:
                act(old)
            except SupersededError as error:
                is_told = False
                assert "new (pid" in str(error)
        if not new:
            break
        told, refused = told + is_told, refused + (not is_told)
        assert read[:1] == [b"old 1"]
        if is_told:
            assert read in ([b"old 1", b"old 2", b"old 3"], [b"old 1", b"snapshot"])
        assert _payloads(folder) == [*read, b"new 1"]
        new[0].append([b"new 2"])
        new[0].compact([b"all of it"])
        new[0].append([b"new 3"])
        with pytest.raises((SupersededError, StoreError)):
            old.append([b"old 4"])
        new[0].close()
        old.close()
        assert Journal.open(folder, TermClaim.take(folder, "third"))[1] == [b"all of it", b"new 3"]
        assert not [name for name in names_in(folder) if name.startswith(".")]
    else:
        pytest.fail("it has more calls than were tried")
    assert refused > 0
    assert (told > 0) == (act is _compact), "only of what has its name already"


@pytest.mark.parametrize("when", ["before", "after"])
def test_scheduler_that_opens_late_does_no_harm(tmp_path: Path, when: str) -> None:
    refused = 0
    for at in range(60):
        folder = tmp_path / str(at)
        TermClaim.take(folder, "first")
        first, _ = Journal.open(folder, TermClaim.take(folder, "first"))
        first.append([b"one", b"two"])
        later: list[Journal] = []

        def come_later(_: Call, folder: Path = folder, later: list[Journal] = later) -> None:
            later.append(Journal.open(folder, TermClaim.take(folder, "later"))[0])
            later[0].append([b"later"])

        disk = Disk()
        _arm(disk, when, at, come_later)
        late: Journal | None = None
        with interposed(disk, folder):
            try:
                late, _ = Journal.open(folder, TermClaim.take(folder, "late"))
            except SupersededError:
                refused += 1
        if not later:
            break
        if late is not None:
            with pytest.raises(SupersededError):
                late.append([b"late"])
        later[0].append([b"more"])
        assert _payloads(folder) == [b"one", b"two", b"later", b"more"], at
    else:
        pytest.fail("it has more calls than were tried")
    assert refused > 0


def _arm(disk: Disk, when: str, at: int, then: Callable[[Call], None]) -> None:
    """Call ``then`` once, before or after call number ``at`` from now on."""
    if when == "before":
        disk.fail_at, disk.failure = disk.matching + at, then
        return
    done = 0

    def after_each(call: Call) -> None:
        nonlocal done
        done += 1
        if done - 1 == at:
            then(call)

    disk.after_each = after_each


def _payloads(folder: Path) -> list[bytes]:
    found = read_journal(folder)
    assert found is not None
    assert found.torn_tail is None
    return found.payloads


def test_hosts_with_the_same_pid_use_different_temporary_files(tmp_path: Path) -> None:
    claims = [TermClaim.take(tmp_path, "a container's only process") for _ in range(2)]
    names = {durable.write_temporary(tmp_path / "journal", b"", tag=claim.tag).name[:16] for claim in claims}
    assert names == {".journal.tmp-1-" + str(os.getpid())[0], ".journal.tmp-2-" + str(os.getpid())[0]}


# ---- every interleaving: the model


@pytest.mark.parametrize("programs", [(OLD, NEW), (OLD, SHORT, SHORT)])
def test_no_interleaving_of_schedulers_forks_the_job(programs: tuple[tuple[str, ...], ...]) -> None:
    what, states = violation(*programs)
    assert what is None, what
    assert states > 400


@pytest.mark.parametrize(
    "programs",
    [
        (OLD, SHORT, FOLDER),
        (OLD, SHORT, CLAIMS),
        (OLD, FOLDER, FOLDER),
        (OLD, CLAIMS, CLAIMS, FOLDER),
    ],
)
def test_no_interleaving_with_a_removal_forks_the_job(programs: tuple[tuple[str, ...], ...]) -> None:
    what, states = violation(*programs)
    assert what is None, what
    assert states > 100


@pytest.mark.parametrize(
    ("again", "removal"),
    {
        "releases what another one may not know": ((), CLAIMS),
        "writes nothing again": (CLAIM[:-1], FOLDER),
        "writes over another one's journal": ((*CLAIM[:-1], *REPLACE), FOLDER),
        "keeps its number": (("create", "recognise", *REPLACE), CLAIMS),
    }.items(),
    ids=lambda named: named[0] if isinstance(named[0], str) else None,
)
def test_wrong_recovery_from_a_removal_is_caught(again: str, removal: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    program, removes = removal
    assert violation(OLD, SHORT, removes, again=program)[0] is not None, again


def _without(step: str, program: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in program if name != step)


_LATE_ASK = ("temporary", "publish", "ask", "open")
_ASKS_FIRST = ("ask", "append", "release")
_BY_NAME = ("temporary", "ask", "publish", "open by name")
_READS_FIRST = ("read", *_without("read", CLAIM))


@pytest.mark.parametrize(
    "programs",
    {
        "speaks without asking": (_without("ask", OLD), SHORT),
        "asks before it appends": ((*_ASKS_FIRST, *REPLACE, *_ASKS_FIRST), SHORT),
        "replaces the journal, then asks": ((*APPEND, *_LATE_ASK, *APPEND), SHORT),
        "opens what has the journal's name": ((*APPEND, *_BY_NAME, *APPEND), SHORT),
        "leaves what another was about to publish": (OLD, _without("unlink", SHORT)),
        "reads before it claims": (OLD, (*_READS_FIRST, *REPLACE, *APPEND)),
        "leaves the old one's claim": (OLD, _without("remove", SHORT)),
        "does not look for a higher claim": (OLD, *[(*_without("look", CLAIM[:3]), *SHORT[3:])] * 3),
    }.items(),
    ids=lambda named: named[0],
)
def test_broken_protocol_is_caught(programs: tuple[str, tuple[tuple[str, ...], ...]]) -> None:
    assert violation(*programs[1])[0] is not None


def test_claim_cut_short_by_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TermClaim.take(tmp_path, "scheduler")

    def refuse(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(durable, "write_all", refuse)
        for _ in range(2):
            with pytest.raises(StoreError, match="claiming a term"):
                TermClaim.take(tmp_path, "scheduler")
    assert [path.name for path in tmp_path.iterdir()] == [f"term.{first.number}"]
    first.require()
    assert TermClaim.take(tmp_path, "scheduler").number == first.number + 1
