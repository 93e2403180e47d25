"""Run a job on the hosts of a Ray cluster, for ``samebits run --on ray``.

Ray places and restarts hosts; SameBits recovers the training. One placement group contains the job's hosts. In each
bundle, a detached actor runs ``samebits run`` for that host's part of the job. A lost worker is therefore replaced as
on any host, and Ray is asked for a new host only if an entire node is lost. The actors start their part when they are
constructed, because Ray reconstructs a restarted actor but does not repeat its driver's calls, and the driver may be
gone by then. If the cluster loses all hosts, the same command starts new actors, which resume the job with the
environment that it was started with.

As in a Slurm step, the hosts share the job's folder. Host 0 has the scheduler and writes its address to a file there,
so the scheduler may move with its actor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import itertools
import math
import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits import config, strict_json
from samebits.account.job_view import JobView
from samebits.errors import JobInterruptedError, LockedError, SameBitsError, StoreError, UsageError
from samebits.launcher import job_spec
from samebits.launcher.interrupts import CTRL_C, Signals
from samebits.launcher.worker_logs import LogLines, last_lines
from samebits.printable import counted, listed
from samebits.store import durable, private
from samebits.store.child_processes import die_with

NAMESPACE = "samebits"
UNCOLLECTED_S = 30.0
"""Seconds that a finished actor waits for its driver before it leaves the cluster on its own."""
LAST_S = 15.0
"""Seconds that the other hosts' commands may take to end after host 0's."""
SHORT_S, MOST_SHORT = 60.0, 5
"""A launcher that is killed within SHORT_S seconds, MOST_SHORT times in a row, is not restarted."""
ANSWER_S, FIRST_ANSWER_S = 5.0, 1.0
"""Seconds from a signal until the command ends although Ray has no place for host 0. The second one applies if host 0
has not answered this command before."""
OUTPUT = "run"
"""The name, in each host's log folder, of the log with the output of the host's command."""
_NONCE_FILE = "ray-start"
_LOOK_S = 5.0
_POLL_S = 0.5
_CALLS = 5
"""Concurrent calls of one actor: two drivers that wait, and others that return at once."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The part of the job that one actor runs.

    Attributes:
        folder: the job's folder, shared by all hosts.
        rank: this host's index; host 0 has the scheduler.
        words: the arguments of ``samebits run``, except those that differ between hosts.
        nonce: identifies this start of the job, so that an actor that Ray or a later command restarts recovers the job.
        is_fresh: whether the first actor starts over although the folder may hold an unfinished job.
    """

    folder: str
    rank: int
    words: tuple[str, ...]
    nonce: str
    is_fresh: bool = False

    @property
    def log_dir(self) -> Path:
        """The folder for logs and pid files of this host's processes."""
        return Path(self.folder, "device", f"host{self.rank}")

    @property
    def address_file(self) -> Path:
        """The file with the scheduler's address, one line ``host:port``."""
        return Path(self.folder, "device", "scheduler-address")

    @property
    def environment_file(self) -> Path:
        """The file with the driver's environment.

        It may contain secrets, which Ray would show to the cluster's users.
        """
        return Path(self.folder, "device", "environment.json")


