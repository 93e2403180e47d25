"""``samebits run``: start a job on this machine, or this host's part of one, and follow it to its end.

Everything is checked before anything is started. Requests to stop are handled from the first process on, so that no
started process is left behind.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from samebits import config
from samebits.commands import recover
from samebits.commands.run import first_hosts, options, prepare
from samebits.commands.run.options import RunRequest
from samebits.commands.run.prepare import PreparedJob
from samebits.config import Settings
from samebits.hosts.discovery import discovery_for
from samebits.launcher import job_spec
from samebits.launcher.dashboard_process import start_beside
from samebits.launcher.follower import Follower, naming_what_runs_on
from samebits.launcher.interrupts import Signals
from samebits.launcher.processes import SCHEDULER, end, name_of, spoken
from samebits.launcher.progress_line import keep_going_without_output
from samebits.launcher.relay_process import end_relay, start_relay
from samebits.launcher.spawning import Program, StartLock, hear_signals, is_here, launch, reserved
from samebits.launcher.supervising import supervisor_for
from samebits.launcher.worker_logs import LogEnds
from samebits.printable import counted
from samebits.scheduler_hosts import names_one, shown
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
    found = first_hosts.running_job(request)
    if found is not None:
        prepare.say(
            "the job is already running: this command follows it, and will manage its hosts when no other command does"
        )
        return recover.go_on(*found)
    request = first_hosts.placed(request)
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
                for said in (ready.said, start_beside(settings, ready.start.folder)):
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
