"""May a job start here, and what must be moved aside first: decisions on what was found, nothing else.

Looking, moving and starting are ``samebits.ops.prepare``'s and the scripts'. The one idea: nothing is ever deleted to
get going, and nothing unfinished is moved without being asked; whoever is refused is told what is there and what to
type.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samebits.errors import ForeignFolderError, ListenError, LockedError, StoreError
from samebits.ops.job_view import JobView
from samebits.ops.kept_start import START_FILE
from samebits.store.owner import OWNER_FILE

NAMED = 6


@dataclass(frozen=True, slots=True)
class Former:
    """The job that was started last with this log folder, where its recovery path is another one."""

    name: str
    recovery_path: Path
    view: JobView | None
    running: tuple[str, ...] = ()

    def __str__(self) -> str:
        job = str(self.view) if self.view is not None else f"job {self.name!r}"
        return f"{job} with RECOVERY_PATH={self.recovery_path}"


@dataclass(frozen=True, slots=True)
class Found:
    """Everything on this machine that the start of a job depends on.

    Attributes:
        name: of the job to be started.
        recover, fresh: what a user types for either.
        view, damage: what the journal in ``recovery_path`` says, or why it cannot be read.
        holder: who holds the lock of ``recovery_path``.
        running: live processes of the job in these folders.
        former: whose log folder it was, if that job has other folders.
        checkpoint_jobs: ids of the jobs that saved below ``checkpoint_path``; ``past_jobs`` those of them that nothing
            can go on with: their recovery folder was moved aside already, or they had none (ENABLE_RECOVERY=0).
        live_jobs: of those in ``checkpoint_jobs``, the ones that a live process is writing points of.
        newest_step: of their points, and of those of the job in ``recovery_path`` in this host's memory.
        host: this machine's name in the job.
        log_job: the id of the job that ``log_dir`` carries.
        port_problem: why SCHED_PORT cannot be listened on.
    """

    name: str
    recovery_path: Path
    checkpoint_path: Path | str
    log_dir: Path
    recover: str
    fresh: str
    view: JobView | None = None
    damage: str = ""
    holder: str = ""
    running: tuple[str, ...] = ()
    former: Former | None = None
    checkpoint_jobs: frozenset[str] = frozenset()
    past_jobs: frozenset[str] = frozenset()
    live_jobs: frozenset[str] = frozenset()
    newest_step: int = 0
    host: str = ""
    log_job: str = ""
    port_problem: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """A file or folder to be renamed, beside itself, under a job's id."""

    path: Path
    job: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens before the start: the moves, in this order, and why."""

    moves: tuple[Move, ...] = ()
    why: tuple[str, ...] = ()


def plan_start(found: Found, *, fresh: bool) -> Plan:
    """What must be done before a job may start.

    Raises:
        LockedError: a job runs here.
        ListenError: the port is taken.
        ForeignFolderError: a folder belongs to another job.
        StoreError: an unfinished job, or a journal that cannot be read, is in the way.
    """
    _refuse_running(found)
    if found.port_problem:
        raise ListenError(found.port_problem)
    parts = [
        _plan_former(found, fresh=fresh),
        _plan_recovery(found, fresh=fresh),
        _plan_checkpoints(found, fresh=fresh),
        _plan_log(found),
    ]
    return Plan(sum((part.moves for part in parts), ()), sum((part.why for part in parts), ()))


def _refuse_running(found: Found) -> None:
    former = found.former
    if former is not None and former.running:
        raise ForeignFolderError(
            f"LOG_DIR={found.log_dir} belongs to {former}, which runs ({_listed(former.running)}); this start is job "
            f"{found.name!r} with RECOVERY_PATH={found.recovery_path}. Export another LOG_DIR for it, or start it in "
            "another folder"
        )
    if found.running or found.holder:
        who = _listed(found.running) or found.holder
        raise LockedError(
            f"RECOVERY_PATH={found.recovery_path}: {found.view or 'a job'} runs here: {who}. `{found.recover}` follows "
            "it and brings back what is gone; for a second job export another RECOVERY_PATH, CHECKPOINT_PATH, LOG_DIR "
            "and SCHED_PORT"
        )


def _plan_former(found: Found, *, fresh: bool) -> Plan:
    """Another job's log folder: how that one was started must not be lost while it is unfinished."""
    former = found.former
    if former is None or former.view is None or former.view.job_finished:
        return Plan()
    if not fresh:
        raise ForeignFolderError(
            f"LOG_DIR={found.log_dir} belongs to {former}, which is unfinished; this start is job {found.name!r} with "
            f"RECOVERY_PATH={found.recovery_path}. `{found.recover}` goes on with the former; for this one export "
            f"another LOG_DIR, or `{found.fresh}` moves aside how the former was started"
        )
    return Plan((Move(found.log_dir / START_FILE, former.view.job),), (f"{former} is unfinished",))


