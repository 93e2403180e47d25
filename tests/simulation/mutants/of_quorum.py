"""Journals in an etcd with one precaution removed: the real ``store.etcd`` loses, doubles or trusts a write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from samebits.errors import StoreError
from samebits.store import journal_format
from samebits.store.etcd import etcd_journal
from samebits.store.etcd.etcd_journal import EtcdJournal
from samebits.store.etcd.gateway import Equals, EtcdGateway, PutKey, Remove
from samebits.store.journal import Journal
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.quorum import QuorumFaults

WRITE_TO_LOG = Journal._write_to_etcd


def _write_without_claim(self: EtcdJournal, before: Equals, change: PutKey) -> None:
    if not self._gateway.change([before], [change]) and self._gateway.get(change.key).value != change.value:
        raise StoreError("the key was changed")


def _write_without_reading_back(self: EtcdJournal, before: Equals, change: PutKey) -> None:
    self._gateway.change([self._claim.condition, before], [change])


def _append_until_it_fits(self: EtcdJournal, payloads: Sequence[bytes]) -> None:
    """Writes the batch to the next free index, although an unanswered attempt may have used the first one."""
    for _ in range(8):
        data = journal_format.encode_batch(payloads, self._head.nonce, etcd_journal._LOG_OFFSET + self._next)
        change = PutKey(self._key(self._next), etcd_journal._PART.pack(0, 1) + data)
        self._next += 1
        if self._gateway.change([self._claim.condition, Equals(change.key, None)], [change]):
            return
        self._claim.require()
    raise StoreError("no index is free")


def _append_all_but_the_last_value(self: EtcdJournal, payloads: Sequence[bytes]) -> None:
    """Returns while the batch's last value is on the way; it is written with the next batch."""
    late: Callable[[], None] | None = getattr(self._gateway, "late", None)
    if late is not None:
        late()
    data = journal_format.encode_batch(payloads, self._head.nonce, etcd_journal._LOG_OFFSET + self._next)
    chunks = list(etcd_journal._chunks(data))
    puts = [
        (self._key(self._next + part), etcd_journal._PART.pack(part, len(chunks)) + chunk)
        for part, chunk in enumerate(chunks)
    ]
    for key, value in puts[:-1]:
        self._put(key, value)
    self._next += len(chunks)
    self._gateway.late = lambda: self._put(*puts[-1])  # type: ignore[attr-defined]


def _write_copy_only(self: Journal, write: Callable[[EtcdJournal], None]) -> None:
    """The folder's copy alone is durable while the etcd does not answer."""
    with contextlib.suppress(StoreError):
        WRITE_TO_LOG(self, write)


def _remove_by_range(self: EtcdJournal) -> None:
    """Removes every journal but the present one; a late attempt removes those that are written since."""
    base, nonce = f"{self._gateway.place.prefix}/{self._name}/", f"{self._head.nonce:016x}"
    others = [Remove(f"{base}0", f"{base}{nonce}/"), Remove(f"{base}{nonce}0", f"{base}g")]
    self._gateway.change([self._claim.condition], others)


def _remove_nothing(self: EtcdJournal) -> None:
    pass


def _accept_any_state(self: EtcdGateway, member: object, revision: int) -> None:
    pass


LOG = "samebits.store.etcd.etcd_journal.EtcdJournal"
ETCD: dict[str, Any] = {
    "quorum": QuorumFaults(lost=0.05, unanswered=0.2, late=0.2, twice=0.1, leaderless=0.02),
    "p_torn": 0.1,
    "fsync_s": 0.0,
    "chaos_s": 40.0,
    "target_step": 60,
    "rates_hz": {"scheduler killed": 1 / 6, "second scheduler started": 1 / 4, "scheduler stopped": 1 / 6},
}
COMPACTING = {**ETCD, "compact_bytes": 500}
REMOVING = {**ETCD, "compact_bytes": 200, "quorum": QuorumFaults(late=0.3, twice=0.3)}

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "quorum: claim not compared",
        frozenset({"S4", "S13"}),
        100,
        patches={f"{LOG}._write": _write_without_claim},
        changes=COMPACTING,
    ),
    Mutant(
        "quorum: append repeated at the next index",
        frozenset({"S4"}),
        50,
        patches={f"{LOG}.append": _append_until_it_fits},
        changes=ETCD,
    ),
    Mutant(
        "quorum: answers sent before the last value is durable",
        frozenset({"S4"}),
        50,
        patches={f"{LOG}.append": _append_all_but_the_last_value},
        changes=ETCD,
    ),
    Mutant(
        "quorum: answers sent once the copy is durable",
        frozenset({"S4"}),
        100,
        patches={f"{Journal.__module__}.Journal._write_to_etcd": _write_copy_only},
        changes=ETCD,
    ),
    Mutant(
        "quorum: write not read back",
        frozenset({"S4", "S13"}),
        100,
        patches={f"{LOG}._write": _write_without_reading_back},
        changes=ETCD,
    ),
    Mutant(
        "quorum: older journals removed by range",
        frozenset({"S4"}),
        100,
        patches={f"{LOG}._remove_others": _remove_by_range},
        changes=REMOVING,
    ),
    Mutant(
        "quorum: older journals stay",
        frozenset({"S16"}),
        50,
        patches={f"{LOG}._remove_others": _remove_nothing},
        changes=COMPACTING,
    ),
    Mutant(
        "quorum: answers from earlier states accepted",
        frozenset({"S4"}),
        100,
        patches={"samebits.store.etcd.gateway.EtcdGateway._require_no_earlier_state": _accept_any_state},
        changes={**COMPACTING, "quorum": QuorumFaults(suspended=0.1)},
    ),
)
