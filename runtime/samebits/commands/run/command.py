"""``samebits run``: start a job on this machine, or this host's part of one, and follow it to its end.

Everything is checked before anything is started. Requests to stop are handled from the first process on, so that no
started process is left behind.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samebits import config
from samebits.commands import recover
from samebits.commands.run import options, prepare
from samebits.commands.run.options import RunRequest
from samebits.commands.run.prepare import PreparedJob, say
from samebits.config import Settings
from samebits.errors import SettingsError, UsageError
from samebits.hosts.discovery import EVERY_S, ask, discovery_for, words_of
from samebits.hosts.host_list import Resting
from samebits.hosts.placement import Placement
from samebits.launcher import job_spec
from samebits.launcher.follower import Follower, naming_what_runs_on
from samebits.launcher.interrupts import Signals
from samebits.launcher.job_spec import JobSpec
from samebits.launcher.processes import SCHEDULER, end, name_of, process_names, read_pid_files, spoken, start_dashboard
from samebits.launcher.progress_line import keep_going_without_output
from samebits.launcher.relay_process import end_relay, start_relay
from samebits.launcher.spawning import Program, StartLock, hear_signals, is_here, launch, reserved, template_of
from samebits.launcher.supervising import supervisor_for
from samebits.launcher.worker_logs import LogEnds
from samebits.printable import counted
from samebits.scheduler_hosts import addresses_in, names_one, shown
from samebits.store.process_identity import ProcessIdentity

TERM_GRACE_S = 5.0


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    request = options.parse(arguments, config.whole_environment())
    if request.check:
        from samebits.commands.run import check  # imports parts of the drill, which other starts do not need

        return check.main(arguments, request)
    if request.on_ray is not None:
        from samebits.hosts import ray_cluster

        words = _less_on(request.words)
        if request.fresh:
            words.remove("--fresh")  # the first one, since options precede the script
        return ray_cluster.run(words, *request.on_ray, is_fresh=request.fresh)
    hear_signals()
    keep_going_without_output()
    found = running_job(request)
    if found is not None:
        prepare.say(
            "the job is already running: this command follows it, and will manage its hosts when no other command does"
        )
        return recover.go_on(*found)
    request = placed(request)
    ready = prepare.read_start(request)
    if request.dry_run:
        return _show(ready, request)
    settings = ready.settings
    with StartLock(settings.log_dir) as lock:
        prepare.prepare(ready, fresh=request.fresh)
        logs = LogEnds(settings.log_dir)
        logs.begin_all()
        with Signals(request.signals) as signals:
            _start(ready, has_spares=not request.adds_spare)
            with naming_what_runs_on(settings):
                lock.release()
                for said in (ready.said, start_dashboard(settings, ready.start.folder)):
                    if said:
                        prepare.say(said)
                if not request.as_json:
                    print(
                        f"samebits: {_counted(ready, has_spares=not request.adds_spare)} of '{ready.start.script}' "
                        f"started; their logs are in {settings.log_dir}",
                        flush=True,
                    )
                if request.detach and not signals.caught:
                    return 0
                supervisor = supervisor_for(settings)
                follower = Follower(
                    settings,
                    signals,
                    logs=logs,
                    supervisor=supervisor,
                    driver=discovery_for(settings, supervisor),
                    tee=_shown(ready, request),
                    as_json=request.as_json,
                )
                result = follower.run()
    return recover.go_on(settings.log_dir, ready.start) if result.call_again else result.verdict.exit_code


def _less_on(words: Sequence[str]) -> list[str]:
    """Return the words without ``--on ray``."""
    at = next(index for index, word in enumerate(words) if word.partition("=")[0] == "--on")
    return [*words[:at], *words[at + 1 + ("=" not in words[at]) :]]


def _names(ready: PreparedJob, *, has_spares: bool = True) -> list[str]:
    """Return the names of the processes to start here, with the scheduler last."""
    nodes = ready.start.nodes if ready.start.nodes is not None else job_spec.first_nodes(ready.settings)
    if not has_spares:
        nodes = nodes[: ready.settings.worker_num]
    return [*map(name_of, nodes), *([SCHEDULER] if ready.start.has_scheduler else [])]


def _shown(ready: PreparedJob, request: RunRequest) -> list[str]:
    """Return the workers whose log lines are shown, with their local ranks."""
    workers = [name for name in _names(ready) if name != SCHEDULER]
    return [name for local_rank, name in enumerate(workers) if request.tee.has(local_rank)]


def _program(ready: PreparedJob) -> Program:
    start = ready.start
    environment = {**config.whole_environment(), **start.environment}
    only_scheduler = {"REBUILD": "0"}  # this command begins a new job
    return Program(
        folder=start.folder,
        interpreter=start.interpreter,
        script=start.script,
        args=start.args,
        environment=environment,
        only_scheduler=only_scheduler,
        way=start.way,
        elsewhere={node: host for node, host in start.hosts.items() if not is_here(host)},
        job=start.job,
        listening=ready.listener.descriptors,
    )


def _start(ready: PreparedJob, *, has_spares: bool) -> None:
    """Start all processes, the scheduler last. If that fails, end those that were started."""
    started: list[ProcessIdentity] = []
    program, log_dir = _program(ready), ready.settings.log_dir
    with reserved(log_dir, _names(ready, has_spares=has_spares)) as berths:
        try:
            if ready.start.has_relay:
                start_relay(log_dir, program, ready.relay_listener.descriptors)
            launch(berths, program, started)
        except Exception:
            prepare.say("the start failed: stopping the processes that were started")
            for identity in started:
                end(identity, TERM_GRACE_S)
            end_relay(log_dir)
            raise
    ready.listener.close()
    ready.relay_listener.close()


def _show(ready: PreparedJob, request: RunRequest) -> int:
    """Print what a start would do."""
    plan = prepare.plan_start(
        prepare.look(ready.settings, ready.port_problem, ready.start.command(fresh=True)), fresh=request.fresh
    )
    program, names = _program(ready), _names(ready, has_spares=not request.adds_spare)
    told = {**request.environment, **{key: ready.start.environment[key] for key in ("SCHED_PORT",) if ready.said}}
    processes: list[dict[str, Any]] = [
        {
            "process": name,
            "command": program.words(name),
            "environment": {key: program.environment_of(name).get(key) for key in ("ROLE", "NODE_ID")},
            "log": str(ready.settings.log_dir / f"{name}.log"),
        }
        for name in names
    ]
    if request.as_json:
        moved = [str(move.path) for move in plan.moves]
        print(json.dumps({"folder": str(program.folder), "environment": told, "moved": moved, "processes": processes}))
        return 0
    print(f"in {program.folder}, logs in {ready.settings.log_dir}, scheduler at {_address(ready.settings)}")
    for move in plan.moves:
        print(f"first moved aside: {move.path}")
    print("exported to all: " + " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(told.items())))
    if ready.settings.relay is not None and ready.start.has_relay:
        print(f"relay: at {ready.settings.relay.host}, on a free port; workers connect through it")
    for one in processes:
        said = " ".join(f"{key}={value}" for key, value in one["environment"].items() if value is not None)
        print(f"{spoken(one['process'])}: {said} {shlex.join(one['command'])}")
    return 0


def _address(settings: Settings) -> str:
    if names_one(settings.sched_host):
        return f"{settings.sched_host}, SCHED_PORT={settings.sched_port}"
    return shown(settings.sched_host, settings.sched_port)


def _counted(ready: PreparedJob, *, has_spares: bool) -> str:
    settings, nodes = ready.settings, ready.start.nodes
    spares = settings.spare_num if has_spares else 0
    workers = settings.worker_num
    if nodes is not None:
        spares = sum(int(node) >= settings.max_worker_num for node in nodes)
        workers = len(nodes) - spares
    said = counted(workers, "worker") + (f", {counted(spares, 'spare')}" if spares else "")
    others = ["a scheduler"] * ready.start.has_scheduler + ["a relay"] * ready.start.has_relay
    return said if not others else f"{said} and {others[0]}" if len(others) == 1 else f"{said}, {' and '.join(others)}"


# ---- a job whose hosts are discovered
#
# A job begins as soon as there are enough hosts. Later hosts join at a commit.


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
