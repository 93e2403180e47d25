"""The keys that the scheduler stores for its workers (``samebits.kv``). Pure.

* Every change has a version. All keys share one counter, which increases across scheduler starts, because its upper
half is the term. A deleted or forgotten key therefore never returns with an old version. * A call that changes a key is
executed exactly once, however often it is sent. Its answer is stored by session and number until the caller confirms it
(``floor``; Lee et al., "Implementing Linearizability at Large Scale and Low Latency", SOSP 2015). For a durable key,
the answer is in the same record as the change. Answers that nothing was changed are stored in memory, too; otherwise, a
late repetition might make a change whose failure was already reported. * Changes to keys that are not durable are lost
with the scheduler. Callers therefore reject answers of an earlier term, and calls to an earlier scheduler are ignored
and sent again. * Stored answers contain no key's value, so they are small. Reads are simply repeated. * A key that a
call made durable stays durable until it is deleted. Otherwise, a newer value that is not durable could be lost with the
scheduler, and the older durable value would return.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec

from samebits.core.messages import Key, KeyAnswer, KeyCall, KeyOp, KeyOutcome, ValueBytes
from samebits.core.values import Count, Id, Int, Meta, Schema, Value

MAX_KEYS = 1 << 16
MAX_STORE_BYTES = 32 << 20
"""Limit for all keys and values together."""
MAX_WAITS = 1 << 16
MAX_WAITS_OF_ONE = 64
CALLERS_A_SEAT = 2
FEW_CALLERS = 64
"""Callers remembered beyond those of the seats. Above that, callers without a seat, which are fenced, are forgotten."""
_TERM_BITS = 32

_NUMBERS = msgspec.msgpack.Decoder(Int)


class StoredValue(NamedTuple):
    """A value and the version at which it was written; version 0 means that the key is absent."""

    value: bytes
    version: int


ABSENT = StoredValue(b"", 0)


def newest(mine: Mapping[bytes, StoredValue], others: Mapping[bytes, StoredValue]) -> dict[bytes, StoredValue]:
    """Merge two sets of keys, keeping the higher version of each key. If versions are equal, ``mine`` is kept."""
    merged = dict(others)
    for key, held in mine.items():
        if key not in merged or merged[key].version <= held.version:
            merged[key] = held
    return merged


@dataclass(slots=True)
class KeyReady:
    """The result of a call. First make ``records`` durable, then send the answers to their sessions."""

    records: list[KeyRecord] = field(default_factory=list)
    answers: list[KeyAnswer] = field(default_factory=list)


@dataclass(slots=True)
class _CallerAnswers:
    """One session's calls."""

    floor: int = 0  # calls below are settled
    answers: dict[int, tuple[KeyAnswer, bool]] = field(default_factory=dict)  # by number; whether each is durable
    waits: dict[int, bytes] = field(default_factory=dict)  # number → key

    def raise_floor(self, floor: int) -> None:
        """Drop the answers to all lower call numbers, which the caller has received."""
        if floor > self.floor:
            self.floor = floor
            for number in [number for number in self.answers if number < floor]:
                del self.answers[number]


