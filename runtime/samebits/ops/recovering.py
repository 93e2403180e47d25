"""Which processes of a job must be started again, which ended first, which left alone: decisions on what was found.

Looking and ending are ``samebits.ops.recover``'s, starting is the script's. The one idea: the scheduler, or its
journal, knows which process holds a seat; pid files know which process was started last. Where the two differ, the one
that was started last is a replacement that waits for its seat, and is left to wait. Only a process that a pid file
names is ever ended: a scheduler knows of processes what those who registered said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from samebits.commands import spelled
from samebits.errors import JobFailedError
from samebits.ops.job_view import EndKind, Interruption, JobView, Presence, WorkerView
from samebits.ops.local_processes import SCHEDULER, node_of, process_names, spoken
from samebits.store.process_identity import ProcessIdentity


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left of a job on this machine.

    Attributes:
        nodes: of the workers and spares on this machine.
        started: the process started last under each name, alive or not.
        view: what the scheduler says, or the journal where ``scheduler_serves`` is false; none where neither can.
        scheduler_holds: a live scheduler on this machine has the lock of the job's recovery path.
        is_alive: whether exactly this process runs.
        host: this machine's name in the job.
        has_scheduler: whether the scheduler belongs to this machine.
        again: the command that starts such a job anew, with recovery.
    """

    nodes: tuple[str, ...]
    recovery: bool
    cool_down_s: float
    started: Mapping[str, ProcessIdentity]
    view: JobView | None
    scheduler_serves: bool
    scheduler_holds: bool
    is_alive: Callable[[ProcessIdentity], bool]
    host: str
    has_scheduler: bool = True
    again: str = field(default_factory=lambda: spelled("run"))


@dataclass(frozen=True, slots=True)
class Lost:
    """A process started here that the job does not count on any more and that still exists: it is ended first."""

    name: str
    identity: ProcessIdentity
    why: str


@dataclass(frozen=True, slots=True)
class Recovery:
    """What recover.sh does; with nothing to start and ``over`` there is nothing to follow either."""

    start: tuple[str, ...] = ()
    end: tuple[Lost, ...] = ()
    lines: tuple[str, ...] = ()
    over: bool = False


def plan_recovery(remains: Remains) -> Recovery:
    """What is gone, or counted lost, on this machine.

    Raises:
        JobFailedError: the job was started with ENABLE_RECOVERY=0 and is over.
    """
    names = process_names(remains.nodes)
    alive = [name for name in names if name in remains.started and remains.is_alive(remains.started[name])]
    if remains.view is not None and remains.view.job_finished:
        over = not alive and not remains.scheduler_serves
        return Recovery(lines=(f"nothing to do: {remains.view} is finished at step {remains.view.step}",), over=over)
    if not remains.recovery:
        if not alive:
            raise JobFailedError(
                "this job was started with ENABLE_RECOVERY=0 and is over: nothing of it was kept. Fix: start it anew, "
                f"with ENABLE_RECOVERY=1: `{remains.again}`"
            )
        return Recovery(lines=("this job was started with ENABLE_RECOVERY=0: nothing can come back, only follow",))
    recovery = _gone(remains, names)
    lines = list(recovery.lines)
    if recovery.start:
        repeated = _repeated(remains.view)
        if repeated:
            lines.append(repeated)
        lines.append(f"starting {', '.join(_title(remains.view, name) for name in recovery.start)}")
        lines += _without_their_slots(remains.view, recovery.start)
        if remains.cool_down_s > 0 and any(_had_a_seat(remains.view, name) for name in recovery.start):
            lines.append(
                f"a worker gets its seat back {remains.cool_down_s:g} s (REGISTER_COOLDOWN) after its last process was "
                "heard; until then it waits, and its log counts the seconds"
            )
    else:
        lines.append("nothing to do: every process of the job is there")
    return Recovery(recovery.start, recovery.end, tuple(lines))


def _gone(remains: Remains, names: list[str]) -> Recovery:
    start: list[str] = []
    end: list[Lost] = []
    lines: list[str] = []
    known = {one.node: one for one in remains.view.nodes} if remains.view is not None else {}
    for name in names:
        if name == SCHEDULER:
            is_there = remains.scheduler_serves or remains.scheduler_holds or _runs(remains, name)
            if remains.has_scheduler and not is_there:
                start.append(name)
            continue
        worker = known.get(node_of(name) or "")
        if worker is None:
            if not _runs(remains, name):
                start.append(name)
        elif worker.presence is Presence.ALIVE and worker.host != remains.host:
            where = worker.host.partition("#")[0]
            lines.append(f"{spoken(name)} runs on {where} (pid {worker.identity.pid}): left alone")
        elif not _is_served(remains, name, worker):
            start.append(name)
            if remains.is_alive(worker.identity) and worker.host == remains.host:
                if remains.started.get(name) == worker.identity:
                    end.append(Lost(name, worker.identity, _why_lost(worker)))
                else:  # who registers may say anything of itself, also what somebody else's process is called
                    lines.append(
                        f"{spoken(name)} last gave itself out for pid {worker.identity.pid}, which no script started "
                        "here: that process is left alone"
                    )
    return Recovery(tuple(start), tuple(end), tuple(lines))


def _is_served(remains: Remains, name: str, worker: WorkerView) -> bool:
    """Whether the worker needs nobody to start it."""
    assert remains.view is not None
    last = remains.started.get(name)
    if last is not None and last != worker.identity and remains.is_alive(last):
        return True  # a replacement that waits for the seat
    if remains.view.training_finished and (worker.presence is Presence.LEFT or worker.slot is None):
        return True
    return worker.presence is Presence.ALIVE and remains.is_alive(worker.identity)


def _had_a_seat(view: JobView | None, name: str) -> bool:
    known = view.node(node_of(name)) if view is not None else None
    return known is not None and known.presence is not Presence.LEFT


def _title(view: JobView | None, name: str) -> str:
    return f"spare {node_of(name)}" if view is not None and view.is_spare(node_of(name)) else spoken(name)


def _without_their_slots(view: JobView | None, names: tuple[str, ...]) -> list[str]:
    """What becomes of those whose slot was given away meanwhile."""
    retired = [one.node for one in view.retired] if view is not None else []
    nodes = [node for name in names if (node := node_of(name)) in retired]
    if view is None or not nodes:
        return []
    what = "comes back as a spare, or in the place of a lost worker" if view.has_one_size else "joins as a newcomer"
    return [f"the slot of worker {node} was given away: it {what}" for node in nodes]


def _runs(remains: Remains, name: str) -> bool:
    return name in remains.started and remains.is_alive(remains.started[name])


def _why_lost(worker: WorkerView) -> str:
    if worker.presence is Presence.LEFT:
        return "left the job"
    return f"counts as lost: {worker.reason}"


def _repeated(view: JobView | None) -> str:
    """Said before a job is tried again that failed twice in the same way."""
    if view is None or len(view.interruptions) < 2:
        return ""
    before, last = view.interruptions[-2:]
    if last.kind is EndKind.STOPPED or _essence(before) != _essence(last):
        return ""
    return f"the job failed twice at step {last.step} with the same cause, and may do so again: {last.cause}"


def _essence(interruption: Interruption) -> tuple[EndKind, int, str]:
    """What tells two failures apart: not which worker was the first to say it, nor its pid."""
    cause = re.sub(r"\bworker \S+ \(pid \d+[^)]*\)", "a worker", interruption.cause)
    return interruption.kind, interruption.step, cause
