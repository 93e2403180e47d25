"""Start a job whose hosts are discovered: wait for enough hosts, or follow the job if it is already running.

A job begins as soon as there are enough hosts. Later hosts join at a commit.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from samebits import config
from samebits.commands.run.options import RunRequest
from samebits.commands.run.prepare import say
from samebits.config import Settings
from samebits.errors import SettingsError, UsageError
from samebits.hosts.discovery import EVERY_S, ask, words_of
from samebits.hosts.host_list import Resting
from samebits.hosts.placement import Placement
from samebits.launcher import job_spec
from samebits.launcher.job_spec import JobSpec
from samebits.launcher.processes import process_names, read_pid_files
from samebits.launcher.spawning import is_here, template_of
from samebits.scheduler_hosts import addresses_in


def running_job(request: RunRequest) -> tuple[Path, JobSpec] | None:
    """Return the requested job if it is already running and its hosts are discovered, otherwise None."""
    settings = _settings(request)
    if settings.host_discovery_script is None or request.fresh or request.dry_run:
        return None
    log_dir = Path.cwd() / settings.log_dir
    kept = job_spec.read(log_dir)
    if kept is None or not kept.hosts:
        return None
    asked = (Path.cwd(), request.script, request.args, request.way)
    started = read_pid_files(log_dir, process_names(kept.nodes or ()))
    runs = any(identity.is_alive() for identity in started.values())
    is_it = runs and asked == (kept.folder, kept.script, kept.args, kept.way)
    return (log_dir, kept) if is_it else None


def placed(request: RunRequest) -> RunRequest:
    """Return the request with the workers and hosts from the discovery script, or unchanged without a script.

    Waits until there are hosts for MIN_WORKER_NUM workers, for at most TOPO_TIMEOUT.

    Raises:
        SettingsError, UsageError: a setting is invalid, or there were too few hosts for too long.
    """
    settings = _settings(request)
    if settings.host_discovery_script is None:
        return request
    if not settings.enable_recovery:
        raise UsageError("HOST_DISCOVERY_SCRIPT needs ENABLE_RECOVERY=1: no other host could join. Fix: leave it out")
    if settings.host_launch is not None:
        template_of(settings.host_launch)
        if settings.cluster_secret is not None:
            raise SettingsError(
                [
                    "CLUSTER_SECRET=(hidden): HOST_LAUNCH would put it into a command line, which every user can read. "
                    "Fix: export CLUSTER_SECRET_FILE=<a file with it, on every host>, and unset CLUSTER_SECRET"
                ]
            )
    hosts = _first_hosts(settings)
    nodes = [number for number, _ in hosts]
    elsewhere = sorted({host for _, host in hosts if not is_here(host)})
    if elsewhere and _is_own(settings):
        say(
            f"SCHED_HOST={settings.sched_host} is this machine's own: workers on {', '.join(elsewhere[:6])} can reach "
            "it only if they run on this machine, too. Fix: --sched-host <an address that they can reach>"
        )
    environment = {**request.environment, "WORKER_NUM": str(len(nodes))}
    return replace(request, environment=environment, nodes=tuple(nodes), hosts=dict(hosts))


def _is_own(settings: Settings) -> bool:
    """Return whether only this machine can reach the scheduler. False for addresses in a file."""
    named = addresses_in(settings.sched_host, settings.sched_port)
    return bool(named) and all(config.is_loopback(one.host) for one in named)


def _first_hosts(settings: Settings) -> list[tuple[str, str]]:
    """Return each worker's number and host, once there are enough hosts."""
    folder, slots = Path.cwd(), settings.host_slots
    words = words_of(settings.host_discovery_script or "", folder)
    placement = Placement(settings.max_worker_num, Resting(*settings.grace.host))
    said, give_up_at = "", time.monotonic() + settings.topo_timeout_s
    while True:
        answer = ask(words, folder, slots)
        if isinstance(answer, str):
            waits = f"the discovery script: {answer}"
        else:
            usable = [host for host in answer if settings.host_launch is not None or is_here(host.name)]
            placement.seen(usable)
            start = placement.next({}, {}, time.monotonic()).start
            if len(start) >= settings.min_worker_num:
                return start
            unused = len(answer) - len(usable)
            waits = f"the discovered hosts have {len(start)} of at least {settings.min_worker_num} slots"
            if unused:
                waits += f"; {unused} more hosts are not this machine, and no --launch says how to start there"
        if waits != said:
            said = waits
            say(f"{waits}; waiting")
        if time.monotonic() >= give_up_at:
            raise UsageError(
                f"{waits}, for {settings.topo_timeout_s:g} s (TOPO_TIMEOUT). Fix: check the output of `{words[0]}`"
            )
        time.sleep(EVERY_S)


def _settings(request: RunRequest) -> Settings:
    """Return the settings that are known before the number of workers is known."""
    everything = {**config.whole_environment(), **request.environment}
    for name in ("ROLE", "MS_ROLE", "NODE_ID", "MS_NODE_ID"):
        everything.pop(name, None)
    most = everything.get("MAX_WORKER_NUM") or everything.get("MS_MAX_WORKER_NUM")
    if most and not (everything.get("WORKER_NUM") or everything.get("MS_WORKER_NUM")):
        everything["WORKER_NUM"] = most
    return config.read(everything, role_required=False)[0]
