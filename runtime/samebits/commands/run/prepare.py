"""Check whether a job may start here, and move aside what is in the way.

Everything is checked, under the lock of the recovery path, before anything is changed. The job spec is stored before
the first process exists.
"""

from __future__ import annotations

import shutil
import sys
import uuid
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path

from samebits import config
from samebits.account.job_view import JobView
from samebits.commands import doctor
from samebits.commands.run.options import RunRequest
from samebits.config import Role, Settings
from samebits.errors import (
    ForeignFolderError,
    JournalDamagedError,
    ListenError,
    LockedError,
    SecretError,
    SettingsError,
    StoreError,
    UsageError,
)
from samebits.launcher import job_spec
from samebits.launcher.job_spec import START_FILE, JobSpec, version_of
from samebits.launcher.processes import (
    name_of,
    process_names,
    read_pid_files,
    remove_dead_pid_files,
    runs_in,
    spoken,
)
from samebits.launcher.relay_process import end_relay, listen_for_relay, wants_relay
from samebits.launcher.scheduler_link import ANSWER_TIMEOUT_S, ask_once
from samebits.launcher.spawning import OF_ONE_PROCESS, Listener, Way, listen_for, names_port
from samebits.net.address import folder_of_holder
from samebits.net.curve import secret_words
from samebits.net.descriptors import require_descriptors
from samebits.scheduler_hosts import SchedulerAddress, names_one, with_relay
from samebits.service import cause_file
from samebits.service.job_journal import clear, refresh, served_by
from samebits.service.status import stored_view
from samebits.spelling import spelled
from samebits.store import checkpoint as checkpoints
from samebits.store import durable, owner, private
from samebits.store.checkpoint.remote_points import jobs_at
from samebits.store.durable import aside_id, move_aside, short_id
from samebits.store.lock import DirectoryLock, is_locked, read_holder
from samebits.store.owner import OWNER_FILE, read_owner
from samebits.store.process_identity import host_id
from samebits.store.progress_report import remove_reports

NAMED = 6


@dataclass(frozen=True, slots=True)
class Former:
    """The job that was last started with this log folder, if it has a different recovery path."""

    name: str
    recovery_path: Path
    view: JobView | None
    running: tuple[str, ...] = ()

    def __str__(self) -> str:
        job = str(self.view) if self.view is not None else f"job {self.name!r}"
        return f"{job} with RECOVERY_PATH={self.recovery_path}"


@dataclass(frozen=True, slots=True)
class StartConditions:
    """Everything on this machine that the start of a job depends on.

    Attributes:
        name: the name of the job to start.
        recover, fresh: the commands that recover the existing job, and that start over.
        view, damage: the journal's content in ``recovery_path``, or why it cannot be read.
        holder: the process that holds the lock of ``recovery_path``.
        running: live processes of the job in these folders.
        former: the job that had this log folder before, if that job has other folders.
        checkpoint_jobs: ids of the jobs that saved below ``checkpoint_path``; ``past_jobs`` are those that cannot be
            continued: their recovery folder was moved aside already, or they had none (ENABLE_RECOVERY=0).
        live_jobs: jobs of ``checkpoint_jobs`` for which a live process is writing points.
        newest_step: newest step of their points, and of the points in this host's memory of the job in
            ``recovery_path``.
        host: this machine's name in the job.
        log_job: the job id in ``log_dir``.
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
    """A file or folder that is renamed in its folder, with a job's id in its name."""

    path: Path
    job: str


@dataclass(frozen=True, slots=True)
class StartPlan:
    """What must be done before the start: files to move aside, in this order, and why."""

    moves: tuple[Move, ...] = ()
    why: tuple[str, ...] = ()


