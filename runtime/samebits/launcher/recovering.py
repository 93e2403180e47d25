"""Decide which processes of a job to restart, which to end first, and which to leave alone.

The scheduler or its journal shows which process has each seat; pid files show which process was started last. If the
two differ, the process started last is a replacement that waits for its seat, and it is left alone. Only processes in
pid files are ever ended. If the journal is lost as well, a new journal is created from the newest checkpoint that every
rank has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samebits.account.job_view import Interruption, JobView, PresenceState, WorkerView
from samebits.config import Settings
from samebits.core.end_kinds import EndKind
from samebits.core.point import Point
from samebits.errors import CheckpointError, ForeignFolderError, JobFailedError, StoreError
from samebits.launcher.processes import SCHEDULER, node_of, process_names, spoken
from samebits.service import job_journal
from samebits.spelling import spelled
from samebits.store import checkpoint as checkpoints
from samebits.store import durable
from samebits.store.checkpoint import FolderEntry
from samebits.store.checkpoint.folder import job_of
from samebits.store.owner import OWNER_FILE, FolderOwner, encode_owner
from samebits.store.process_identity import ProcessIdentity


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left of a job on this machine.

    Attributes:
        nodes: node ids of the workers and spares on this machine.
        started: the process started last under each name, alive or not.
        view: the scheduler's view, or the journal's if ``scheduler_serves`` is false; None if there is neither.
        scheduler_holds: whether a live scheduler on this machine holds the lock of the job's recovery path.
        is_alive: returns whether exactly this process is running.
        host: this machine's name in the job.
        has_scheduler: whether the scheduler belongs to this machine.
        again: the command that starts such a job with recovery.
        foreign_job: the id of another job whose scheduler answers in place of this job's; "" for none.
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
    foreign_job: str = ""


@dataclass(frozen=True, slots=True)
class LostProcess:
    """A process that still runs although the job counts it as lost, so it must be ended first."""

    name: str
    identity: ProcessIdentity
    why: str


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """The actions of ``samebits recover``.

    If there is nothing to start and ``over`` is true, there is nothing to follow either.
    """

    start: tuple[str, ...] = ()
    end: tuple[LostProcess, ...] = ()
    lines: tuple[str, ...] = ()
    over: bool = False


def plan_recovery(remains: Remains) -> RecoveryPlan:
    """Decide what to do about this machine's processes that are gone or count as lost.

    Raises:
        JobFailedError: the job was started with ENABLE_RECOVERY=0 and is over.
    """
    names = process_names(remains.nodes)
    alive = [name for name in names if name in remains.started and remains.is_alive(remains.started[name])]
    if remains.view is not None and remains.view.job_finished:
        over = not alive and not remains.scheduler_serves
        return RecoveryPlan(
            lines=(f"nothing to do: {remains.view} is finished at step {remains.view.step}",), over=over
        )
    if not remains.recovery:
        if not alive:
            raise JobFailedError(
                "this job was started with ENABLE_RECOVERY=0 and has ended: nothing of it was kept. Fix: start it "
                f"again with ENABLE_RECOVERY=1: `{remains.again}`"
            )
        return RecoveryPlan(lines=("this job was started with ENABLE_RECOVERY=0: nothing can come back, only follow",))
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
                f"a worker gets its seat back {remains.cool_down_s:g} s (REGISTER_COOLDOWN) after the scheduler "
                "last heard from it; until then it waits, and its log counts down"
            )
    else:
        lines.append("nothing to do: every process of the job is there")
    return RecoveryPlan(recovery.start, recovery.end, tuple(lines))


def _gone(remains: Remains, names: list[str]) -> RecoveryPlan:
    start: list[str] = []
    end: list[LostProcess] = []
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
        elif worker.presence is PresenceState.ALIVE and worker.host != remains.host:
            where = worker.host.partition("#")[0]
            lines.append(f"{spoken(name)} runs on {where} (pid {worker.identity.pid}): left alone")
        elif not _is_served(remains, name, worker):
            start.append(name)
            if remains.is_alive(worker.identity) and worker.host == remains.host:
                if remains.started.get(name) == worker.identity:
                    end.append(LostProcess(name, worker.identity, _why_lost(worker)))
                else:  # a process may claim anything when it registers, even another process's name
                    lines.append(
                        f"{spoken(name)} last registered as pid {worker.identity.pid}, which no command started "
                        "here; that process is left alone"
                    )
    return RecoveryPlan(tuple(start), tuple(end), tuple(lines))


def _is_served(remains: Remains, name: str, worker: WorkerView) -> bool:
    """Return whether the worker needs no restart."""
    assert remains.view is not None
    last = remains.started.get(name)
    if last is not None and last != worker.identity and remains.is_alive(last):
        return True  # a replacement that waits for its seat
    if remains.view.training_finished and (worker.presence is PresenceState.LEFT or worker.slot is None):
        return True
    return worker.presence is PresenceState.ALIVE and remains.is_alive(worker.identity)


def _had_a_seat(view: JobView | None, name: str) -> bool:
    known = view.node(node_of(name)) if view is not None else None
    return known is not None and known.presence is not PresenceState.LEFT


def _title(view: JobView | None, name: str) -> str:
    return f"spare {node_of(name)}" if view is not None and view.is_spare(node_of(name)) else spoken(name)


def _without_their_slots(view: JobView | None, names: tuple[str, ...]) -> list[str]:
    """Return messages about nodes whose slots other nodes have taken."""
    retired = [one.node for one in view.retired] if view is not None else []
    nodes = [node for name in names if (node := node_of(name)) in retired]
    if view is None or not nodes:
        return []
    what = "joins as a newcomer" if view.has_room else "comes back as a spare, or in the place of a lost worker"
    return [f"the slot of worker {node} was given away: it {what}" for node in nodes]


def _runs(remains: Remains, name: str) -> bool:
    return name in remains.started and remains.is_alive(remains.started[name])


def _why_lost(worker: WorkerView) -> str:
    if worker.presence is PresenceState.LEFT:
        return "left the job"
    return f"counts as lost: {worker.reason}"


def _repeated(view: JobView | None) -> str:
    """Return a warning if the job has failed twice in the same way, otherwise ""."""
    if view is None or len(view.interruptions) < 2:
        return ""
    before, last = view.interruptions[-2:]
    if last.kind is EndKind.STOPPED or _essence(before) != _essence(last):
        return ""
    return f"the job failed twice at step {last.step} with the same cause, and may do so again: {last.cause}"


def _essence(interruption: Interruption) -> tuple[EndKind, int, str]:
    """Return the parts of a failure that are equal when it repeats, so not the reporting worker or its pid."""
    cause = re.sub(r"\bworker \S+ \(pid \d+[^)]*\)", "a worker", interruption.cause)
    return interruption.kind, interruption.step, cause


@dataclass(frozen=True, slots=True)
class Candidate:
    """The newest point that every rank has saved, according to the manifests.

    Attributes:
        job: the id of the point's job.
        point, world_size: the point, and the number of ranks that hold it.
        top: the highest generation of all points found.
        entries: the point's entries, by rank.
        folders: folders of all ranks that saved anything.
    """

    job: str
    point: Point
    world_size: int
    top: int
    entries: tuple[FolderEntry, ...]
    folders: tuple[Path, ...]


def newest_candidate(settings: Settings) -> Candidate | None:
    """Return the newest point that every rank has on disk, or None if there is none.

    Raises:
        ForeignFolderError: several jobs have saved in this folder.
        StoreError: a folder cannot be read, or the checkpoints are not on a disk.
    """
    path = settings.checkpoint_path
    if isinstance(path, str):
        return None
    entries = [entry for root in checkpoints.folders_with_points(path) for entry in checkpoints.survey(root)]
    return _newest(entries)


def verified_candidate(settings: Settings, say: Callable[[str], object]) -> Candidate | None:
    """Return the newest point of which every byte is intact on every rank, or None; damaged points are skipped."""
    path = settings.checkpoint_path
    if isinstance(path, str):
        raise StoreError(
            f"CHECKPOINT_PATH={path}: a job can be restarted only from checkpoints on a disk. Fix: copy that folder "
            "to a disk and export CHECKPOINT_PATH=<it>"
        )
    entries = [entry for root in checkpoints.folders_with_points(path) for entry in checkpoints.survey(root)]
    while (candidate := _newest(entries)) is not None:
        damaged = [entry for entry in candidate.entries if not _is_whole(entry, say)]
        if not damaged:
            return candidate
        entries = [entry for entry in entries if entry not in damaged]
    return None


def begin_journal(settings: Settings, candidate: Candidate) -> None:
    """Create a journal that starts at this point, and mark folders whose owner marker was lost.

    Raises:
        StoreError: a journal already exists, or the disk reports an error.
    """
    owner = FolderOwner(candidate.job, settings.job_name)
    for folder in candidate.folders:
        if job_of(folder) is None:  # every manifest in the folder names the same job
            durable.write_file_atomically(folder / OWNER_FILE, encode_owner(owner))
    job_journal.begin_from(settings, candidate.job, candidate.point, candidate.top)


def _newest(entries: list[FolderEntry]) -> Candidate | None:
    whole = [entry for entry in entries if entry.header is not None]
    folders = tuple(sorted({entry.path.parent for entry in entries}))
    jobs = {entry.header.job for entry in whole if entry.header is not None}
    jobs |= {owner for folder in folders if (owner := job_of(folder)) is not None}
    if len(jobs) > 1:
        raise ForeignFolderError(
            f"{folders[0].parent} holds folders of several jobs ({', '.join(sorted(jobs))}), and it is unclear "
            "which one is meant. Fix: move the folders of the other jobs away"
        )
    best: tuple[Point, int, Path] | None = None
    for root in sorted({folder.parent for folder in folders}):
        newest = checkpoints.newest_common_point([entry for entry in whole if entry.path.parent.parent == root])
        if newest is not None and (best is None or newest > best[:2]):
            best = (*newest, root)
    if best is None:
        return None
    point, world_size, root = best
    held = tuple(
        entry
        for entry in whole
        if entry.header is not None
        and (entry.header.point, entry.header.world_size) == (point, world_size)
        and entry.path.parent.parent == root
    )
    top = max(entry.point.generation for entry in entries if entry.point is not None)
    return Candidate(jobs.pop(), point, world_size, top, held, folders)


def _is_whole(entry: FolderEntry, say: Callable[[str], object]) -> bool:
    try:
        checkpoints.verify(checkpoints.point_in(entry.path))
    except CheckpointError as error:
        say(f"not used: {error}")
        return False
    return True
