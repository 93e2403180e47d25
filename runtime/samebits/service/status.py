"""Describe a job's state for followers, ``samebits status`` and the status page.

A :class:`~samebits.account.job_view.JobView` comes from the running scheduler's core or, without a scheduler, from the
journal. For transfer, it is compressed, with lists of nodes stored by column: ten thousand workers take 71 kB instead
of 1.9 MB of plain JSON. The module also creates the messages that followers send.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from samebits import strict_json
from samebits.account.job_view import (
    JOURNAL,
    NODE_LISTS,
    SCHEDULER,
    Interruption,
    JobView,
    PresenceState,
    StandstillView,
    WorkerView,
)
from samebits.core.causes.table import Observation
from samebits.core.hangs import SILENT_KINDS, ProcessState
from samebits.core.ledger import NAMED
from samebits.core.membership.shard_groups import mesh_for
from samebits.core.messages import (
    MAX_DECISION,
    MAX_END_CHARS,
    MAX_STOPPED_BY,
    Activity,
    OperatorDecision,
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
MAX_SNAPSHOT_BYTES = 256 << 20  # size of the uncompressed JSON

ForHistory: TypeAlias = OperatorDecision | ProcessEnded | ProcessSeen | Restarting
"""A follower's reports to its job's scheduler."""


def snapshot(core: SchedulerCore, *, whole: bool) -> JobView:
    """Return the job's state from a running core. With ``whole``, all workers are listed, however many."""
    state, phase, policy = core.state, core.phase(), core.policy
    nodes = _with_gaps(core, _nodes(state, lambda seat: _live_node(core, seat)))
    is_ending = phase == "ending" and not state.finished and state.interruptions
    steps = [*_durable_steps(state), *(worker.step for worker in nodes.workers)]
    return JobView(
        source=SCHEDULER,
        phase=phase,
        ready=core.ready,
        recovery=policy.recovery,
        step=max(steps, default=0),
        seat_free_in_s=core.seat_free_in_s(),
        first_cause=core.first_cause,
        standstill=core.standstill,
        ailments=tuple(core.ailments),
        stragglers=tuple(core.stragglers),
        notices=tuple(core.notices),
        stall=_stall(core),
        ended=_interruption(state.interruptions[-1]) if is_ending else None,
        **_durable(state),
        **_world(state, nodes, policy.world_size, policy.min_world_size, policy.max_world_size),
        **(nodes._asdict() if whole or sum(map(len, nodes)) <= LISTED_WORKERS else {}),
    )


