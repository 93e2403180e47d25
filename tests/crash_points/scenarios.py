"""What this package writes, one scenario each: the actions, and what may be read back at any time.

A scenario's ``act`` continues from wherever an earlier attempt ended, as the real caller does, and calls ``promise(n)``
once state n has been promised. A later read returns state n or, if interrupted, state n + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from samebits.core.point import Point
from samebits.launcher import job_spec
from samebits.launcher.job_spec import JobSpec
from samebits.store import durable
from samebits.store.checkpoint import prune, rank_directory, scan, verify
from samebits.store.journal import JOURNAL_FILE, Journal, read_journal
from samebits.store.lock import HOLDER_FILE, LOCK_FILE, DirectoryLock
from samebits.store.owner import claim_folder, make_claim_durable, read_owner
from samebits.store.step_log import STEPS_FOLDER, StepLogWriter, read_step_log
from samebits.store.step_record import LogHeader, StepRecord
from samebits.store.term_claim import TermClaim, highest_claim
from tests.store import killed_writer
from tests.store.killed_writer import BATCHES, SNAPSHOT
from tests.store.points import JOB, change_byte

Promise = Callable[[int], None]
Files = dict[str, bytes]

FIRST, SECOND = BATCHES[0], BATCHES[2]
TORN = b"an append that was cut"


@dataclass(frozen=True, slots=True)
class Scenario:
    """``states``: what ``read`` returns after each promise. ``lost``: why a folder of these files lost something."""

    prepare: Callable[[Path], None]
    act: Callable[[Path, Promise], None]
    read: Callable[[Path], object]
    states: tuple[object, ...]
    lost: Callable[[Files, Files], str | None]


def files_of(folder: Path) -> Files:
    """Return every file below a folder by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _nothing(folder: Path) -> None:
    pass


def _changed_beyond(*free: str) -> Callable[[Files, Files], str | None]:
    """Allow new files and changes of the named ones only."""

    def lost(before: Files, after: Files) -> str | None:
        for name, data in before.items():
            if name not in after:
                return f"{name} is gone"
            if after[name] != data and name not in free:
                return f"{name} was changed"
        return None

    return lost


# ---- the journal --------------------------------------------------------------------------------------------------


def _payloads(folder: Path) -> list[bytes]:
    seen = read_journal(folder)
    if seen is None:
        return []
    journal, payloads = Journal.open(folder)
    journal.close()
    assert payloads == seen.payloads, "a reader and the next writer find different content"
    return payloads


def _write_first_batch(folder: Path) -> None:
    journal, _ = Journal.open(folder)
    journal.append(FIRST)
    journal.close()


def _append(folder: Path, promise: Promise) -> None:
    journal, payloads = Journal.open(folder)
    with journal:
        if not payloads:
            journal.append(FIRST)
        promise(1)
        if payloads in ([], FIRST):
            journal.append(SECOND)
        promise(2)


def _create(folder: Path, promise: Promise) -> None:
    _append(folder / "job" / "recovery", promise)


def _compact(folder: Path, promise: Promise) -> None:
    journal, payloads = Journal.open(folder)
    with journal:
        if payloads == FIRST:
            journal.compact(SNAPSHOT)
        promise(1)
        if payloads in (FIRST, SNAPSHOT):
            journal.append(SECOND)
        promise(2)


def _append_under_a_claim(folder: Path, promise: Promise) -> None:
    """Act as a scheduler: the successor of a killed one claims the next term, which voids the old claim."""
    claim = TermClaim.take(folder, "scheduler")
    journal, payloads = Journal.open(folder, claim)
    with journal:
        if payloads == FIRST:
            journal.append(SECOND)
        promise(1)
        if payloads in (FIRST, FIRST + SECOND):
            journal.compact(SNAPSHOT)
        promise(2)
    assert claim.number == highest_claim(folder), "a killed scheduler's claim still holds"


def _claim_first(folder: Path) -> None:
    journal, _ = Journal.open(folder, TermClaim.take(folder, "an earlier scheduler"))
    journal.append(FIRST)
    journal.close()


def _lost_of_claimed(before: Files, after: Files) -> str | None:
    if not any(name.startswith("term.") for name in after):
        return "no term is claimed: the next one's number may have been another's"
    return _lost_of_appended(before, after)


def _tear(folder: Path) -> None:
    _write_first_batch(folder)
    with (folder / JOURNAL_FILE).open("ab") as file:
        file.write(TORN)


def _lost_of_torn(before: Files, after: Files) -> str | None:
    if not any(data == TORN for data in after.values()) and TORN not in after.get(JOURNAL_FILE, b""):
        return "the torn end is nowhere"
    return _lost_of_appended(before, after)


def _lost_of_appended(before: Files, after: Files) -> str | None:
    """Opening rewrites a journal, so its bytes may change; ``read`` checks the content."""
    return None if JOURNAL_FILE in after else "the journal is gone"


