"""Define a job's events, and derive them from the scheduler's passes.

The history, the page, the metrics and the report all use these events. They are derived from each pass of a scheduler:
from its records, its messages, and the few heartbeats that report a new activity. The scheduler produces these in any
case, so a lost event changes no decision.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samebits.core.messages import (
    Activity,
    Credential,
    GenerationStarted,
    Heartbeat,
    Join,
    ReportEnvelope,
    RoundId,
    RoundOpened,
)
from samebits.core.ready import Note, Send, Severity
from samebits.core.records import (
    CauseFound,
    GenerationCommitted,
    JobCreated,
    JobFinished,
    JobInterrupted,
    JobRebuilt,
    PointCommitted,
    Record,
    RolledBack,
    SeatGranted,
    SeatLeft,
    SeatLost,
    SeatResumed,
    SeatRetired,
    SlotGiven,
    SpareAdmitted,
    TermStarted,
    TrainingFinished,
)
from samebits.core.reports import SavedPoints
from samebits.core.state import JobState
from samebits.printable import IN_LOGS, printable, shortened

NAMED = 16  # events of one kind in one pass; a single event counts the others
MAX_TEXT = 600
SHORTEST_SAMPLE_S, LONGEST_SAMPLE_S = 1.0, 60.0
SAMPLES_A_STRETCH = 100
"""Steps are recorded at intervals of 1/100 of the time since training began, so less and less often."""


class EventKind(enum.StrEnum):
    """The subject of an event."""

    JOB = "job"
    SCHEDULER = "scheduler"
    SEATED = "seated"
    RETURNED = "returned"
    SPARE = "spare"
    PROMOTED = "promoted"
    LOST = "lost"
    CAUSE = "cause"  # more details on a loss
    LEFT = "left"
    RETIRED = "retired"
    ROUND = "round"
    GENERATION = "generation"
    TRAINING = "training"
    STEP = "step"
    COMMITTED = "committed"
    TRAINED = "trained"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"
    REBUILT = "rebuilt"
    ROLLED_BACK = "rolled back"
    DECIDED = "decided"
    NOTE = "note"
    ASKED = "asked"  # by a user; not made by the scheduler
    CARRIED = "carried"


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event of a job.

    Attributes:
        at: seconds since 1970; never decreases within one scheduler start.
        step: the highest step that any worker had completed according to heartbeats.
        more: further plain values.
    """

    kind: EventKind
    at: float
    term: int = 0
    generation: int = 0
    step: int = 0
    node: str = ""
    text: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, text in (("node", self.node), ("text", self.text)):
            if not text.isprintable():
                object.__setattr__(self, name, printable(text))

    def plain(self) -> dict[str, Any]:
        """Return the event as values for JSON, without empty fields."""
        head = {"kind": str(self.kind), "at": round(self.at, 6), "term": self.term}
        tail = {"generation": self.generation, "step": self.step, "node": self.node, "text": self.text}
        return {**head, **{name: value for name, value in tail.items() if value}, **self.more}


STALLS_TOLD = frozenset({EventKind.STEP, EventKind.COMMITTED, EventKind.TRAINED})
"""Events that state in ``stalled_ms`` how long steps have waited for saves since the last such event."""
_KINDS = frozenset(map(str, EventKind))
_HEAD = ("kind", "at", "term", "generation", "step", "node", "text")


def event_in(plain: object) -> JobEvent | None:
    """Parse an event from JSON, or return None if it is invalid or unknown to this version."""
    if not isinstance(plain, dict) or not isinstance(plain.get("kind"), str) or plain["kind"] not in _KINDS:
        return None
    at, numbers = plain.get("at"), [plain.get(name, 0) for name in ("term", "generation", "step")]
    texts = [plain.get(name, "") for name in ("node", "text")]
    is_sound = isinstance(at, int | float) and abs(at) < 1e12 and all(isinstance(one, str) for one in texts)
    if not is_sound or not all(type(one) is int and abs(one) < 1 << 63 for one in numbers):
        return None
    try:
        more = {name: _sound(value) for name, value in plain.items() if name not in _HEAD}
    except ValueError:
        return None
    term, generation, step = numbers
    node, text = texts
    return JobEvent(EventKind(plain["kind"]), float(at or 0), term, generation, step, node, text, more)