def stored_view(recovery_path: Path) -> JobView | None:
    """Return the job's state from the journal, read without its lock, or None if there is no job.

    ``step`` is the highest step that the journal proves. ``alive`` counts seats, because no process was examined.

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
    wanted = int(settings.get("WORKER_NUM", len(nodes.workers)))
    least, most = (int(settings.get(name, wanted)) for name in ("MIN_WORKER_NUM", "MAX_WORKER_NUM"))
    ended = _interruption_of_last_term(history)
    reasons = {(one.node, one.incarnation): one.reason for one in history if isinstance(one, SeatLost)}
    for seat in state.seats.values():
        if seat.is_held and (key := (seat.node, seat.incarnation)) in reasons:
            reasons[key] += "; it is back"
    return JobView(
        source=JOURNAL,
        phase="finished" if state.finished else "interrupted" if ended else "no scheduler",
        recovery=True,
        step=max([*_durable_steps(state), *(record.step for record in state.interruptions)], default=0),
        first_cause=ended.cause if ended else "",
        ended=_interruption(ended) if ended and not state.finished else None,
        losses=len(reasons),
        last_losses=tuple(f"worker {node}: {reason}" for (node, _), reason in reasons.items())[-SHOWN_LOSSES:],
        **_durable(state),
        **_world(state, nodes, wanted, least, most),
        **nodes._asdict(),
    )


def seen_view(recovery_path: Path) -> JobView | None:
    """Return the state from the journal, with each process's state as seen from this host.

    Raises:
        JournalDamagedError: the journal cannot be read.
    """
    view = stored_view(recovery_path)
    return None if view is None else looked_at(view)


def looked_at(view: JobView) -> JobView:
    """Add each process's state, as seen from this host, to a state from the journal.

    The journal only records seats. If a seat was held when the scheduler ended, its process becomes GONE if exactly
    that process has ended on this host, and UNKNOWN if the process belongs to another host.
    """
    if not view.from_journal:
        return view
    workers, spares, retired = (tuple(map(_looked_at, nodes)) for nodes in (view.workers, view.spares, view.retired))
    members = [worker for worker in workers if not worker.is_joining]
    return msgspec.structs.replace(
        view,
        workers=workers,
        spares=spares,
        retired=retired,
        alive=_alive(members),
        spares_alive=_alive(spares),
    )


def _looked_at(node: WorkerView) -> WorkerView:
    if node.presence is not PresenceState.ALIVE:
        return node
    if node.host != host_id():
        return msgspec.structs.replace(node, presence=PresenceState.UNKNOWN)
    return node if node.identity.is_alive() else msgspec.structs.replace(node, presence=PresenceState.GONE)


def question(*, follow: bool) -> StatusQuery:
    """Return a request for one snapshot or, with ``follow``, also for one after each change."""
    return StatusQuery(follow)


def stop_request(by: str, status: int = 0, *, at_commit: bool = False) -> StopJob:
    """Return a request to end the job gracefully; ``by`` is shown to all processes.

    ``by`` may be the full text of an exception, so it is shortened to the line that a scheduler accepts.
    """
    return StopJob(printable(by, MAX_STOPPED_BY, IN_LOGS), status, at_commit)


def decision(text: str, drain: Sequence[str] = ()) -> OperatorDecision:
    """Return a decision for the job's history, with the nodes that are asked to leave."""
    return OperatorDecision(printable(text, MAX_DECISION, IN_LOGS), tuple(drain)[:MAX_ITEMS])


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
    """Return a report that workers are starting and have not registered yet."""
    return Restarting()


def message_of(view: JobView) -> Status:
    """Return the message that carries this state."""
    content = view.plain()
    for name in NODE_LISTS:
        rows = content[name]
        if rows:
            content[name] = {key: [row[key] for row in rows] for key in rows[0]}
        elif not view.nodes:
            del content[name]
    return Status(zlib.compress(strict_json.dumps(content).encode(), level=1))


def view_in(message: object) -> JobView | None:
    """Return the state in a message; None for other messages or damaged data."""
    if not isinstance(message, Status):
        return None
    try:
        content = strict_json.loads(zlib.decompressobj().decompress(message.packed, MAX_SNAPSHOT_BYTES))
        columns = {name: content[name] for name in NODE_LISTS if content.get(name)}
        rows = {
            name: [dict(zip(of, values, strict=True)) for values in zip(*of.values(), strict=True)]
            for name, of in columns.items()
        }
        return msgspec.convert({**content, **rows}, JobView)
    except (zlib.error, ValueError, AttributeError, TypeError):
        return None


def _durable_steps(state: JobState) -> list[int]:
    """Return the steps that the journal proves. Workers may be further."""
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
        "interruptions": tuple(_interruption(record) for record in state.interruptions),
    }


def _interruption(record: JobInterrupted) -> Interruption:
    return Interruption(record.kind.label, record.step, record.cause, record.status)


def _interruption_of_last_term(history: list[Record]) -> JobInterrupted | None:
    found = None
    for record in history:
        if isinstance(record, TermStarted):
            found = None
        elif isinstance(record, JobInterrupted):
            found = record
    return found


class _Nodes(NamedTuple):
    workers: tuple[WorkerView, ...]
    spares: tuple[WorkerView, ...]
    retired: tuple[WorkerView, ...]


