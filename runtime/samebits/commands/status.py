"""``samebits status``: show a job's state from its scheduler or, if none runs, from its journal.

The output says which of the two was used, because a journal knows seats but no processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from samebits import strict_json
from samebits.account.history import summary_of_folder
from samebits.account.job_view import JobView, PresenceState, WorkerView
from samebits.commands.clean import memory_line
from samebits.config import Settings
from samebits.core.replacement_names import number_of, title_of, titled
from samebits.errors import SchedulerUnreachableError, UsageError
from samebits.launcher import job_spec
from samebits.launcher.processes import process_names, read_pid_files, spoken
from samebits.launcher.progress_line import phase_text, world_text
from samebits.launcher.relay_process import relay_line
from samebits.launcher.scheduler_link import ANSWER_TIMEOUT_S, ask_once, own_job
from samebits.launcher.supervising import supervisor_of
from samebits.printable import counted, listed
from samebits.scheduler_hosts import shown
from samebits.service import status
from samebits.service.job_journal import outage
from samebits.service.status import stored_view
from samebits.spelling import spelled


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits status",
        description="Show the job that was started in this folder, or the one at SCHED_HOST and SCHED_PORT.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    settings = job_spec.settings_here()
    view = status.looked_at(find(settings))
    if view.from_journal:  # workers may have taken further steps after the last record with a step
        view = msgspec.structs.replace(view, step=summary_of_folder(settings.recovery_path, view.step)[0])
    if options.json:
        print(strict_json.dumps(view.plain()))
        return 0
    if not job_spec.is_job_named(settings):
        where = shown(settings.sched_host, settings.sched_port)
        print(f"no job was started in {Path.cwd()}; showing the job whose scheduler answers at {where}")
    stored = view if view.from_journal else stored_view(settings.recovery_path)
    print(table(view, settings, stored))
    if relay := relay_line(settings.log_dir):
        print(relay)
    memory = memory_line(view.job)
    if memory:
        print(f"{memory}; `samebits clean` frees it once nothing of the job runs")
    return 0


def find(settings: Settings) -> JobView:
    """Return the state of this folder's job or, if it has none, of the job whose scheduler answers.

    Raises:
        SchedulerUnreachableError: workers of the job run on this host, but their scheduler does not answer.
        UsageError: there is no journal, and no scheduler answers, or only another job's.
    """
    told = ask_once(settings, ANSWER_TIMEOUT_S)
    stored = stored_view(settings.recovery_path) if told is None or settings.enable_recovery else None
    if told is not None and stored is None and (own := own_job(settings)) not in ("", told.job):
        raise UsageError(
            f"no scheduler of job {own}, which was started in {Path.cwd()}, answers; the one at "
            f"{shown(settings.sched_host, settings.sched_port)} serves {told}. Fix: `{spelled('ps')}` lists what "
            "is left of this folder's job; change to the other job's folder to see that one"
        )
    view = told if told is not None and not _is_superseded(told, stored) else stored
    if view is None:
        _require_no_workers(settings)
        raise UsageError(
            f"no scheduler answers at {shown(settings.sched_host, settings.sched_port)}, and there is no journal "
            f"in RECOVERY_PATH={settings.recovery_path}. Fix: change to the folder the job was started in, or "
            f"start one with `{spelled('run')}`"
        )
    return view


def _require_no_workers(settings: Settings) -> None:
    """Check that no worker of a job runs on this host, which has no journal because the scheduler is on another host.

    Raises:
        SchedulerUnreachableError: a worker runs.
    """
    names = process_names(job_spec.nodes_of(settings.log_dir, settings))
    alive = {name: one for name, one in read_pid_files(settings.log_dir, names).items() if one.is_alive()}
    if alive:
        running = listed(f"{spoken(name)} ({one})" for name, one in alive.items())
        raise SchedulerUnreachableError(
            f"the scheduler at {shown(settings.sched_host, settings.sched_port)} does not answer. On this host, "
            f"{running} still run{'s' if len(alive) == 1 else ''}. Fix: check the network and the scheduler's host"
        )


def _is_superseded(told: JobView, stored: JobView | None) -> bool:
    """Return whether the folder's journal has a later term than the scheduler that answers, or another job."""
    return stored is not None and (stored.job != told.job or stored.term > told.term)


