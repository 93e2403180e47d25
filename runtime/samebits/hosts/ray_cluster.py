"""Run a job on the hosts of a Ray cluster, for ``samebits run --on ray``.

Ray places and restarts hosts; SameBits recovers the training. One placement group contains the job's hosts. In each
bundle, a detached actor runs ``samebits run`` for that host's part of the job. A lost worker is therefore replaced as
on any host, and Ray is asked for a new host only if an entire node is lost. The actors start their part when they are
constructed, because Ray reconstructs a restarted actor but does not repeat its driver's calls, and the driver may be
gone by then.

As in a Slurm step, the hosts share the job's folder. Host 0 has the scheduler and writes its address to a file there,
so the scheduler may move with its actor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import itertools
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
from samebits.errors import JobInterruptedError, UsageError
from samebits.launcher.interrupts import CTRL_C, Signals
from samebits.printable import counted
from samebits.store import durable, private
from samebits.store.child_processes import die_with

NAMESPACE = "samebits"
UNCOLLECTED_S = 30.0
"""Seconds that a finished actor waits for its driver before it leaves the cluster on its own."""
LAST_S = 15.0
"""Seconds that the other hosts' commands may take to end after host 0's."""
SHORT_S, MOST_SHORT = 60.0, 5
"""A launcher that is killed within SHORT_S seconds, MOST_SHORT times in a row, is not restarted."""
_LOOK_S = 5.0
_CALLS = 4
"""Concurrent calls of one actor: two drivers that wait, and one that stops it."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The part of the job that one actor runs.

    Attributes:
        folder: the job's folder, shared by all hosts.
        rank: this host's index; host 0 has the scheduler.
        words: the arguments of ``samebits run``, except those that differ between hosts.
        nonce: identifies this start of the job, so that an actor restarted by Ray knows what to recover.
    """

    folder: str
    rank: int
    words: tuple[str, ...]
    nonce: str

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

        If an earlier process of this actor has begun it, it is recovered.
        """
        plan = self._plan
        plan.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        begun = plan.log_dir / "ray-start"
        is_known = begun.exists() and begun.read_text() == plan.nonce and (plan.log_dir / "start.json").exists()
        durable.replace_note(begun, plan.nonce.encode())
        given = strict_json.loads(plan.environment_file.read_text())
        environment = {**config.whole_environment(), **given, "LOG_DIR": str(plan.log_dir)}
        if plan.rank == 0:
            environment["SCHED_PORT"] = str(self._publish_address())
        else:
            environment["RECOVERY_PATH"] = str(plan.log_dir / "recovery")
        where = ("--node-rank", str(plan.rank), "--sched-host", f"file:{plan.address_file}", "--die-with-me")
        words = ["recover"] if is_known else ["run", *where, *plan.words]
        with contextlib.ExitStack() as stack:
            output: int | None = None  # Ray shows host 0's output
            if plan.rank:
                output = private.open_to_append(plan.log_dir / "run.log")
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
            return self._child.wait()

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


def run(words: Sequence[str], hosts: int, per_host: int, *, folder: Path | None = None, kind: str | None = None) -> int:
    """Start a folder's job on the cluster, and follow the job to its end.

    If the same job already runs there, follow it.

    Args:
        words: the arguments of ``samebits run`` without ``--on ray``.
        hosts: number of hosts of the job.
        per_host: number of workers on each host.
        folder: the job's folder, which all hosts share; None for the current folder.
        kind: the resource that each worker occupies, CPU or GPU; None for GPU if the cluster has enough.

    Returns:
        The exit status of host 0's command, which follows the entire job.

    Raises:
        UsageError: Ray is not installed, no cluster answers, or another job runs in the folder.
        JobInterruptedError: Ray lost host 0's actor; the job may continue without this command.
    """
    ray = connected()
    folder = Path.cwd() if folder is None else folder
    name = name_for(folder)
    with Signals() as signals:  # after Ray's start, which installs its own SIGTERM handler
        actors = _running(ray, name, folder, words, hosts)
        if not actors:
            needs = {kind or _kind(ray, per_host): float(per_host)}
            actors = _start(ray, name, folder, words, hosts, needs, signals)
        if not actors:
            return 128 + signal.SIGINT
        status = _follow(ray, actors, signals)
    for actor in actors:  # before the group is removed, because Ray would then wait for a place to restart them
        ray.kill(actor, no_restart=True)
    with contextlib.suppress(ValueError):  # an actor that its driver had left has removed the group
        ray.util.remove_placement_group(ray.util.get_placement_group(name))
    return status


def name_for(folder: Path) -> str:
    """Return the name of a folder's placement group, which is also the prefix of its actors' names."""
    return f"samebits-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"


def _running(ray: Any, name: str, folder: Path, words: Sequence[str], hosts: int) -> list[Any]:
    """Return the actors of this folder's job, by rank, if the job is running.

    Raises:
        UsageError: a different job is running in the folder, or some of the job's actors are currently missing.
    """
    try:
        first = ray.get_actor(f"{name}-host0", NAMESPACE)
    except ValueError:
        return []
    try:
        ray.util.get_placement_group(name)
    except ValueError:  # the job has ended, but Ray waits for a place to restart its actors
        _end_actors(ray, name)
        return []
    require_same(folder, words, hosts)
    try:
        return [first, *(ray.get_actor(f"{name}-host{rank}", NAMESPACE) for rank in range(1, hosts))]
    except ValueError as error:
        raise UsageError(
            f"--on ray: the job in {folder} is being started, or has just ended ({str(error).splitlines()[0]}). Fix: "
            "repeat this command in a minute"
        ) from None


