"""``samebits stop``: end the job as Ctrl-C in a follower does, and wait until none of its processes runs.

A follower ends the processes of this machine. If an engine started them elsewhere, only the scheduler ends the job.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence

from samebits.account.job_view import JobView, PresenceState
from samebits.commands.clean import memory_line
from samebits.commands.drain import ASK_AGAIN_S, wait_until_left
from samebits.commands.recover import look
from samebits.commands.scale import view_of
from samebits.config import Settings
from samebits.core.end_kinds import EndKind
from samebits.errors import SameBitsError, UsageError
from samebits.launcher import job_spec
from samebits.launcher.follower import Follower
from samebits.launcher.interrupts import Signals
from samebits.launcher.processes import process_names, read_pid_files, send_signal
from samebits.launcher.relay_process import end_relay
from samebits.launcher.scheduler_link import is_listening, stop_once
from samebits.launcher.supervising import supervisor_of
from samebits.option_types import interval
from samebits.printable import counted
from samebits.scheduler_hosts import shown
from samebits.service.status import stored_view
from samebits.spelling import spelled
from samebits.store.process_identity import ProcessIdentity

BY = "samebits stop"
DRAIN_S = 60.0
END_S = 30.0
"""Seconds to wait for a scheduler that was told to end; it gives its workers 10 s."""
_LOOK_S = 0.2


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits stop",
        description=f"End the job that was started in this folder; {spelled('recover')} continues from there.",
    )
    parser.add_argument(
        "--drain",
        type=interval,
        nargs="?",
        const=DRAIN_S,
        metavar="S",
        help="first let all workers train to the same commit, so that no step is repeated when the job resumes; "
        f"after S seconds (default {DRAIN_S:g}), the job ends as without this option",
    )
    options = parser.parse_args(arguments)
    settings = job_spec.settings_here()
    job_spec.require_job(settings)
    status = _stop(settings, options.drain)
    end_relay(settings.log_dir)
    return status


def _stop(settings: Settings, drain_s: float | None) -> int:
    nodes = job_spec.nodes_of(settings.log_dir, settings)
    identities = read_pid_files(settings.log_dir, process_names(nodes)).values()
    runs_here, listens = any(identity.is_alive() for identity in identities), is_listening(settings)
    supervisor = supervisor_of(settings.log_dir)
    if supervisor is not None and not (listens and look(settings).scheduler_serves):
        return _stop_supervisor(supervisor, settings)
    view = None if runs_here else stored_view(settings.recovery_path)
    if view is not None and view.job_finished:
        print(f"samebits: nothing to stop: {view} is finished at step {view.step}", flush=True)
        return 0
    if view is not None and not listens:
        raise UsageError(
            f"nothing to stop: {view} is unfinished at step {view.step}, but no process of it runs here, and no "
            f"scheduler answers at {shown(settings.sched_host, settings.sched_port)}. Fix: "
            f"`{job_spec.command_to_continue(settings.log_dir)}` resumes it"
        )
    if not runs_here and not listens:
        raise UsageError(
            f"no job is running here: {settings.log_dir} names no live process, and no scheduler answers at "
            f"{shown(settings.sched_host, settings.sched_port)}. Fix: change to the folder the job was started in"
        )
    elsewhere = None if runs_here else view_of(settings)  # rejects another job's scheduler on the same port
    if listens and drain_s is not None:
        _stop_at_commit(settings, drain_s)
    if elsewhere is not None:
        return _stop_elsewhere(settings, elsewhere)
    with Signals() as signals:
        verdict = Follower(settings, signals).run(stop_by=BY).verdict
    view = stored_view(settings.recovery_path)
    memory = memory_line(view.job) if view is not None else ""
    if memory:
        print(f"samebits: {memory}; `samebits clean` frees it")
    return 0 if verdict.kind in (None, EndKind.STOPPED) else verdict.exit_code


def _stop_supervisor(supervisor: ProcessIdentity, settings: Settings) -> int:
    """Ask the supervisor to end the job, because there is no scheduler to do it.

    Raises:
        UsageError: the supervisor has not ended in time.
    """
    follower = f"the command that follows the job ({supervisor})"
    print(f"samebits: no scheduler answers: {follower} is asked to end the job", flush=True)
    send_signal(supervisor, signal.SIGTERM)
    patience_s = settings.grace.shutdown_s + END_S
    if not supervisor.wait_for_exit(patience_s):
        raise UsageError(
            f"{follower} has not ended after {patience_s:g} s. Fix: check its output, or end it with kill -9 and run "
            "`samebits stop` again"
        )
    again = job_spec.command_to_continue(settings.log_dir)
    print(f"samebits: the job was stopped; {again} continues from there", flush=True)
    return 0


def _stop_at_commit(settings: Settings, timeout_s: float) -> None:
    """Ask for a stop after a commit that all workers make, and wait for it.

    If that fails, request a plain stop.
    """
    try:
        view = view_of(settings)
        if not view.generation:  # no worker trains in a group: each leaves as it does after SIGTERM
            _drain(settings, view, timeout_s)
            return
        give_up_at, ask_at = time.monotonic() + timeout_s, 0.0
        while is_listening(settings):
            now = time.monotonic()
            if now >= give_up_at:
                raise UsageError(f"the workers have not stopped after the same commit within {timeout_s:g} s")
            if now >= ask_at:
                stop_once(settings, BY, at_commit=True)
                ask_at = now + ASK_AGAIN_S
            time.sleep(_LOOK_S)
    except SameBitsError as error:
        print(f"samebits: {error}; the job is stopped now", flush=True)


def _drain(settings: Settings, view: JobView, timeout_s: float) -> None:
    """Make every worker leave. Those that have not left in time end with the job."""
    nodes = [one.node for one in view.nodes if one.presence is PresenceState.ALIVE]
    if nodes:
        text = f"{counted(len(nodes), 'worker')} must leave: the job is drained ({BY} --drain)"
        wait_until_left(settings, text, nodes, timeout_s)


def _stop_elsewhere(settings: Settings, view: JobView) -> int:
    """End a job that has no known process on this machine, which only its scheduler can do."""
    deadline = time.monotonic() + END_S
    while is_listening(settings):
        stop_once(settings, BY)
        if time.monotonic() >= deadline:
            raise UsageError(
                f"the scheduler on {settings.sched_host}, SCHED_PORT={settings.sched_port} has not ended after "
                f"{END_S:g} s. Fix: check its log, or end its process on that host"
            )
        time.sleep(_LOOK_S)
    print(
        f"samebits: {view} was stopped; `samebits recover` in its folder, or a restart by its cluster, continues it",
        flush=True,
    )
    return 0