def _sound(value: Any) -> Any:
    """Make texts from JSON printable.

    Raises:
        ValueError: a number is too large for sums.
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int | float) and not abs(value) < 1 << 63:
        raise ValueError("a number of more than 64 bits")
    if isinstance(value, list):
        return [_sound(one) for one in value]
    return {printable(name): _sound(one) for name, one in value.items()} if isinstance(value, dict) else value


class Chronicle:
    """Derives the events of one scheduler start.

    Args:
        state: the core's durable state, read-only.
        step: returns the step in a node's last heartbeat; 0 if unknown.
        wall_s: the Unix time at which ``now`` is 0.
    """

    def __init__(self, state: JobState, step: Callable[[str], int], wall_s: float) -> None:
        self._state, self._step_of, self._wall_s = state, step, wall_s
        self._round: tuple[RoundId, bool] | None = None
        self._round_at = 0.0
        self._joined_last = ""
        self._awaited = _members(state.generation)  # members of the last generation that do not train yet
        self._began = 0  # the last generation committed by this scheduler start
        self._trains_since: float | None = None
        self._sampled_at = 0.0
        self._step = 0
        self._committed: int | None = None  # a point without an event yet
        self._committed_at = 0.0
        self._stalled_s: dict[str, tuple[int, float]] = {}  # by node: incarnation and last reported total
        self._waited_s: dict[str, float] = {}  # by node: the share of this generation
        self._waits_told_s = 0.0  # already in events of this generation
        self._causes = {(cause.generation, cause.node) for cause in state.causes}  # already known
        self._events: list[JobEvent] = []

    def heard(self, message: object, now: float) -> None:
        """Process a worker's message."""
        if type(message) is Join:
            self._joined_last = message.sender.node
        elif type(message) is Heartbeat and message.activity is Activity.TRAINING:
            self._trains(message, now)
        elif type(message) is ReportEnvelope and type(message.body) is SavedPoints:
            self._take_stall(message.sender, message.body.stalled_s)

    def decided(self, text: str, drain: Sequence[str], now: float) -> None:
        """Record a decision of an operator or launcher."""
        if text:
            self._look()
            self._add(EventKind.DECIDED, now, text=text, more={"drain": list(drain[:NAMED])} if drain else None)

    def take(
        self, records: Iterable[Record], sends: Iterable[Send], notes: Sequence[Note], now: float
    ) -> list[JobEvent]:
        """Return the events of one pass, in order."""
        if self._trains_since is not None and now >= self._sample_at():
            self._look()
            self._add(EventKind.STEP, now)
            self._sampled_at = now
            self._tell_committed(now)
        counts: dict[EventKind, int] = {}
        for record in records:
            self._note(record, now, counts)
        for kind, count in counts.items():
            if count > NAMED:
                self._add(kind, now, text=f"{count - NAMED} more", more={"count": count - NAMED})
        self._note_round(sends, now)
        reasons = [
            event.text
            for event in self._events
            if event.kind in (EventKind.LOST, EventKind.CAUSE, EventKind.ROLLED_BACK)
        ]
        for note in notes[: 2 * NAMED]:
            if note.level is Severity.WARNING and not any(reason in note.text for reason in reasons):
                self._add(EventKind.NOTE, now, text=note.text)
        events, self._events = self._events, []
        return events

    def _sample_at(self) -> float:
        since = self._trains_since or 0.0
        return self._sampled_at + self._pause_s(since)

    def _pause_s(self, since: float) -> float:
        share = (self._sampled_at - since) / SAMPLES_A_STRETCH
        return min(max(share, SHORTEST_SAMPLE_S), LONGEST_SAMPLE_S)

    def _take_stall(self, sender: Credential, stalled_s: float) -> None:
        """Count newly reported waiting times of a process.

        The first report of a process that an earlier scheduler start had seated is not counted again.
        """
        node, incarnation = sender.node, sender.incarnation
        since, before = self._stalled_s.get(node, (incarnation, stalled_s))
        grown = stalled_s - (before if since == incarnation else 0.0)
        self._stalled_s[node] = incarnation, stalled_s
        if grown > 0:
            self._waited_s[node] = self._waited_s.get(node, 0.0) + grown

    def _stalls(self, kind: EventKind) -> dict[str, float]:
        """Return how long the slowest rank's steps waited for saves since the earlier events."""
        if kind not in STALLS_TOLD:
            return {}
        waited_s = max(self._waited_s.values(), default=0.0)
        stalled_ms, self._waits_told_s = _ms(waited_s - self._waits_told_s), waited_s
        return {"stalled_ms": stalled_ms} if stalled_ms else {}

    def _tell_committed(self, now: float) -> None:
        """Record the committed point.

        There may be many points per second, so only samples are recorded, as for steps.
        """
        if self._committed is not None:
            self._add(EventKind.COMMITTED, now, more={"point": self._committed})
            self._committed, self._committed_at = None, now

    def _look(self) -> None:
        """Update the current step from a sample of the members, which differ by at most one step."""
        committed = self._state.generation
        members = committed.members[:64] if committed is not None else ()
        self._step = max((self._step_of(node) for node, _ in members), default=0)

    def _add(
        self, kind: EventKind, now: float, node: str = "", text: str = "", more: Mapping[str, Any] | None = None
    ) -> None:
        state, at = self._state, self._wall_s + now
        text = shortened(text, MAX_TEXT, IN_LOGS)
        more = {**(more or {}), **self._stalls(kind)}
        self._events.append(JobEvent(kind, at, state.term, state.generation_number, self._step, node, text, more))

    def _trains(self, message: Heartbeat, now: float) -> None:
        node = message.sender.node
        committed = self._state.generation
        if node not in self._awaited or committed is None or message.generation != committed.generation:
            return
        self._awaited.discard(node)
        if self._awaited:
            return
        self._trains_since = self._sampled_at = now
        began_here = self._began == committed.generation
        self._step = message.step if not began_here else committed.restore.step if committed.restore else 0
        waited_ms = {"after_ms": _ms(now - self._round_at)} if self._round_at else {}
        self._add(EventKind.TRAINING, now, text="every member trains", more={"last": node, **waited_ms})

    def _note(self, record: Record, now: float, counts: dict[EventKind, int]) -> None:
        match record:
            case SeatGranted(node, slot, incarnation, _, process):
                self._stalled_s[node] = incarnation, 0.0
                self._seat(
                    EventKind.SEATED, now, counts, node, str(process), {"slot": slot, "incarnation": incarnation}
                )
            case SpareAdmitted(node, incarnation, _, process):
                self._stalled_s[node] = incarnation, 0.0
                self._seat(EventKind.SPARE, now, counts, node, str(process), {"incarnation": incarnation})
            case SlotGiven(node, slot):
                self._seat(EventKind.PROMOTED, now, counts, node, "the spare takes a slot", {"slot": slot})
            case SeatResumed(node, _):
                self._seat(EventKind.RETURNED, now, counts, node, "heard again", self._slot(node))
            case SeatLost(node, _, since, reason):
                self._stalled_s.pop(node, None)
                silent_ms = {"silent_ms": _ms(now - since)}
                self._look()
                self._seat(EventKind.LOST, now, counts, node, reason, {**self._slot(node), **silent_ms})
            case CauseFound(generation, _, node, _, _, _, text):
                if (generation, node) in self._causes:
                    self._seat(EventKind.CAUSE, now, counts, node, text, self._slot(node))
                self._causes = {one for one in self._causes if one[0] == generation} | {(generation, node)}
            case SeatLeft(node, _):
                self._look()
                self._seat(EventKind.LEFT, now, counts, node, "left the job", self._slot(node))
            case SeatRetired(node, slot):
                self._seat(EventKind.RETIRED, now, counts, node, "its slot may go to another", {"slot": slot})
            case GenerationCommitted():
                self._begin_generation(record, now)
            case PointCommitted(point):
                self._committed = point.step
                if now >= self._committed_at + self._pause_s(self._trains_since or now):
                    self._tell_committed(now)
            case JobCreated(job, name, settings):
                self._add(EventKind.JOB, now, text=name, more={"job": job, "settings": dict(settings)})
            case TermStarted():
                self._add(EventKind.SCHEDULER, now, text="the scheduler starts", more={"job": self._state.job})
            case JobRebuilt(job=job):
                self._awaited = _members(self._state.generation)
                self._add(EventKind.REBUILT, now, text="the journal was rebuilt from the workers", more={"job": job})
            case RolledBack():
                self._look()
                nodes = [node for node, _ in record.suspects[:NAMED]]
                more = {"back_to": record.to.step, "suspects": nodes, "seen_at": record.step}
                self._add(EventKind.ROLLED_BACK, now, text=record.text, more=more)
            case TrainingFinished(point):
                self._tell_committed(now)
                self._look()
                self._step, self._trains_since = max(self._step, point.step), None
                self._add(EventKind.TRAINED, now, text="training is finished")
            case JobInterrupted(kind, step, cause, _, status):
                self._tell_committed(now)
                self._step, self._trains_since = max(self._step, step), None
                self._add(EventKind.INTERRUPTED, now, text=cause, more={"end": kind.label, "status": status})
            case JobFinished():
                self._add(EventKind.FINISHED, now, text="the job is finished")

    def _seat(
        self, kind: EventKind, now: float, counts: dict[EventKind, int], node: str, text: str, more: Mapping[str, Any]
    ) -> None:
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= NAMED:
            self._add(kind, now, node, text, more)

    def _slot(self, node: str) -> dict[str, int]:
        """Return the node's slot for an event, or {} if the node has lost it in the same pass."""
        seat = self._state.seats.get(node)
        if seat is None:
            return {}
        return {"spare": 1} if seat.is_spare else {} if seat.slot is None else {"slot": seat.slot}

    def _begin_generation(self, record: GenerationCommitted, now: float) -> None:
        self._awaited, self._trains_since, self._began = _members(record), None, record.generation
        self._waited_s.clear()
        self._waits_told_s = 0.0
        self._look()
        self._add(
            EventKind.GENERATION,
            now,
            more={
                "members": len(record.members),
                "restore": record.restore.step if record.restore else None,
                "last": self._joined_last,
                "after_ms": _ms(now - self._round_at),
            },
        )

    def _note_round(self, sends: Iterable[Send], now: float) -> None:
        """Record a round that was opened or became urgent.

        Also add the source of the restore point to the generation.
        """
        restores = None
        for send in sends:
            message = send.message
            if type(message) is RoundOpened:
                seen = (message.round, message.gently)
                if self._round is None or (seen != self._round and message.round >= self._round[0]):
                    self._open_round(message, now)
            elif type(message) is GenerationStarted and restores is None:
                restores = message
        if restores is None:
            return
        for place, event in enumerate(self._events):
            if event.kind is EventKind.GENERATION:
                self._events[place] = JobEvent(
                    event.kind, event.at, event.term, event.generation, event.step, "", restores.text, event.more
                )

    def _open_round(self, message: RoundOpened, now: float) -> None:
        if self._round is None or message.round != self._round[0]:
            self._round_at = now
        self._round = (message.round, message.gently)
        if not message.gently:
            self._tell_committed(now)
            self._look()
            self._trains_since = None
        more = {"round": str(message.round), "missing": message.missing, "gently": message.gently}
        self._add(EventKind.ROUND, now, text=message.text, more=more)


def _members(committed: GenerationCommitted | None) -> set[str]:
    return {node for node, _ in committed.members} if committed is not None else set()


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 1)
