"""What is written of the scheduler's keys, in a journal of their own: only of keys that are to be durable.

Not in the job's journal: values are large where the job's records are small, and whoever reads that one, an earlier
release as well, would have to know them. Replaying any prefix gives the keys at that record (``KeyStore.apply``).
"""

from __future__ import annotations

from typing import Annotated

from samebits.core.messages import Key, KeyValue
from samebits.core.values import Count, Id, Meta, Schema, Value

MAX_KEPT_ANSWERS = 1024
"""Of one caller: it has no more calls that change something between the first unanswered one and the last."""


class KeysOf(Value, frozen=True, tag=1):
    """Whose keys these are; the first record."""

    job: str


class KeyWritten(Value, frozen=True, tag=2):
    """The key has this value; a record of an older version than the key is at changes nothing."""

    key: Key
    value: KeyValue
    version: Count
    session: Id = ""  # whose call it was; "": in a snapshot, where that is said apart
    number: Count = 0
    floor: Count = 0
    answer: KeyValue = b""  # what the call was answered besides the version


class KeyDeleted(Value, frozen=True, tag=3):
    """The key is gone."""

    key: Key
    version: Count
    session: Id
    number: Count
    floor: Count


class KeptAnswer(Value, frozen=True):
    """What a call that was done was answered; it may yet be said again."""

    number: Count
    version: Count
    value: KeyValue


class CallerKept(Value, frozen=True, tag=4):
    """Of a snapshot: what one caller was answered."""

    session: Id
    floor: Count
    answers: Annotated[tuple[KeptAnswer, ...], Meta(max_length=MAX_KEPT_ANSWERS)]


KeyRecord = KeysOf | KeyWritten | KeyDeleted | CallerKept

SCHEMA: Schema[KeyRecord] = Schema(KeyRecord)
