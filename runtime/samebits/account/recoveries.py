"""Derive a job's recoveries from its events, each with its cause, phases and cost.

A recovery lasts from the first loss (or the round, if no member was lost) until every member of the next generation
trains. Further losses in that time belong to the same recovery. A loss before the first step counts as well. If the job
ends during a recovery, the recovery is dropped, because restarting an ended job is not a recovery.

The time of each phase is the time that ``Goodput`` adds to the phase's category during the recovery, so a recovery and
the job's totals agree.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from samebits.account.events import EventKind, JobEvent
from samebits.account.goodput import Bucket, Goodput
from samebits.printable import counted


@dataclass(slots=True)
class Recovery:
    """One recovery. Times are in seconds since 1970, or None if not reached yet.

    Attributes:
        spent_us: microseconds by category of time, without those in ``deciding_us``. Losses that were not noticed yet
            count from the lost worker's last message, but not while the others still made progress.
        deciding_us: microseconds from the loss to the round.
        is_first_start: the job had not trained before, so training began only after this recovery.
        all_lost: every member was lost, so no worker could report the last step, and ``step`` is a lower bound.
        last_to_join: the worker that the others waited for.
        last_to_train: the worker whose group or state took longest.
    """

    number: int
    cause: str
    lost: list[str]
    noticed_at: float
    step: int  # the highest step before it
    spent_us: dict[Bucket, int] = field(default_factory=dict)
    deciding_us: int = 0
    decided_at: float | None = None
    formed_at: float | None = None
    trains_at: float | None = None
    restore_step: int | None = None
    restored_from: str = ""
    generation: int = 0
    members: int = 0
    is_first_start: bool = False
    all_lost: bool = False
    last_to_join: str = ""
    last_to_train: str = ""
    missing: str = ""

    @property
    def began_at(self) -> float:
        """Return when the first lost worker fell silent."""
        return self.noticed_at - self.spent_us.get(Bucket.NOTICING, 0) / 1e6

    @property
    def total_ms(self) -> float | None:
        """Return the time from the last message to training in ms, or None during the recovery.

        A clock that was set back counts as paused.
        """
        return None if self.trains_at is None else round(sum(self.phases().values()), 1)

    @property
    def steps_lost(self) -> int:
        """Return how many completed steps had to be repeated; this is a lower bound with ``all_lost``."""
        return 0 if self.restore_step is None else max(0, self.step - self.restore_step)

    def steps_lost_text(self) -> str:
        """Return a text about the lost steps, such as ``no step``, ``3 steps`` or ``any steps after step 300``."""
        if self.all_lost:
            after = f"any steps after step {self.restore_step or 0}"
            return f"at least {counted(self.steps_lost, 'step')}" if self.steps_lost else after
        return counted(self.steps_lost, "step") if self.steps_lost else "no step"

    def phases(self) -> dict[str, float]:
        """Return the milliseconds of each phase that took place; they add up to ``total_ms``."""
        ended = {"decide": self.decided_at, "meet": self.formed_at, "restore": self.trains_at}
        found = {
            "silent": self.spent_us.get(Bucket.NOTICING, 0),
            "decide": self.deciding_us,
            "idle": self.spent_us.get(Bucket.IDLE, 0),
            "wait_for_seats": self.spent_us.get(Bucket.WAITING, 0),
            "meet": self.spent_us.get(Bucket.FORMING, 0),
            "restore": self.spent_us.get(Bucket.RESTORING, 0),
        }
        return {name: round(us / 1000, 1) for name, us in found.items() if us or ended.get(name) is not None}

    def plain(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            **{name: getattr(self, name) for name in self.__slots__ if not name.endswith("_us")},
            "total_ms": self.total_ms,
            "steps_lost": self.steps_lost,
            "phases_ms": self.phases(),
        }


class _Training(enum.Enum):
    STARTING = enum.auto()  # no member has trained yet
    TRAINED = enum.auto()
    OVER = enum.auto()  # ended; a later scheduler start may resume the job


@dataclass(slots=True)
class Recoveries:
    """Collects recoveries from events in ``rows``. A recovery in progress is the last row."""

    rows: list[Recovery] = field(default_factory=list)
    _open: Recovery | None = None
    _time: Goodput = field(default_factory=Goodput)
    _spent_us: dict[Bucket, int] = field(default_factory=dict)  # before the open recovery
    _stage: _Training = _Training.STARTING
    _reached: int = 0  # the highest step seen on the current line, or in a checkpoint
    _leaving: set[str] = field(default_factory=set)  # nodes asked to leave that have not left yet
    _absent: set[object] = field(default_factory=set)  # slots without a holder in the open recovery
    _formed: int = 0  # members of the last generation
    _members: int = 0  # members of the last generation that trained
    _lost_slots: set[object] = field(default_factory=set)  # in the open recovery; the node if unknown
    _left: set[str] = field(default_factory=set)  # nodes that left on purpose in the open recovery
    _has_left: bool = False  # whether a leaving node has left since every member trained

    def add(self, event: JobEvent) -> None:
        """Add one event."""
        self._reach(event)
        self._time.add(event)
        match event.kind:
            case EventKind.DECIDED:
                drain = event.more.get("drain")
                self._leaving.update(map(str, drain) if isinstance(drain, list) else ())
            case EventKind.LEFT if event.node in self._leaving and self._open is None:
                self._leaving.discard(event.node)
                self._has_left = True
            case EventKind.TRAINING:
                self._has_left = False
                self._close(event)
            case EventKind.ROUND if self._open is None and (self._leaving or self._has_left):
                pass  # the world changes as requested
            case EventKind.TRAINED | EventKind.INTERRUPTED | EventKind.FINISHED:
                self.rows = [row for row in self.rows if row is not self._open]
                self._open, self._stage = None, _Training.OVER
            case EventKind.CAUSE:  # it may arrive after the recovery
                self._explain(event)
            case EventKind.LOST | EventKind.ROUND if self._open is None and self._interrupts(event):
                self._begin(event)
            case _ if self._open is not None:
                self._go_on(self._open, event)

    def _interrupts(self, event: JobEvent) -> bool:
        """Return whether this loss or round begins a recovery.

        Before the first training, only a loss does.
        """
        if event.more.get("spare"):
            return False
        is_start = self._stage is _Training.STARTING and event.kind is EventKind.LOST
        return self._stage is _Training.TRAINED or is_start

    def _reach(self, event: JobEvent) -> None:
        """Update the highest known step, because a newly started scheduler does not know it."""
        match event.kind:
            case EventKind.GENERATION:
                self._formed = int(_number(event.more.get("members")))
            case EventKind.TRAINING:
                self._reached, self._members = event.step, self._formed
            case EventKind.STEP:
                self._reached = max(self._reached, event.step)
            case EventKind.COMMITTED:
                self._reached = max(self._reached, int(_number(event.more.get("point"))))

    def _begin(self, event: JobEvent) -> None:
        self._leaving.discard(event.node)
        if event.kind is EventKind.ROUND and event.more.get("gently"):
            return
        row = Recovery(len(self.rows) + 1, event.text, [], event.at, max(event.step, self._reached))
        if event.kind is EventKind.LOST:
            row.lost, row.cause = [event.node], loss_of(event)
        row.is_first_start = self._stage is _Training.STARTING
        self._open, self._spent_us = row, self._time.buckets()
        self._absent.clear()
        self._lost_slots.clear()
        self._left.clear()
        self._go_on(row, event)

    def _explain(self, event: JobEvent) -> None:
        """Replace the cause of the last recovery, if it began with the loss of this node."""
        rows = [*self.rows, *([self._open] if self._open is not None else [])]
        row = next((one for one in reversed(rows) if one.lost[:1] == [event.node]), None)
        if row is not None:
            row.cause = loss_of(event)

    def _measure(self, row: Recovery) -> None:
        """Update the time of each phase."""
        row.spent_us = {bucket: us - self._spent_us[bucket] for bucket, us in self._time.buckets().items()}

    def _begin_round(self, row: Recovery, event: JobEvent) -> None:
        """Add the recovery to the rows: the loss of a node that is not a member yet begins none.

        The time between the loss and the first round passes in that round's event.
        """
        if row in self.rows:
            return
        self.rows.append(row)
        for bucket in (Bucket.WAITING, Bucket.FORMING):
            if row.decided_at is None:
                row.deciding_us += row.spent_us[bucket]
                self._spent_us[bucket] += row.spent_us[bucket]
        self._spent_us[Bucket.IDLE] += row.spent_us[Bucket.IDLE]  # until this scheduler started
        row.decided_at = row.decided_at or event.at
        self._measure(row)

    def _go_on(self, row: Recovery, event: JobEvent) -> None:
        self._measure(row)
        match event.kind:
            case EventKind.LOST:
                if event.node not in row.lost:
                    row.lost.append(event.node)
                row.step = max(row.step, event.step)
                self._absent.add(event.more.get("slot"))
                if not event.more.get("spare"):
                    self._count_lost(row, event)
            case EventKind.LEFT:
                self._absent.add(event.more.get("slot"))
                self._left.add(event.node)
            case EventKind.RETIRED:
                self._absent.add(event.more.get("slot"))
                if event.node not in self._left:  # an earlier scheduler may have noticed its loss
                    self._count_lost(row, event)
            case EventKind.ROUND:
                self._begin_round(row, event)
                row.missing = str(event.more.get("missing", ""))
                row.step = max(row.step, event.step)
            case EventKind.SEATED | EventKind.PROMOTED | EventKind.RETURNED if event.more.get("slot") in self._absent:
                self._absent.discard(event.more.get("slot"))
                row.decided_at = (
                    row.decided_at or row.noticed_at
                )  # all members were lost, so none was left to begin a round
            case EventKind.GENERATION:
                row.formed_at, row.generation, row.restored_from = event.at, event.generation, event.text
                restore = event.more.get("restore")
                row.restore_step = restore if type(restore) is int else 0
                row.step = max(row.step, row.restore_step, event.step)  # a survivor may know a later one by now
                row.members = int(_number(event.more.get("members")))
                row.last_to_join = str(event.more.get("last", ""))

    def _count_lost(self, row: Recovery, event: JobEvent) -> None:
        self._lost_slots.add(event.more.get("slot", event.node))
        row.all_lost = 0 < self._members <= len(self._lost_slots)

    def _close(self, event: JobEvent) -> None:
        row, self._open, self._stage = self._open, None, _Training.TRAINED
        if row is not None and row.formed_at is not None:
            self._measure(row)
            row.trains_at, row.last_to_train = event.at, str(event.more.get("last", ""))


def loss_of(event: JobEvent) -> str:
    """Describe a loss, such as ``worker 1 was killed by …`` or ``worker 1: its process is gone``."""
    is_predicate = event.text.startswith(("was ", "is ", "ended ", "failed "))
    return f"worker {event.node}{' ' if is_predicate else ': '}{event.text}"


def recoveries_of(events: Iterable[JobEvent]) -> list[Recovery]:
    """Return the recoveries in these events."""
    fold = Recoveries()
    for event in events:
        fold.add(event)
    return fold.rows


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