class KeyStore:
    """All keys of one job.

    Args:
        term: this scheduler's term.
    """

    def __init__(self, term: int) -> None:
        self._term = term
        self._version = term << _TERM_BITS
        self._keys: dict[bytes, StoredValue] = {}
        self._durable: dict[bytes, None] = {}  # in order of writing
        self._bytes = 0
        self._callers: dict[str, _CallerAnswers] = {}
        self._waits: dict[bytes, dict[tuple[str, int], int]] = {}  # key → call → the version it must exceed
        self._waits_count = 0
        self._trouble = ""

    def apply(self, record: KeyRecord) -> None:
        """Apply a record read from the keys' journal. New records are applied by the store itself."""
        match record:
            case KeysOf():
                return
            case KeyWritten():
                self._version = max(self._version, record.version)
                if record.version > self._keys.get(record.key, ABSENT).version:
                    self._set(record.key, StoredValue(record.value, record.version), durable=True)
            case KeyDeleted():
                self._version = max(self._version, record.version)
                if record.version > self._keys.get(record.key, ABSENT).version:
                    self._drop(record.key)
            case CallerKept(session, floor, answers):
                caller = self._callers.setdefault(session, _CallerAnswers())
                caller.answers.update(
                    {
                        one.number: (
                            KeyAnswer(session, one.number, self._term, KeyOutcome.DONE, one.version, one.value),
                            True,
                        )
                        for one in answers
                    }
                )
                caller.raise_floor(floor)
                return
        if record.session:
            answer = record.answer if isinstance(record, KeyWritten) else b""
            caller = self._callers.setdefault(record.session, _CallerAnswers())
            caller.raise_floor(record.floor)
            kept = KeyAnswer(record.session, record.number, self._term, KeyOutcome.DONE, record.version, answer)
            caller.answers[record.number] = (kept, True)

    def snapshot(self) -> Iterator[KeyRecord]:
        """Yield the fewest records whose replay gives the durable keys and their answers."""
        for key, value in self._keys.items():
            if key in self._durable:
                yield KeyWritten(key, *value)
        for session, caller in self._callers.items():
            kept = tuple(
                KeptAnswer(one.number, one.version, one.value)
                for one, is_durable in caller.answers.values()
                if is_durable
            )
            if kept or caller.floor:
                yield CallerKept(session, caller.floor, kept)

    def refuse(self, why: str) -> None:
        """Reject every call from now on, with this message."""
        self._trouble = why

    # ---- callers

    @property
    def callers(self) -> int:
        """Return how many sessions are remembered."""
        return len(self._callers)

    @property
    def keys(self) -> Mapping[bytes, StoredValue]:
        """Return all keys; read-only."""
        return self._keys

    @property
    def waits(self) -> int:
        """Return how many calls wait for a key."""
        return self._waits_count

    def forget_callers_but(self, sessions: Collection[str]) -> None:
        """Forget all callers except these sessions. The others are fenced before they can call again."""
        for session in [session for session in self._callers if session not in sessions]:
            for number in list(self._callers[session].waits):
                self._end_wait(session, number)
            del self._callers[session]

    # ---- calls

    def take(self, call: KeyCall) -> KeyReady:
        """Execute a call unless it was executed before, and answer calls that waited for its change."""
        ready, session = KeyReady(), call.sender.session
        if call.term not in (0, self._term):  # an earlier scheduler's answer to it may be unknown here
            return ready
        caller = self._callers.setdefault(session, _CallerAnswers())
        caller.raise_floor(call.floor)
        if self._trouble:
            if call.number in caller.answers:
                return ready  # whether the change is durable is unknown, so no answer is sent
            ready.answers.append(self._refused(call, self._trouble))
        elif call.op is KeyOp.GET:
            ready.answers.append(self._got(call))
        elif call.op is KeyOp.WAIT:
            self._wait(caller, call, ready)
        elif (kept := caller.answers.get(call.number)) is not None:
            ready.answers.append(kept[0])
        elif caller.floor <= call.number < caller.floor + MAX_KEPT_ANSWERS:  # else it is late, and was answered
            self._change(caller, call, ready)
        return ready

    def _got(self, call: KeyCall) -> KeyAnswer:
        held = self._keys.get(call.key, ABSENT)
        outcome = KeyOutcome.DONE if held.version else KeyOutcome.ABSENT
        return KeyAnswer(call.sender.session, call.number, self._term, outcome, held.version, held.value)

    def _wait(self, caller: _CallerAnswers, call: KeyCall, ready: KeyReady) -> None:
        session, number = call.sender.session, call.number
        if self._keys.get(call.key, ABSENT).version > call.version:
            self._end_wait(session, number)
            ready.answers.append(self._got(call))
        elif number not in caller.waits:
            if len(caller.waits) >= MAX_WAITS_OF_ONE:  # the caller has fewer open calls: it abandoned the oldest
                self._end_wait(session, min(caller.waits))
            if self._waits_count >= MAX_WAITS:
                ready.answers.append(
                    self._refused(
                        call,
                        f"{MAX_WAITS} calls are already waiting for keys, the maximum. Fix: let one thread of "
                        "each process wait and notify the others",
                    )
                )
                return
            caller.waits[number] = call.key
            self._waits.setdefault(call.key, {})[session, number] = call.version
            self._waits_count += 1

    def _end_wait(self, session: str, number: int) -> None:
        key = self._callers[session].waits.pop(number, None)
        if key is not None:
            del self._waits[key][session, number]
            if not self._waits[key]:
                del self._waits[key]
            self._waits_count -= 1

    def _change(self, caller: _CallerAnswers, call: KeyCall, ready: KeyReady) -> None:
        held = self._keys.get(call.key, ABSENT)
        has_changed, answered, problem = False, b"", ""
        match call.op:
            case KeyOp.DELETE if not held.version:
                outcome = KeyOutcome.ABSENT
            case KeyOp.COMPARE_AND_SET | KeyOp.DELETE if call.version != held.version and (
                call.version or call.op is KeyOp.COMPARE_AND_SET
            ):
                outcome = KeyOutcome.DIFFERS
            case KeyOp.DELETE:
                outcome, has_changed = KeyOutcome.DONE, True
            case KeyOp.ADD:
                total = _sum(held.value, call.amount) if held.version else call.amount
                answered = b"" if isinstance(total, str) else msgspec.msgpack.encode(total)
                problem = total if isinstance(total, str) else self._no_room(call.key, held, answered)
                outcome, has_changed = (KeyOutcome.REFUSED, False) if problem else (KeyOutcome.DONE, True)
            case _:
                problem = self._no_room(call.key, held, call.value)
                outcome, has_changed = (KeyOutcome.REFUSED, False) if problem else (KeyOutcome.DONE, True)
        session, number = call.sender.session, call.number
        if not has_changed:
            kept = KeyAnswer(session, number, self._term, outcome, held.version, text=_said(call, problem))
            caller.answers[number] = (kept, False)
            ready.answers.append(kept)
            return
        self._version += 1
        is_durable = call.key in self._durable or call.is_durable
        kept = KeyAnswer(session, number, self._term, outcome, self._version, answered)
        caller.answers[number] = (kept, is_durable)
        if call.op is KeyOp.DELETE:
            self._drop(call.key)
        else:
            self._set(call.key, StoredValue(answered or call.value, self._version), durable=is_durable)
        if is_durable:
            ready.records.append(self._record(call, caller.floor, answered))
        ready.answers.append(kept)
        self._wake(call.key, ready)

    def _record(self, call: KeyCall, floor: int, answered: bytes) -> KeyRecord:
        who = (call.sender.session, call.number, floor)
        if call.op is KeyOp.DELETE:
            return KeyDeleted(call.key, self._version, *who)
        return KeyWritten(call.key, self._keys[call.key].value, self._version, *who, answered)

    def _wake(self, key: bytes, ready: KeyReady) -> None:
        held = self._keys.get(key, ABSENT)
        for (session, number), above in list(self._waits.get(key, {}).items()):
            if held.version > above:
                self._end_wait(session, number)
                ready.answers.append(KeyAnswer(session, number, self._term, KeyOutcome.DONE, held.version, held.value))

    def _refused(self, call: KeyCall, why: str) -> KeyAnswer:
        return KeyAnswer(call.sender.session, call.number, self._term, KeyOutcome.REFUSED, text=_said(call, why))

    def _no_room(self, key: bytes, held: StoredValue, value: bytes) -> str:
        if not held.version and len(self._keys) >= MAX_KEYS:
            return f"there are {MAX_KEYS} keys, the maximum. Fix: delete those that are no longer needed"
        more = len(value) - (len(held.value) if held.version else -len(key))
        if more > 0 and self._bytes + more > MAX_STORE_BYTES:
            return (
                f"all keys and values would have {self._bytes + more} bytes, at most {MAX_STORE_BYTES} are kept. Fix: "
                "delete keys that are no longer needed, or keep large values in files and their paths here"
            )
        return ""

    def _set(self, key: bytes, held: StoredValue, *, durable: bool) -> None:
        self._drop(key)
        self._keys[key] = held
        self._bytes += len(key) + len(held.value)
        if durable:
            self._durable[key] = None

    def _drop(self, key: bytes) -> None:
        held = self._keys.pop(key, None)
        if held is not None:
            self._bytes -= len(key) + len(held.value)
        self._durable.pop(key, None)


