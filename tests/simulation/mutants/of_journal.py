"""Journals that are not quite durable, and folders with two writers: the real code with one precaution removed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from samebits.store import durable, journal, journal_format
from samebits.store.journal import Journal
from samebits.store.journal_format import JournalPayloads
from tests.simulation.checkpoints import Checkpoints
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.recovery_path import RecoveryPath

OPEN, APPEND = Journal.open, Journal.append
DECODE_FILE, DECODE_BATCH, ENCODE_BATCH = (
    journal_format.decode_file,
    journal_format._decode_batch,
    journal_format.encode_batch,
)


def _without_fsync() -> AbstractContextManager[Any]:
    return mock.patch.object(journal.os, "fsync", lambda descriptor: None)


def _append_unsynced(self: Journal, payloads: Sequence[bytes]) -> None:
    with _without_fsync():
        APPEND(self, payloads)


def _append_one_by_one(self: Journal, payloads: Sequence[bytes]) -> None:
    for payload in payloads:
        APPEND(self, [payload])


def _open_unsynced(directory: Any) -> Any:
    with _without_fsync():
        return OPEN(directory)


def _decode_without_a_torn_end(data: bytes) -> JournalPayloads:
    return replace(DECODE_FILE(data), torn=None)


def _decode_trusting(data: bytes, offset: int, seed: int) -> Any:
    """Accepts a batch whose head is good, with zeros for what is missing."""
    found = DECODE_BATCH(data, offset, seed)
    if not isinstance(found, journal_format._Bad) or found.end is None:
        return found
    _, count, size, _ = journal_format._BATCH_HEAD.unpack_from(data, offset)
    start = offset + journal_format.BATCH_HEAD_BYTES
    body = data[start : start + size].ljust(size, bytes(1))
    lengths = [int.from_bytes(body[4 * index : 4 * index + 4], "little") for index in range(count)]
    payloads, first = [], 4 * count
    for length in lengths:
        payloads.append(body[first : first + length])
        first += length
    return journal_format._FrameBatch(payloads, min(found.end, len(data)))


def _publish_unsynced(temporary: Any, path: Any) -> None:
    temporary.rename(path)


def _write_unsynced(path: Any, data: bytes, *, sync: bool = True, tag: str = "") -> Any:
    temporary = path.with_name(f".{path.name}.tmp-unsynced")
    temporary.unlink(missing_ok=True)
    durable.write_file(temporary, data, sync=False)
    return temporary


def _take_any_lock(self: RecoveryPath, process: int) -> bool:
    self.lock_holder = process if self.lock_holder is None else self.lock_holder
    return True


DYING = {
    "p_torn": 0.2,
    "fsync_s": 0.0,
    "quorum": None,
    "rates_hz": {"scheduler killed": 1 / 6, "power lost": 1 / 6},
}
COMPACTING = {**DYING, "compact_bytes": 500, "chaos_s": 60.0, "target_step": 100}

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "journal: append not synced",
        frozenset({"S4"}),
        50,
        patches={"samebits.store.journal.Journal.append": _append_unsynced},
        changes=DYING,
    ),
    Mutant(
        "journal: a group commit is split",
        frozenset({"S4"}),
        50,
        patches={"samebits.store.journal.Journal.append": _append_one_by_one},
        changes=DYING,
    ),
    Mutant(
        "journal: records that were read are not synced",
        frozenset({"S4"}),
        100,
        patches={"samebits.store.journal.Journal.open": _open_unsynced},
        changes=DYING,
    ),
    Mutant(
        "journal: tail trusted",
        frozenset({"S4"}),
        50,
        patches={"samebits.store.journal_format._decode_batch": _decode_trusting},
        changes=DYING,
    ),
    Mutant(
        "journal: torn end not cut off",
        frozenset({"S4"}),
        50,
        patches={"samebits.store.journal_format.decode_file": _decode_without_a_torn_end},
        changes=DYING,
    ),
    Mutant(
        "journal: rename not synced",
        frozenset({"S4"}),
        300,
        patches={"samebits.store.durable.publish": _publish_unsynced},
        changes=COMPACTING,
    ),
    Mutant(
        "journal: renamed before it is synced",
        frozenset({"S4"}),
        100,
        patches={"samebits.store.durable.write_temporary": _write_unsynced},
        changes=COMPACTING,
    ),
    Mutant(
        "journal: never compacted",
        frozenset({"S16"}),
        150,
        patches={"tests.simulation.recovery_path.RecoveryPath.is_large": lambda self: False},
        changes=COMPACTING,
    ),
    Mutant(
        "lock: two writers",
        frozenset({"S13"}),
        50,
        patches={"tests.simulation.recovery_path.RecoveryPath.take_lock": _take_any_lock},
        changes={"quorum": None},
    ),
    Mutant(
        "checkpoints: nothing is kept",
        frozenset({"L3", "S19"}),
        20,
        patches={f"{Checkpoints.__module__}.Checkpoints.save": lambda self, point, committed: None},
    ),
)
