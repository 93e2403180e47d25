"""Store the journal of the scheduler's durable keys in ``RECOVERY_PATH/keys``.

A job without durable keys has no such folder. Unless the disk fails, no problem with this journal ends training: if it
cannot be read, every call is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from samebits.core.keys import key_store
from samebits.core.keys.key_store import KeyRecord, KeysOf
from samebits.core.scheduler import SchedulerCore
from samebits.errors import ClaimRemovedError, JournalDamagedError, ProtocolError, StoreError
from samebits.service import log
from samebits.store.durable import move_aside
from samebits.store.journal import JOURNAL_FILE, KEYS_FOLDER, Journal, remove_leftovers
from samebits.store.term_claim import TermClaim

COMPACT_BYTES = 4 << 20
APPEND_BYTES = 16 << 20
"""Limit for one append, because a pass may bring more than the journal accepts at once."""


class KeyFile:
    """The keys' journal of the scheduler that holds the folder's lock.

    Args:
        recovery_path: the job's RECOVERY_PATH; None if nothing outlives the scheduler (ENABLE_RECOVERY=0).

    Attributes:
        is_loaded: the core has the stored keys.
    """

    def __init__(self, recovery_path: Path | None) -> None:
        self._path = None if recovery_path is None else recovery_path / KEYS_FOLDER
        self._journal: Journal | None = None
        self._claim: TermClaim | None = None
        self._is_named = False  # whether the job's id is written
        self._uncompacted_bytes = 0  # the journal's size when compaction failed
        self.is_loaded = False

    def claimed(self, claim: TermClaim) -> None:
        """Write under this claim from now on, and remove an earlier scheduler's unpublished files.

        Raises:
            StoreError: the disk reports an error.
        """
        self._claim = claim
        if self._path is not None and self._path.is_dir():
            remove_leftovers(self._path)

    def load(self, core: SchedulerCore) -> None:
        """Load the stored keys into the core once the job is known; move another job's keys aside.

        Raises:
            StoreError: the disk reports an error.
        """
        self.is_loaded = True
        if self._path is None or not (self._path / JOURNAL_FILE).exists():
            return
        try:
            records = self._read(self._path)
        except JournalDamagedError as error:
            log.warn(f"{error}. Training continues; samebits.kv is refused")
            core.keys.refuse(f"the keys cannot be read: {error}")
            return
        if not records:  # killed between creating the folder and the first record
            return
        self._is_named = records[0] == KeysOf(core.state.job)
        if self._is_named:
            core.load_keys(records)
        else:
            self.close()
            if self._claim is not None:
                self._claim.require()
            owner = records[0].job if isinstance(records[0], KeysOf) else ""
            log.warn(f"{self._path} holds the keys of another job: moved aside to {move_aside(self._path, owner)}")
            if self._claim is not None and self._claim.in_etcd is not None:
                with Journal.open(self._path, self._claim)[0] as journal:
                    journal.compact([])

    def _read(self, path: Path) -> list[KeyRecord]:
        self._journal, payloads = Journal.open(path, self._claim)
        if self._journal.torn_tail is not None:
            log.warn(str(self._journal.torn_tail))
        try:
            return [key_store.SCHEMA.unpack(payload) for payload in payloads]
        except ProtocolError as error:
            self.close()
            raise JournalDamagedError(
                f"{path / JOURNAL_FILE}: this version does not recognize a record ({error}). Fix: run the version "
                "that wrote it, or move the folder away to start without keys"
            ) from None

    def append(self, records: Sequence[KeyRecord], core: SchedulerCore) -> bool:
        """Make these records durable, in order, before their effects are sent.

        Returns:
            False if there was no room. Then the answers to these calls must not be sent, and all later calls are
            refused. Training continues.

        Raises:
            StoreError: the disk failed and its content is unknown; the next scheduler reads it.
            ClaimRemovedError: the claim is gone; :meth:`begin_again` makes the records durable.
        """
        if self._path is None or not records:
            return True
        journal = None
        try:
            journal = self._journal = self._journal or Journal.open(self._path, self._claim)[0]
            named = records if self._is_named else [KeysOf(core.state.job), *records]
            for part in _parts([key_store.SCHEMA.pack(record) for record in named]):
                journal.append(part)
        except ClaimRemovedError:
            self._is_named = True  # the core has these changes, so rewriting the keys includes them
            raise
        except StoreError as error:
            if journal is not None and not journal.goes_on:
                raise
            log.warn(f"{error}. Training continues; samebits.kv is refused until a scheduler is started again")
            core.keys.refuse(f"the keys cannot be written: {error}. Fix: make room, then start the scheduler again")
            return False
        self._is_named = True
        if journal.size_bytes > max(COMPACT_BYTES, 4 * journal.compacted_bytes, 2 * self._uncompacted_bytes):
            self._compact(journal, core)
        return True

    def begin_again(self, claim: TermClaim, core: SchedulerCore) -> None:
        """Rewrite all durable keys, because the folder or the previous claim was removed.

        Raises:
            StoreError: the disk reports an error.
        """
        self.claimed(claim)
        self.close()
        if self._path is not None and self._is_named:
            self._journal = Journal.open(self._path, claim)[0]
            self._journal.compact(self._whole(core))

    def _whole(self, core: SchedulerCore) -> list[bytes]:
        return [key_store.SCHEMA.pack(record) for record in (KeysOf(core.state.job), *core.keys.snapshot())]

    def _compact(self, journal: Journal, core: SchedulerCore) -> None:
        try:
            journal.compact(self._whole(core))
            self._uncompacted_bytes = 0
        except StoreError as error:
            if not journal.goes_on:
                raise
            self._uncompacted_bytes = journal.size_bytes  # retried when the file has doubled
            log.warn(f"{error}. The keys are durable as they are")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def _parts(payloads: Sequence[bytes]) -> Iterator[list[bytes]]:
    part: list[bytes] = []
    size_bytes = 0
    for payload in payloads:
        if size_bytes + len(payload) > APPEND_BYTES:
            yield part
            part, size_bytes = [], 0
        part.append(payload)
        size_bytes += len(payload)
    yield part