def replay(records: Iterable[KeyRecord], term: int) -> KeyStore:
    """Return the store after these records."""
    store = KeyStore(term)
    for record in records:
        store.apply(record)
    return store


def _sum(value: bytes, amount: int) -> int | str:
    """Return the sum, or a text with the reason why there is none."""
    try:
        total = _NUMBERS.decode(value) + amount
    except (msgspec.MsgspecError, UnicodeError):
        return "its value is not a whole number. Fix: add only to a key that add() or a whole number has made"
    if not -(2**63) <= total < 2**63:
        return f"the sum {total} has more than 64 bits. Fix: count in a coarser unit"
    return total


def _said(call: KeyCall, problem: str) -> str:
    return f"key {shown(call.key)}: {problem}" if problem else ""


def shown(key: bytes) -> str:
    """Return a key as messages show it."""
    return repr(key.decode(errors="replace")[:80])


# ---- journal records of durable keys
#
# The keys have a separate journal, because values are large and the job's records are small, and because readers of the
# job's journal, including earlier releases, would otherwise have to know the keys' records. Replaying the first n
# records gives the keys after the n-th record (``KeyStore.apply``).

MAX_KEPT_ANSWERS = 1024
"""Most changes of one caller from its first unanswered one to its last."""


class KeysOf(Value, frozen=True, tag=1):
    """The first record: the job to which the keys belong."""

    job: str


class KeyWritten(Value, frozen=True, tag=2):
    """A key was set to this value. A record older than the key's version has no effect."""

    key: Key
    value: ValueBytes
    version: Count
    session: Id = ""  # the caller; "" in a snapshot, which keeps callers separately
    number: Count = 0
    floor: Count = 0
    answer: ValueBytes = b""  # the answer to the call, without the version


class KeyDeleted(Value, frozen=True, tag=3):
    """The key was deleted."""

    key: Key
    version: Count
    session: Id
    number: Count
    floor: Count


class KeptAnswer(Value, frozen=True):
    """The answer to a completed call, stored because the call may be repeated."""

    number: Count
    version: Count
    value: ValueBytes


class CallerKept(Value, frozen=True, tag=4):
    """In a snapshot: one caller's answers."""

    session: Id
    floor: Count
    answers: Annotated[tuple[KeptAnswer, ...], Meta(max_length=MAX_KEPT_ANSWERS)]


KeyRecord = KeysOf | KeyWritten | KeyDeleted | CallerKept

SCHEMA: Schema[KeyRecord] = Schema(KeyRecord)