class RayHost:
    """The actor of one host, which runs its part of the job and stores the exit status for the driver.

    Args:
        plan: the share to run.
    """

    def __init__(self, plan: HostPlan) -> None:
        ray = importlib.import_module("ray")
        self._plan = plan
        self._address = ray.util.get_node_ip_address()
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped_by = 0
        self._waiting = 0
        self._status: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True, name="samebits-raylet").start()
        # The kernel ends the child when the thread that started it ends, so the thread lives as long as this process.
        threading.Thread(target=self._run, daemon=True, name="samebits-host").start()

    def answer(self) -> None:
        """Return, to show that this host has its place in the cluster."""

    def wait(self) -> int:
        """Return the exit status of this host's command once it has ended."""
        self._waiting += 1
        try:
            self._ended.wait()
            assert self._status is not None
            return self._status
        finally:
            self._waiting -= 1

    def stop(self, by: int) -> None:
        """Pass a signal on to the command."""
        self._stopped_by = by
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(by)

    def _run(self) -> None:
        short = 0
        while True:
            began_s = time.monotonic()
            status = self._once()
            short = short + 1 if time.monotonic() - began_s < SHORT_S else 0
            if status >= 0 or self._stopped_by or short == MOST_SHORT:
                break
            by = signal.Signals(-status).name
            print(f"samebits: the launcher of host {self._plan.rank} was ended by {by}; recovering", flush=True)
        self._status = status if status >= 0 else 128 - status
        self._ended.set()
        self._leave_unless_collected()

    def _once(self) -> int:
        """Run this host's part, and return its status.

        If an earlier actor has begun it, it is recovered. Ray shows host 0's output.
        """
        plan = self._plan
        plan.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        begun = plan.log_dir / _NONCE_FILE
        is_known = begun.exists() and begun.read_text() == plan.nonce and (plan.log_dir / "start.json").exists()
        durable.replace_note(begun, plan.nonce.encode())
        given = strict_json.loads(plan.environment_file.read_text())
        environment = {**config.whole_environment(), **given, "LOG_DIR": str(plan.log_dir)}
        if plan.rank == 0:
            environment["SCHED_PORT"] = str(self._publish_address())
        else:
            environment["RECOVERY_PATH"] = str(plan.log_dir / "recovery")
        where = ("--node-rank", str(plan.rank), "--sched-host", f"file:{plan.address_file}", "--die-with-me")
        fresh = ["--fresh"] * plan.is_fresh
        words = ["recover", "--ray-host"] if is_known else ["run", *fresh, *where, "--ray-host", *plan.words]
        with contextlib.ExitStack() as stack:
            output, lines = private.open_to_append(plan.log_dir / f"{OUTPUT}.log"), LogLines(plan.log_dir, [OUTPUT])
            stack.callback(os.close, output)
            self._child = subprocess.Popen(
                [sys.executable, "-m", "samebits", *words],
                cwd=plan.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=functools.partial(die_with, os.getpid()),
            )
            if self._stopped_by:
                self._child.send_signal(self._stopped_by)
            ended = os.pidfd_open(self._child.pid)
            stack.callback(os.close, ended)
            while not select.select([ended], [], [], _POLL_S)[0]:
                self._show(lines)
            self._show(lines)
            return self._child.wait()

    def _show(self, lines: LogLines) -> None:
        if self._plan.rank == 0:
            show(lines)

    def _publish_address(self) -> int:
        """Write the address of this host's scheduler to the file; the port stays the same while the job runs."""
        path, port = self._plan.address_file, 0
        with contextlib.suppress(OSError, ValueError):
            port = int(path.read_text().rpartition(":")[2])
        if not port:
            with socket.create_server((self._address, 0)) as free:
                port = free.getsockname()[1]
        durable.replace_note(path, f"{self._address}:{port}\n".encode())
        return port

    def _leave_unless_collected(self) -> None:
        left_s = UNCOLLECTED_S
        while left_s > 0:
            time.sleep(_LOOK_S)
            left_s = UNCOLLECTED_S if self._waiting else left_s - _LOOK_S
        # By handle, since another namespace may have an actor and a group of the same names.
        ray = importlib.import_module("ray")
        group = ray.util.get_current_placement_group()
        if self._plan.rank == 0 and group is not None:
            ray.util.remove_placement_group(group)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _end_with(raylet: int) -> None:
    """End this process when its raylet ends.

    Ray then places the actor on another host, and otherwise both would run. Ray's own check may take minutes, and does
    not work if orphans are adopted by a process other than init.
    """
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(raylet)
        select.select([descriptor], [], [])
    os._exit(1)


def connected() -> Any:
    """Return the ``ray`` module, connected to the cluster of RAY_ADDRESS or of this machine's Ray.

    Raises:
        UsageError: Ray is not installed, or no cluster answers.
    """
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util")
    except ModuleNotFoundError:
        raise UsageError("--on ray: Ray is not installed. Fix: pip install 'samebits[ray]'") from None
    try:
        ray.init(address="auto", namespace=NAMESPACE, ignore_reinit_error=True)
    except ConnectionError as error:
        raise UsageError(
            f"--on ray: no Ray cluster answers: {str(error).splitlines()[0]}. Fix: run this on a node of the cluster, "
            "through `ray job submit`, or export RAY_ADDRESS=<host>:6379"
        ) from None
    return ray


