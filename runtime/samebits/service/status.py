"""A snapshot of the job as plain values: what followers, ``samebits status`` and the status page show.

Here lives the one shape of it, made from the running scheduler's core or, where none runs, from the journal; and the
few messages with which it is asked for, and sent. Never here: how it is shown. The one idea: a reader need not know
which of the two answered, ``source`` tells it. On its way it is compressed, and each list of nodes by columns: of ten
thousand workers that is 71 kB, and 1.9 MB of plain JSON.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from samebits import strict_json
from samebits.core.causes.kinds import Observation
from samebits.core.hangs import SILENT_KINDS, Sight
from samebits.core.ledger import NAMED
from samebits.core.messages import (
    MAX_DECISION,
    MAX_END_CHARS,
    MAX_STOPPED_BY,
    Decision,
    ProcessEnded,
    ProcessSeen,
    Restarting,
    Status,
    StatusQuery,
    StopJob,
)
from samebits.core.records import JobInterrupted, Record, SeatLost, TermStarted
from samebits.core.reports import MEASURED as MEASURED
from samebits.core.scheduler import SchedulerCore
from samebits.core.state import JobState, Seat
from samebits.core.values import MAX_ITEMS
from samebits.printable import printable
from samebits.service.job_journal import history_of
from samebits.store.journal import read_journal
from samebits.store.process_identity import ProcessIdentity, host_id

LISTED_WORKERS = 64  # a snapshot that is pushed names each worker, spare and retired node only up to this many

SHOWN_LOSSES = 3
MAX_SNAPSHOT_BYTES = 256 << 20  # of its JSON

Content: TypeAlias = dict[str, Any]
ForHistory: TypeAlias = Decision | ProcessEnded | ProcessSeen | Restarting
"""What a follower reports to its job's scheduler."""

_LISTS = ("workers", "spares", "retired")


def snapshot(core: SchedulerCore, *, whole: bool) -> Content:
    """The job: phase, step, workers, first cause. ``whole`` lists the workers however many they are."""
    state, phase, policy = core.state, core.phase(), core.policy
    nodes = _nodes(state, lambda seat: _live_node(core, seat))
    ending = phase == "ending" and not state.finished and state.interruptions
    content = {
        "source": "scheduler",
        **_durable(state),
        "phase": phase,
        **_world(state, nodes, policy.world_size, policy.min_world_size, policy.max_world_size),
        "ready": core.ready,
        "recovery": policy.recovery,
        "step": max([*_durable_steps(state), *(worker["step"] for worker in nodes["workers"])], default=0),
        "seat_free_in_s": core.seat_free_in_s(),
        "first_cause": core.first_cause,
        "standstill": core.standstill,
        "ailments": core.ailments,
        "stragglers": core.stragglers,
        "notices": [list(one) for one in core.notices],
        "stall": _stall(core),
        "ended": _interruption(state.interruptions[-1]) if ending else None,
    }
    if whole or sum(map(len, nodes.values())) <= LISTED_WORKERS:
        content |= nodes
    return content


def stored_snapshot(recovery_path: Path) -> Content | None:
    """The same from the journal, without its lock and without changing anything; none where there is no job.

    ``step`` is the greatest that the journal proves; ``alive`` counts seats, not processes: nobody was asked.

    Raises:
        JournalDamagedError: the journal cannot be read.
    """
    contents = read_journal(recovery_path)
    if contents is None or not contents.payloads:
        return None
    history = history_of(recovery_path, contents.payloads)
    state = JobState.replay(history)
    settings = dict(state.settings)
    nodes = _nodes(state, _node)
    wanted = int(settings.get("WORKER_NUM", len(nodes["workers"])))
    least, most = (int(settings.get(name, wanted)) for name in ("MIN_WORKER_NUM", "MAX_WORKER_NUM"))
    ended = _interruption_of_last_term(history)
    return {
        "source": "journal",
        **_durable(state),
        "phase": "finished" if state.finished else "interrupted" if ended else "no scheduler",
        **_world(state, nodes, wanted, least, most),
        "recovery": True,
        "step": max([*_durable_steps(state), *(record.step for record in state.interruptions)], default=0),
        "seat_free_in_s": None,
        "first_cause": ended.cause if ended else "",
        "standstill": "",
        "ailments": [],
        "stragglers": [],
        "ended": _interruption(ended) if ended and not state.finished else None,
        **_losses(history),
        **nodes,
    }


def question(*, follow: bool) -> StatusQuery:
    """Asks a scheduler for one snapshot, or, with ``follow``, for one now and one at every change."""
    return StatusQuery(follow)


def stop_request(by: str) -> StopJob:
    """Asks a scheduler to end the job gracefully; ``by`` is told to everybody, as far as a line holds it.

    A cause may be an exception's whole text, with its line breaks: a scheduler takes none of those, nor a longer one.
    """
    return StopJob(printable(by, MAX_STOPPED_BY))


def decision(text: str, drain: Sequence[str] = ()) -> Decision:
    """Asks a scheduler to keep what was decided in the job's history, and these nodes to leave."""
    return Decision(printable(text, MAX_DECISION), tuple(drain)[:MAX_ITEMS])


def process_ended(node: str, identity: ProcessIdentity, seen: Observation, text: str) -> ProcessEnded:
    """Tells a scheduler how a node's process of this host has ended."""
    return ProcessEnded(
        node,
        host_id(),
        identity.pid,
        identity.started_at,
        printable(text, MAX_END_CHARS),
        seen.status,
        seen.signal,
        printable(seen.error, MAX_END_CHARS),
        seen.is_failure,
        seen.is_out_of_memory,
    )