# ---- locks, claims, notes -----------------------------------------------------------------------------------------


_locks: list[DirectoryLock] = []  # a process that drops its lock object has released it


def _lock(folder: Path, promise: Promise) -> None:
    _locks.append(lock := DirectoryLock(folder / "recovery", "scheduler"))
    with lock:
        assert lock.is_held
        promise(1)
    again = DirectoryLock(folder / "recovery", "scheduler")  # released, whatever happened to the note
    again.acquire()
    again.release()


def _can_be_locked(folder: Path) -> object:
    if (folder / "recovery").is_dir():
        with DirectoryLock(folder / "recovery", "the next one"):
            return "free"
    return "free"


def _claim(folder: Path, promise: Promise) -> None:
    claim_folder(folder / "logs" / "job", "a job", "digits")
    promise(1)


def _claim_quickly(folder: Path, promise: Promise) -> None:
    """Act as a rank: the claim costs no sync and becomes durable before the first save."""
    rank = folder / "ckpt" / "0"
    claim_folder(rank, "a job", "digits", sync=False)
    make_claim_durable(rank)
    promise(1)
    durable.write_file_atomically(rank / "saved", b"state")
    promise(2)


def _owner(folder: Path) -> object:
    found = {place: read_owner(folder / place) for place in ("logs/job", "ckpt/0")}
    for place in found:
        if (folder / place / "saved").exists():
            assert found[place] is not None, "saved in a folder without an owner"
            assert (folder / place / "saved").read_bytes() == b"state"
            return "saved"
    return next((owner.job for owner in found.values() if owner is not None), None)


OLD, NEW = b"an old note", b"a newer, longer note"


def _replace_note(folder: Path, promise: Promise) -> None:
    durable.write_file_atomically(folder / "note", NEW)
    promise(1)


def _start(script: str) -> Callable[[Path], None]:
    def keep(folder: Path) -> None:
        start = JobSpec(folder, "python", script, ("--steps", "30"), {"WORKER_NUM": "4"})
        job_spec.keep(folder / "logs", start)

    return keep


def _keep_start(folder: Path, promise: Promise) -> None:
    _start("new.py")(folder)
    promise(1)


def _kept_script(folder: Path) -> object:
    kept = job_spec.read(folder / "logs")
    return kept and kept.script


# ---- points -------------------------------------------------------------------------------------------------------


def _save(*steps: int) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        for step in steps:
            killed_writer.save(folder, step)

    return save


def _save_two(folder: Path, promise: Promise) -> None:
    claim_folder(rank_directory(folder, 0), JOB, "digits", sync=False)
    make_claim_durable(rank_directory(folder, 0))  # as a rank does before its first save
    for number, step in enumerate((1, 2)):
        killed_writer.save(folder, step)
        promise(number + 1)


STEPS = 4


def _save_every_step(folder: Path, promise: Promise) -> None:
    """Act as a rank with save_checkpoint_steps=1 and async_save=False, which keeps two points."""
    claim_folder(rank_directory(folder, 0), JOB, "digits", sync=False)
    make_claim_durable(rank_directory(folder, 0))
    for step in range(_resumed_step(folder) + 1, STEPS + 1):
        killed_writer.save(folder, step)
        promise(step)
        prune(rank_directory(folder, 0), JOB, keep=2)


def _resumed_step(folder: Path) -> int:
    """Return the step from which training resumes; raise if a point that counts as complete is not."""
    steps = _whole_points(folder)
    assert isinstance(steps, list)
    return max(steps, default=0)


def _whole_points(folder: Path) -> object:
    """Return the points listed as complete; raise if one is not."""
    found = [point for point in scan(rank_directory(folder, 0), JOB) if point.is_usable]
    for point in found:
        verify(point)
    return [point.point.step for point in found]


def _verified_points(folder: Path) -> object:
    found = []
    for point in scan(rank_directory(folder, 0), JOB):
        try:
            verify(point)
        except Exception:  # this decides which of them are complete
            continue
        found.append(point.point.step)
    return found


def _damage_the_second(folder: Path) -> None:
    _save(1, 2)(folder)
    change_byte(killed_writer.save(folder, 2) / "data.safetensors", 40)


def _save_anew(folder: Path, promise: Promise) -> None:
    killed_writer.save(folder, 2)
    promise(1)


def _lost_a_point(before: Files, after: Files) -> str | None:
    gone = [name for name, data in before.items() if data not in after.values()]
    return f"the bytes of {gone} are nowhere" if gone else None


def _prune(folder: Path, promise: Promise) -> None:
    prune(rank_directory(folder, 0), JOB, keep=2)
    promise(1)
    prune(rank_directory(folder, 0), JOB, keep=2, abandoned=[Point(3, 1)])  # never anything newer than the live line
    promise(2)