def plan_start(found: StartConditions, *, fresh: bool) -> StartPlan:
    """Return what must be done before a job may start.

    Raises:
        LockedError: a job runs here.
        ListenError: the port is in use.
        ForeignFolderError: a folder belongs to another job.
        StoreError: an unfinished job, or an unreadable journal, is in the way.
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
    return StartPlan(sum((part.moves for part in parts), ()), sum((part.why for part in parts), ()))


def _refuse_running(found: StartConditions) -> None:
    former = found.former
    if former is not None and former.running:
        raise ForeignFolderError(
            f"LOG_DIR={found.log_dir} belongs to {former}, which is running ({_listed(former.running)}); this command "
            f"starts job {found.name!r} with RECOVERY_PATH={found.recovery_path}. Fix: export another LOG_DIR for this "
            "job, or start it in another folder"
        )
    if found.running or found.holder:
        who = _listed(found.running) or found.holder
        raise LockedError(
            f"RECOVERY_PATH={found.recovery_path}: {found.view or 'a job'} is running here: {who}. Fix: "
            f"`{found.recover}` follows it and restarts its lost processes; for a second job, export another "
            "RECOVERY_PATH, CHECKPOINT_PATH, LOG_DIR "
            "and SCHED_PORT"
        )


def _plan_former(found: StartConditions, *, fresh: bool) -> StartPlan:
    """Plan for a log folder that belongs to another job.

    While that job is unfinished, its job spec must not be lost.
    """
    former = found.former
    if former is None or former.view is None or former.view.job_finished:
        return StartPlan()
    if not fresh:
        raise ForeignFolderError(
            f"LOG_DIR={found.log_dir} belongs to {former}, which is unfinished; this command starts job {found.name!r} "
            "with "
            f"RECOVERY_PATH={found.recovery_path}. Fix: `{found.recover}` continues the unfinished job; to start this "
            f"one, export another LOG_DIR, or `{found.fresh}` moves the old job's start file aside"
        )
    return StartPlan((Move(found.log_dir / START_FILE, former.view.job),), (f"{former} is unfinished",))


def _plan_recovery(found: StartConditions, *, fresh: bool) -> StartPlan:
    """Plan which folders to move aside.

    The journal's folder comes first, so that an interrupted move can be continued.
    """
    view = found.view
    if view is None and not found.damage:
        return StartPlan()
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
    return StartPlan(tuple(moves), (f"{view or 'a job'} {state}",))


def _plan_checkpoints(found: StartConditions, *, fresh: bool) -> StartPlan:
    if not found.checkpoint_jobs:
        return StartPlan()
    if isinstance(found.checkpoint_path, str):
        raise ForeignFolderError(
            f"CHECKPOINT_PATH={found.checkpoint_path} belongs to {_jobs(found.checkpoint_jobs)}, and objects in an "
            f"object store are not moved aside. Fix: export another CHECKPOINT_PATH for {found.name!r}, such as "
            f"{found.checkpoint_path}-2, or delete that folder if it is no longer needed"
        )
    job = found.view.job if found.view is not None else ""
    if live := found.live_jobs - {job}:
        raise LockedError(
            f"CHECKPOINT_PATH={found.checkpoint_path}: {_jobs(live)} is running and saves there. Fix: export another "
            "CHECKPOINT_PATH for this job"
        )
    others = found.checkpoint_jobs - {job} - found.past_jobs
    if others and not fresh:
        raise ForeignFolderError(
            f"CHECKPOINT_PATH={found.checkpoint_path} belongs to {_jobs(others)}, but this command starts job "
            f"{found.name!r} with RECOVERY_PATH={found.recovery_path}, which holds another journal. Fix: export "
            f"another CHECKPOINT_PATH, or that job's RECOVERY_PATH; or `{found.fresh}` moves that folder aside and "
            "starts over"
        )
    why = () if found.view or found.damage else (f"{_jobs(found.checkpoint_jobs)} left checkpoints",)
    owner = job if job in found.checkpoint_jobs else min(found.checkpoint_jobs)
    return StartPlan((Move(found.checkpoint_path, owner),), why)


def _plan_log(found: StartConditions) -> StartPlan:
    """Plan for the logs, which are kept and appended to; only their owner changes."""
    return StartPlan((Move(found.log_dir / OWNER_FILE, found.log_job),)) if found.log_job else StartPlan()


def _never_began(found: StartConditions, view: JobView) -> bool:
    """Return whether there is nothing to recover, because the script ended before its first step."""
    if view.step or found.newest_step:
        return False
    # The last step is known if it was recorded at the end; points may be on other hosts on which the job had workers.
    has_ended_here = bool(view.interruptions) and all(worker.host == found.host for worker in view.workers)
    return view.generation == 0 or has_ended_here


def _unfinished(found: StartConditions, view: JobView) -> str:
    step = max(view.step, found.newest_step)
    return (
        f"RECOVERY_PATH={found.recovery_path} holds {view}, unfinished at step {step} with {view.world_size} workers. "
        f"Fix: `{found.recover}` continues it; `{found.fresh}` moves its folders aside and starts over"
    )


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _jobs(ids: frozenset[str]) -> str:
    return ", ".join(f"job {job}" for job in sorted(ids))


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that is ready to start: its settings, with absolute folders, and its stored spec.

    Attributes:
        listener: sockets for its scheduler; empty if there is no scheduler here, or a ``port_problem``.
        relay_listener: sockets for this host's relay; empty if it has none.
        port_problem: why SCHED_PORT cannot be listened on.
        said: a message about a choice that the user did not make, such as a different port.
    """

    settings: Settings
    start: JobSpec
    listener: Listener
    relay_listener: Listener
    port_problem: str = ""
    said: str = ""


