"""What a journal says: its payloads as the core's records, for the scheduler that goes on and for who only looks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from samebits.core import records
from samebits.core.records import Record
from samebits.core.state import JobState
from samebits.errors import JournalDamagedError, ProtocolError
from samebits.spelling import spelled
from samebits.store import journal_format
from samebits.store.journal import JOURNAL_FILE, read_journal


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
