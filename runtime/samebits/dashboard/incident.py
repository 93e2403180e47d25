"""Decide what the page's banner shows: the problem, the ranks, what happens next, and the command to type.

The result consists of values and keys, because the page words them in the reader's language. The functions depend only
on their arguments; the caller reads the clock, the processes and the files.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from samebits.account.events import STALLS_TOLD, EventKind, JobEvent
from samebits.account.job_view import JobView, PresenceState, WorkerView
from samebits.account.recoveries import Recovery
from samebits.config import Settings
from samebits.spelling import spelled

RECENT_S = 600.0  # how long a completed recovery stays in the banner
STALL_WINDOW_S, STALL_SHARE, STALL_LEAST_S = 60.0, 0.2, 1.0
"""Saves hold up training if steps waited for them for this share of the window, and for at least this long."""
NAMED = 8  # ranks in a banner
_STILL = re.compile(r"no step for (\d+) s")
_JUDGEMENT = re.compile(r" \(((?:node|network|storage|software|data|device)(?: fault)?|cause unknown); ")
_KEPT_REMEDIES = ("job ends", "ends the job")


class Trouble(enum.StrEnum):
    """The subject of the banner."""

    LOST = "lost"
    REJOINING = "rejoining"
    NO_SCHEDULER = "no_scheduler"
    ALL_GONE = "all_gone"
    HANG = "hang"
    SAVES = "saves"
    RECOVERED = "recovered"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class Next(enum.StrEnum):
    """What happens next without a user's action."""

    SPARE = "spare"
    SPARE_CAME = "spare_came"
    SEAT = "seat"
    RESTART = "restart"
    RESTART_ELSEWHERE = "restart_elsewhere"
    SHRINK = "shrink"
    NOTHING_STARTS = "nothing_starts"
    JOB_ENDS = "job_ends"
    REGROUP = "regroup"
    SCHEDULER_RESTART = "scheduler_restart"
    SCHEDULER_STAYS_AWAY = "scheduler_stays_away"
    HANG_ENDS = "hang_ends"
    HANG_STAYS = "hang_stays"
    SLOWER = "slower"
    TRAINS = "trains"
    OVER = "over"
    CAN_CONTINUE = "can_continue"
    CANNOT_CONTINUE = "cannot_continue"


class Until(enum.StrEnum):
    """The event to which a countdown leads."""

    SEAT = "seat"
    SHRINK = "shrink"
    GIVE_UP = "give_up"
    HANG_ENDS = "hang_ends"


@dataclass(frozen=True, slots=True)
class Incident:
    """What the banner shows.

    Attributes:
        since: when it began, in seconds since 1970; None if unknown.
        ranks: the ranks concerned, each with ``slot`` (None: unknown), ``node``, ``host`` and ``pid`` (0: unknown).
        more: how many further ranks are concerned.
        why: the reason that the scheduler or the script gave, in English.
        facts: values for the page's sentences.
        until: when each countdown ends, in seconds since 1970.
        command: the command to copy; "" if there is nothing to do.
    """

    kind: Trouble
    follows: Next
    since: float | None = None
    ranks: tuple[dict[str, Any], ...] = ()
    more: int = 0
    why: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)
    command: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the incident as plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class IncidentState:
    """What is known about the job at one moment.

    Attributes:
        is_away: a scheduler should answer, but none does.
        away_since: since when no scheduler answers; None if this server has never reached one.
        is_supervised: a command on this host restarts the processes that it started.
        host: this machine's name, in the form that workers use.
        seat_free_at: when the process that waits longest gets its seat.
        still_since: the time of the last step before the current standstill.
        reported: step and time of rank 0's last report on this machine.
    """

    view: JobView | None
    settings: Settings
    now: float
    events: Sequence[JobEvent]
    recoveries: Sequence[Recovery]
    is_away: bool = False
    away_since: float | None = None
    is_supervised: bool = False
    host: str = ""
    seat_free_at: float | None = None
    still_since: float | None = None
    reported: tuple[int, float] | None = None


def incident_of(scene: IncidentState) -> Incident | None:
    """Return the most important incident, or None while the job trains without problems."""
    view = scene.view
    if view is None:
        return None
    if view.job_finished:
        return Incident(
            Trouble.FINISHED,
            Next.OVER,
            since=_last(scene.events, EventKind.FINISHED),
            facts={"step": _step(scene, view)},
            command=spelled("history"),
        )
    if view.ended is not None:
        return _ended(scene, view)
    if scene.is_away:
        return _away(scene, view)
    if view.from_journal:
        return None  # the current state is unknown
    lost = [one for one in view.workers if one.presence in (PresenceState.LOST, PresenceState.GONE)]
    if lost and not view.training_finished:
        return _lost(scene, view, lost)
    last = scene.recoveries[-1] if scene.recoveries else None
    if last is not None and last.trains_at is None and view.phase.startswith("forming"):
        return _rejoining(scene, view, last)
    if view.standstill:
        return _hang(scene, view)
    waited_s, window_s = _waited_for_saves(scene)
    if waited_s >= max(STALL_LEAST_S, STALL_SHARE * window_s):
        return Incident(
            Trouble.SAVES,
            Next.SLOWER,
            facts={"waited_s": waited_s, "window_s": window_s, "where": str(scene.settings.checkpoint_path)},
            command=spelled("doctor"),
        )
    if last is not None and last.trains_at is not None and scene.now - last.trains_at < RECENT_S:
        return _recovered(scene, view, last)
    return None