def read_start(request: RunRequest) -> PreparedJob:
    """Return the job described by the request and the environment, and listen on the scheduler's port.

    Two launchers may start at the same moment, so a port counts as free only once this process listens on it.

    Raises:
        SettingsError: a setting is invalid.
        UsageError: there is no such script.
    """
    require_script(request)
    everything = {**config.whole_environment(), **request.environment}
    shared = {name: text for name, text in everything.items() if name not in OF_ONE_PROCESS}
    role = "scheduler" if request.has_scheduler else "worker"  # only a scheduler's listening address is checked
    settings, warnings = config.read({"NODE_ID": "0", **shared, "ROLE": role})
    for warning in warnings:
        say(warning)
    require_descriptors(settings.max_worker_num + settings.spare_num)
    refuse_unusable(settings)
    environment, said = config.kept_environment(everything), ""
    listener, port_problem = Listener(), ""
    if request.has_scheduler:
        is_one_start = request.nodes is None or bool(request.hosts)  # otherwise other hosts already know the port
        try:
            listener = listen_for(settings, may_choose=is_one_start and not names_port(environment))
        except ListenError as error:
            port_problem = (names_one(settings.sched_host) and _other_job(settings)) or str(error)
    if (port := listener.chosen_port) is not None:
        said = f"the default SCHED_PORT={settings.sched_port} is in use; this job's scheduler listens on port {port}"
        settings, environment = replace(settings, sched_port=port), {**environment, "SCHED_PORT": str(port)}
    relay, relay_listener = _relay(settings, request)
    if relay is not None:
        settings = replace(settings, relay=relay)
        environment = {**environment, "SCHED_HOST": with_relay(relay, settings.sched_host, settings.inner_relay)}
    start = JobSpec(
        folder=Path.cwd(),
        interpreter=sys.executable,
        script=request.script,
        args=request.args,
        environment=environment,
        needs_secret=settings.cluster_secret is not None,
        nodes=request.nodes,
        script_version=version_of(Path(request.script)) if request.way is Way.SCRIPT else None,
        way=request.way,
        has_scheduler=request.has_scheduler,
        hosts=request.hosts,
        job=str(uuid.uuid4()) if request.has_scheduler else "",
        has_relay=relay is not None,
        words=_typed(request),
        other_variables=job_spec.digests_of_others(everything),
    )
    settings = replace(config.in_folder(start.folder, settings), role=Role.SCHEDULER)
    if not start.has_scheduler:
        settings = replace(settings, journal_place=None)  # another host's launcher handles the journal
    secret_words(settings.cluster_secret, settings.cluster_secret_file)  # fail here rather than in every process
    cause_file.table_of(settings)
    return PreparedJob(settings, start, listener, relay_listener, port_problem, said)


def _relay(settings: Settings, request: RunRequest) -> tuple[SchedulerAddress | None, Listener]:
    """Return the address of the relay that this launcher should start, or None, and the relay's sockets."""
    has_other_hosts, discovers_hosts = request.nodes is not None, bool(request.hosts)
    if not wants_relay(settings, has_other_hosts=has_other_hosts, discovers_hosts=discovers_hosts):
        return None, Listener()
    address, one = listen_for_relay()
    return address, Listener((one,))


def _typed(request: RunRequest) -> tuple[str, ...]:
    """Return the command line that was typed, preceded by the SameBits variables in the environment.

    On Ray, the job's folder contains the environment.
    """
    given = {} if request.words[:2] == job_spec.ON_RAY else config.own_environment(config.whole_environment())
    told = (f"{name}={value}" for name, value in sorted(given.items()) if name not in request.environment)
    return (*told, *(word for word in request.words if word != "--dry-run"))


