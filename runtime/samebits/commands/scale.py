"""``samebits scale``: add workers on this machine to a running job, or remove some.

The job spec names the nodes of this machine, and is changed first. Even if this command is killed, ``recover``
therefore restarts added workers and does not restart removed ones.
"""

from __future__ import annotations

import argparse
import signal
import sys
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from samebits import config
from samebits.account.job_view import JobView, PresenceState
from samebits.commands.recover import look
from samebits.config import Settings
from samebits.core.replacement_names import root_of
from samebits.errors import UsageError
from samebits.launcher import job_spec
from samebits.launcher.interrupts import Signals
from samebits.launcher.job_spec import JobSpec, program_of
from samebits.launcher.processes import name_of, read_pid_files, send_signal
from samebits.launcher.scheduler_link import decide_once
from samebits.launcher.spawning import StartLock, hear_signals, is_here, launch, reserved
from samebits.option_types import whole
from samebits.printable import counted
from samebits.spelling import spelled


def main(arguments: Sequence[str]) -> int:
    """Run ``scale``."""
    parser = argparse.ArgumentParser(
        prog="samebits scale",
        description=textwrap.fill(
            "Change the number of workers: start more on this machine, or make the newest workers on this machine "
            "leave at their next commit. If hosts are discovered, the command that follows the job does this."
        ),
        epilog="examples:\n"
        "  samebits scale 6             train with six workers (MIN_WORKER_NUM to MAX_WORKER_NUM)\n"
        "  samebits scale 6 --dry-run   only print which workers would start or leave\n"
        "  samebits scale --add 2       start two more on this machine\n"
        "  samebits scale --remove 5 6  make workers 5 and 6 on this machine leave for good\n\n"
        "Exits with 0 as soon as the change is under way. `samebits status` shows the workers, `samebits history` why.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("size", type=whole(1), nargs="?", metavar="N", help="number of workers to have")
    what.add_argument("--add", type=whole(1), nargs="?", const=1, metavar="N", help="start this many more here (1)")
    what.add_argument("--remove", nargs="+", metavar="NODE", help="make these workers or spares leave for good")
    parser.add_argument("--dry-run", action="store_true", help="with N: only print what would be done")
    options = parser.parse_args(arguments)
    if options.dry_run and options.size is None:
        parser.error("--dry-run needs a number of workers, as in `samebits scale 6 --dry-run`")
    log_dir, kept = job_spec.read_here()
    if options.size is None:
        require_no_driver(kept, "--remove" if options.remove else "--add")
    hear_signals()
    with StartLock(log_dir), Signals():
        if options.remove:
            release(log_dir, tuple(dict.fromkeys(options.remove)))
        elif options.add:
            _add(log_dir, options.add)
        elif not bring_to(log_dir, options.size, "by hand", dry_run=options.dry_run):
            _say(f"{options.size} workers are present, joining or already requested")
    return 0


def _add(log_dir: Path, count: int) -> None:
    _, kept = job_spec.read_here()
    present = config.whole_environment()
    secrets = job_spec.secrets_for(kept, present)
    job_spec.require_secrets(kept, secrets)
    settings = kept.settings(secrets)
    if not settings.enable_recovery:
        raise UsageError(
            "this job was started with ENABLE_RECOVERY=0, so no worker can join it. Fix: start it with "
            "ENABLE_RECOVERY=1"
        )
    nodes = job_spec.nodes_of(log_dir, settings)
    view = view_of(settings)
    added = nodes_to_add(settings, nodes, view, count)
    with reserved(settings.log_dir, [name_of(node) for node in added]) as berths:
        job_spec.keep(log_dir, replace(kept, nodes=nodes + added))
        joins = "new workers join at a commit" if view.has_room else "every slot is taken, so new workers become spares"
        _say(f"starting worker {', '.join(added)}: {joins}")
        launch(berths, program_of(kept, present, secrets), [])


def require_no_driver(kept: JobSpec, option: str) -> None:
    """Raise if a driver already decides which host runs which worker.

    Raises:
        UsageError: the job's hosts are discovered.
    """
    if kept.hosts:
        raise UsageError(
            f"samebits scale {option}: this job's hosts are discovered, so its follower places the workers. "
            "Fix: `samebits scale N` changes the size, and `samebits drain NODE|HOST` empties a machine before it is "
            "removed"
        )


def release(log_dir: Path, leaving: Sequence[str]) -> None:
    """Make these nodes of this machine leave permanently. The caller holds the start lock.

    Raises:
        UsageError: the job cannot continue without them, they are not on this machine, or no scheduler answers.
    """
    _, kept = job_spec.read_here()
    settings = job_spec.settings_here()
    nodes = job_spec.nodes_of(log_dir, settings)
    check_removal(nodes, view_of(settings), leaving)
    job_spec.keep(log_dir, replace(kept, nodes=tuple(node for node in nodes if node not in leaving)))
    for node in leaving:
        if not is_here(kept.hosts.get(node, "localhost")):  # the driver asks the worker itself
            _say(f"worker {node} on {kept.hosts[node]} leaves at its next commit")
            continue
        identity = read_pid_files(log_dir, [name_of(node)]).get(name_of(node))
        is_told = identity is not None and send_signal(identity, signal.SIGTERM)
        _say(f"worker {node} ({identity}) leaves after its present step" if is_told else f"worker {node} is gone")


def bring_to(log_dir: Path, size: int, why: str, *, dry_run: bool = False) -> bool:
    """Start or release workers until the job has ``size`` workers. The caller holds the start lock.

    Args:
        why: reason for the job's history.
        dry_run: only print what would be done.

    Returns:
        False if there was nothing to do: this many workers are already present, joining or requested.

    Raises:
        UsageError: the job's bounds forbid it, it has too few workers here, or no scheduler answers.
    """
    settings = job_spec.settings_here()
    view = view_of(settings)
    if not view.min_world_size <= size <= view.max_world_size:
        raise UsageError(
            f"{size} workers: this job allows {view.min_world_size} (MIN_WORKER_NUM) to {view.max_world_size} "
            "(MAX_WORKER_NUM). Fix: give a number in this range, or start the job again with other limits"
        )
    nodes = job_spec.nodes_of(log_dir, settings)
    kept = job_spec.read(log_dir)
    there = standing(nodes, view, running_here(log_dir, nodes, view))
    before = len(there)
    if kept is not None and kept.hosts:
        if kept.size == size:
            return False
        _say(f"{'would want' if dry_run else 'wanted'}: {size} workers on the discovered hosts; {before} are there")
        if not dry_run:
            job_spec.keep(log_dir, replace(kept, size=size))
    elif size > before:
        added = nodes_to_add(settings, nodes, view, size - before)
        if dry_run:
            _say(f"would start worker {', '.join(added)}: {before} → {size} workers")
        else:
            _add(log_dir, size - before)
    elif size < before:
        leaving = last_to_come([node for node in there if node in nodes], before - size)
        if dry_run:
            check_removal(nodes, view, leaving)
            _say(f"would have worker {', '.join(leaving)} leave: {before} → {size} workers")
        else:
            release(log_dir, leaving)
    else:
        return False
    if not dry_run:
        decide_once(settings, f"{before} → {size} workers: {why}")
    return True


def standing(nodes: Sequence[str], view: JobView, running: Collection[str]) -> list[str]:
    """Return the workers that will remain, in slot order: including those that are joining, without those leaving.

    Args:
        nodes: node ids that belong to this machine.
        running: node ids whose process runs on this machine.
    """
    alive = [one.node for one in view.workers if one.presence is PresenceState.ALIVE]
    staying = [
        node for node in alive if node in nodes or node not in running
    ]  # a node that runs here but no longer belongs to this machine is leaving
    coming = [node for node in nodes if node in running and node not in alive and not view.is_spare(node)]
    return staying + coming


def running_here(log_dir: Path, nodes: Sequence[str], view: JobView) -> set[str]:
    """Return which of these nodes, and of the job's nodes, have a process on this machine."""
    names = {name_of(node): node for node in (*nodes, *(one.node for one in view.workers))}
    return {names[name] for name, found in read_pid_files(log_dir, names).items() if found.is_alive()}


def last_to_come(nodes: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the ``count`` local workers with the highest slots, which joined last.

    Raises:
        UsageError: there are not that many workers.
    """
    if count > len(nodes):
        raise UsageError(
            f"{count} workers would have to leave, but only {len(nodes)} of them run on this machine. Fix: run "
            "this command on the other workers' hosts, too"
        )
    return tuple(nodes[len(nodes) - count :])


def view_of(settings: Settings) -> JobView:
    """Return the job as its scheduler describes it now.

    Raises:
        UsageError: no scheduler of this job answers, because the job is finished or the scheduler is gone.
    """
    remains = look(settings)
    if remains.view is not None and remains.view.job_finished:
        raise UsageError(
            f"{remains.view} is finished at step {remains.view.step}, and has no workers left. Fix: "
            f"`{spelled('run')}` starts the next job"
        )
    if remains.view is None or not remains.scheduler_serves:
        raise UsageError(f"no scheduler of this job answers. Fix: `{spelled('recover')}` brings it back")
    return remains.view


def nodes_to_add(settings: Settings, nodes: Sequence[str], view: JobView, count: int) -> tuple[str, ...]:
    """Return the first ``count`` unused node ids that name a slot.

    Raises:
        UsageError: there are not that many ids.
    """
    if count < 1:
        raise UsageError(f"{count} workers to add: expected 1 or more")
    elsewhere = {one.node for one in view.nodes if one.presence is PresenceState.ALIVE}
    taken = {root_of(node) for node in (*nodes, *elsewhere)}  # 1.1 runs in place of 1
    free = [node for node in map(str, range(settings.max_worker_num)) if node not in taken]
    if len(free) < count:
        raise UsageError(
            f"MAX_WORKER_NUM={settings.max_worker_num}: {len(free)} node ids below it are free, but {count} are "
            "needed. Fix: stop the job and start it with a larger MAX_WORKER_NUM"
        )
    return tuple(free[:count])


def check_removal(nodes: Sequence[str], view: JobView, leaving: Sequence[str]) -> None:
    """Check that the job can continue without these nodes.

    Raises:
        UsageError: it cannot, or the nodes are not on this machine.
    """
    strangers = [node for node in leaving if node not in nodes]
    if strangers:
        raise UsageError(
            f"no worker {', '.join(strangers)} of this job runs here; expected one or more of {', '.join(nodes)}"
        )
    alive = {one.node for one in view.nodes if one.presence is PresenceState.ALIVE and one.node not in leaving}
    workers = sum(worker.node in alive for worker in view.workers)
    spares = sum(spare.node in alive for spare in view.spares)
    gone = [worker.node for worker in view.workers if worker.node in leaving]
    if gone and workers + spares < view.min_world_size:
        raise UsageError(
            f"MIN_WORKER_NUM={view.min_world_size}: without worker {', '.join(gone)} the job has "
            f"{counted(workers, 'worker')} and {counted(spares, 'spare')}, and would wait for more. Fix: add workers "
            "first, or end the job with `samebits stop`"
        )


def _say(text: str) -> None:
    print(f"samebits: {text}", file=sys.stderr, flush=True)
