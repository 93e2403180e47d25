"""Convert a job's events to spans for a tracing system.

No step ever waits for a trace, because only recorded events are read. A span is emitted once its start and end are
known. Reading the events again, or incrementally, therefore gives the same spans, each once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from samebits.account.events import EventKind, JobEvent
from samebits.account.recoveries import Recoveries, Recovery


@dataclass(frozen=True, slots=True)
class Span:
    """One span of a trace; times are in seconds since 1970, and ``parts`` are the child spans."""

    name: str
    began_at: float
    ended_at: float
    attributes: dict[str, str | int | float]
    parts: tuple[Span, ...] = ()


@dataclass(slots=True)
class Spans:
    """Converts events to spans. ``add`` returns the spans that end with an event."""

    job: str = ""
    _seated_from: float | None = None  # the scheduler's start, until its first round
    _round_at: float | None = None
    _committed_at: float | None = None
    _told: int = 0  # recoveries already returned
    _recoveries: Recoveries = field(default_factory=Recoveries)

    def add(self, event: JobEvent) -> list[Span]:
        """Process one event, and return the spans that it ends."""
        if type(job := event.more.get("job")) is str:
            self.job = job
        self._recoveries.add(event)
        match event.kind:
            case EventKind.SCHEDULER:
                self._seated_from = event.at
            case EventKind.ROUND:
                return self._round(event)
            case EventKind.GENERATION:
                return self._generation(event)
            case EventKind.TRAINING:
                self._committed_at = event.at
                return self._recovered()
            case EventKind.COMMITTED:
                return self._committed(event)
        return []

    def _span(self, name: str, began_at: float, event: JobEvent, **more: str | int | float) -> Span:
        shared: dict[str, str | int | float] = {"samebits.job": self.job, "samebits.generation": event.generation}
        mine = {f"samebits.{key}": value for key, value in more.items()}
        return Span(name, min(began_at, event.at), event.at, shared | mine)

    def _round(self, event: JobEvent) -> list[Span]:
        if event.more.get("gently"):
            return []
        self._round_at = event.at
        began_at, self._seated_from = self._seated_from, None
        return [] if began_at is None else [self._span("register", began_at, event, term=event.term)]

    def _generation(self, event: JobEvent) -> list[Span]:
        began_at, self._round_at = self._round_at, None
        if began_at is None:
            return []
        members = event.more.get("members")
        more = {"members": members} if type(members) is int else {}
        return [self._span("form", began_at, event, last_to_join=str(event.more.get("last", "")), **more)]

    def _committed(self, event: JobEvent) -> list[Span]:
        """Return the span since the last point or the start of training, with the time that steps have waited."""
        began_at, self._committed_at = self._committed_at, event.at
        if began_at is None:
            return []
        point, stalled_ms = event.more.get("point"), event.more.get("stalled_ms")
        more: dict[str, str | int | float] = {"step": point} if type(point) is int else {}
        if isinstance(stalled_ms, int | float):
            more["stalled_ms"] = stalled_ms
        return [self._span("checkpoint", began_at, event, **more)]

    def _recovered(self) -> list[Span]:
        rows = [row for row in self._recoveries.rows[self._told :] if row.trains_at is not None]
        self._told = len(self._recoveries.rows)
        return [_recovery(row, self.job) for row in rows]


def _recovery(row: Recovery, job: str) -> Span:
    shared: dict[str, str | int | float] = {"samebits.job": job, "samebits.generation": row.generation}
    parts, at = [], row.began_at
    for name, ms in row.phases().items():
        parts.append(Span(f"recover.{name}", at, at + ms / 1000, shared))
        at += ms / 1000
    more: dict[str, str | int | float] = {
        "samebits.cause": row.cause,
        "samebits.lost": ",".join(row.lost),
        "samebits.step": row.step,
        "samebits.steps_lost": row.steps_lost,
        "samebits.all_lost": row.all_lost,
        "samebits.restored_from": row.restored_from,
    }
    return Span("recover", row.began_at, max(at, row.trains_at or at), shared | more, tuple(parts))