def _end_actors(ray: Any, name: str) -> None:
    """End what is left of a job's actors."""
    with contextlib.suppress(ValueError):  # no actor has this name
        for rank in itertools.count():
            ray.kill(ray.get_actor(f"{name}-host{rank}", NAMESPACE), no_restart=True)


def require_same(folder: Path, words: Sequence[str], hosts: int) -> None:
    """Raise unless the folder's job was started with these words on this many hosts.

    Raises:
        UsageError: the job was started differently.
    """
    try:
        started = strict_json.loads(_record_file(folder).read_text())
    except FileNotFoundError:
        raise UsageError(
            f"--on ray: a job runs in {folder}, but {_record_file(folder).name}, which records how it was "
            "started, was removed. Fix: wait until `ray list actors` shows no actor of that job, or use another "
            "folder"
        ) from None
    if started != {"words": list(words), "hosts": hosts}:
        raise UsageError(
            f"--on ray: the job that runs in {folder} was started as `{shlex.join(started['words'])}` on "
            f"{counted(started['hosts'], 'host')}, but this command asks for `{shlex.join(words)}` on "
            f"{counted(hosts, 'host')}. Fix: repeat the first command to follow that job, or start this job in "
            "another folder"
        )


def _record_file(folder: Path) -> Path:
    """Return the file with the arguments and the number of hosts of the folder's job."""
    return folder / "device" / "ray-job.json"


def _start(
    ray: Any, name: str, folder: Path, words: Sequence[str], hosts: int, needs: Mapping[str, float], signals: Signals
) -> list[Any]:
    group = ray.util.placement_group([dict(needs)] * hosts, strategy="STRICT_SPREAD", name=name, lifetime="detached")
    ready, since_s = group.ready(), time.monotonic()
    while not ray.wait([ready], timeout=_LOOK_S)[0]:
        needed = " and ".join(f"{amount:g} {kind}" for kind, amount in needs.items())
        waited_s = time.monotonic() - since_s
        print(f"samebits: waited {waited_s:.0f} s for {hosts} hosts of the Ray cluster with {needed} each", flush=True)
        if signals.take():
            ray.util.remove_placement_group(group)
            return []
    _write_environment(folder)
    durable.replace_note(_record_file(folder), strict_json.dumps({"words": list(words), "hosts": hosts}).encode())
    nonce = secrets.token_hex(16)
    strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    actors = []
    for rank in range(hosts):
        plan = HostPlan(str(folder), rank, tuple(words), nonce)
        actors.append(
            ray.remote(RayHost)
            .options(
                name=f"{name}-host{rank}",
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=_CALLS,
                num_cpus=needs.get("CPU", 0.0),
                num_gpus=needs.get("GPU", 0.0),
                scheduling_strategy=strategy(group, placement_group_bundle_index=rank),
            )
            .remote(plan)
        )
    return actors


def _follow(ray: Any, actors: Sequence[Any], signals: Signals) -> int:
    """Forward signals to the hosts until host 0's command has ended, and return its status.

    That command follows the entire job, so hosts that Ray could not place again are not awaited.

    Raises:
        JobInterruptedError: Ray can no longer reach the actor.
    """
    found: list[int] = []
    problems: list[str] = []
    readable, writable = os.pipe()
    first, *others = [actor.wait.remote() for actor in actors]

    def collect() -> None:
        try:
            found.append(ray.get(first))
            if others:
                ray.wait(others, num_returns=len(others), timeout=LAST_S)
        except ray.exceptions.RayError as error:
            problems.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        finally:
            os.close(writable)

    threading.Thread(target=collect, daemon=True, name="samebits-collect").start()
    while readable not in select.select([readable, signals.fileno()], [], [])[0]:
        for name in signals.take():
            number = signal.SIGINT if name == CTRL_C else signal.Signals[name]
            for actor in actors:  # do not wait for the result, since an actor may currently have no host
                actor.stop.remote(int(number))
    os.close(readable)
    if not found:
        raise JobInterruptedError(
            f"Ray has lost host 0 of the job ({'; '.join(problems)}). Fix: `ray status` shows whether the cluster is "
            "up; the same command in the same folder then follows the job, or resumes it"
        )
    return found[0]


def _kind(ray: Any, per_host: int) -> str:
    """Return GPU if a node of the cluster has enough GPUs, otherwise CPU."""
    has_devices = any(node["Alive"] and node["Resources"].get("GPU", 0) >= per_host for node in ray.nodes())
    return "GPU" if has_devices else "CPU"


def _write_environment(folder: Path) -> None:
    """Write this process's environment to a file for the hosts.

    Variables that Ray sets for each actor are omitted.
    """
    environment = {
        name: value
        for name, value in config.whole_environment().items()
        if not name.startswith("RAY_") and not name.endswith("VISIBLE_DEVICES")
    }
    device = folder / "device"
    device.mkdir(mode=0o700, exist_ok=True)
    if not (environment.get("CLUSTER_SECRET") or environment.get("CLUSTER_SECRET_FILE")):
        secret = device / "cluster.secret"
        durable.create_file_atomically(secret, secrets.token_hex(32).encode())
        environment["CLUSTER_SECRET_FILE"] = str(secret)
    durable.replace_note(HostPlan(str(folder), 0, (), "").environment_file, strict_json.dumps(environment).encode())