def require_script(request: RunRequest) -> None:
    """Raise if the program that the workers would run does not exist.

    Raises:
        UsageError: says what to type instead.
    """
    script, as_in = request.script, f"`{spelled('run', 'train.py')}`"
    if request.way is Way.SCRIPT and Path(script).is_dir():
        raise UsageError(
            f"{script!r} is a folder: expected a script. Fix: `cd` to it and name the script alone, as in {as_in}"
        )
    if request.way is Way.SCRIPT and not Path(script).is_file():
        raise UsageError(f"there is no script {script!r} in {Path.cwd()}. Fix: name one, as in {as_in}")
    if request.way is Way.PROGRAM and shutil.which(script) is None:
        raise UsageError(f"there is no program {script!r}. Fix: name one that can be run, or leave --no-python out")
    package = script.partition(".")[0]
    if request.way is Way.MODULE and not PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]):
        raise UsageError(
            f"-m {script}: no module {package!r} was found in {Path.cwd()} or among the installed ones. Fix: name an "
            f"existing module, as in `{spelled('run', '-m', 'package.train')}`; -n takes the number of workers"
        )


def refuse_unusable(settings: Settings) -> None:
    """Raise, before anything is started, if one of the job's folders cannot be written.

    Raises:
        SettingsError: has a line for each such folder.
    """
    findings = (doctor.folder(name, path) for name, path in doctor.folders(settings) if isinstance(path, Path))
    problems = [f"{one.what}: {one.found}. Fix: {one.fix}" for one in findings if one.fix]
    if problems:
        raise SettingsError(problems)


def prepare(ready: PreparedJob, *, fresh: bool) -> None:
    """Move aside what is in the way of this start, and store its job spec.

    Raises:
        SameBitsError: the job may not start; nothing was changed.
    """
    settings, start = ready.settings, ready.start
    private.check_folder(settings.recovery_path, "RECOVERY_PATH")
    lock = DirectoryLock(settings.recovery_path, "samebits run")
    found = look(settings, ready.port_problem, start.command(fresh=True))
    if settings.recovery_path.exists():
        try:
            lock.acquire()
        except LockedError:
            holder = read_holder(settings.recovery_path)
            found = replace(found, holder=str(holder or "an unknown process"))
    try:
        plan = plan_start(found, fresh=fresh)
        end_relay(settings.log_dir)  # the previous job's
        _carry_out(plan)
        if any(move.path == settings.recovery_path for move in plan.moves):
            clear(settings, "samebits run", say)
        remove_dead_pid_files(settings.log_dir)
        remove_reports(settings.log_dir)
        if unfound := job_spec.keep(settings.log_dir, start):
            say(unfound)
        if settings.enable_recovery and start.has_scheduler:
            owner.make_token(settings.log_dir)
    finally:
        lock.release()
    usual = start.folder / job_spec.USUAL_LOG_DIR
    if (usual / job_spec.START_FILE).exists() and usual.resolve() != settings.log_dir.resolve():
        say(f"{usual} belongs to another job; for this one, type LOG_DIR={settings.log_dir} {found.recover}")


def look(settings: Settings, port_problem: str = "", fresh: str = "") -> StartConditions:
    """Find what exists without changing anything. ``fresh`` is the command that moves it aside and starts over.

    Raises:
            ForeignFolderError: the journals in the folder and in etcd belong to different jobs.
            StoreError: etcd does not answer.
    """
    found = StartConditions(
        name=settings.job_name,
        recovery_path=settings.recovery_path,
        checkpoint_path=settings.checkpoint_path,
        log_dir=settings.log_dir,
        recover=spelled("recover"),
        fresh=fresh or spelled("run", "--fresh"),
        port_problem=port_problem,
    )
    found = replace(found, holder=served_by(settings, say))
    try:
        refresh(settings, say)
    except JournalDamagedError as error:  # for any other error, neither the job nor whether it runs is known
        found = replace(found, damage=str(error))
    try:
        found = replace(found, view=stored_view(settings.recovery_path))
    except StoreError as error:
        found = replace(found, damage=str(error))
    running = _running_seats(found.view)
    log_owner = read_owner(settings.log_dir)
    jobs, live_jobs, newest_step = _checkpoints(settings.checkpoint_path)
    moved = _moved_ids(settings.recovery_path)
    past = frozenset(job for job in jobs if short_id(job) in moved)
    kept = job_spec.read(settings.log_dir)
    if kept is not None and not job_spec.is_at_home(settings.log_dir, kept):  # this folder was moved or copied
        running = _running_here(kept.moved_to(Path.cwd()).settings(), found.view)
        found = replace(found, recover=spelled("recover", "--moved"))
    elif kept is not None:
        started = kept.settings()
        here = _running_processes(started)
        if _is_same(started.checkpoint_path, settings.checkpoint_path):
            if not started.enable_recovery:
                past = jobs
            elif kept.is_finished and log_owner is not None:
                past |= {log_owner.job}
        if _is_same(started.recovery_path, settings.recovery_path):
            running = tuple(dict.fromkeys((*here, *running)))
        else:
            former = Former(started.job_name, started.recovery_path, _view_of_former(started), here)
            found = replace(found, former=former)
        if kept.is_on_ray:
            found = replace(found, recover=kept.command())
    return replace(
        found,
        running=running,
        checkpoint_jobs=jobs,
        live_jobs=live_jobs,
        past_jobs=past,
        newest_step=max(newest_step, _step_in_memory(found.view)),
        host=host_id(),
        log_job=log_owner.job if log_owner is not None else "",
    )


