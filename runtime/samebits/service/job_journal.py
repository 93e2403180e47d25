"""The job's journal as records: read it, or write a new one for a job that lost its own and every process.

A new journal is one group of records, there whole or not at all, and never over a journal that exists. Which restore
point it names was found and verified by the caller.
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
    """The records, in the order in which they were written.

    Raises:
        JournalDamagedError: one of them is none that this version knows.
    """
    unpack = records.SCHEMA.unpack
    try:
        return [unpack(payload, journal_format.MAX_BODY_BYTES) for payload in payloads]
    except ProtocolError as error:
        raise JournalDamagedError(
            f"{recovery_path / JOURNAL_FILE}: a record is none that this version knows ({error}): run the version that "
            f"wrote it, or `{spelled('run', '--fresh')}` moves the folder aside and starts a new job"
        ) from None


def written_term(recovery_path: Path) -> int:
    """The last term that the folder's journal tells of; 0 where it has none.

    Raises:
        JournalDamagedError: it cannot be read.
    """
    found = read_journal(recovery_path)
    return 0 if found is None else JobState.replay(history_of(recovery_path, found.payloads)).term


def begin_from(settings: Settings, job: str, point: Point, top: int) -> None:
    """Write the journal of ``job`` anew, for a scheduler that goes on from ``point``.

    Args:
        settings: of the job.
        job: its id, as its points have it.
        point: held by every rank, and verified.
        top: the greatest generation of which any point was found.

    Raises:
        LockedError: a scheduler writes there.
        StoreError: there is a journal, or the disk refuses.
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
