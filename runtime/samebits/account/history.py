"""Read a job's events, and compute its statistics: time spent, goodput, recoveries.

The page, the metrics, the report and the commands all show these statistics, so they agree. A reader that follows the
event log remembers the last line, so it repeats nothing when a file is rotated.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.account.event_log import asked_events, events_in, merged, read_events
from samebits.account.events import EventKind, JobEvent
from samebits.account.goodput import Bucket, goodput_of
from samebits.account.recoveries import Recoveries, Recovery, loss_of, recoveries_of
from samebits.core.end_kinds import EndKind
from samebits.core.replacement_names import root_of, titled
from samebits.errors import StoreError, UsageError
from samebits.printable import counted, listed
from samebits.store.text_log import Tail

LOOK_S = 0.25
PATIENCE_LOOKS = 4  # polls without news after the job's end, before reading stops


class EventStream:
    """Reads the events of the job in this folder."""

    def __init__(self, recovery_path: Path) -> None:
        self._path, self._tail = recovery_path, Tail(recovery_path)
        self._last = ""
        self._asked = 0

    def new(self) -> list[JobEvent]:
        """Return the events since the last call; the first call returns all events.

        Raises:
            StoreError: the disk reports an error, or a file belongs to another user.
        """
        lines, is_anew = self._tail.new_lines()
        if is_anew and self._last in lines:
            lines = lines[len(lines) - lines[::-1].index(self._last) :]
        if lines:
            self._last = lines[-1]
        asked = asked_events(self._path)
        new, self._asked = asked[min(self._asked, len(asked)) :], len(asked)
        return [event for event in merged(events_in(lines), new) if event.kind is not EventKind.CARRIED]

    def all(self, *, follows: bool, sleep: Callable[[float], object] = time.sleep) -> Iterator[JobEvent]:
        """Yield every event and, with ``follows``, also new ones until the job is finished."""
        quiet, is_finished = 0, False
        while True:
            events = self.new()
            for event in events:
                is_finished = event.kind is EventKind.FINISHED or (
                    is_finished and event.kind is not EventKind.SCHEDULER
                )
                yield event
            quiet = 0 if events else quiet + 1
            if not follows or (is_finished and quiet >= PATIENCE_LOOKS):
                return
            sleep(LOOK_S)


class RecoveryFeed:
    """The completed recoveries of the job in this folder.

    Attributes:
        over: all completed recoveries, according to the events read so far.
        trained: the last generation in which every member trained, according to the events read so far; 0 for none.
    """

    def __init__(self, recovery_path: Path) -> None:
        self._stream, self._fold = EventStream(recovery_path), Recoveries()
        self.trained = 0
        self.over: list[Recovery] = []
        self.new()

    def new(self) -> list[Recovery]:
        """Return the recoveries completed since the last call, or since this object was created.

        Return [] if the events cannot be read.
        """
        with contextlib.suppress(StoreError):
            for event in self._stream.new():
                self._fold.add(event)
                if event.kind is EventKind.TRAINING:
                    self.trained = event.generation
        before = len(self.over)
        self.over = [row for row in self._fold.rows if row.total_ms is not None]
        return self.over[before:]

    @property
    def lost_s(self) -> float:
        """Return the duration of all completed recoveries in seconds."""
        return sum(row.total_ms or 0.0 for row in self.over) / 1000


_QUIET = {EventKind.STEP, EventKind.CARRIED}
_SHOWN_RECOVERIES = 3


def required_events(recovery_path: Path) -> list[JobEvent]:
    """Return the job's events.

    Raises:
        UsageError: there are no events.
    """
    events = read_events(recovery_path)
    if not events:
        raise UsageError(
            f"RECOVERY_PATH={recovery_path} holds no events. Fix: change to the folder the job was started in; "
            "only jobs with ENABLE_RECOVERY=1 have a history"
        )
    return events


def account(events: Sequence[JobEvent], now: float | None = None, *, has_steps: bool = True) -> dict[str, Any]:
    """Return the job's statistics as plain values: identity, time, progress, buckets and recoveries.

    Args:
        events: the job's events.
        now: the time, in seconds since 1970, up to which an unfinished job counts; None for its last event.
        has_steps: False for a plain job. Its goodput is unknown, because only its script knows which steps were redone.
    """
    fold = goodput_of(events)
    wall_us = fold.wall_us(now)
    buckets_s = {str(bucket): us / 1e6 for bucket, us in fold.buckets(now).items()}
    jobs = [str(event.more["job"]) for event in events if event.more.get("job")]
    points = [event for event in events if event.kind is EventKind.COMMITTED]
    ends = [event for event in events if event.kind in (EventKind.FINISHED, EventKind.INTERRUPTED, EventKind.SCHEDULER)]
    return {
        "job": jobs[-1] if jobs else "",
        "name": next((event.text for event in events if event.kind is EventKind.JOB), ""),
        "began_at": None if fold.began_us is None else fold.began_us / 1e6,
        "wall_s": wall_us / 1e6,
        "step": max((event.step for event in events), default=0),
        "generation": max((event.generation for event in events), default=0),
        "terms": max((event.term for event in events), default=0),
        "losses": sum(event.kind is EventKind.LOST for event in events),
        "end": str(ends[-1].kind) if ends and ends[-1].kind is not EventKind.SCHEDULER else None,
        "committed_step": max((_whole(event.more.get("point")) for event in points), default=0),
        "committed_at": max((event.at for event in points), default=None),
        "goodput": buckets_s[Bucket.PRODUCTIVE] * 1e6 / wall_us if wall_us and has_steps else None,
        "buckets_s": buckets_s,
        "recoveries": [row.plain() for row in recoveries_of(events)],
    }


def summary(events: Sequence[JobEvent], heard: int = 0, *, has_steps: bool = True) -> list[str]:
    """Return a few lines for people: progress, time, the slowest recoveries, and time by category.

    Args:
        events: as in :func:`account`.
        heard: a step that the job is known to have completed.
        has_steps: False for a plain job, whose steps only its script counts.
    """
    told = account(events, has_steps=has_steps)
    rows = recoveries_of(events)
    goodput = "" if told["goodput"] is None else f", {told['goodput']:.1%} of it productive"
    recovered = f"{len(rows)} recover{'ies' if len(rows) != 1 else 'y'}"
    if len(rows) > _SHOWN_RECOVERIES:
        recovered += f", of which the slowest {_SHOWN_RECOVERIES}:"
    last = max(told["step"], heard)
    steps = f"{counted(last, 'step')} in " if has_steps and last else "ran for "
    lines = [f"{steps}{duration(told['wall_s'])}{goodput}; {recovered}"]
    slowest = sorted(rows, key=lambda row: row.total_ms or 0, reverse=True)[:_SHOWN_RECOVERIES]
    lines += [recovery_line(row, has_steps=has_steps) for row in sorted(slowest, key=lambda row: row.number)]
    names = _BUCKETS if has_steps else {**_BUCKETS, Bucket.PRODUCTIVE: "workers running"}
    spent = [f"{names[Bucket(name)]} {duration(s)}" for name, s in told["buckets_s"].items() if s >= 0.0005]
    return [*lines, f"time: {', '.join(spent)}"]


_BUCKETS = {
    Bucket.PRODUCTIVE: "productive",
    Bucket.START_UP: "start-up",
    Bucket.NOTICING: "losses not yet noticed",
    Bucket.FORMING: "workers joining",
    Bucket.WAITING: "waiting for replacements",
    Bucket.RESTORING: "restoring",
    Bucket.REDONE: "redone steps",
    Bucket.STALLS: "waiting for saves",
    Bucket.IDLE: "idle",
}
_PHASES = {
    "decide": "decision",
    "idle": _BUCKETS[Bucket.IDLE],
    "wait_for_seats": _BUCKETS[Bucket.WAITING],
    "meet": _BUCKETS[Bucket.FORMING],
    "restore": _BUCKETS[Bucket.RESTORING],
}
"""The names of a recovery's phases, equal to those of their categories of time.

