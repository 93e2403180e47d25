"""Keep one journal in etcd: a snapshot, then appends, under one scheduler's claim.

::

  <prefix>/term                              the claim: its number, its holder, and random bytes
  <prefix>/<name>/head                       the current nonce, and its snapshot's number of chunks; written last
  <prefix>/<name>/<nonce>/snapshot/<chunk>   the chunks of a journal file (``journal_format``)
  <prefix>/<name>/<nonce>/log/<index>        appends in order; a large one takes several indices

Every write compares the claim in its own transaction, so a scheduler whose claim was taken over can no longer change
anything; no clock or lease is involved. A transaction without an answer is read back: an append has one index and one
content, and is never written to a second index.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from samebits.core.records import MAX_TERM
from samebits.errors import ClaimRemovedError, JournalDamagedError, LockedError, StoreError, SupersededError
from samebits.spelling import spelled
from samebits.store import journal_format
from samebits.store.etcd.gateway import Equals, EtcdGateway, PutKey, Remove
from samebits.store.journal_format import JournalFormatError

CHUNK_BYTES: Final = 512 << 10
"""Bytes per value: an etcd accepts requests of 1.5 MiB, and the gateway's base64 enlarges a value by a third."""

JOURNALS: Final = ("journal", "keys")
EVENTS: Final = "events"
SERVING: Final = "serving"
"""The names below a job's prefix, besides ``term``."""

_PART = struct.Struct("<II")
_LOG_OFFSET: Final = 1 << 40
_CLAIM_ATTEMPTS: Final = 8
_VERSION: Final = 1