def _world(state: JobState, nodes: _Nodes, wanted: int, least: int, most: int) -> dict[str, Any]:
    """Return the world's size and its current members.

    The size is ``wanted`` (WORKER_NUM) for a world of fixed size and before the first generation.
    """
    members = [worker for worker in nodes.workers if not worker.is_joining]
    has_begun = least < most and state.generation is not None
    return {
        "world_size": max(len(members), least) if has_begun else wanted,
        "wanted_size": wanted,
        "min_world_size": least,
        "max_world_size": most,
        "alive": _alive(members),
        "joining": _alive(nodes.workers) - _alive(members),
        "spares_alive": _alive(nodes.spares),
    }


def _alive(nodes: Sequence[WorkerView]) -> int:
    return sum(node.presence is PresenceState.ALIVE for node in nodes)


def _nodes(state: JobState, told: Callable[[Seat], WorkerView]) -> _Nodes:
    """Return the members by slot, the spares in order of arrival, and nodes that lost their slot.

    Once a spare has taken another node's place, node ids no longer equal slots.
    """
    members = set() if state.generation is None else set(state.generation.slots)
    seats = [state.seats[node] for _, node in sorted(state.by_slot.items())]
    unseated = [seat for seat in state.seats.values() if seat.slot is None]
    return _Nodes(
        tuple(
            msgspec.structs.replace(told(seat), is_joining=bool(members) and seat.slot not in members) for seat in seats
        ),
        tuple(told(seat) for seat in unseated if seat.is_spare),
        tuple(told(seat) for seat in unseated if not seat.is_spare),
    )


def _with_gaps(core: SchedulerCore, nodes: _Nodes) -> _Nodes:
    """Add what the shard groups of joining workers wait for: vacant slots, and workers that are not ready."""
    state = core.state
    mesh = None if state.generation is None else mesh_for(core.policy, state.generation.sharding)
    joining = {one.slot: one for one in nodes.workers if one.is_joining and one.slot is not None}
    if mesh is None or not joining:
        return nodes
    held = {slot for slot, node in state.by_slot.items() if state.seats[node].is_held}
    gaps: dict[int, dict[int, str]] = {}  # by group and slot
    for slot in set(range(core.policy.max_world_size)) - held:
        gaps.setdefault(mesh.group_of(slot), {})[slot] = f"slot {slot} is filled"
    for slot, one in joining.items():
        if one.presence is PresenceState.ALIVE and one.activity != Activity.WAITING.name.lower():
            gaps.setdefault(mesh.group_of(slot), {})[slot] = f"worker {one.node} is ready"

    def with_gaps(one: WorkerView) -> WorkerView:
        if one.slot is None or not one.is_joining:
            return one
        others = sorted(gaps.get(mesh.group_of(one.slot), {}).items())
        return msgspec.structs.replace(one, waits_for=tuple(text for slot, text in others if slot != one.slot))

    return nodes._replace(workers=tuple(map(with_gaps, nodes.workers)))


def _node(seat: Seat) -> WorkerView:
    return WorkerView(
        node=seat.node,
        slot=seat.slot,
        incarnation=seat.incarnation,
        presence=PresenceState.ALIVE if seat.is_held else PresenceState(seat.state.value),
        reason=seat.reason,
        host=seat.process.host,
        pid=seat.process.pid,
        started_at=seat.process.started_at,
    )


def _live_node(core: SchedulerCore, seat: Seat) -> WorkerView:
    presence = core.presence(seat.node)
    if presence is None:
        return _node(seat)
    figures = {one.name: one.value for one in presence.figures}
    activity = presence.activity.name.lower()
    return msgspec.structs.replace(_node(seat), activity=activity, step=presence.step, figures=figures)


def _stall(core: SchedulerCore) -> StandstillView | None:
    found = core.found
    if found is None:
        return None
    culprits = found.culprits[:NAMED]
    return StandstillView(
        max((member.step for member in (*(member for member, _ in found.culprits), *found.waiting)), default=0),
        tuple(member.node for member, _ in culprits),
        tuple(member.node for member, hang in culprits if hang in SILENT_KINDS),
        tuple(member.node for member in found.waiting[:NAMED]),
    )