def without_remedy(text: str) -> str:
    """Return a cause without the remedy that the scheduler expected at the time.

    The remedy may be over, or may never have happened. For example, ``… SIGKILL (node fault; a new process takes its
    place)`` becomes ``… SIGKILL (node fault)``. A remedy that ends the job is kept.
    """
    at = 0
    while (found := _JUDGEMENT.search(text, at)) is not None:
        depth, end = 1, found.end()
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        remedy = text[found.end() : end - 1]
        at = end
        if not depth and not any(one in remedy for one in _KEPT_REMEDIES):
            text = f"{text[: found.start()]} ({found[1]}){text[end:]}"
            at = found.start()
    return text


def _ended(scene: IncidentState, view: JobView) -> Incident:
    assert view.ended is not None
    kind = Trouble.STOPPED if view.ended.label == "stopped" else Trouble.FAILED
    recovers = scene.settings.enable_recovery
    return Incident(
        kind,
        Next.CAN_CONTINUE if recovers else Next.CANNOT_CONTINUE,
        since=_last(scene.events, EventKind.INTERRUPTED),
        ranks=() if kind is Trouble.STOPPED else tuple(_who(one) for one in _lost_of(view)[:NAMED]),
        why=without_remedy(view.ended.cause),
        facts={"step": _step(scene, view), "label": view.ended.label},
        command=spelled("recover") if recovers else "",
    )


def _away(scene: IncidentState, view: JobView) -> Incident:
    members = [*view.workers, *view.spares]
    runs = [one for one in members if one.presence is PresenceState.ALIVE]
    gone = [one for one in members if one.presence in (PresenceState.GONE, PresenceState.LOST)]
    elsewhere = sorted({_host(one) for one in members if one.presence is PresenceState.UNKNOWN})
    is_over = not runs and not elsewhere
    step, at = scene.reported or (0, None)
    is_new = at is not None and (scene.away_since is None or at > scene.away_since)
    facts = {
        "running": len(runs),
        "known": len(members),
        "elsewhere": ", ".join(elsewhere[:NAMED]),
        "address": f"{scene.settings.sched_host}:{scene.settings.sched_port}",
        "reported_step": step if is_new else 0,
        "reported_at": at if is_new else None,
        "step": _step(scene, view),
    }
    if not scene.settings.enable_recovery:
        follows, command = Next.JOB_ENDS, ""
    elif scene.is_supervised:
        follows, command = Next.SCHEDULER_RESTART, ""
    else:
        follows, command = Next.CAN_CONTINUE if is_over else Next.SCHEDULER_STAYS_AWAY, spelled("recover")
    kind = Trouble.ALL_GONE if is_over else Trouble.NO_SCHEDULER
    since = scene.away_since if scene.away_since is not None else max((one.at for one in scene.events), default=None)
    return _of_ranks(Incident(kind, follows, since=since, facts=facts, command=command), gone)


def _lost(scene: IncidentState, view: JobView, lost: list[WorkerView]) -> Incident:
    """Describe lost workers that have not been replaced yet, and what, if anything, will replace them."""
    settings, count = scene.settings, len(lost)
    since = max((one.at for one in scene.events if one.kind is EventKind.LOST), default=None)
    opened = max((one.at for one in scene.events if one.kind is EventKind.ROUND), default=since)
    until: dict[str, float] = {} if scene.seat_free_at is None else {Until.SEAT: scene.seat_free_at}
    strangers = sorted({_host(one) for one in lost if one.host != scene.host})
    facts: dict[str, Any] = {"count": count, "elsewhere": ", ".join(strangers), "step": view.committed_step or 0}
    command = ""
    if not view.recovery:
        follows = Next.JOB_ENDS
    elif view.spares_alive >= count:
        follows = Next.SPARE
        facts["spares"] = [one.node for one in view.spares if one.presence is PresenceState.ALIVE][:count]
    elif scene.seat_free_at is not None:
        follows = Next.SEAT
    elif scene.is_supervised and not strangers:
        follows = Next.RESTART
    elif not view.has_one_size and view.min_world_size <= view.world_size - count:
        follows = Next.SHRINK
        if opened is not None:
            until[Until.SHRINK] = opened + settings.grace.shrink_s
    elif strangers:
        follows, command = Next.RESTART_ELSEWHERE, spelled("recover")
    else:
        follows, command = Next.NOTHING_STARTS, spelled("recover")
    if follows in (Next.SEAT, Next.RESTART, Next.RESTART_ELSEWHERE, Next.NOTHING_STARTS) and opened is not None:
        until[Until.GIVE_UP] = opened + settings.topo_timeout_s
    why = "; ".join(dict.fromkeys(one.reason for one in lost if one.reason)) or view.first_cause
    return _of_ranks(
        Incident(
            Trouble.LOST, follows, since=since, why=without_remedy(why), facts=facts, until=until, command=command
        ),
        lost,
    )


