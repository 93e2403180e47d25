"""Collect the page's data: the scheduler's messages, the events on disk, rank 0's reports, and the ends of logs.

``look`` reads new data, and ``state`` returns the result as plain values. The events record what has happened; the
scheduler's messages describe the current state. A page that is opened after the job's end works in the same way,
without these messages.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.account.event_log import asked_events, events_in, merged
from samebits.account.events import EventKind, JobEvent
from samebits.account.goodput import Bucket, Goodput
from samebits.account.job_view import JobView, WorkerView
from samebits.account.recoveries import Recoveries
from samebits.config import Settings
from samebits.dashboard.incident import Incident, IncidentState, incident_of, still_since, without_remedy
from samebits.errors import JournalDamagedError, StoreError
from samebits.launcher import job_spec
from samebits.launcher.processes import SCHEDULER, name_of, replaced_names
from samebits.launcher.progress_line import shown_value
from samebits.launcher.scheduler_link import Linked, SchedulerLink, Unlinked
from samebits.launcher.supervising import supervisor_of
from samebits.launcher.worker_logs import size_of
from samebits.service.status import seen_view
from samebits.store import text_log
from samebits.store.process_identity import host_id
from samebits.store.progress_report import ProgressReport, read_report, report_file
from samebits.store.text_log import Tail

MOST_EVENTS = 5000
NAMES_S, NAMES_SOON_S = 2.0, 0.2
"""Seconds between requests for all workers' states in a large job; shorter after a worker was lost or joined."""
MOST_POINTS = 1500  # per line of a plot
LOG_BYTES = 64 << 10
PACE_S = 120.0  # the speed is measured over the last two minutes
STEPPED = frozenset({EventKind.STEP, EventKind.ROUND, EventKind.TRAINING, EventKind.TRAINED, EventKind.INTERRUPTED})
AWAY_AFTER_S = 3.0  # how long this server tries to reach a scheduler before it reports that none answers
JOURNAL_S = 1.0  # how often processes are examined while no scheduler answers


@dataclass(frozen=True, slots=True)
class Changed:
    """The result of ``look``.

    It contains the new events, whether they replace all earlier ones, and whether anything has changed.
    """

    events: list[JobEvent]
    is_anew: bool
    is_told: bool