def table(view: JobView, settings: Settings, stored: JobView | None = None) -> str:
    """Format the state for people: lines about the job, then workers, spares, and nodes that lost their slots.

    Args:
        stored: the journal's view, which alone knows workers that were lost and came back.
    """
    phase = view.ended.words if view.from_journal and view.ended is not None else phase_text(view)
    step = "" if settings.plain else f" · step {view.step}"
    head = [str(view), f"{phase}{step} · {world_text(view, view.alive)}"]
    head[1] += f" · term {view.term} · generation {view.generation}"
    if view.address:
        head[1] += f" · scheduler at {view.address}"
    if view.restore_step is not None and not settings.plain:
        head.append(f"this generation began at step {view.restore_step}")
    if view.from_journal:
        head += _without_scheduler(view, settings)
    if view.standstill:
        head.append(view.standstill)
    head += [*view.ailments, *view.stragglers, *_reported(view)]
    if view.first_cause:
        head.append(view.first_cause if view.ended is not None else f"first cause: {view.first_cause}")
    is_told = 1 if view.first_cause else 0
    if stored is not None and stored.job == view.job and stored.losses > is_told:
        lost = f"{stored.losses} processes were" if stored.losses > 1 else "1 process was"
        head.append(f"{lost} lost so far; the last: {'; '.join(stored.last_losses)}")
    rows: list[tuple[str, ...]] = [("slot", "node", "state", "step", "process", "")]
    rows += [_row(view, str(worker.slot), worker, settings) for worker in view.workers]
    rows += [_row(view, "spare", spare, settings) for spare in view.spares]
    rows += [_row(view, "–", node, settings) for node in view.retired]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ("  ".join([*(f"{row[i]:<{widths[i]}}" for i in range(5)), row[5]]).rstrip() for row in rows)
    nodes = [node.node for node in view.nodes if number_of(node.node)]
    told = [f"node {nodes[0]} is worker {title_of(nodes[0])}"] if nodes else []
    return "\n".join([*map(titled, head), *lines, *told] if view.nodes else head)


def _without_scheduler(view: JobView, settings: Settings) -> list[str]:
    """Return the source of a journal's view, the processes that run without a scheduler, and how to restart the job."""
    says = f"this is what the journal in {settings.recovery_path} says"
    if view.job_finished:
        return [f"the job is over: {says}"]
    told = [f"no scheduler answers at {shown(settings.sched_host, settings.sched_port)}: {says}"]
    counts = {one: sum(node.presence is one for node in view.nodes) for one in PresenceState}
    alive, gone = counts[PresenceState.ALIVE], counts[PresenceState.GONE]
    hosts = sorted({one.host.partition("#")[0] for one in view.nodes if one.presence is PresenceState.UNKNOWN})
    if why := outage(settings):
        told.append(why)
    if hosts:
        told.append(f"processes on {listed(hosts)} cannot be seen from here")
    back = f"Fix: `{job_spec.command_to_continue(settings.log_dir)}` brings the job back"
    if view.ended is not None and view.ended.has_fix:
        back = f"{back.removeprefix('Fix: ')}, once the error below is corrected"
    if alive:
        rest = f", {gone} {'is' if gone == 1 else 'are'} gone" if gone else ""
        told.append(f"{counted(alive, 'worker')} of it still run{'s' if alive == 1 else ''}{rest}")
    elif not hosts:
        told.append("no process of the job runs any more")
    if why:
        told[-1] += "; the scheduler continues once the etcd answers" if alive else ""
        return told
    has_supervisor = supervisor_of(settings.log_dir) is not None
    told[-1] += "; the command that follows the job starts what is missing" if has_supervisor else f". {back}"
    return told


def _reported(view: JobView) -> list[str]:
    """Return the workers' reported numbers; for each name, that of the worker with the lowest slot."""
    found: dict[str, str] = {}
    for worker in view.workers:
        if worker.presence is PresenceState.ALIVE:
            for name, value in worker.figures.items():
                if name not in status.MEASURED:
                    found.setdefault(name, f"{name} {value:,.6g} (worker {worker.node})")
    return [f"reported: {', '.join(found.values())}"] if found else []


def _row(view: JobView, slot: str, worker: WorkerView, settings: Settings) -> tuple[str, ...]:
    return (
        slot,
        worker.node,
        worker.presence.value,
        "–" if view.from_journal or settings.plain else str(worker.step),
        f"pid {worker.identity.pid} on {worker.host.partition('#')[0]}",
        worker.reason or _doing(view, worker),
    )


def _doing(view: JobView, worker: WorkerView) -> str:
    if view.from_journal or worker.presence is not PresenceState.ALIVE:
        return ""
    if worker in view.spares:
        return {"seated": "warming up", "waiting": "warm"}.get(worker.activity, worker.activity)
    if not worker.is_joining:
        return worker.activity
    joins = f"with its shard group when {listed(worker.waits_for)}" if worker.waits_for else "at the next commit"
    return f"{worker.activity}, joins {joins}"