class _Head(msgspec.Struct, frozen=True):
    version: int
    nonce: int
    chunks: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A change that is made together with a claim, and the condition for both."""

    condition: Equals
    change: PutKey


class EtcdClaim:
    """The claim of one scheduler start, stored in etcd.

    Attributes:
        number: the term, higher than all earlier terms.
        condition: true until another scheduler claims the job.
        holder: the line that describes this process to others.
    """

    def __init__(self, gateway: EtcdGateway, number: int, value: bytes, holder: bytes) -> None:
        self.number = number
        self.holder = holder
        self.condition = Equals(_term_key(gateway), value)
        self.gateway = gateway

    @classmethod
    def take(cls, gateway: EtcdGateway, holder: bytes, floor: int = 0, take_over: TakeOver | None = None) -> EtcdClaim:
        """Claim the next term; once this returns, no earlier claim can write.

        Args:
            gateway: a client of the etcd.
            holder: the line that describes this process to others.
            floor: the highest term known from elsewhere.
            take_over: a further condition and change of the claim's transaction.

        Raises:
            LockedError: the condition of ``take_over`` is no longer true; nothing was claimed.
            SupersededError: other schedulers repeatedly claim the job.
            StoreError: etcd does not answer, refuses the request, or has other data under the job's prefix.
        """
        for _ in range(_CLAIM_ATTEMPTS):
            seen = gateway.get(_term_key(gateway))
            number = max(_number_in(gateway, seen.value), floor) + 1
            if number > MAX_TERM:
                raise StoreError(f"{gateway.place}: a job can have at most {MAX_TERM} scheduler starts")
            claim = cls(gateway, number, b"%d %s\n%s" % (number, os.urandom(16).hex().encode(), holder), holder)
            before = Equals(claim.condition.key, seen.value if seen.revision else None)
            conditions = [before] if take_over is None else [before, take_over.condition]
            changes = [claim.write] if take_over is None else [claim.write, take_over.change]
            if gateway.change(conditions, changes) or claim.stands():
                return claim
            if take_over is not None and not gateway.holds(take_over.condition):
                raise LockedError(f"{gateway.place}: another scheduler has begun to serve this job")
        raise SupersededError(
            f"{gateway.place}: other schedulers have claimed this job {_CLAIM_ATTEMPTS} times in a row. Fix: start one "
            "scheduler per job; another job needs another prefix"
        )

    @property
    def write(self) -> PutKey:
        """Return the change that sets this claim."""
        assert self.condition.value is not None
        return PutKey(self.condition.key, self.condition.value)

    def require(self) -> None:
        """Raise unless the claim is still valid.

        Raises:
            SupersededError: another scheduler has taken over the claim.
            ClaimRemovedError: the claim's key was removed.
            StoreError: etcd does not answer.
        """
        found = self.gateway.get(self.condition.key)
        if found.value == self.condition.value:
            return
        if not found.revision:
            raise ClaimRemovedError(
                f"{self.gateway.place}: the key `term`, this scheduler's claim, was removed. Fix: leave the keys of a "
                f"running job alone; `{spelled('stop')}` ends it first"
            )
        number = _number_in(self.gateway, found.value)
        raise SupersededError(
            f"{self.gateway.place}: another scheduler has claimed term {number}, so this scheduler, of term "
            f"{self.number}, has stopped and sent nothing that it wrote since. Fix: nothing to do; the job continues "
            "with the other one"
        )

    def stands(self) -> bool:
        """Return whether the claim is still valid. If it is not, :meth:`require` raises the reason.

        Raises:
            StoreError: etcd does not answer.
        """
        return self.gateway.get(self.condition.key).value == self.condition.value


class EtcdJournal:
    """One journal in etcd, opened for writing by the holder of the claim.

    Only one thread may use it.
    """

    def __init__(self, claim: EtcdClaim, name: str) -> None:
        self._gateway = claim.gateway
        self._name = name
        self._claim = claim
        self._head = _Head(_VERSION, 0, 0)
        self._head_value: bytes | None = None
        self._next = 0
        self._broken: str | None = None

    @classmethod
    def load(cls, claim: EtcdClaim, name: str) -> tuple[EtcdJournal, list[bytes] | None]:
        """Open the journal, or create an empty one; return it and its payloads in order.

        The payloads are None if the journal was created. An append that was interrupted between its chunks was never
        sent, and is removed.

        Raises:
            SupersededError: another scheduler took over the claim.
            JournalDamagedError: the stored data is not a journal, or was changed.
            StoreError: etcd does not answer, or refuses the request.
        """
        gateway, log = claim.gateway, cls(claim, name)
        found = gateway.get(_head_key(gateway, name))
        if not found.revision:
            log._replace([])
            return log, None
        log._head_value, log._head = found.value, _decoded_head(gateway, found.value)
        try:
            payloads, log._next, is_cut = _read(gateway, name, log._head)
        finally:
            claim.require()  # a successor may have compacted the journal during the read
        if is_cut:
            log._replace(payloads)  # merely removing the rest might be applied late, after appends in its place
        log._remove_others()
        return log, payloads

    @property
    def goes_on(self) -> bool:
        """Return whether the journal can be appended to."""
        return self._broken is None

    def append(self, payloads: Sequence[bytes]) -> None:
        """Make all these payloads durable on a majority of members, or none.

        Raises:
            SupersededError, ClaimRemovedError: nothing in the batch may be sent.
            StoreError: the payloads are not durable (``may_pass``: etcd is full), or may not be.
        """
        self._require_usable()
        if not payloads:
            return
        data = journal_format.encode_batch(payloads, self._head.nonce, _LOG_OFFSET + self._next)
        chunks = list(_chunks(data))
        for part, chunk in enumerate(chunks):
            try:
                self._put(self._key(self._next + part), _PART.pack(part, len(chunks)) + chunk)
            except BaseException as error:
                if part or not (isinstance(error, StoreError) and error.may_pass):
                    self._broken = f"an append was not confirmed: {error}"
                raise
        self._next += len(chunks)

    def compact(self, payloads: Sequence[bytes]) -> None:
        """Replace the entire journal with these payloads; a crash leaves the old or the new one.

        Raises:
            SupersededError, ClaimRemovedError: the old journal, or another scheduler's, is in place.
            StoreError: the old journal is in place and usable, unless :attr:`goes_on` is false.
        """
        self._require_usable()
        self._replace(payloads)

    def begin_again(self, payloads: Sequence[bytes], claim: EtcdClaim) -> None:
        """Rewrite the entire journal after a :class:`ClaimRemovedError`, under a new claim.

        Raises:
            SupersededError: another scheduler has written the journal.
            StoreError: etcd does not answer, or refuses the request.
        """
        found = self._gateway.get(_head_key(self._gateway, self._name))
        if found.revision and found.value != self._head_value:
            raise SupersededError(
                f"{self._gateway.place}: another scheduler has written this journal since this one's claim was "
                f"removed, so this one has stopped. Fix: `{spelled('recover')}` continues with that journal"
            )
        self._head_value = found.value if found.revision else None
        self._claim, self._broken = claim, None
        self._replace(payloads)

    def _replace(self, payloads: Sequence[bytes]) -> None:
        nonce = int.from_bytes(os.urandom(8), "little")
        chunks = list(_chunks(journal_format.encode_file(payloads, nonce)))
        head = _Head(_VERSION, nonce, len(chunks))
        subtree = _subtree(self._gateway, self._name, nonce)
        for number, chunk in enumerate(chunks):
            self._put(f"{subtree}snapshot/{number:08d}", chunk)
        value = msgspec.msgpack.encode(head)
        key = _head_key(self._gateway, self._name)
        try:
            self._write(Equals(key, self._head_value), PutKey(key, value))
        except BaseException as error:
            self._broken = f"a compaction was not confirmed: {error}"
            raise
        self._head, self._head_value, self._next = head, value, 0
        self._remove_others()

    def _put(self, key: str, value: bytes) -> None:
        self._write(Equals(key, None), PutKey(key, value))

    def _write(self, before: Equals, change: PutKey) -> None:
        """Make one change if the claim is valid. If the result is unclear, check whether the change was made."""
        try:
            if self._gateway.change([self._claim.condition, before], [change]):
                return
            refused = None
        except StoreError as error:
            if not error.may_pass:
                raise
            refused = error  # the write that fills an etcd's quota is refused, although it was applied
        written = self._gateway.get(change.key).value
        self._claim.require()
        if written != change.value:
            raise refused or StoreError(
                f"{self._gateway.place}: the key {change.key} was changed by another program; nothing more is written. "
                "Fix: keep other programs out of the job's prefix, then start the scheduler again"
            )

    def _remove_others(self) -> None:
        """Remove journals that the head does not name.

        These are older journals, and those whose writer crashed before it wrote the head. Each is removed by its nonce,
        which is never reused. A removal by range might be applied late, when a new journal is in the range.
        """
        base = f"{self._gateway.place.prefix}/{self._name}/"
        keys = (found.key.removeprefix(base) for found in self._gateway.under(base, has_values=False))
        nonces = {key.partition("/")[0] for key in keys if "/" in key} - {f"{self._head.nonce:016x}"}
        if nonces:
            others = [Remove(f"{base}{nonce}/", f"{base}{nonce}0") for nonce in sorted(nonces)]
            self._gateway.change([self._claim.condition], others)

    def _key(self, index: int) -> str:
        return f"{self._subtree('log/')}{index:012d}"

    def _subtree(self, kind: str) -> str:
        return _subtree(self._gateway, self._name, self._head.nonce) + kind

    def _require_usable(self) -> None:
        if self._broken is not None:
            raise StoreError(
                f"{self._gateway.place}: nothing more is written, because {self._broken}. Fix: end this process and "
                f"start it again (`{spelled('recover')}`); it continues from what is in the etcd"
            )


def read_etcd_journal(gateway: EtcdGateway, name: str) -> list[bytes] | None:
    """Return a journal's payloads in order, without a claim; None if there is no journal.

    Raises:
        JournalDamagedError: the stored data is not a journal, or was changed.
        StoreError: etcd does not answer, or refuses the request.
    """
    found = gateway.get(_head_key(gateway, name))
    while found.revision:
        damage, payloads = None, list[bytes]()
        try:
            payloads, _, _ = _read(gateway, name, _decoded_head(gateway, found.value))
        except JournalDamagedError as error:
            damage = error
        before, found = found, gateway.get(found.key)
        if found.value == before.value:
            if damage is not None:
                raise damage
            return payloads
        # A compaction replaced the journal during the read, and removed appends that were not read yet.
    return None


def remove_job(claim: EtcdClaim) -> None:
    """Remove all keys of the job except its term.

    The term is kept so that a scheduler that is still alive cannot write again. Other keys below the prefix are kept,
    because the prefix of another job may begin with this one.

    Raises:
        SupersededError: another scheduler has claimed the job meanwhile; nothing was removed.
        StoreError: etcd does not answer, or refuses the request.
    """
    prefix = claim.gateway.place.prefix
    folders = [Remove(f"{prefix}/{name}/", f"{prefix}/{name}0") for name in (*JOURNALS, EVENTS)]
    serving = f"{prefix}/{SERVING}"
    if not claim.gateway.change([claim.condition], [*folders, Remove(serving, f"{serving}\0")]):
        claim.require()


def _read(gateway: EtcdGateway, name: str, head: _Head) -> tuple[list[bytes], int, bool]:
    """Return the payloads, the next index, and whether an incomplete append is stored there."""
    subtree = _subtree(gateway, name, head.nonce)
    chunks = [found.value for found in gateway.under(f"{subtree}snapshot/")]
    if len(chunks) != head.chunks:
        raise _damaged(gateway, f"{len(chunks)} of {head.chunks} chunks of {name}'s snapshot are there")
    payloads = _decoded(gateway, name, lambda: journal_format.decode_file(b"".join(chunks)).payloads)
    index = 0
    group: list[bytes] = []
    for found in gateway.under(f"{subtree}log/"):
        part, parts = _PART.unpack_from(found.value) if len(found.value) >= _PART.size else (0, 0)
        if found.key != f"{subtree}log/{index + len(group):012d}" or part != len(group) or parts <= part:
            raise _damaged(gateway, f"the append {found.key} is not the next one of {name}")
        group.append(found.value[_PART.size :])
        if len(group) == parts:
            offset, data = _LOG_OFFSET + index, b"".join(group)
            payloads += _decoded(gateway, name, lambda: journal_format.decode_batch(data, head.nonce, offset))  # noqa: B023
            index, group = index + parts, []
    return payloads, index, bool(group)


def _decoded(gateway: EtcdGateway, name: str, decode: Callable[[], list[bytes]]) -> list[bytes]:
    try:
        return decode()
    except JournalFormatError as error:
        raise _damaged(gateway, f"{name} {error.fault.value} ({error.found})") from None


def _decoded_head(gateway: EtcdGateway, value: bytes) -> _Head:
    try:
        head = msgspec.msgpack.decode(value, type=_Head)
    except msgspec.DecodeError as error:
        raise _damaged(gateway, f"its head is not one ({error})") from None
    if head.version != _VERSION or not 0 <= head.nonce < 1 << 64:
        raise _damaged(gateway, f"its head has version {head.version}, but this program reads {_VERSION}")
    return head


def _damaged(gateway: EtcdGateway, why: str) -> JournalDamagedError:
    return JournalDamagedError(
        f"{gateway.place}: this is not the journal that was written there: {why}; nothing was changed. Fix: run the "
        f"version that wrote it, give each job its own prefix, or `{spelled('run', '--fresh')}` starts a new job"
    )


def _number_in(gateway: EtcdGateway, value: bytes) -> int:
    first = value.partition(b" ")[0]
    if not value or (len(first) <= 18 and first.isdigit()):
        return int(first or b"0")
    raise StoreError(
        f"{gateway.place}: the key `term` is not a scheduler's claim: {value[:40]!r}. Fix: give the job a prefix of "
        "its own in RECOVERY_PATH"
    )


def _chunks(data: bytes) -> Iterator[bytes]:
    return (data[first : first + CHUNK_BYTES] for first in range(0, len(data), CHUNK_BYTES))


def _term_key(gateway: EtcdGateway) -> str:
    return f"{gateway.place.prefix}/term"


def _head_key(gateway: EtcdGateway, name: str) -> str:
    return f"{gateway.place.prefix}/{name}/head"


def _subtree(gateway: EtcdGateway, name: str, nonce: int) -> str:
    return f"{gateway.place.prefix}/{name}/{nonce:016x}/"