The decision has no category of its own: as a rule, it counts as waiting for replacements.
"""


def recovery_line(row: Recovery, *, has_steps: bool = True) -> str:
    """Return a line about one recovery, which has the same form everywhere."""
    at = time.strftime("%H:%M:%S", time.localtime(row.noticed_at))
    shown = {name: duration(ms / 1000) for name, ms in row.phases().items() if ms >= 0.5}
    parts = [f"silent for {shown.pop('silent')}"] if "silent" in shown else []
    phases = ", then ".join([*parts, ", ".join(f"{_PHASES[name]} {took}" for name, took in shown.items())])
    began = "training began" if row.is_first_start else "all workers trained again"
    took = "not over yet" if row.total_ms is None else f"{began} after {duration(row.total_ms / 1000)} ({phases})"
    redone = "" if row.is_first_start else f", {row.steps_lost_text()} redone"
    step = f", step {row.step}" if has_steps else ""
    several = f"workers {listed(map(root_of, row.lost))} were lost; " if len(row.lost) > 1 else ""
    text = f"recovery {row.number} at {at}{step}: {several}{titled(row.cause)}; {took}"
    return text + (redone if has_steps and row.formed_at is not None else "")


@dataclass(slots=True)
class StepColumn:
    """Computes the step to show with each event, in order.

    An event has the step that its scheduler start knew of, which may be lower than in earlier events.
    """

    _reached: int = 0

    def of(self, event: JobEvent) -> int:
        """Process the next event; return its step."""
        match event.kind:
            case EventKind.COMMITTED:
                point = _whole(event.more.get("point"))
                self._reached = max(self._reached, point)
                return point
            case EventKind.GENERATION:
                self._reached = _whole(event.more.get("restore"))
            case _:
                self._reached = max(self._reached, event.step)
        return self._reached


def line(event: JobEvent, *, step: int | None) -> str:
    """Return one event as a line.

    ``step`` comes from ``StepColumn``; it is None for a job whose steps only its script counts.
    """
    day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at)) + f".{int(event.at % 1 * 1000):03d}"
    parts = [day, f"{event.kind:<11}", f"generation {event.generation:<3}"]
    if step is not None:
        parts.append(f"step {step:<7}")
    text = loss_of(event) if event.node else event.text
    if event.kind is EventKind.INTERRUPTED:
        kind = EndKind.__members__.get(str(event.more.get("end")).upper(), EndKind.INTERRUPTED)
        text = f"the job {kind.words_with(_whole(event.more.get('status')))}: {text}"
    after = event.more.get("after_ms")
    tail = f" (after {duration(after / 1000)})" if isinstance(after, int | float) else ""
    point = (
        f"step {_whole(event.more.get('point'))} is on every rank's disk" if event.kind is EventKind.COMMITTED else ""
    )
    return titled("  ".join([*parts, f"{text or point}{tail}"]).rstrip())


def duration(seconds: float) -> str:
    """Format a duration, such as ``90 ms``, ``4.2 s``, ``3 min 5 s`` or ``2 h 10 min``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def summary_of_folder(recovery_path: Path, heard: int, *, has_steps: bool = True) -> tuple[int, list[str]]:
    """Return the last step (at least ``heard``) and the summary, which is empty without events.

    A job without steps (``has_steps``) is at step 0.
    """
    try:
        events = read_events(recovery_path)
    except StoreError:
        events = []
    if not events:
        return heard, []
    step = max(events[-1].step, heard) if has_steps else 0
    return step, summary(events, heard=heard, has_steps=has_steps)


def _whole(value: object) -> int:
    return value if type(value) is int else 0