class _SignalError(Exception):
    """A signal ended the command before host 0 had a place in the cluster."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.status = 128 + number_of(name)


def run(
    words: Sequence[str],
    hosts: int,
    per_host: int,
    *,
    folder: Path | None = None,
    kind: str | None = None,
    is_fresh: bool = False,
) -> int:
    """Start or resume a folder's job on the cluster, and follow the job to its end.

    If the same job already runs there, follow it.

    Args:
        words: the arguments of ``samebits run`` without ``--on ray`` and ``--fresh``.
        hosts: number of hosts of the job.
        per_host: number of workers on each host.
        folder: the job's folder, which all hosts share; None for the current folder.
        kind: the resource that each worker occupies, CPU or GPU; None for GPU if the cluster has enough.
        is_fresh: whether to start over if the folder holds an unfinished job.

    Returns:
        The exit status of host 0's command, which follows the entire job.

    Raises:
        UsageError: Ray is not installed, no cluster answers, or another job runs in the folder.
        StoreError: another job in the folder is unfinished.
        LockedError: ``is_fresh``, and the job runs.
        JobInterruptedError: Ray lost host 0's actor; the job may continue without this command.
    """
    ray = connected()
    folder = Path.cwd() if folder is None else folder
    name = name_for(folder)
    with Signals() as signals:  # after Ray's start, which installs its own SIGTERM handler
        actors = _running(ray, name, folder, words, hosts, is_fresh=is_fresh)
        output: LogLines | None = None
        try:
            if actors:
                output = _begin_to_show(folder)
            else:
                nonce = "" if is_fresh else nonce_of_unfinished(folder, words, hosts)
                needs = {kind or _kind(ray, per_host): float(per_host)}
                group = _placed(ray, name, hosts, needs, signals)
                if not nonce:
                    nonce = secrets.token_hex(16)
                    _write_start(folder, words, hosts)
                plans = [HostPlan(str(folder), rank, tuple(words), nonce, is_fresh) for rank in range(hosts)]
                actors = _start(ray, name, group, plans, needs)
            status = _follow(ray, actors, signals, output)
        except _SignalError as stopped:
            status = stopped.status
    _end(ray, name, actors)
    return status


def name_for(folder: Path) -> str:
    """Return the name of a folder's placement group, which is also the prefix of its actors' names."""
    return f"samebits-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"


def number_of(name: str) -> int:
    """Return the number of a signal, as ``Signals.take`` names it."""
    return int(signal.SIGINT if name == CTRL_C else signal.Signals[name])


def show(lines: LogLines) -> None:
    """Print the new lines of a log."""
    for _, line in lines.take():
        print(line, flush=True)


def _begin_to_show(folder: Path) -> LogLines:
    """Say that the job runs, and print the last line of host 0's output; return the lines that follow it.

    Ray shows an actor's output only to the command that has started the actor.
    """
    _say("the job is already running: this command follows it")
    with contextlib.suppress(FileNotFoundError):
        _say_what_differs(folder)
    log_dir = _host(folder).log_dir
    lines = LogLines(log_dir, [OUTPUT])
    for line in last_lines(log_dir / f"{OUTPUT}.log", 1):
        print(line, flush=True)
    return lines


def _running(ray: Any, name: str, folder: Path, words: Sequence[str], hosts: int, *, is_fresh: bool) -> list[Any]:
    """Return the actors of this folder's job, by rank, if the job is running.

    Raises:
        UsageError: a different job is running in the folder, or some of the job's actors are currently missing.
        LockedError: ``is_fresh``.
    """
    try:
        first = ray.get_actor(f"{name}-host0", NAMESPACE)
    except ValueError:
        return []
    try:
        ray.util.get_placement_group(name)
    except ValueError:  # the job has ended, but Ray waits for a place to restart its actors
        with contextlib.suppress(ValueError):  # no actor has this name
            for rank in itertools.count():
                ray.kill(ray.get_actor(f"{name}-host{rank}", NAMESPACE), no_restart=True)
        return []
    require_same(folder, words, hosts)
    if is_fresh:
        raise LockedError(
            f"--on ray --fresh: the job in {folder} is running. Fix: leave --fresh out to follow it, or end it with "
            "`samebits stop` first"
        )
    try:
        return [first, *(ray.get_actor(f"{name}-host{rank}", NAMESPACE) for rank in range(1, hosts))]
    except ValueError as error:
        raise UsageError(
            f"--on ray: the job in {folder} is being started, or has just ended ({str(error).splitlines()[0]}). Fix: "
            "repeat this command in a minute"
        ) from None


def require_same(folder: Path, words: Sequence[str], hosts: int, unfinished: JobView | None = None) -> None:
    """Raise unless the folder's job was started with these words on this many hosts.

    Args:
        folder: the job's folder.
        words: the arguments of ``samebits run`` without ``--on ray`` and ``--fresh``.
        hosts: number of hosts.
        unfinished: the job if it does not run; None if it runs.

    Raises:
        UsageError: the job runs, and was started differently.
        StoreError: the same of an unfinished job.
    """
    error: type[SameBitsError] = UsageError
    job, fresh = f"the job that runs in {folder}", ""
    fix, follows = "wait until `ray list actors` shows no actor of that job", "follow that job"
    if unfinished is not None:
        error = StoreError
        job, fresh = f"the unfinished job in {folder}", ", or start over with --fresh"
        fix, follows = "restore the file", f"resume that job at step {unfinished.step}"
    try:
        started = strict_json.loads(_record_file(folder).read_text())
    except FileNotFoundError:
        raise error(
            f"--on ray: {job} has no file {_record_file(folder).name}, which records how it was started. Fix: "
            f"{fix}{fresh}, or use another folder"
        ) from None
    if started != {"words": list(words), "hosts": hosts}:
        raise error(
            f"--on ray: {job} was started as `{shlex.join(started['words'])}` on "
            f"{counted(started['hosts'], 'host')}, but this command asks for `{shlex.join(words)}` on "
            f"{counted(hosts, 'host')}. Fix: repeat the first command to {follows}{fresh}, or start this job in "
            "another folder"
        )


def nonce_of_unfinished(folder: Path, words: Sequence[str], hosts: int) -> str:
    """Return the nonce with which the folder's unfinished job was started, and say that the job resumes.

    Returns:
        "" if the next start is a new job, because there is no job, or it is finished, or its workers never met.

    Raises:
        StoreError: the unfinished job was started differently, or a file of it was removed or cannot be read.
        UsageError: the folder was moved or copied.
    """
    log_dir = _host(folder).log_dir
    started = job_spec.read(log_dir)
    if started is None:
        return ""
    is_home = job_spec.is_at_home(log_dir, started)
    view = job_spec.stored_job(started if is_home else started.moved_to(folder))
    if view is None or view.job_finished or not view.generation or started.job not in ("", view.job):
        return ""
    if not is_home:
        raise UsageError(
            f"--on ray: {view} was started in {started.folder}, and does not resume in a copied or moved folder. Fix: "
            "return the folder to its place, or start over with --fresh"
        )
    require_same(folder, words, hosts, view)
    _say(f"{view} is unfinished at step {view.step}: its hosts resume it")
    try:
        _say_what_differs(folder)
        return (log_dir / _NONCE_FILE).read_text()
    except FileNotFoundError as error:
        raise StoreError(
            f"--on ray: {error.filename}, which {view} needs to resume, was removed. Fix: restore the file, or start "
            "over with --fresh"
        ) from None


def _say_what_differs(folder: Path) -> None:
    """Name the variables whose values differ between the job's environment and this command's.

    Raises:
        FileNotFoundError: the file with the job's environment was removed.
    """
    path, own = _host(folder).environment_file, str(_secret_file(folder))
    started, present = strict_json.loads(path.read_text()), _environment(folder)
    for environment in (started, present):  # the command's own choice, not the user's
        if environment.get("CLUSTER_SECRET_FILE") == own:
            del environment["CLUSTER_SECRET_FILE"]
    names = config.changed_names(started, present)
    if not names:
        return
    named = listed(names, config.MOST_NAMED)
    _say(
        f"the job keeps the environment of its start; this command's differs in {named}. Fix: to change one, end the "
        f"job, edit {path}, and repeat this command; --fresh starts over with this command's environment"
    )


def _say(text: str) -> None:
    print(f"samebits: {text}", flush=True)


def _host(folder: Path, rank: int = 0) -> HostPlan:
    """Return a plan that only names the files of a host."""
    return HostPlan(str(folder), rank, (), "")


def _record_file(folder: Path) -> Path:
    """Return the file with the arguments and the number of hosts of the folder's job."""
    return folder / "device" / "ray-job.json"


