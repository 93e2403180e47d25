"""The processes of one measurement: started, watched, and ended by the pids that were started.

The module has a job of ours, its environment, and the cleanup. Whatever happens to a benchmark, leaving the ``with``
block leaves no process and no folder behind. SIGTERM leaves that block as Ctrl-C does; if a benchmark is killed, the
kernel ends its processes.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.moments import CHANNEL, WHO, Channel
from samebits.settings_table import VARIABLES
from samebits.store.child_processes import die_with

__all__ = [
    "REPOSITORY",
    "Job",
    "Stage",
    "free_port",
    "processes_below",
    "start",
    "wait_until_listening",
    "worker_module",
    "worker_name",
]

REPOSITORY = Path(__file__).resolve().parents[1]
_LOOPBACK = "127.0.0.1"
_LOG_TAIL_BYTES = 3000
_START_S = 60.0
_LEFT_WITHIN_S = 30.0
_PARENT_GRACE_S = 40.0  # torchrun gives its workers 30 s


def worker_module(name: str) -> list[str]:
    """Return the command that runs ``benchmarks.workers.<name>`` with this interpreter."""
    return [sys.executable, "-m", f"benchmarks.workers.{name}"]


def free_port() -> int:
    """Return a free TCP port of loopback."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def start(command: Sequence[str], ends_by: signal.Signals = signal.SIGKILL, **options: Any) -> subprocess.Popen[Any]:
    """Start a process that ends with this one, however this one ends.

    Args:
        command: what to run.
        ends_by: the signal that the kernel sends to it if this process is killed: SIGTERM if it has children to end.
        options: options for ``subprocess.Popen``.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
    parent = os.getpid()
    return subprocess.Popen(command, preexec_fn=lambda: die_with(parent, ends_by), **options)


class Stage:
    """A folder, a channel for events, and the processes of one measurement.

    Args:
        within: where the folder is created; by default where this machine keeps temporary files.

    Attributes:
        folder: for their files; removed afterwards.
        channel: where their events arrive.
    """

    def __init__(self, within: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="samebits-benchmark-", dir=within))
        self.channel = Channel(self.folder / "moments", self.require_alive)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._parents: set[str] = set()
        self._left: list[int] = []  # descriptors of orphaned child processes

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            print(self.logs(), file=sys.stderr)
        self.close()

    def close(self) -> None:
        """End every process and remove the folder."""
        for name in [*self._running]:
            self.end(name)
        self._wait_for_those_left()
        self.channel.close()
        shutil.rmtree(self.folder)

    def _wait_for_those_left(self) -> None:
        """Wait for writer processes, each of which finishes the saves of its killed trainer in this folder."""
        deadline_s = time.monotonic() + _LEFT_WITHIN_S
        for descriptor in self._left:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000)
            os.close(descriptor)
        self._left.clear()

    def start(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        gated: bool = False,
        is_parent: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a process with one thread per operator, this repository on its path, and its output in ``<name>.log``.

        Args:
            name: the name of its log and its events.
            command: what to run.
                variables: added to the environment, from which the settings of any job were removed.
            gated: whether its standard input is a pipe to write to.
            is_parent: whether it starts processes of its own and ends them on SIGTERM.
        """
        environment = {**_environment(), CHANNEL: str(self.channel.path), WHO: name, **variables}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = start(
                command,
                signal.SIGTERM if is_parent else signal.SIGKILL,
                env=environment,
                cwd=self.folder,
                stdin=subprocess.PIPE if gated else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running[name] = process
        if is_parent:
            self._parents.add(name)
        return process

    def end(self, name: str) -> None:
        """Kill -9 a process and wait until it is gone; a parent first gets time to end its own processes."""
        process = self._running.pop(name)
        for pid in processes_below(process.pid):
            with contextlib.suppress(ProcessLookupError):
                self._left.append(os.pidfd_open(pid))
        if name in self._parents:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PARENT_GRACE_S)
        process.kill()
        process.wait()

    def wait(self, name: str, within_s: float) -> int:
        """Wait until a process that was told to end has ended; return its exit status."""
        process = self._running[name]
        status = process.wait(within_s)
        del self._running[name]
        return status

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process that keeps running, as far as the signal allows."""
        self._running[name].send_signal(number)

    def require_alive(self) -> None:
        """Raise ChildProcessError if a process has ended by itself."""
        for name, status in self.ended().items():
            raise ChildProcessError(f"{name} ended with status {status} in the middle of a measurement")

    def ended(self) -> dict[str, int]:
        """Return the exit status of each process that has ended by itself, by name."""
        found = {name: process.poll() for name, process in self._running.items()}
        return {name: status for name, status in found.items() if status is not None}

    def pids(self) -> dict[str, int]:
        """Return the pids of the processes that were started and not ended, by name."""
        return {name: process.pid for name, process in self._running.items()}

    def logs(self) -> str:
        """Return the end of every log."""
        texts = []
        for log in sorted(self.folder.glob("*.log")):
            texts.append(f"== {log.name}\n" + log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace"))
        return "\n".join(texts)


def processes_below(pid: int) -> Iterator[int]:
    """Yield every process below this one whose parents are all still alive."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError):  # the process has just ended
        for thread in list(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # or that thread of it
                children += map(int, (thread / "children").read_text().split())
    for child in children:
        yield child
        yield from processes_below(child)


def _environment() -> dict[str, str]:
    """Return this process's environment without a job's identity, and with one thread per process."""
    ours = {variable.name for variable in VARIABLES}
    torchs = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ours | torchs and not name.startswith(("MS_", "TORCHELASTIC_"))
    }
    path = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environment, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


class Job:
    """A job of ours on a stage: a scheduler that imports no torch, and workers that run one module.

    Args:
        stage: where it runs.
        module: the workers' module in ``benchmarks.workers``.
        world_size: number of workers.
        variables: added to the environment of all processes.
    """

    def __init__(self, stage: Stage, module: str, world_size: int, **variables: str) -> None:
        self._stage = stage
        self._module = module
        self._port = free_port()
        self.variables = {
            "WORKER_NUM": str(world_size),
            "SCHED_PORT": str(self._port),
            "JOB_NAME": module,
            "ENABLE_RECOVERY": "1",
            "REGISTER_COOLDOWN": "0",
            "RECOVERY_PATH": str(stage.folder / "recovery"),
            "CHECKPOINT_PATH": str(stage.folder / "ckpt_of_rank"),
            **variables,
        }

    def start_scheduler(self, command: Sequence[str] = (sys.executable, "-m", "samebits", "scheduler")) -> None:
        """Start the scheduler, and return when it listens."""
        self._stage.start("scheduler", [*command], {**self.variables, "ROLE": "scheduler"})
        wait_until_listening(self._port, self._stage)

    def worker_variables(self, slot: int) -> dict[str, str]:
        return {**self.variables, "ROLE": "worker", "NODE_ID": str(slot)}

    def start_worker(self, slot: int, *arguments: str, gated: bool = False) -> subprocess.Popen[bytes]:
        command = [*worker_module(self._module), *arguments]
        return self._stage.start(worker_name(slot), command, self.worker_variables(slot), gated=gated)


def worker_name(slot: int) -> str:
    """Return the name of a slot's worker on its stage."""
    return f"worker_{slot}"


def wait_until_listening(port: int, stage: Stage) -> None:
    """Wait until a process of the stage listens on that port of loopback."""
    deadline_s = time.monotonic() + _START_S
    while not _listens(port):
        stage.require_alive()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"nothing listened on port {port} within {_START_S:g} s")
        time.sleep(0.005)


def _listens(port: int) -> bool:
    try:
        socket.create_connection((_LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True
