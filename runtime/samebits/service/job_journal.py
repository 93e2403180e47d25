"""Read the job's journal as records, or write a new one for a job that lost its journal and processes.

A new journal is one atomic group of records and never replaces an existing one. The caller has found and verified the
restore point in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from samebits.config import Settings, fixed_settings
from samebits.core import records
from samebits.core.membership.rebuild import from_points
from samebits.core.point import Point
from samebits.core.records import Record
from samebits.core.state import JobState
from samebits.errors import JournalDamagedError, ProtocolError, StoreError
from samebits.service import clock
from samebits.spelling import spelled
from samebits.store import journal_format
from samebits.store.journal import JOURNAL_FILE, Journal, read_journal
from samebits.store.lock import DirectoryLock
from samebits.store.term_claim import TermClaim


def history_of(recovery_path: Path, payloads: Sequence[bytes]) -> list[Record]:
    """Return the records in the order in which they were written.

    Raises:
        JournalDamagedError: a record is unknown to this version.
    """
    unpack = records.SCHEMA.unpack
    try:
        return [unpack(payload, journal_format.MAX_BODY_BYTES) for payload in payloads]
    except ProtocolError as error:
        raise JournalDamagedError(
            f"{recovery_path / JOURNAL_FILE}: a record is unknown to this version ({error}): run the version that "
            f"wrote it, or `{spelled('run', '--fresh')}` moves the folder aside and starts a new job"
        ) from None


def written_term(recovery_path: Path) -> int:
    """Return the last term in the folder's journal; 0 if there is none.

    Raises:
        JournalDamagedError: it cannot be read.
    """
    found = read_journal(recovery_path)
    return 0 if found is None else JobState.replay(history_of(recovery_path, found.payloads)).term


def begin_from(settings: Settings, job: str, point: Point, top: int) -> None:
    """Write a new journal of ``job``, for a scheduler that continues from ``point``.

    Args:
        settings: of the job.
        job: its id, as stated in its points.
        point: held by every rank, and verified.
        top: the highest generation of any point found.

    Raises:
        LockedError: a scheduler is writing there.
        StoreError: a journal exists, or the disk refuses.
    """
    path = settings.recovery_path
    with DirectoryLock(path, "recover.sh"):
        journal, payloads = Journal.open(path, TermClaim.take(path, "recover.sh"))
        with journal:
            if payloads:
                raise StoreError(f"{path}: there is a journal. Fix: call recover.sh without --from-checkpoints")
            begun = from_points(
                job, settings.job_name, fixed_settings(settings), clock.boot_id(), clock.now_s(), point, top
            )
            journal.append([records.SCHEMA.pack(record) for record in begun])
