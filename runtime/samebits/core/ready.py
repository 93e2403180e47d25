"""The output of one core step, processed in this order: make durable, send, show.

The order implements "save, then speak" (invariant S7, after etcd-io/raft's ``Ready``): no message in ``sends`` leaves
the process before all of ``records`` are on disk.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from samebits.core.end_kinds import EndKind
from samebits.core.keys.key_store import KeyRecord
from samebits.core.messages import FromScheduler, KeyAnswer
from samebits.core.records import Record


class Severity(enum.IntEnum):
    """Severity of a note."""

    INFO = 1
    WARNING = 2


@dataclass(frozen=True, slots=True)
class Note:
    """A decision and its reason, for the log, the status and tests."""

    level: Severity
    text: str


class Send(NamedTuple):
    """A message to one session. A named tuple, because one loss may create ten thousand."""

    session: str
    message: FromScheduler


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over. The caller delivers ``sends`` and exits."""

    kind: EndKind
    text: str


@dataclass(slots=True)
class Ready:
    """The result of one step, which the caller carries out and then discards."""

    records: list[Record] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    ended: JobEnded | None = None
    key_records: list[KeyRecord] = field(default_factory=list)  # for the keys' own journal

    def add(self, later: Ready) -> None:
        """Append the result of a later step, so that both are carried out together."""
        self.records += later.records
        self.sends += later.sends
        self.notes += later.notes
        self.ended = self.ended or later.ended
        self.key_records += later.key_records

    @property
    def is_about_keys(self) -> bool:
        """Return whether the step only handled a key and changed nothing else about the job."""
        if self.records or self.notes or self.ended:
            return False
        return all(isinstance(send.message, KeyAnswer) for send in self.sends)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to do."""
        return not (self.records or self.sends or self.notes or self.ended or self.key_records)

    def say(self, text: str, level: Severity = Severity.INFO) -> None:
        """Add a note."""
        self.notes.append(Note(level, text))

    def send(self, session: str, message: FromScheduler) -> None:
        """Add a message for a session."""
        self.sends.append(Send(session, message))