def process_seen(node: str, identity: ProcessIdentity, sight: Sight) -> ProcessSeen:
    """Tells a scheduler what is seen of a node's process of this host."""
    return ProcessSeen(node, host_id(), identity.pid, identity.started_at, sight.doing, sight.quiet_s)


def restarting() -> Restarting:
    """Tells a scheduler that workers are starting which have not registered yet."""
    return Restarting()


def message_of(content: Content) -> Status:
    """A snapshot as it is sent."""
    columns = {name: {key: [node[key] for node in nodes] for key in nodes[0]} for name, nodes in _lists_in(content)}
    return Status(zlib.compress(strict_json.dumps({**content, **columns}).encode(), level=1))


def snapshot_in(message: object) -> Content | None:
    """The snapshot that a scheduler's message carries; none in any other message, or where it is damaged."""
    if not isinstance(message, Status):
        return None
    try:
        content: Content = strict_json.loads(zlib.decompressobj().decompress(message.packed, MAX_SNAPSHOT_BYTES))
    except (zlib.error, ValueError):
        return None
    rows = {
        name: [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        for name, columns in _lists_in(content)
    }
    return {**content, **rows}


def _lists_in(content: Content) -> list[tuple[str, Any]]:
    return [(name, content[name]) for name in _LISTS if content.get(name)]


def _durable_steps(state: JobState) -> list[int]:
    """Steps the job has come to for all that its journal says; its workers may be further."""
    points = [state.final, state.committed_point, state.generation.restore if state.generation else None]
    return [point.step for point in points if point is not None]


def _durable(state: JobState) -> dict[str, Any]:
    restore = state.generation.restore if state.generation else None
    return {
        "job": state.job,
        "name": state.name,
        "term": state.term,
        "generation": state.generation_number,
        "restore_step": restore.step if restore else None,
        "committed_step": state.committed_point.step if state.committed_point else None,
        "training_finished": state.final is not None,
        "job_finished": state.finished,
        "interruptions": [_interruption(record) for record in state.interruptions],
    }


def _losses(history: list[Record]) -> dict[str, Any]:
    """How many processes were lost, and why the last few; as far as the journal goes back."""
    reasons = {(one.node, one.incarnation): one.reason for one in history if isinstance(one, SeatLost)}
    last = [f"worker {node}: {reason}" for (node, _), reason in reasons.items()][-SHOWN_LOSSES:]
    return {"losses": len(reasons), "last_losses": last}


def _interruption(record: JobInterrupted) -> dict[str, Any]:
    return {"kind": record.kind.label, "step": record.step, "cause": record.cause, "status": record.status}


def _interruption_of_last_term(history: list[Record]) -> JobInterrupted | None:
    found = None
    for record in history:
        if isinstance(record, TermStarted):
            found = None
        elif isinstance(record, JobInterrupted):
            found = record
    return found


def _world(
    state: JobState, nodes: dict[str, list[dict[str, Any]]], wanted: int, least: int, most: int
) -> dict[str, Any]:
    """How large the world is now, and who is there of it; ``joining``: workers for whom no generation was made yet.

    It is ``wanted`` (WORKER_NUM) where it has one size only, and before the first generation.
    """
    members = [worker for worker in nodes["workers"] if not worker["joining"]]
    began = least < most and state.generation is not None
    return {
        "world_size": max(len(members), least) if began else wanted,
        "wanted_size": wanted,
        "min_world_size": least,
        "max_world_size": most,
        "alive": _alive(members),
        "joining": _alive(nodes["workers"]) - _alive(members),
        "spares_alive": _alive(nodes["spares"]),
    }


def _alive(nodes: list[dict[str, Any]]) -> int:
    return sum(node["state"] == "alive" for node in nodes)


def _nodes(state: JobState, told: Callable[[Seat], dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Who holds a slot, by slot; who is a spare, in the order they came; whose slot was given away.

    A node is no slot's number any more once a spare has taken the place of another.
    """
    lists: dict[str, list[dict[str, Any]]] = {name: [] for name in _LISTS}
    members = set() if state.generation is None else set(state.generation.slots)
    for _, node in sorted(state.by_slot.items()):
        seat = state.seats[node]
        lists["workers"].append({**told(seat), "joining": bool(members) and seat.slot not in members})
    for seat in state.seats.values():
        if seat.slot is None:
            lists["spares" if seat.is_spare else "retired"].append(told(seat))
    return lists


def _node(seat: Seat) -> dict[str, Any]:
    return {
        "node": seat.node,
        "slot": seat.slot,
        "incarnation": seat.incarnation,
        "state": "alive" if seat.is_held else seat.state.value,
        "reason": seat.reason,
        "host": seat.process.host,
        "pid": seat.process.pid,
        "started_at": seat.process.started_at,
        "activity": "unknown",
        "step": 0,
        "figures": {},
    }


def _stall(core: SchedulerCore) -> dict[str, Any] | None:
    """Whom to look at, of a job that does not come on: who holds the others up, and some who wait."""
    found = core.found
    if found is None:
        return None
    members = [*(member for member, _ in found.culprits), *found.waiting]
    return {
        "step": max((member.step for member in members), default=0),
        "culprits": [member.node for member, _ in found.culprits[:NAMED]],
        "silent": [member.node for member, hang in found.culprits[:NAMED] if hang in SILENT_KINDS],
        "waiting": [member.node for member in found.waiting[:NAMED]],
    }


def _live_node(core: SchedulerCore, seat: Seat) -> dict[str, Any]:
    node = _node(seat)
    presence = core.presence(seat.node)
    if presence is not None:
        figures = {one.name: one.value for one in presence.figures}
        node |= {"activity": presence.activity.name.lower(), "step": presence.step, "figures": figures}
    return node
