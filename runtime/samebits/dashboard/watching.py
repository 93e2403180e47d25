"""Collect what the page shows: the scheduler's pushes, the events on disk, and the last lines of the logs.

``look`` reads what is new, and ``state`` returns the result as plain values. The events record what happened; the
pushes describe the present. So a page that opens after the job's end works in the same way, without the pushes.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.account.event_log import asked_events, events_in, merged
from samebits.account.events import Event, Kind
from samebits.account.goodput import Bucket, Goodput
from samebits.account.job_view import JobView, WorkerView
from samebits.account.recoveries import Recoveries
from samebits.config import Settings
from samebits.errors import JournalDamagedError, StoreError
from samebits.launcher import job_spec
from samebits.launcher.processes import SCHEDULER, name_of, replaced_names
from samebits.launcher.scheduler_link import Linked, SchedulerLink, Unlinked
from samebits.service.status import seen_view
from samebits.store import event_log
from samebits.store.event_log import Tail

MOST_EVENTS = 5000
NAMES_S, NAMES_SOON_S = 2.0, 0.2
"""Seconds between requests for all workers' states in a large job; sooner after a worker was lost or joined."""
MOST_POINTS = 1500  # per line of a plot
LOG_BYTES = 64 << 10
MOST_LOGS = 64  # number of logs read for the loss
_LOSS_BYTES = 1 << 20
_LINE_BYTES = 200
_LOSS = re.compile(
    rb"\bstep\b\W*(\d{1,15})\W+loss\b(?:\s+is\b)?[\s:=]*([-+]?(?:\d[\d.]{0,30}(?:[eE][-+]?\d{1,3})?|nan|inf))"
)


@dataclass(frozen=True, slots=True)
class Changed:
    """The result of ``look``: new events, whether they replace all earlier ones, whether anything else changed."""

    events: list[Event]
    is_anew: bool
    is_told: bool