def _secret_file(folder: Path) -> Path:
    """Return the file with the secret of a job that was started without one."""
    return folder / "device" / "cluster.secret"


def _placed(ray: Any, name: str, hosts: int, needs: Mapping[str, float], signals: Signals) -> Any:
    """Return the job's placement group once Ray has reserved its resources.

    Raises:
        _SignalError: a signal arrived first; the group is removed.
    """
    group = ray.util.placement_group([dict(needs)] * hosts, strategy="STRICT_SPREAD", name=name, lifetime="detached")
    ready, since_s = group.ready(), time.monotonic()
    say_at_s = since_s + _LOOK_S
    while not ray.wait([ready], timeout=_POLL_S)[0]:
        if names := signals.take():
            ray.util.remove_placement_group(group)
            raise _SignalError(names[0])
        if (now_s := time.monotonic()) >= say_at_s:
            say_at_s = now_s + _LOOK_S
            needed = " and ".join(f"{amount:g} {kind}" for kind, amount in needs.items())
            where = f"{counted(hosts, 'host')} of the Ray cluster with {needed}{' each' * (hosts > 1)}"
            _say(f"waited {now_s - since_s:.0f} s for {where}")
    return group


def _start(ray: Any, name: str, group: Any, plans: Sequence[HostPlan], needs: Mapping[str, float]) -> list[Any]:
    """Start the hosts' actors, and return them by rank."""
    strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    return [
        ray.remote(RayHost)
        .options(
            name=f"{name}-host{plan.rank}",
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_CALLS,
            num_cpus=needs.get("CPU", 0.0),
            num_gpus=needs.get("GPU", 0.0),
            scheduling_strategy=strategy(group, placement_group_bundle_index=plan.rank),
        )
        .remote(plan)
        for plan in plans
    ]


