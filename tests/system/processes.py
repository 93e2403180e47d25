"""Real processes by pid and start time: started cold or warm, signalled, awaited, and found if they escape.

Importing torch takes seconds, so most processes are forked from one that has imported it (``warm_start``). They are
otherwise ordinary processes with their own pid, environment, log and end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from samebits.store.process_identity import ProcessIdentity

REPOSITORY = Path(__file__).resolve().parents[2]
WARM_START_S = 120.0  # importing torch on a busy machine
PRELOADED = ("LD_PRELOAD", "DELAY_SEED", "DELAY_UP_TO_MS")
"""Environment variables of ``tests.under_delay``, which delays every process of a test."""
PATIENCE = 5.0 if PRELOADED[-1] in os.environ else 1.0
"""Factor on all timeouts of the tests."""
SAMEBITS = ("-P", "-m", "samebits")
"""The Python options that the scripts use, before the words of a subcommand."""
READ_AT_START = ("PYTHONHOME", "PYTHONSAFEPATH", "PYTHONHASHSEED", "PYTHONIOENCODING", "LC_ALL", "LANG")
"""Variables that Python reads at startup, so that a forked process cannot be given others."""
TRAINING = ("filelock", "msgpack", "safetensors", "sklearn.datasets", "torch", "torch._dynamo", "xxhash", "zmq")
TRAINING += (
    "samebits.service.scheduling.loop",
    "samebits.training.run.elastic_run",
    "samebits.service.copies.copying_writer",
)  # and everything else that a worker loads
_ROOM = "x" * 16_000  # for the command lines and environments that a warm starter's children show


@dataclass(frozen=True, slots=True)
class Command:
    """A Python script and everything its process is given; standard output and error are appended to ``log``.

    ``script``: None stands for the command ``samebits`` with the words ``args``, or for another ``module``. ``inside``:
    the pid of a process in whose namespaces a warm start takes place (``tests.clusters.namespaces``).
    """

    script: Path | None
    args: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    inside: int | None = None
    module: str = ""

    @property
    def words(self) -> list[str]:
        """Return the words after ``python``."""
        if self.module:
            return ["-m", self.module, *self.args]
        return [*(SAMEBITS if self.script is None else (str(self.script),)), *self.args]


class FairClock:
    """Seconds since it was made, without those in which a watched process was ready to run and had no core.

    On a machine with many more runnable processes than cores these are most of them. Counts the main thread's, as
    /proc/PID/schedstat has them (kernel's Documentation/scheduler/sched-stats.rst).

    Args:
        pids: those watched now.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._passed_s, self._at_s, self._queued_ns = 0.0, time.monotonic(), self._queued()

    def passed_s(self) -> float:
        """Return them."""
        now_s, queued_ns = time.monotonic(), self._queued()
        kept_ns = max((ns - self._queued_ns.get(pid, ns) for pid, ns in queued_ns.items()), default=0)
        self._passed_s += max(0.0, now_s - self._at_s - kept_ns / 1e9)
        self._at_s, self._queued_ns = now_s, queued_ns
        return self._passed_s

    def _queued(self) -> dict[int, int]:
        found = {}
        for pid in self._pids():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended
                found[pid] = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
        return found


class Starter(Protocol):
    """A way to start a script as a process."""

    def start(self, command: Command) -> Running:
        """Start it."""

    def status(self, pid: int, timeout_s: float) -> int | None:
        """Return how an ended process exited, as subprocess does (minus the signal); None: not reported in time."""


@dataclass(slots=True)
class Running:
    """One of our processes, alive or not."""

    identity: ProcessIdentity
    starter: Starter
    _status: int | None = field(default=None, init=False)

    @property
    def pid(self) -> int:
        return self.identity.pid

    def is_alive(self) -> bool:
        return self.identity.is_alive()

    def wait(self, timeout_s: float = 60.0 * PATIENCE) -> int:
        """Return its exit status, or minus the signal that ended it.

        Raises:
            TimeoutError: it still runs.
        """
        if self._status is None:
            deadline = time.monotonic() + timeout_s
            if not self.identity.wait_for_exit(timeout_s):
                raise TimeoutError(f"pid {self.pid} still runs after {timeout_s:g} s")
            self._status = self.starter.status(self.pid, max(10.0, deadline - time.monotonic()))
            if self._status is None:
                raise TimeoutError(f"no status of pid {self.pid} was reported")
        return self._status

    def signal(self, number: signal.Signals) -> None:
        """Signal exactly this process; no effect if it is gone."""
        signal_process(self.identity, number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()


def signal_process(identity: ProcessIdentity, number: signal.Signals) -> None:
    """Signal exactly this process, never another one with its pid."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    try:
        if identity.is_alive():
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


class ColdStarter:
    """Starts a new interpreter, imports included, as a user's shell does."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: Command) -> Running:
        assert command.inside is None, "only a warm start can enter namespaces"
        with command.log.open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, *command.words],
                env=dict(command.environment),
                cwd=command.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children[child.pid] = child
        return Running(identity_of_child(child.pid), self)

    def status(self, pid: int, timeout_s: float) -> int | None:
        try:
            return self._children.pop(pid).wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


class WarmStarter:
    """Forks from a process that has imported what is needed; see ``warm_start``. Closing it ends that process.

    Args:
        modules: what it imports; by default torch and everything else that a worker loads.
        environment: that process's environment; a child gets another one, except for ``READ_AT_START``.
    """

    def __init__(self, modules: Sequence[str] = TRAINING, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        self._environment = dict(environment_of_tests() if environment is None else environment)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.system.warm_start", str(theirs.fileno()), " ".join(modules), _ROOM],
                cwd=REPOSITORY,
                # Torch reads the number of its threads when it is imported.
                env=self._environment | {"OMP_NUM_THREADS": "1", "ROOM": _ROOM},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = ours
        self._rest = b""
        self._statuses: dict[int, int] = {}
        self._receive("ready", time.monotonic() + WARM_START_S)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60.0 * PATIENCE)

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Return whether a process with this environment can be forked here."""
        return all(environment.get(name) == self._environment.get(name) for name in READ_AT_START)

    def start(self, command: Command) -> Running:
        order = {
            "words": command.words,
            "environment": dict(command.environment),
            "folder": str(command.folder),
            "log": str(command.log),
            "inside": command.inside,
        }
        self._socket.sendall(json.dumps(order).encode() + b"\n")
        told = self._receive("started_at", time.monotonic() + 60.0 * PATIENCE)
        assert told is not None, "the warm starter did not answer"
        self._statuses.pop(told["pid"], None)  # of an earlier process whose status was never asked for: pids are reused
        return Running(ProcessIdentity(told["pid"], told["started_at"]), self)

    def status(self, pid: int, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while pid not in self._statuses:
            if self._receive("status", deadline) is None:
                return None
        return self._statuses.pop(pid)

    def _receive(self, wanted: str, deadline: float) -> dict[str, int] | None:
        """Return the next message of this kind; keep exit statuses that arrive before it."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                message: dict[str, int] = json.loads(line)
                if "status" in message:
                    self._statuses[message["pid"]] = message["status"]
                if wanted in message:
                    return message
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            received = self._socket.recv(65536)
            assert received, f"the warm starter ended with status {self._process.wait(60.0 * PATIENCE)}"
            self._rest += received


class Forked:
    """The part of ``subprocess.Popen`` that the tests use, for a process of a warm starter."""

    def __init__(self, running: Running, args: list[str]) -> None:
        self._running = running
        self.args = args
        self.pid = running.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return None if self._running.is_alive() else self.wait()

    def wait(self, timeout: float = 60.0 * PATIENCE) -> int:
        try:
            self.returncode = self._running.wait(timeout)
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(self.args, timeout) from error
        return self.returncode

    def send_signal(self, number: int) -> None:
        self._running.signal(signal.Signals(number))

    def kill(self) -> None:
        self._running.signal(signal.SIGKILL)


def identity_of_child(pid: int) -> ProcessIdentity:
    """Return the identity of a child that has not been waited for, even if it has ended (proc(5), field 22 of stat)."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return ProcessIdentity(pid, int(stat[stat.rindex(b")") + 2 :].split()[19]))


def environment_of_tests() -> dict[str, str]:
    """Return an environment in which a process finds the package, without job settings of the caller's shell."""
    kept = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", *PRELOADED)
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    return environment | {"PYTHONPATH": str(REPOSITORY)}


def found_below(folder: Path) -> list[ProcessIdentity]:
    """Return our processes whose working folder or environment names this folder, by whatever parent.

    A test's folder is named nowhere else, so no foreign process is found.
    """
    found = []
    wanted, me = str(folder).encode(), os.getpid()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == me:
            continue
        identity = ProcessIdentity.of(int(entry.name))
        try:
            belongs = (entry / "cwd").readlink().is_relative_to(folder) or wanted in (entry / "environ").read_bytes()
        except OSError:
            continue  # gone, or another user's
        if identity is not None and belongs and identity.is_alive():
            found.append(identity)
    return found


def free_port() -> int:
    """Return a free loopback port below those the kernel gives to outgoing connections (ip(7)).

    A killed scheduler leaves its port unused for a while; no outgoing connection may take it meanwhile.
    """
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(first_outgoing, 20_000))
        with socket.socket() as attempt, contextlib.suppress(OSError):
            attempt.bind(("127.0.0.1", port))
            return port


def lines_of(path: Path) -> Sequence[str]:
    """Return the complete lines of a log, or none without a log."""
    try:
        return _lines_of(path, path.stat().st_size)
    except FileNotFoundError:
        return []


@lru_cache(maxsize=64)
def _lines_of(path: Path, size: int) -> Sequence[str]:
    """Read a log only if it has grown: tests poll logs a hundred times a second."""
    with path.open("rb") as log:
        return log.read(size).decode(errors="replace").rpartition("\n")[0].splitlines()