def _plan_recovery(found: Found, *, fresh: bool) -> Plan:
    """The journal's folder goes first: what is left if this is cut short is then known by its aside folder."""
    view = found.view
    if view is None and not found.damage:
        return Plan()
    if not fresh and found.damage:
        raise StoreError(found.damage)
    if not fresh and view is not None and not view.job_finished and not _never_began(found, view):
        raise StoreError(_unfinished(found, view))
    job = view.job if view is not None else next(iter(sorted(found.checkpoint_jobs)), "")
    if view is None:
        state = "its journal is damaged"
    elif view.job_finished:
        state = "is finished"
    else:
        began = "never began" if view.generation == 0 else "never got past step 0"
        state = began if _never_began(found, view) else "is unfinished"
    moves = [Move(found.recovery_path, job)]
    if found.former is None:
        moves.append(Move(found.log_dir / START_FILE, job))
    return Plan(tuple(moves), (f"{view or 'a job'} {state}",))


def _plan_checkpoints(found: Found, *, fresh: bool) -> Plan:
    if not found.checkpoint_jobs:
        return Plan()
    if isinstance(found.checkpoint_path, str):
        raise ForeignFolderError(
            f"CHECKPOINT_PATH={found.checkpoint_path} belongs to {_jobs(found.checkpoint_jobs)}, and what lies in an "
            f"object store is not moved aside: for this start of {found.name!r} export another one, such as "
            f"{found.checkpoint_path}-2, or delete that folder if nobody needs it"
        )
    job = found.view.job if found.view is not None else ""
    if live := found.live_jobs - {job}:
        raise LockedError(
            f"CHECKPOINT_PATH={found.checkpoint_path}: {_jobs(live)} is running and saves there. Fix: export another "
            "CHECKPOINT_PATH for this one"
        )
    others = found.checkpoint_jobs - {job} - found.past_jobs
    if others and not fresh:
        raise ForeignFolderError(
            f"CHECKPOINT_PATH={found.checkpoint_path} belongs to {_jobs(others)}, and this start is job {found.name!r} "
            f"with RECOVERY_PATH={found.recovery_path}, whose journal is not that job's. Export another "
            f"CHECKPOINT_PATH, or that job's RECOVERY_PATH; or `{found.fresh}` moves that folder aside and starts anew"
        )
    why = () if found.view or found.damage else (f"{_jobs(found.checkpoint_jobs)} left checkpoints",)
    owner = job if job in found.checkpoint_jobs else min(found.checkpoint_jobs)
    return Plan((Move(found.checkpoint_path, owner),), why)


def _plan_log(found: Found) -> Plan:
    """Logs stay and are appended to; only whose they are changes."""
    return Plan((Move(found.log_dir / OWNER_FILE, found.log_job),)) if found.log_job else Plan()


def _never_began(found: Found, view: JobView) -> bool:
    """Whether there is nothing to go on from: its script had an error, or it was stopped before its first step."""
    if view.step or found.newest_step:
        return False
    # How far it was is known where it said so at its end; a point may lie on another host that it had workers on.
    has_ended_here = bool(view.interruptions) and all(worker.host == found.host for worker in view.workers)
    return view.generation == 0 or has_ended_here


def _unfinished(found: Found, view: JobView) -> str:
    step = max(view.step, found.newest_step)
    return (
        f"RECOVERY_PATH={found.recovery_path} holds {view}, unfinished at step {step} with {view.world_size} workers. "
        f"`{found.recover}` goes on with it; `{found.fresh}` moves its folders aside and starts anew"
    )


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _jobs(ids: frozenset[str]) -> str:
    return ", ".join(f"job {job}" for job in sorted(ids))