def _newest_points(folder: Path) -> object:
    steps = _whole_points(folder)
    assert isinstance(steps, list)
    return steps[:2]


def _lost_a_newest(before: Files, after: Files) -> str | None:
    kept = {name: data for name, data in before.items() if "step_0000000003" in name or "step_0000000004" in name}
    return _changed_beyond()(kept, after)


# ---- the step log --------------------------------------------------------------------------------------------------


def _record(step: int) -> StepRecord:
    return StepRecord(step, 1, 4, 0, 7, (0.01,), (3 * step, 3 * step + 1), f"{step:032x}")


def _log_steps(*steps: int) -> Callable[[Path], None]:
    def log(folder: Path) -> None:
        writer = _open_log(folder)
        for step in steps:
            writer.append([_record(step)])
        writer.close()

    return log


def _open_log(folder: Path) -> StepLogWriter:
    return StepLogWriter.open(rank_directory(folder, 0), LogHeader(JOB, 0, "worker-0"))


def _log_three(folder: Path, promise: Promise) -> None:
    """Act as a rank: the successor of a killed one logs again a step that may not have been durable."""
    writer = _open_log(folder)
    try:
        for step in (1, 2, 3):
            if writer.last_step <= step:
                writer.append([_record(step)])
            promise(step)
    finally:
        writer.close()


def _tear_the_log(folder: Path) -> None:
    _log_steps(1, 2)(folder)
    (segment,) = (rank_directory(folder, 0) / STEPS_FOLDER).iterdir()
    segment.write_bytes(segment.read_bytes()[:-9])


def _log_behind_a_torn_end(folder: Path, promise: Promise) -> None:
    writer = _open_log(folder)
    try:
        if writer.last_step <= 2:
            writer.append([_record(2)])
        promise(1)
    finally:
        writer.close()


def _logged_steps(folder: Path) -> object:
    """Return the steps in the log; raise if one is not as it was written."""
    found = read_step_log(rank_directory(folder, 0))
    if found is None:
        return []
    assert found.problems == [], found.problems
    for step, record in found.history.line.items():
        assert replace(record, is_complete=False) == _record(step), f"step {step} is not what was logged"
    return sorted(found.history.line)


SCENARIOS = {
    "journal created": Scenario(
        _nothing,
        _create,
        lambda folder: _payloads(folder / "job" / "recovery"),
        ([], FIRST, FIRST + SECOND),
        _changed_beyond(),
    ),
    "journal appended": Scenario(
        _write_first_batch, _append, _payloads, (FIRST, FIRST, FIRST + SECOND), _lost_of_appended
    ),
    "journal compacted": Scenario(
        _write_first_batch, _compact, _payloads, (FIRST, SNAPSHOT, SNAPSHOT + SECOND), _changed_beyond(JOURNAL_FILE)
    ),
    "journal under a claim": Scenario(
        _claim_first, _append_under_a_claim, _payloads, (FIRST, FIRST + SECOND, SNAPSHOT), _lost_of_claimed
    ),
    "journal with a torn end": Scenario(_tear, _append, _payloads, (FIRST, FIRST, FIRST + SECOND), _lost_of_torn),
    "lock": Scenario(
        _nothing,
        _lock,
        _can_be_locked,
        ("free", "free"),
        _changed_beyond(f"recovery/{LOCK_FILE}", f"recovery/{HOLDER_FILE}"),
    ),
    "claim": Scenario(_nothing, _claim, _owner, (None, "a job"), _changed_beyond()),
    "claim of a rank": Scenario(_nothing, _claim_quickly, _owner, (None, "a job", "saved"), _changed_beyond()),
    "file replaced": Scenario(
        lambda folder: durable.write_file_atomically(folder / "note", OLD),
        _replace_note,
        lambda folder: (folder / "note").read_bytes(),
        (OLD, NEW),
        _changed_beyond("note"),
    ),
    "start kept": Scenario(
        _start("old.py"), _keep_start, _kept_script, ("old.py", "new.py"), _changed_beyond("logs/start.json")
    ),
    "steps logged": Scenario(_nothing, _log_three, _logged_steps, ([], [1], [1, 2], [1, 2, 3]), _changed_beyond()),
    "step log with a torn end": Scenario(
        _tear_the_log, _log_behind_a_torn_end, _logged_steps, ([1], [1, 2]), lambda before, after: None
    ),
    "points saved": Scenario(_nothing, _save_two, _whole_points, ([], [1], [2, 1]), _changed_beyond()),
    "every step saved": Scenario(_nothing, _save_every_step, _resumed_step, tuple(range(STEPS + 1)), _changed_beyond()),
    "point saved again": Scenario(_damage_the_second, _save_anew, _verified_points, ([1], [2, 1]), _lost_a_point),
    "points pruned": Scenario(_save(1, 2, 3, 4), _prune, _newest_points, ([4, 3],) * 3, _lost_a_newest),
}