def _is_same(one: Path | str, other: Path | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return one.resolve() == other.resolve()


def _other_job(settings: Settings) -> str:
    """Describe the scheduler of another job on this port, or return "" if none answers."""
    try:
        view = ask_once(settings, ANSWER_TIMEOUT_S)
        job = "" if view is None else str(view)
    except SecretError:
        job = "a job with another secret"
    if not job:
        return ""
    folder = folder_of_holder(settings.sched_port)
    where = f", started in {folder}" if folder is not None else ""
    return (
        f"SCHED_PORT={settings.sched_port} is the scheduler's of {job}{where}. Fix: `unset SCHED_PORT` to have a free "
        "port chosen, or set it to one, the same in every process of this job"
    )


def _running_processes(started: Settings) -> tuple[str, ...]:
    identities = read_pid_files(started.log_dir, process_names(job_spec.nodes_of(started.log_dir, started)))
    return tuple(f"{spoken(name)} ({identity})" for name, identity in identities.items() if identity.is_alive())


def _running_seats(view: JobView | None) -> tuple[str, ...]:
    here = host_id()
    workers = view.workers if view is not None else ()
    return tuple(
        f"worker {worker.node} ({worker.identity})"
        for worker in workers
        if worker.host == here and worker.identity.is_alive()
    )


def _running_here(started: Settings, view: JobView | None) -> tuple[str, ...]:
    """Return the processes that run here. In a copied folder, pid files name processes of the original job."""
    seats = {name_of(one.node): one.identity for one in view.workers} if view is not None else {}
    names = process_names(job_spec.nodes_of(started.log_dir, started))
    identities = {**seats, **read_pid_files(started.log_dir, names)}
    return tuple(
        f"{spoken(name)} ({identity})"
        for name, identity in identities.items()
        if runs_in(identity, Path.cwd(), started.log_dir / f"{name}.log")
    )


def _view_of_former(started: Settings) -> JobView | None:
    return stored_view(started.recovery_path) if started.enable_recovery else None


def _checkpoints(path: Path | str) -> tuple[frozenset[str], frozenset[str], int]:
    """Return the jobs that have saved below ``path``, those saving now, and the newest step."""
    if isinstance(path, str):
        jobs, newest_step = jobs_at(path)
        return jobs, frozenset(), newest_step  # an object store has no locks, and is never moved aside
    with durable.disk_errors(path, "looking for checkpoints"):
        roots = checkpoints.folders_with_points(path)
        folders = [checkpoints.rank_directory(root, slot) for root in roots for slot in checkpoints.slots_in(root)]
        points = [checkpoints.parse_point_name(entry.name) for folder in folders for entry in folder.iterdir()]
    owners = {folder: owner.job for folder in (path, *folders) if (owner := read_owner(folder)) is not None}
    live = frozenset(job for folder, job in owners.items() if is_locked(folder))
    return frozenset(owners.values()), live, max((point.step for point in points if point is not None), default=0)


def _step_in_memory(view: JobView | None) -> int:
    newest = None if view is None else checkpoints.newest_in_memory(checkpoints.SHARED_MEMORY, view.job)
    return 0 if newest is None else newest.step


def _moved_ids(path: Path) -> set[str]:
    with durable.disk_errors(path.parent, "looking for folders that were moved aside"):
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.exists() else []
    return {moved for name in names if (moved := aside_id(name, path.name)) is not None}


def _carry_out(plan: StartPlan) -> None:
    for reason in plan.why:
        say(f"{reason}; its folders are moved aside, nothing is deleted")
    for move in plan.moves:
        aside = move_aside(move.path, move.job)
        if aside is not None:
            say(f"  {move.path} → {aside.name}")


def say(text: str) -> None:
    """Print a line for people."""
    print(f"samebits: {text}", file=sys.stderr, flush=True)
