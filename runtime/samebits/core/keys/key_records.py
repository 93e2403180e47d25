"""Journal records of the scheduler's durable keys.

The keys have a separate journal, because values are large and the job's records are small, and because readers of the
job's journal, including earlier releases, would otherwise have to know the keys' records. Replaying the first n records
gives the keys after the n-th record (``KeyStore.apply``).
"""

from __future__ import annotations

from typing import Annotated

from samebits.core.messages import Key, ValueBytes
from samebits.core.values import Count, Id, Meta, Schema, Value

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