def _follow(ray: Any, actors: Sequence[Any], signals: Signals, output: LogLines | None) -> int:
    """Forward signals to the hosts until host 0's command has ended, and return its status.

    That command follows the entire job, so hosts that Ray could not place again are not awaited.

    Raises:
        JobInterruptedError: Ray can no longer reach the actor.
        _SignalError: a signal arrived, and Ray has no place for host 0.
    """
    first, *others = [actor.wait.remote() for actor in actors]
    answer, stopped, by, give_up_at_s = actors[0].answer.remote(), None, "", math.inf
    while not ray.wait([first], timeout=_POLL_S)[0]:
        if output is not None:
            show(output)
        for by in signals.take():
            # Do not wait for the result, since an actor may currently have no host.
            stopped, *_ = [actor.stop.remote(number_of(by)) for actor in actors]
            patience_s = ANSWER_S if ray.wait([answer], timeout=0)[0] else FIRST_ANSWER_S
            give_up_at_s = time.monotonic() + patience_s
        if time.monotonic() >= give_up_at_s:
            if not ray.wait([stopped], timeout=0)[0]:
                _say(f"{by}: host 0 of the job has no place in the cluster; the job's actors are removed")
                raise _SignalError(by)
            give_up_at_s = math.inf
    try:
        status: int = ray.get(first)
    except ray.exceptions.RayError as error:
        raise JobInterruptedError(
            f"Ray has lost host 0 of the job ({type(error).__name__}: {str(error).splitlines()[0]}). Fix: `ray status` "
            "shows whether the cluster is up; the same command in the same folder then follows the job, or resumes it"
        ) from None
    if output is not None:
        show(output)
    if others:
        ray.wait(others, num_returns=len(others), timeout=LAST_S)
    return status


def _end(ray: Any, name: str, actors: Sequence[Any]) -> None:
    """Remove a job's actors and its placement group."""
    for actor in actors:  # before the group is removed, because Ray would then wait for a place to restart them
        ray.kill(actor, no_restart=True)
    with contextlib.suppress(ValueError):  # an actor that its driver had left has removed the group
        ray.util.remove_placement_group(ray.util.get_placement_group(name))


def _kind(ray: Any, per_host: int) -> str:
    """Return GPU if a node of the cluster has enough GPUs, otherwise CPU."""
    has_devices = any(node["Alive"] and node["Resources"].get("GPU", 0) >= per_host for node in ray.nodes())
    return "GPU" if has_devices else "CPU"


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment that this process gives to a job's hosts.

    Variables that Ray sets for each actor are omitted. Without a secret, the secret's file is that of the folder.
    """
    environment = {
        name: value
        for name, value in config.whole_environment().items()
        if not name.startswith("RAY_") and not name.endswith("VISIBLE_DEVICES")
    }
    if not (environment.get("CLUSTER_SECRET") or environment.get("CLUSTER_SECRET_FILE")):
        environment["CLUSTER_SECRET_FILE"] = str(_secret_file(folder))
    return environment


def _write_start(folder: Path, words: Sequence[str], hosts: int) -> None:
    """Write the files with which the hosts start a new job, and with which later commands find it."""
    environment, secret = _environment(folder), _secret_file(folder)
    secret.parent.mkdir(mode=0o700, exist_ok=True)
    if environment.get("CLUSTER_SECRET_FILE") == str(secret):
        durable.create_file_atomically(secret, secrets.token_hex(32).encode())
    durable.replace_note(_host(folder).environment_file, strict_json.dumps(environment).encode())
    durable.replace_note(_record_file(folder), strict_json.dumps({"words": list(words), "hosts": hosts}).encode())
