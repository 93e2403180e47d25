"""What one step of a core asks its shell to do, in this order: make durable, send, show.

The order is the promise "save, then speak" (invariant S7; the idea is etcd-io/raft's ``Ready``): nothing of ``sends``
may leave the process before every record of ``records`` is on disk.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from samebits.core.ends import EndKind
from samebits.core.keys.key_records import KeyRecord
from samebits.core.messages import FromScheduler, KeyAnswer
from samebits.core.records import Record


class Level(enum.IntEnum):
    """How loud a note is."""

    INFO = 1
    WARNING = 2


@dataclass(frozen=True, slots=True)
class Note:
    """One decision and its reason: log line, status text and test oracle."""

    level: Level
    text: str


class Send(NamedTuple):
    """A message for the connection of one session. A named tuple: ten thousand are made to tell of one loss."""

    session: str
    message: FromScheduler


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is over; the shell delivers ``sends`` and leaves."""

    kind: EndKind
    text: str


@dataclass(slots=True)
class Ready:
    """Filled by one step, carried out by the shell, then forgotten."""

    records: list[Record] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    ended: Ended | None = None
    key_records: list[KeyRecord] = field(default_factory=list)  # of a journal of their own

    @property
    def is_about_keys(self) -> bool:
        """Whether it carries out a call to a key and nothing else: of the job nothing has changed."""
        if self.records or self.notes or self.ended:
            return False
        return all(isinstance(send.message, KeyAnswer) for send in self.sends)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to carry out."""
        return not (self.records or self.sends or self.notes or self.ended or self.key_records)

    def say(self, text: str, level: Level = Level.INFO) -> None:
        """Add a note."""
        self.notes.append(Note(level, text))

    def send(self, session: str, message: FromScheduler) -> None:
        """Add a message for a session."""
        self.sends.append(Send(session, message))
