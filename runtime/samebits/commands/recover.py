"""``samebits recover``: restart the dead processes of the job that was started in this folder, and follow it.

Processes are started from the job spec, not from the current environment, except for a secret that was given by value,
which is not stored. A start that fails ends no living process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from samebits import config
from samebits.config import Settings
from samebits.errors import ForeignFolderError, ListenError, StoreError, UsageError
from samebits.hosts.discovery import discovery_for
from samebits.launcher import job_spec, recovering
from samebits.launcher.follower import Follower, naming_what_runs_on
from samebits.launcher.follower_decisions import FollowResult
from samebits.launcher.interrupts import Signals
from samebits.launcher.job_spec import JobSpec, change, program_of, version_of
from samebits.launcher.processes import SCHEDULER, end, is_stopped, process_names, read_pid_files, runs_in, spoken
from samebits.launcher.progress_line import keep_going_without_output
from samebits.launcher.recovering import RecoveryPlan, Remains, plan_recovery
from samebits.launcher.relay_process import restart_relay
from samebits.launcher.scheduler_link import ANSWER_TIMEOUT_S, ask_once, is_listening, own_job
from samebits.launcher.spawning import (
    Listener,
    Program,
    StartLock,
    hear_signals,
    launch,
    listen_for,
    names_port,
    reserved,
)
from samebits.launcher.supervising import can_replace, start_in_place, supervisor_for
from samebits.launcher.worker_logs import LogEnds
from samebits.net.descriptors import require_descriptors
from samebits.printable import listed
from samebits.service.job_journal import refresh
from samebits.service.status import stored_view
from samebits.spelling import spelled
from samebits.store.lock import read_holder
from samebits.store.owner import read_owner
from samebits.store.process_identity import ProcessIdentity, host_id

TERM_GRACE_S = 5.0


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits recover",
        description="Restart the dead processes of the job that was started in this folder, and only those; then "
        "follow it to its end. scripts/recover.sh calls it.",
    )
    parser.add_argument("--moved", action="store_true", help="this folder was moved: continue its job here")
    parser.add_argument(
        "--from-checkpoints",
        action="store_true",
        help="if the journal and all processes are lost: begin a new journal at the newest step that all ranks have "
        "on disk",
    )
    parser.add_argument("--detach", action="store_true", help="exit as soon as the processes have started")
    # An actor in a Ray cluster passes this.
    parser.add_argument("--ray-host", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    hear_signals()
    keep_going_without_output()
    if not options.ray_host:
        _require_no_ray()
    log_dir, kept = _moved_in() if options.moved else job_spec.read_here()
    if options.from_checkpoints:
        _begin_journal(log_dir, kept)
    return go_on(log_dir, kept, detach=options.detach)


def _require_no_ray() -> None:
    """Raise if Ray places the hosts of this folder's job, since their processes must not be started here.

    Raises:
        UsageError: names the command that resumes the job.
    """
    _, kept, _ = job_spec.find_here()
    if kept.is_on_ray:
        raise UsageError(
            f"Ray places the hosts of the job in {kept.folder}, which has its own environment. Fix: run "
            f"`{kept.continuing()}` in that folder, which follows or resumes the job"
        )


def go_on(log_dir: Path, kept: JobSpec, *, detach: bool = False) -> int:
    """Restart dead processes, follow the job, and return the exit status.

    This is repeated if the scheduler gave up too early. With ``detach``, return once the processes are started.
    """
    while True:
        result = _bring_back(log_dir, job_spec.read(log_dir) or kept, detach=detach)
        if result is None or not result.call_again:
            return 0 if result is None else result.verdict.exit_code
        print("samebits: the scheduler gave up while the workers were starting; starting them again", flush=True)


def _moved_in() -> tuple[Path, JobSpec]:
    """Adopt the current folder as the home of a job whose folder was moved, and return the job.

    Raises:
        UsageError: the job is also in its original folder, or its processes run in another folder.
    """
    log_dir, kept, is_home = job_spec.find_here()
    if is_home:
        return log_dir, kept
    job_spec.require_moved(kept)
    moved = replace(kept.moved_to(Path.cwd()), interpreter=sys.executable)
    if moved.settings().log_dir.resolve() != log_dir.resolve():
        raise UsageError(
            f"{log_dir} is not the log folder of a job in {Path.cwd()}. Fix: change to the folder that was moved, then "
            f"{spelled('recover', '--moved')}"
        )
    with StartLock(log_dir):
        names = process_names(job_spec.nodes_of(log_dir, moved.settings()))
        for name, identity in read_pid_files(log_dir, names).items():
            if identity.is_alive() and not runs_in(identity, Path.cwd(), log_dir / f"{name}.log"):
                raise UsageError(
                    f"{spoken(name)} ({identity}) of the job that was copied to {Path.cwd()} is running elsewhere, and "
                    f"one job cannot continue in two folders. Fix: `{moved.command(fresh=True)}` starts over here"
                )
        job_spec.keep(log_dir, moved)
    _say(f"the job that was started in {kept.folder} continues in {moved.folder}")
    return log_dir, moved


def _bring_back(log_dir: Path, kept: JobSpec, *, detach: bool) -> FollowResult | None:
    """Restart dead processes and follow the job. Return None if the job is over, or with ``detach``."""
    present = config.whole_environment()
    secrets = job_spec.secrets_for(kept, present)
    settings = kept.settings(secrets)
    require_descriptors(settings.max_worker_num + settings.spare_num)
    if kept.is_finished:
        _say(f"nothing to do: job {own_job(settings)} is finished")
        return None
    with StartLock(log_dir) as lock:
        if is_listening(settings):
            job_spec.require_secrets(kept, secrets)
        remains = look(settings)
        _require_own_journal(kept, settings, remains)
        if _journal_is_lost(remains):
            _refuse_without_journal(settings, kept)
        supervisor = supervisor_for(settings)
        job = remains.view.job if remains.view is not None else own_job(settings)
        replaces = supervisor is not None and can_replace(settings, job)
        recovery = plan_recovery(replace(remains, cool_down_s=0.0) if replaces else remains)
        if recovery.start:
            job_spec.require_secrets(kept, secrets)
        for line in (*recovery.lines, _script_change(kept, remains, recovery), environment_change(kept, present)):
            if line:
                _say(line)
        if recovery.over:
            return None
        listener = Listener()
        if SCHEDULER in recovery.start:
            listener = _listener(kept, settings, remains)
            if listener.chosen_port is not None:
                kept, settings = _with_port(log_dir, kept, settings, listener.chosen_port)
        logs = LogEnds(settings.log_dir)
        logs.begin_all()
        with Signals() as signals, naming_what_runs_on(settings):
            program = program_of(kept, present, secrets)
            program = replace(program, listening=listener.descriptors, job=kept.job or job)
            if kept.has_relay:
                try:
                    restart_relay(settings.log_dir, program)
                except ListenError as error:
                    _say(f"the workers connect without this host's relay: {error}")
            in_place = partial(start_in_place, kept=kept, settings=settings, job=job, program=program)
            start_again(settings.log_dir, recovery, program, in_place if replaces else None)
            listener.close()
            lock.release()
            if detach and not signals.caught:
                _say(f"the job runs without this command; `{spelled('follow')}` follows it")
                return None
            driver = discovery_for(settings, supervisor)
            return Follower(
                settings,
                signals,
                restarts=True,
                logs=logs,
                supervisor=supervisor,
                driver=driver,
                foreign_job=remains.foreign_job,
            ).run()


def _with_port(log_dir: Path, kept: JobSpec, settings: Settings, port: int) -> tuple[JobSpec, Settings]:
    """Store the chosen port in place of the default one."""
    _say(f"the default SCHED_PORT={settings.sched_port} is in use; this job's scheduler listens on port {port}")
    kept = replace(kept, environment={**kept.environment, "SCHED_PORT": str(port)})
    job_spec.keep(log_dir, kept)
    return kept, replace(settings, sched_port=port)


def _listener(kept: JobSpec, settings: Settings, remains: Remains) -> Listener:
    """Listen for the scheduler, on any free port if the job's is in use and no process of the job knows it.

    Raises:
        ListenError: another process has the port, and no process of the job is left to follow.
    """
    runs = any(remains.is_alive(identity) for identity in remains.started.values())
    has_other_hosts = bool(kept.hosts) or len(remains.nodes) < settings.worker_num
    may_choose = not (runs or has_other_hosts or names_port(kept.environment))
    try:
        return listen_for(settings, may_choose=may_choose)
    except ListenError:
        if not runs:
            raise
        return Listener()  # the scheduler reports the problem, and its workers are followed meanwhile


def _require_own_journal(kept: JobSpec, settings: Settings, remains: Remains) -> None:
    """Raise if RECOVERY_PATH holds another job, because two launchers may have been given the same path.

    Raises:
        ForeignFolderError: names both jobs.
    """
    view = remains.view
    if view is not None and kept.job and view.job != kept.job:
        raise ForeignFolderError(
            f"RECOVERY_PATH={settings.recovery_path} holds {view}, but this folder's job is {kept.job} "
            f"({kept.script}), which has no journal there. Fix: give each job its own RECOVERY_PATH, then run "
            f"`{kept.command()}`"
        )


def _journal_is_lost(remains: Remains) -> bool:
    """Return whether there is no journal, and no process on this host that knows its content."""
    runs = any(remains.is_alive(identity) for identity in remains.started.values())
    is_here = remains.recovery and remains.has_scheduler
    return is_here and remains.view is None and not (runs or remains.scheduler_holds)


def _refuse_without_journal(settings: Settings, kept: JobSpec) -> None:
    """Raise, before anything is written, if a new job would overwrite the remains of this one.

    Raises:
        StoreError: data of the job is left. If none is, the job had hardly begun, and is started again.
    """
    candidate = recovering.newest_candidate(settings)
    if candidate is None and read_owner(settings.log_dir) is None:
        return
    gone = f"RECOVERY_PATH={settings.recovery_path} holds no journal, and no process of the job is left"
    fresh = f"`{kept.command(fresh=True)}` starts over"
    if candidate is None:
        raise StoreError(
            f"{gone}; no checkpoint on disk is complete for all ranks. Fix: restore that folder, or {fresh}"
        )
    raise StoreError(
        f"{gone}. The newest point that all {candidate.world_size} ranks hold on disk is step {candidate.point.step}, "
        f"of job {candidate.job}. Fix: restore that folder, or "
        f"`{spelled('recover', '--from-checkpoints')}` continues from there with a new journal; {fresh}"
    )


def _begin_journal(log_dir: Path, kept: JobSpec) -> None:
    """Create a new journal for a job that has lost its own.

    Raises:
        UsageError: there is a journal, or a living process that knows its content.
        StoreError: there is no point to continue from.
    """
    settings = kept.settings(job_spec.secrets_for(kept, config.whole_environment()))
    with StartLock(log_dir):
        if not _journal_is_lost(look(settings)):
            raise UsageError(
                f"RECOVERY_PATH={settings.recovery_path} holds a journal, or live processes of the job still know "
                f"its content. Fix: run `{spelled('recover')}` without --from-checkpoints"
            )
        candidate = recovering.verified_candidate(settings, _say)
        if candidate is None:
            raise StoreError(
                f"CHECKPOINT_PATH={settings.checkpoint_path}: no checkpoint is complete for all ranks. Fix: "
                f"`{kept.command(fresh=True)}` starts over"
            )
        recovering.begin_journal(settings, candidate)
        job_spec.keep(log_dir, replace(kept, job=candidate.job))
    _say(
        f"created a new journal in {settings.recovery_path}: job {candidate.job} continues from step "
        f"{candidate.point.step}, which all {candidate.world_size} ranks have on disk (every byte was verified)"
    )


def _script_change(kept: JobSpec, remains: Remains, recovery: RecoveryPlan) -> str:
    """Describe how the script has changed, or return "" if it has not, or if no worker will read it."""
    if not any(name != SCHEDULER for name in recovery.start):
        return ""
    others = (name for name in remains.started if name != SCHEDULER and name not in recovery.start)
    now = version_of(kept.folder / kept.script)
    others_run = any(remains.is_alive(remains.started[name]) for name in others)
    return change(kept.script, kept.script_version, now, others_run=others_run)


def environment_change(kept: JobSpec, present: Mapping[str, str]) -> str:
    """Name the variables whose values differ between the job's start and this command, or return "".

    Variables that the job spec stores are not among them.
    """
    if kept.is_on_ray or not kept.other_variables:  # a file has the environment of a job on Ray
        return ""
    names = config.changed_names(kept.other_variables, job_spec.digests_of_others(present))
    if not names:
        return ""
    named = listed(names, config.MOST_NAMED)
    return (
        f"{named} {'differs' if len(names) == 1 else 'differ'} from the environment in which the job was started: "
        "processes that this command starts get the present values. Fix: if the script reads one of them, export the "
        "value of the start, and run this command again"
    )


def start_again(
    log_dir: Path, recovery: RecoveryPlan, program: Program, in_place: Callable[[Sequence[str]], object] | None = None
) -> None:
    """Start dead processes again, after ending those that are in the way.

    With ``in_place``, replacements are new nodes, which wait for no cool-down.

    Raises:
        StoreError: for example, no space for a pid file; running processes of the job continue.
    """
    with reserved(log_dir, () if in_place is not None else recovery.start) as berths:
        for lost in recovery.end:
            _say(f"ending {spoken(lost.name)} ({lost.identity}), which {lost.why}")
            end(lost.identity, TERM_GRACE_S)
        launch(berths, program, [])
    if in_place is not None and recovery.start:
        in_place(recovery.start)


def look(settings: Settings) -> Remains:
    """Find what is left of the job on this machine."""
    nodes = job_spec.nodes_of(settings.log_dir, settings)
    kept = job_spec.read(settings.log_dir)
    started = read_pid_files(settings.log_dir, process_names(nodes))
    refresh(settings, _say)
    stored = stored_view(settings.recovery_path) if settings.enable_recovery else None
    told = ask_once(settings, ANSWER_TIMEOUT_S)
    own, foreign_job = own_job(settings), ""
    if told is not None and own not in ("", told.job):
        foreign_job = told.job
        where = told.address or f"SCHED_PORT={settings.sched_port}"
        _say(f"the scheduler at {where} serves {told}, but this folder belongs to {stored or f'job {own}'}")
        told = None
    if told is not None and stored is not None and told.term < stored.term:
        _say(
            f"the scheduler that answers has term {told.term}, but a scheduler with term {stored.term} has replaced it"
        )
        told = None
    scheduler = started.get(SCHEDULER)
    if told is None and scheduler is not None and is_stopped(scheduler):
        _say(f"the scheduler ({scheduler}) is stopped. Fix: resume it with kill -CONT {scheduler.pid}")
    holder = read_holder(settings.recovery_path)
    return Remains(
        nodes=nodes,
        recovery=settings.enable_recovery,
        cool_down_s=settings.register_cooldown_s,
        started=started,
        view=told or stored,
        scheduler_serves=told is not None,
        foreign_job=foreign_job,
        scheduler_holds=holder is not None
        and holder.role.startswith(SCHEDULER)
        and holder.is_on_this_host()
        and holder.identity.is_alive(),
        is_alive=ProcessIdentity.is_alive,
        host=host_id(),
        has_scheduler=kept is None or kept.has_scheduler,
        again=spelled("run") if kept is None else _with_recovery(kept).command(),
    )


def _with_recovery(kept: JobSpec) -> JobSpec:
    words = tuple(word for word in kept.words if not word.removeprefix(config.PREFIX).startswith("ENABLE_RECOVERY="))
    return replace(kept, words=words)


def _say(text: str) -> None:
    print(f"samebits: {text}", file=sys.stderr, flush=True)
