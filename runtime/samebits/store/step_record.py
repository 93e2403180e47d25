"""Encode and decode the entries of a step log, and compare two records of a step.

This module does no I/O. A record is written before its step. Samples that the loop reports only after the step are a
separate entry, and are added to the record. A later record of a step replaces an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import msgpack

VERSION = 1
SHOWN_SAMPLES = 4

_MAX_INT = 2**63 - 1


class StepEntryError(ValueError):
    """The payload is not an entry of a step log."""


@dataclass(frozen=True, slots=True)
class LogHeader:
    """The job, slot and node that a log belongs to; the first payload of every file."""

    job: str
    slot: int
    node: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The inputs of one step, recorded just before it is taken.

    Attributes:
        samples: the indices of this rank's samples; while ``is_complete`` is false, more may follow.
        weights: hex digest of the parameters before the step; None if it was not computed.
    """

    step: int
    generation: int
    world_size: int
    rank: int
    seed: int
    learning_rates: tuple[float, ...]
    samples: tuple[int, ...]
    weights: str | None
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class LateSamples:
    """Samples of ``step`` that the loop reported after the step."""

    step: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewLine:
    """Marks the start of a new course of training after ``step``.

    Existing records of later steps are no longer compared.
    """

    step: int
    reason: str


StepEntry = StepRecord | LateSamples | NewLine


class _Kind(IntEnum):
    HEADER = 0
    STEP = 1
    LATE_SAMPLES = 2
    NEW_LINE = 3


# ---- bytes


def pack_header(header: LogHeader) -> bytes:
    """Encode the first payload of a file."""
    return _pack(_Kind.HEADER, VERSION, header.job, header.slot, header.node)


def unpack_header(payload: bytes) -> LogHeader:
    """Decode a payload of :func:`pack_header`.

    Raises:
        StepEntryError: the payload is not a header, or has a different version.
    """
    kind, fields = _unpack(payload)
    if kind is not _Kind.HEADER or not fields or fields[0] != VERSION:
        raise StepEntryError(f"does not begin like a step log of version {VERSION}")
    match fields:
        case [int(), str(job), int(slot), str(node)]:
            return LogHeader(job, slot, node)
    raise StepEntryError("begins with an incomplete header")


def pack(entry: StepEntry) -> bytes:
    """Encode one entry as a payload."""
    match entry:
        case StepRecord():
            return _pack(
                _Kind.STEP,
                entry.step,
                entry.generation,
                entry.world_size,
                entry.rank,
                entry.seed,
                entry.learning_rates,
                entry.samples,
                entry.weights,
            )
        case LateSamples():
            return _pack(_Kind.LATE_SAMPLES, entry.step, entry.samples)
        case NewLine():
            return _pack(_Kind.NEW_LINE, entry.step, entry.reason)


def unpack(payload: bytes) -> StepEntry:
    """Decode a payload of :func:`pack`.

    Raises:
        StepEntryError: the payload is not an entry.
    """
    kind, fields = _unpack(payload)
    match kind, fields:
        case (
            _Kind.STEP,
            [
                int(step),
                int(generation),
                int(world_size),
                int(rank),
                int(seed),
                tuple(rates),
                tuple(samples),
                str() | None as weights,
            ],
        ):
            if all(type(one) is float for one in rates) and _are_ints(samples):
                return StepRecord(step, generation, world_size, rank, seed, rates, samples, weights)
        case _Kind.LATE_SAMPLES, [int(step), tuple(samples)]:
            if _are_ints(samples):
                return LateSamples(step, samples)
        case _Kind.NEW_LINE, [int(step), str(reason)]:
            return NewLine(step, reason)
    raise StepEntryError("holds an unknown entry")


def _pack(kind: _Kind, *fields: Any) -> bytes:
    packed: bytes = msgpack.packb([int(kind), *fields])
    return packed


def _unpack(payload: bytes) -> tuple[_Kind, list[Any]]:
    try:
        kind, *fields = msgpack.unpackb(payload, use_list=False)
        return _Kind(kind), fields
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise StepEntryError(f"holds an invalid entry ({type(error).__name__})") from None


