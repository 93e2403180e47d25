"""Journal records of the scheduler's durable keys.

The keys have their own journal because values are large, while the job's records are small, and because otherwise all
readers of the job's journal, including earlier releases, would have to know the keys' records. Replaying any prefix
gives the keys at that record (``KeyStore.apply``).
"""

from __future__ import annotations

from typing import Annotated

from samebits.core.messages import Key, ValueBytes
from samebits.core.values import Count, Id, Meta, Schema, Value

MAX_KEPT_ANSWERS = 1024
"""Most changes of one caller from its first unanswered one to its last."""


class KeysOf(Value, frozen=True, tag=1):
    """The job that the keys belong to; first record."""

    job: str


class KeyWritten(Value, frozen=True, tag=2):
    """The key has this value. A record older than the key's version has no effect."""

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
    """The answer to a completed call, kept because the call may be repeated."""

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
