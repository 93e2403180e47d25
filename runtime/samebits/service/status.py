"""Snapshots of the job as plain values, for followers, ``samebits status`` and the status page.

A snapshot comes from the running scheduler's core or, without one, from the journal. Both have the same shape, and
``source`` tells them apart. For transfer it is compressed, with lists of nodes by columns: ten thousand workers take
71 kB instead of 1.9 MB of plain JSON. The module also makes the messages that followers send.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from samebits import strict_json
from samebits.core.causes.kinds import Observation
from samebits.core.hangs import SILENT_KINDS, ProcessState
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
from samebits.printable import IN_LOGS, printable
from samebits.service.job_journal import history_of
from samebits.store.journal import read_journal
from samebits.store.process_identity import ProcessIdentity, host_id

LISTED_WORKERS = 64  # a pushed snapshot lists nodes only up to this many

SHOWN_LOSSES = 3
MAX_SNAPSHOT_BYTES = 256 << 20  # of its JSON

Content: TypeAlias = dict[str, Any]
ForHistory: TypeAlias = Decision | ProcessEnded | ProcessSeen | Restarting
"""A follower's reports to its job's scheduler."""

_LISTS = ("workers", "spares", "retired")


def snapshot(core: SchedulerCore, *, whole: bool) -> Content:
    """Return the job's snapshot from a running core; ``whole`` lists workers in any number."""
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
    """Return the job's snapshot from the journal, read without its lock; None without a job.

    ``step`` is the highest that the journal proves. ``alive`` counts seats, since no process was asked.

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


def looked_at(content: Content) -> Content:
    """Return a journal's snapshot with the state of each process as this host sees it.

    A journal knows seats. A seat that was held when the scheduler ended says nothing about its process, so it becomes
    ``gone`` if exactly that process has ended here, and ``unknown`` if it is another host's.
    """
    if content["source"] != "journal":
        return content
    lists = {name: [_looked_at(node) for node in content[name]] for name in _LISTS}
    members = [worker for worker in lists["workers"] if not worker["joining"]]
    return {**content, **lists, "alive": _alive(members), "spares_alive": _alive(lists["spares"])}


def _looked_at(node: dict[str, Any]) -> dict[str, Any]:
    if node["state"] != "alive":
        return node
    if node["host"] != host_id():
        return {**node, "state": "unknown"}
    is_alive = ProcessIdentity(node["pid"], node["started_at"]).is_alive()
    return node if is_alive else {**node, "state": "gone"}


def question(*, follow: bool) -> StatusQuery:
    """Return a request for one snapshot or, with ``follow``, for one now and one after each change."""
    return StatusQuery(follow)


def stop_request(by: str) -> StopJob:
    """Return a request to end the job gracefully; ``by`` is shown to all processes.

    It may be the whole text of an exception, so it is cut to the one line that a scheduler accepts.
    """
    return StopJob(printable(by, MAX_STOPPED_BY, IN_LOGS))


def decision(text: str, drain: Sequence[str] = ()) -> Decision:
    """Return a decision for the job's history, and the nodes that it asks to leave."""
    return Decision(printable(text, MAX_DECISION, IN_LOGS), tuple(drain)[:MAX_ITEMS])


def process_ended(node: str, identity: ProcessIdentity, seen: Observation, text: str) -> ProcessEnded:
    """Return a report on how a node's process on this host ended."""
    return ProcessEnded(
        node,
        host_id(),
        identity.pid,
        identity.started_at,
        printable(text, MAX_END_CHARS, IN_LOGS),
        seen.status,
        seen.signal,
        printable(seen.error, MAX_END_CHARS),
        seen.is_failure,
        seen.is_out_of_memory,
    )


def process_seen(node: str, identity: ProcessIdentity, state: ProcessState) -> ProcessSeen:
    """Return a report on the state of a node's process on this host."""
    return ProcessSeen(node, host_id(), identity.pid, identity.started_at, state.doing, state.quiet_s)


def restarting() -> Restarting:
    """Return a report that workers are starting which have not registered yet."""
    return Restarting()


def message_of(content: Content) -> Status:
    """Return the message with this snapshot."""
    columns = {name: {key: [node[key] for node in nodes] for key in nodes[0]} for name, nodes in _lists_in(content)}
    return Status(zlib.compress(strict_json.dumps({**content, **columns}).encode(), level=1))


def snapshot_in(message: object) -> Content | None:
    """Return the snapshot in a message; None for other messages or damaged data."""
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
    """Return the steps that the journal proves; workers may be further."""
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
    """Return the number of losses, and the latest reasons, as far back as the journal goes."""
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
    """Return the world's size and its present members.

    ``joining`` counts workers that no generation includes yet. The size is ``wanted`` (WORKER_NUM) for a world of fixed
    size and before the first generation.
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
    """Return the members by slot, the spares in order of arrival, and nodes whose slot was given away.

    Once a spare has taken another node's place, node ids no longer equal slots.
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
    """Return the nodes to examine in a standstill: the culprits and some that wait."""
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
