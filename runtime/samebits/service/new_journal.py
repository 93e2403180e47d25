"""A journal for a job that has lost its own, and every process with it: the next scheduler goes on from a point.

Only the writing lives here; which point that is was found, and verified, by the caller. The one idea: what is written
is one group of records, there whole or not at all, and never over a journal that is there.
"""

from __future__ import annotations

from samebits.config import Settings, fixed_settings
from samebits.core import records
from samebits.core.point import Point
from samebits.core.rebuild import from_points
from samebits.errors import StoreError
from samebits.service import clock
from samebits.store.journal import Journal
from samebits.store.lock import DirectoryLock
from samebits.store.term_claim import TermClaim


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