def _rejoining(scene: IncidentState, view: JobView, row: Recovery) -> Incident:
    """Describe a recovery in which all members are present again."""
    came = [one for one in scene.events if one.kind is EventKind.PROMOTED and one.at >= row.noticed_at]
    facts = {"spares": [one.node for one in came][:NAMED], "step": row.restore_step}
    return Incident(
        Trouble.REJOINING,
        Next.SPARE_CAME if came else Next.REGROUP,
        since=row.noticed_at,
        ranks=_ranks_in(row, scene.events, view),
        why=without_remedy(row.cause),
        facts=facts,
        until={} if scene.seat_free_at is None else {Until.SEAT: scene.seat_free_at},
    )


def _hang(scene: IncidentState, view: JobView) -> Incident:
    settings = scene.settings.hang
    culprits = [one for node in (view.stall.culprits if view.stall else ()) if (one := view.node(node)) is not None]
    ends = settings.policy == "end" and bool(culprits)
    until: dict[str, float] = {}
    if ends and settings.step_timeout_s is not None and scene.still_since is not None:
        until[Until.HANG_ENDS] = scene.still_since + 2 * settings.step_timeout_s
    waiting = len(view.stall.waiting) if view.stall else 0
    rank = [str(culprits[0].slot)] if culprits and culprits[0].slot is not None else []
    return _of_ranks(
        Incident(
            Trouble.HANG,
            Next.HANG_ENDS if ends else Next.HANG_STAYS,
            since=scene.still_since,
            why=view.standstill,
            facts={"waiting": waiting, "supervised": scene.is_supervised or view.spares_alive > 0},
            until=until,
            command=spelled("stack", *rank),
        ),
        culprits,
    )


def _recovered(scene: IncidentState, view: JobView, row: Recovery) -> Incident:
    return Incident(
        Trouble.RECOVERED,
        Next.TRAINS,
        since=row.trains_at,
        ranks=_ranks_in(row, scene.events, view),
        why=without_remedy(row.cause),
        facts={
            "total_ms": row.total_ms,
            "redone": f"{'≥ ' if row.all_lost else ''}{row.steps_lost}",
            "step": row.restore_step,
        },
        command=spelled("history"),
    )


def still_since(standstill: str, now: float) -> float:
    """Return the time of the last step from a sentence about a standstill that was made at ``now``."""
    found = _STILL.match(standstill)
    return now - (float(found[1]) if found else 0.0)


def _waited_for_saves(scene: IncidentState) -> tuple[float, float]:
    """Return how long steps have recently waited for saves, and the length of the observed period."""
    waited_ms, oldest = 0.0, scene.now
    for event in reversed(scene.events):
        if event.at < scene.now - STALL_WINDOW_S:
            break
        oldest = event.at
        if event.kind in STALLS_TOLD and isinstance(ms := event.more.get("stalled_ms"), int | float):
            waited_ms += ms
    return waited_ms / 1000, max(1.0, scene.now - oldest)


def _of_ranks(incident: Incident, workers: Sequence[WorkerView]) -> Incident:
    ranks = tuple(_who(one) for one in workers[:NAMED])
    return replace(incident, ranks=ranks, more=len(workers) - len(ranks))


def _ranks_in(row: Recovery, events: Iterable[JobEvent], view: JobView) -> tuple[dict[str, Any], ...]:
    """Return the ranks that were lost in a recovery, which other processes may have replaced."""
    slots = {
        one.node: one.more.get("slot")
        for one in events
        if one.kind is EventKind.LOST and one.at >= row.noticed_at - 1.0
    }
    known = [view.node(node) for node in row.lost[:NAMED]]
    return tuple(
        {"slot": slots.get(node), "node": node, "host": _host(one) if one is not None else "", "pid": 0}
        for node, one in zip(row.lost, known, strict=False)
    )


def _who(worker: WorkerView) -> dict[str, Any]:
    return {"slot": worker.slot, "node": worker.node, "host": _host(worker), "pid": worker.pid}


def _host(worker: WorkerView) -> str:
    return worker.host.partition("#")[0]


def _lost_of(view: JobView) -> list[WorkerView]:
    return [one for one in view.workers if one.presence in (PresenceState.LOST, PresenceState.GONE) and one.reason]


def _last(events: Sequence[JobEvent], kind: EventKind) -> float | None:
    return next((one.at for one in reversed(events) if one.kind is kind), None)


def _step(scene: IncidentState, view: JobView) -> int:
    """Return the highest known step, because a journal only contains saved steps."""
    told = next((one.step for one in reversed(scene.events) if one.step), 0)
    return max(view.step, told, scene.reported[0] if scene.reported else 0)