class Watch:
    """Observe one job. One thread calls these methods.

    Args:
        settings: the job's settings.
        link: the link to its scheduler; None to use only the files.
    """

    def __init__(self, settings: Settings, link: SchedulerLink | None) -> None:
        self._settings, self._link = settings, link
        self._tail = Tail(settings.recovery_path)
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._goodput, self._recoveries = Goodput(), Recoveries()
        self._steps: list[tuple[float, int]] = []
        self._view: JobView | None = None
        self._stored: JobView | None = None
        self._is_linked = False
        self._named_counts: tuple[object, ...] = ()  # counts in the view that last named all workers
        self._names_asked_at = float("-inf")
        self._asked = self._asked_bytes = 0  # number of operators' requests, and size of their file
        self._losses: dict[int, float] = {}  # by step
        self._logs: dict[Path, int] = {}  # bytes read of each log

    @property
    def source(self) -> int | None:
        """A descriptor that is readable while there is unread news from the scheduler; None without a link."""
        return None if self._link is None else self._link.fileno()

    def look(self) -> Changed:
        """Read what is new since the last call."""
        is_told = self._take_news()
        try:
            lines, is_anew = self._tail.new_lines()
        except (OSError, StoreError):
            lines, is_anew = [], False
        asked = self._asked_since(0 if is_anew else self._asked)
        events = merged(events_in(lines), asked)
        if is_anew:
            self.events.clear()
            self._goodput, self._recoveries, self._steps = Goodput(), Recoveries(), []
        for event in events:
            self._take(event)
        if events or self._view is None:
            self._stored = self._read_journal()
        return Changed(events, is_anew, is_told or bool(events))

    def _asked_since(self, known: int) -> list[Event]:
        """Return operators' requests after the first ``known`` ones."""
        try:
            path = self._settings.recovery_path / event_log.ASKED_FILE
            size = _size_of(path)
            if size == self._asked_bytes and known:
                return []
            found = asked_events(self._settings.recovery_path) if size else []
        except (OSError, StoreError):
            return []
        known = min(known, len(found)) if size >= self._asked_bytes else 0
        self._asked, self._asked_bytes = len(found), size
        return found[known:]

    def _take_news(self) -> bool:
        told = self._link.take() if self._link is not None else []
        for one in told:
            match one:
                case Linked():
                    self._is_linked = True
                case Unlinked():
                    self._is_linked = False
                case JobView():
                    self._is_linked = True
                    self._take_view(one)
        return bool(told)

    def _take_view(self, view: JobView) -> None:
        """Handle a view; pushes of a large job name no workers.

        The known workers are kept, and their states are requested if the view shows a change.
        """
        known, now = self._view, time.monotonic()
        counts = (view.job, view.generation, view.phase, view.alive, view.spares_alive)
        if view.nodes or known is None or known.job != view.job:
            self._view, self._named_counts = view, counts
            return
        self._view = view.with_nodes_of(known)
        pause_s = NAMES_S if counts == self._named_counts else NAMES_SOON_S
        if self._link is not None and now - self._names_asked_at >= pause_s:
            self._names_asked_at = now
            self._link.ask()

    def _take(self, event: Event) -> None:
        self.events.append(event)
        self._goodput.add(event)
        self._recoveries.add(event)
        if event.kind in (Kind.STEP, Kind.ROUND, Kind.TRAINING, Kind.TRAINED, Kind.INTERRUPTED):
            self._steps.append((event.at, event.step))
            if len(self._steps) > 2 * MOST_POINTS:
                del self._steps[1 : -MOST_POINTS // 2 : 2]  # thin out the older half

    def _read_journal(self) -> JobView | None:
        if not self._settings.enable_recovery:
            return None
        try:
            return seen_view(self._settings.recovery_path)
        except (JournalDamagedError, StoreError):
            return None

    # ---- what is shown

    @property
    def view(self) -> JobView | None:
        """The job as its scheduler reports it, otherwise from its journal."""
        return self._view if self._is_linked and self._view is not None else (self._stored or self._view)

    @property
    def is_linked(self) -> bool:
        """Whether a scheduler answers."""
        return self._is_linked

    def state(self) -> dict[str, Any]:
        """Return everything except the events, as plain values."""
        now, view = time.time(), self.view
        is_over = view is None or view.job_finished or view.ended is not None
        until = None if is_over else now
        buckets = self._goodput.buckets(until)
        wall_us = self._goodput.wall_us(until)
        return {
            "now": now,
            "linked": self._is_linked,
            "job": _job(view),
            "ranks": [_rank(worker, "worker") for worker in view.workers]
            + [_rank(worker, "spare") for worker in view.spares]
            + [_rank(worker, "retired") for worker in view.retired]
            if view is not None
            else [],
            "wall_s": wall_us / 1e6,
            "buckets_s": {str(bucket): us / 1e6 for bucket, us in buckets.items()},
            "goodput": buckets[Bucket.PRODUCTIVE] / wall_us if wall_us else None,
            "committed_at": max((event.at for event in self.events if event.kind is Kind.COMMITTED), default=None),
            "committed_step": max(
                (point for event in self.events if type(point := event.more.get("point")) is int), default=None
            ),
            "recoveries": [row.plain() for row in self._recoveries.rows[-200:]],
            "recovery_count": len(self._recoveries.rows),
            "losses": sum(event.kind is Kind.LOST for event in self.events),
        }

    def steps(self) -> list[tuple[float, int]]:
        """Return times and the step reached at each, thinned out."""
        return self._steps[-MOST_POINTS:]

    def losses(self) -> list[tuple[int, float]]:
        """Return steps and losses from the workers' logs, thinned out; rank 0 may have been several nodes."""
        nodes = self.view.nodes[:MOST_LOGS] if self.view is not None else ()
        has_grown = False
        for path in [self._settings.log_dir / f"{name_of(one.node)}.log" for one in nodes if "/" not in one.node]:
            size = _size_of(path)
            if size == self._logs.get(path, 0):
                continue
            grown = size - self._logs.get(path, 0)
            self._logs[path], has_grown = size, True
            data = _end_of(path, _LOSS_BYTES if grown < 0 else min(_LOSS_BYTES, grown + _LINE_BYTES))
            for step, loss in _LOSS.findall(data):
                if loss.count(b".") <= 1 and abs(float(loss)) < 1e30:
                    self._losses[int(step)] = float(loss)
        if has_grown and len(self._losses) > 2 * MOST_POINTS:
            steps = sorted(self._losses)
            for step in steps[1 : -MOST_POINTS // 2 : 2]:
                del self._losses[step]
        return sorted(self._losses.items())[-2 * MOST_POINTS :]

    def log_end(self, name: str) -> str | None:
        """Return the end of a process's log; None if no process of the job has that name."""
        settings = self._settings
        nodes = {worker.node for worker in (self.view.nodes if self.view is not None else ())}
        nodes |= set(job_spec.nodes_of(settings.log_dir, settings))
        names = {SCHEDULER, *map(name_of, nodes), *replaced_names(settings.log_dir, nodes)}
        if name not in names or "/" in name:
            return None
        return _end_of(settings.log_dir / f"{name}.log", LOG_BYTES).decode(errors="replace")


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _end_of(path: Path, limit: int) -> bytes:
    """Return the end of a log, or nothing if it cannot be opened; never follows a link or waits for a fifo."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        try:
            size = os.fstat(descriptor).st_size
            file.seek(max(0, size - limit))
            return file.read(limit)
        except OSError:
            return b""


def _job(view: JobView | None) -> dict[str, Any] | None:
    if view is None:
        return None
    return {
        "id": view.job,
        "name": view.name,
        "from_journal": view.from_journal,
        "term": view.term,
        "generation": view.generation,
        "phase": view.phase,
        "step": view.step,
        "alive": view.alive,
        "world_size": view.world_size,
        "wanted_size": view.wanted_size,
        "spares_alive": view.spares_alive,
        "joining": view.joining,
        "finished": view.job_finished,
        "ended": None if view.ended is None else {"kind": view.ended.kind.label, "cause": view.ended.cause},
        "first_cause": view.first_cause,
        "restore_step": view.restore_step,
        "seat_free_in_s": view.seat_free_in_s,
    }


def _rank(worker: WorkerView, role: str) -> dict[str, Any]:
    return {
        "role": role,
        "node": worker.node,
        "slot": worker.slot,
        "state": worker.presence.value,
        "activity": worker.activity,
        "step": worker.step,
        "host": worker.host.partition("#")[0],
        "pid": worker.identity.pid,
        "incarnation": worker.incarnation,
        "joining": worker.is_joining,
        "reason": worker.reason,
        "figures": dict(worker.figures),
    }