def _are_ints(samples: tuple[Any, ...]) -> bool:
    return all(type(one) is int for one in samples)


# ---- the history in a log


@dataclass(slots=True)
class History:
    """The records of a log, after its entries have been applied in order.

    Attributes:
        records: every record in the order of the log, including repeated steps.
        line: the newest record of every step that is still compared.
        last_step: the newest record's step; 0 if there is none.
    """

    records: list[StepRecord]
    line: dict[int, StepRecord]
    last_step: int = 0

    @classmethod
    def of(cls, entries: Iterable[StepEntry], *, after_step: int = 0) -> History:
        """Return the history of these entries, without the steps up to ``after_step``."""
        history = cls([], {})
        for entry in entries:
            history.add(entry, after_step=after_step)
        return history

    def add(self, entry: StepEntry, *, after_step: int = 0) -> None:
        """Apply the next entry of the log."""
        match entry:
            case StepRecord():
                last = self.records[-1] if self.records else None
                if last is not None and (last.step + 1, last.generation) == (entry.step, entry.generation):
                    self._replace_last(replace(last, is_complete=True))
                self.last_step = entry.step
                if entry.step > after_step:
                    self.records.append(entry)
                    self.line[entry.step] = entry
            case LateSamples():
                if self.records and self.records[-1].step == entry.step:
                    last = self.records[-1]
                    self._replace_last(replace(last, samples=last.samples + entry.samples, is_complete=True))
            case NewLine():
                self.line = {step: record for step, record in self.line.items() if step <= entry.step}

    def _replace_last(self, record: StepRecord) -> None:
        if self.line.get(record.step) is self.records[-1]:
            self.line[record.step] = record
        self.records[-1] = record


# ---- comparison of two records of one step


@dataclass(frozen=True, slots=True)
class RecordDifference:
    """A value in which two records of a step differ, with both values as texts."""

    what: str
    one: str
    other: str


def difference(one: StepRecord, other: StepRecord, *, same_rank: bool = True) -> RecordDifference | None:
    """Return the first difference between two records of a step; None if there is none.

    A value that only one record has (such as a digest that was not computed in the other, or samples that may have
    followed) is not a difference.

    Args:
        one: a record of the step.
        other: another record of the step.
        same_rank: False compares two ranks of one world, whose rank and samples are expected to differ.
    """
    if (one.world_size, one.rank if same_rank else 0) != (other.world_size, other.rank if same_rank else 0):
        return RecordDifference("world", _place(one, same_rank), _place(other, same_rank))
    if one.seed != other.seed:
        return RecordDifference("seed", str(one.seed), str(other.seed))
    if one.learning_rates != other.learning_rates:
        return RecordDifference("learning rate", _rates(one), _rates(other))
    if same_rank and _samples_differ(one, other):
        return RecordDifference("samples", *_where_samples_differ(one.samples, other.samples))
    if one.weights is not None and other.weights is not None and one.weights != other.weights:
        return RecordDifference("weights before it", one.weights, other.weights)
    return None


def _samples_differ(one: StepRecord, other: StepRecord) -> bool:
    shared = min(len(one.samples), len(other.samples))
    if one.samples[:shared] != other.samples[:shared]:
        return True
    shorter, longer = (one, other) if len(one.samples) == shared else (other, one)
    return len(longer.samples) > shared and shorter.is_complete


def _where_samples_differ(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[str, str]:
    place = 0
    while place < min(len(one), len(other)) and one[place] == other[place]:
        place += 1
    return _samples_from(one, place), _samples_from(other, place)


def _samples_from(samples: tuple[int, ...], place: int) -> str:
    shown = [str(one) for one in samples[place : place + SHOWN_SAMPLES]]
    more = ["…"] if len(samples) > place + SHOWN_SAMPLES else []
    before = ["…"] if place else []
    return f"{', '.join([*before, *shown, *more]) or 'none'} ({len(samples)} in all)"


def _place(record: StepRecord, same_rank: bool) -> str:
    return f"rank {record.rank} of {record.world_size}" if same_rank else f"{record.world_size} ranks"


def _rates(record: StepRecord) -> str:
    return ", ".join(map(repr, record.learning_rates)) or "none"