class JobWatch:
    """Observes one job. Only one thread may call its methods.

    Args:
        settings: the job's settings.
        link: the link to the job's scheduler; None to use only the files.
    """

    def __init__(self, settings: Settings, link: SchedulerLink | None) -> None:
        self._settings, self._link = settings, link
        self._tail = Tail(settings.recovery_path)
        self.events: deque[JobEvent] = deque(maxlen=MOST_EVENTS)
        self._goodput, self._recoveries = Goodput(), Recoveries()
        self._steps: list[tuple[float, int | None]] = []  # None: training stopped
        self._view: JobView | None = None
        self._stored: JobView | None = None
        self._is_linked = False
        self._named_counts: tuple[object, ...] = ()  # counts in the view that last named all workers
        self._names_asked_at = float("-inf")
        self._asked = self._asked_bytes = 0  # number of operators' requests, and size of their file
        self._began_at = 0.0  # time of the job's first event; an older report belongs to another job
        self._report: ProgressReport | None = None
        self._report_stamp: tuple[str, int] = ("", 0)
        self._losses: list[tuple[int, float]] = []
        self._viewed_at = 0.0  # when the scheduler sent its last view
        self._still_since: float | None = None
        self._away_since: float | None = None  # when a scheduler that had answered was gone
        self._opened_at = time.monotonic()
        self._stored_at = float("-inf")

    @property
    def source(self) -> int | None:
        """A descriptor that is readable if the scheduler has sent something, or None without a connection."""
        return None if self._link is None else self._link.fileno()

    def look(self) -> Changed:
        """Read everything that is new since the last call."""
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
            self._began_at = 0.0
        for event in events:
            self._take(event)
        now = time.monotonic()
        if events or (not self._is_linked and now - self._stored_at >= JOURNAL_S):
            self._stored, self._stored_at = self._read_journal(), now
        self._read_report()
        return Changed(events, is_anew, is_told or bool(events))

    def _asked_since(self, known: int) -> list[JobEvent]:
        """Return operators' requests after the first ``known`` ones."""
        try:
            path = self._settings.recovery_path / text_log.ASKED_FILE
            size = size_of(path)
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
                    self._is_linked, self._away_since = True, None
                case Unlinked():
                    self._away_since = time.time() if self._is_linked else self._away_since
                    self._is_linked, self._stored_at = False, float("-inf")
                case JobView():
                    self._is_linked, self._away_since, self._viewed_at = True, None, time.time()
                    if not one.standstill:
                        self._still_since = None
                    elif self._still_since is None:
                        self._still_since = still_since(one.standstill, self._viewed_at)
                    self._take_view(one)
        return bool(told)

    def _take_view(self, view: JobView) -> None:
        """Process a snapshot of the job.

        Snapshots of a large job contain no workers. The known workers are then kept, and their states are requested if
        the snapshot shows a change.
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

    def _take(self, event: JobEvent) -> None:
        self.events.append(event)
        self._goodput.add(event)
        self._recoveries.add(event)
        self._began_at = self._began_at or event.at
        if event.kind in STEPPED:
            is_gentle = event.kind is EventKind.ROUND and event.more.get("gently")
            is_stop = event.kind not in (EventKind.STEP, EventKind.TRAINING) and not is_gentle
            self._steps.append((event.at, event.step))
            if is_stop:
                self._steps.append((event.at, None))
        elif event.kind is EventKind.SCHEDULER and self._steps:
            self._steps.append((event.at, None))  # nothing was recorded while the scheduler was away
        if len(self._steps) > 2 * MOST_POINTS:
            older, newer = self._steps[: -MOST_POINTS // 2], self._steps[-MOST_POINTS // 2 :]
            kept = [one for place, one in enumerate(older) if one[1] is None or place % 2 == 0]
            self._steps = [*kept[-MOST_POINTS:], *newer]

    def _read_report(self) -> None:
        """Read rank 0's report on this machine, unless it belongs to an earlier job."""
        view = self.view
        node = view.workers[0].node if view is not None and view.workers else ""
        if not node or "/" in node:
            return
        try:
            stamp_ns = report_file(self._settings.log_dir, node).stat().st_mtime_ns
        except OSError:
            return
        if (node, stamp_ns) == self._report_stamp or stamp_ns / 1e9 < self._began_at:
            return
        self._report_stamp = node, stamp_ns
        report = read_report(self._settings.log_dir, node)
        if report is None:
            return
        self._report = report
        loss = report.values.get("loss")
        if loss is None or not math.isfinite(loss):
            return
        while self._losses and self._losses[-1][0] >= report.step:
            self._losses.pop()  # steps that were rolled back
        self._losses.append((report.step, loss))
        if len(self._losses) > 2 * MOST_POINTS:
            del self._losses[1 : -MOST_POINTS // 2 : 2]  # thin out the older half

    def _read_journal(self) -> JobView | None:
        if not self._settings.enable_recovery:
            return None
        try:
            return seen_view(self._settings.recovery_path)
        except (JournalDamagedError, StoreError):
            return None

    # ---- the data shown

    @property
    def view(self) -> JobView | None:
        """The job's state from its scheduler or, if none answers, from its journal."""
        return self._view if self._is_linked and self._view is not None else (self._stored or self._view)

    @property
    def is_linked(self) -> bool:
        """Whether a scheduler answers."""
        return self._is_linked

    def incident(self, now: float) -> Incident | None:
        """Return the most important incident, for the banner."""
        view, reported = self.view, None
        if self._report is not None:
            reported = self._report.step, self._report_stamp[1] / 1e9
        free_in_s = self._view.seat_free_in_s if self._is_linked and self._view is not None else None
        free_at = None if free_in_s is None else self._viewed_at + free_in_s
        return incident_of(
            IncidentState(
                view,
                self._settings,
                now,
                self.events,
                self._recoveries.rows,
                is_away=self._is_away(),
                away_since=self._away_since,
                is_supervised=supervisor_of(self._settings.log_dir) is not None,
                host=host_id(),
                seat_free_at=free_at if free_at is not None and free_at > now else None,
                still_since=self._still_since,
                reported=reported,
            )
        )

    def _is_away(self) -> bool:
        """Return whether a scheduler should answer, but none does."""
        if self._link is None or self._is_linked:
            return False
        return self._away_since is not None or time.monotonic() - self._opened_at >= AWAY_AFTER_S

    def _steps_per_s(self, now: float) -> float | None:
        """Return the speed over the last minutes of the current training, or None while unknown."""
        latest: list[tuple[float, int]] = []
        for at, step in reversed(self._steps):
            if step is None or now - at > PACE_S or (latest and step > latest[-1][1]):
                break
            latest.append((at, step))
        if len(latest) < 2 or latest[0][0] - latest[-1][0] < 1.0:
            return None
        return (latest[0][1] - latest[-1][1]) / (latest[0][0] - latest[-1][0])

    def _progress(self, now: float, job: dict[str, Any] | None) -> dict[str, Any]:
        """Return the values that the header shows next to the phase."""
        report = self._report
        trains = job is not None and job["phase"] == "training" and not job["stands_still"]
        pace = self._steps_per_s(now) if trains else None
        total = report.total_steps if report is not None else None
        left = total - job["step"] if job is not None and total else None
        return {
            "total_steps": total,
            "steps_per_s": pace,
            "left_s": max(0, left) / pace if pace and left is not None else None,
            "values": {} if report is None else {name: shown_value(one) for name, one in report.values.items()},
            "reported_step": None if report is None else report.step,
        }

    def state(self) -> dict[str, Any]:
        """Return everything except the events, as plain values."""
        now, view = time.time(), self.view
        job, incident = _job(view), self.incident(now)
        if job is not None and self._report is not None:
            job["step"] = max(job["step"], self._report.step) if job["from_journal"] else job["step"]
        is_over = view is None or view.job_finished or view.ended is not None
        until = None if is_over else now
        buckets = self._goodput.buckets(until)
        wall_us = self._goodput.wall_us(until)
        return {
            "now": now,
            "linked": self._is_linked,
            "job": job,
            "incident": None if incident is None else incident.plain(),
            "away_known": self._away_since is not None,
            "progress": self._progress(now, job),
            "ailments": [] if view is None else list(view.ailments),
            "stragglers": [] if view is None else list(view.stragglers),
            "ranks": [_rank(worker, "worker") for worker in view.workers]
            + [_rank(worker, "spare") for worker in view.spares]
            + [_rank(worker, "retired") for worker in view.retired]
            if view is not None
            else [],
            "wall_s": wall_us / 1e6,
            "buckets_s": {str(bucket): us / 1e6 for bucket, us in buckets.items()},
            "goodput": buckets[Bucket.PRODUCTIVE] / wall_us if wall_us and not self._settings.plain else None,
            "committed_at": max((event.at for event in self.events if event.kind is EventKind.COMMITTED), default=None),
            "committed_step": max(
                (point for event in self.events if type(point := event.more.get("point")) is int), default=None
            ),
            "recoveries": [{**row.plain(), "cause": without_remedy(row.cause)} for row in self._recoveries.rows[-200:]],
            "recovery_count": len(self._recoveries.rows),
            "losses": sum(event.kind is EventKind.LOST for event in self.events),
        }

    def steps(self) -> list[tuple[float, int | None]]:
        """Return a limited number of times with the step reached at each; None marks a stop of training."""
        return self._steps[-MOST_POINTS:]

    def losses(self) -> list[tuple[int, float]]:
        """Return the steps and losses that the script reported while this server was watching."""
        return self._losses[-MOST_POINTS:]

    def log_end(self, name: str) -> str | None:
        """Return the end of a process's log, or None if no process of the job has that name."""
        settings = self._settings
        nodes = {worker.node for worker in (self.view.nodes if self.view is not None else ())}
        nodes |= set(job_spec.nodes_of(settings.log_dir, settings))
        names = {SCHEDULER, *map(name_of, nodes), *replaced_names(settings.log_dir, nodes)}
        if name not in names or "/" in name:
            return None
        return _end_of(settings.log_dir / f"{name}.log", LOG_BYTES).decode(errors="replace")


def shown_events(events: Iterable[JobEvent]) -> list[dict[str, Any]]:
    """Return events for the page, without remedies that were only expected at the time."""
    return [
        {**event.plain(), "text": without_remedy(event.text)} if event.kind in _WITH_CAUSES else event.plain()
        for event in events
    ]


_WITH_CAUSES = frozenset({EventKind.CAUSE, EventKind.INTERRUPTED, EventKind.NOTE})


def _end_of(path: Path, limit: int) -> bytes:
    """Return the end of a log, or b"" if it cannot be opened. Links are not followed, and a fifo is not awaited."""
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
        "joining": max(0, view.joining - view.held_back),
        "held_back": view.held_back,
        "finished": view.job_finished,
        "ended": None if view.ended is None else {"words": view.ended.words, "cause": without_remedy(view.ended.cause)},
        "stands_still": bool(view.standstill),
        "first_cause": without_remedy(view.first_cause),
        "restore_step": view.restore_step,
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
