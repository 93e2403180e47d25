"""A job in its own folder, started as a user does: its output, its processes, its end.

``run_sh`` and ``recover_sh`` call the scripts. ``run``, ``recover`` and ``tool`` start the commands behind them,
``samebits run`` and so on, in a forked process with everything imported, which takes a fifth of the CPU time. Tests of
what precedes the command (bash, the interpreter's start, limits, descriptors) call the script.

Waits are for events (a line, a snapshot pushed by the scheduler, a process's end), each with a bound. Processes that a
test leaves running are ended by pid and start time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

import samebits
from samebits import config
from samebits.account.job_view import JobView
from samebits.launcher.processes import process_names, read_pid_files, send_signal
from samebits.launcher.scheduler_link import SchedulerLink
from samebits.store.process_identity import ProcessIdentity
from tests.system.processes import (
    PATIENCE,
    SAMEBITS,
    Command,
    Forked,
    WarmStarter,
    found_below,
    free_port,
    signal_process,
)

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("tiny_worker.py")
ENDLESS = ("--steps", "1000000000")
UNTIL_TOLD = ("--until", "enough")
WAIT_S = 120.0 * PATIENCE  # scripts whose workers import torch start slowly on a busy machine
POLL_S = 0.01
SHOWN_LINES = 12
RUN_SH = ROOT / "scripts" / "run.sh"
RECOVER_SH = ROOT / "scripts" / "recover.sh"
NOT_OF_COMMANDS = ("training", "dashboard", "compat", "integrations", "horovod", "earlier", "remote")
"""Packages that these commands do not import: torch, web servers, object stores, earlier releases."""


def modules_of_commands() -> list[str]:
    """Return all modules that a command of ``samebits``, its scheduler and ``tiny_worker`` may import."""
    root = Path(samebits.__file__).parent
    paths = [path.relative_to(root.parent).with_suffix("") for path in sorted(root.rglob("*.py"))]
    return [".".join(path.parts) for path in paths if not set(path.parts) & set(NOT_OF_COMMANDS)]


def bare_environment() -> dict[str, str]:
    """Return the environment without any setting of a job."""
    settings = [name for name in config.KEPT_NAMES if name not in ("PATH", "PYTHONPATH")]
    settings += ["ROLE", "NODE_ID", "MS_ROLE", "MS_NODE_ID"]
    return {name: text for name, text in os.environ.items() if not any(fnmatchcase(name, word) for word in settings)}


class Shell:
    """One running command; its standard output and error are merged and read by line."""

    def __init__(self, process: subprocess.Popen[str] | Forked, output: IO[str]) -> None:
        self.process = process
        self._output = output
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._seen: list[str] = []
        self.heard: list[tuple[float, str]] = []  # every line with the time it arrived (monotonic seconds)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def of(cls, words: list[str], folder: Path, environment: Mapping[str, str]) -> Shell:
        """Start any program."""
        process = subprocess.Popen(
            # otherwise it inherits an ignored SIGHUP if the tests run under nohup
            ["env", "--default-signal=HUP", *words],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        return cls(process, process.stdout)

    @classmethod
    def forked(cls, starter: WarmStarter, words: list[str], folder: Path, environment: Mapping[str, str]) -> Shell:
        """Start ``samebits WORDS``."""
        with tempfile.TemporaryDirectory(prefix="samebits-shell-") as name:
            pipe = Path(name) / "output"
            os.mkfifo(pipe)
            reads = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            running = starter.start(Command(None, tuple(words), environment, folder, pipe))
            os.set_blocking(reads, True)
        return cls(Forked(running, ["samebits", *words]), os.fdopen(reads, errors="replace"))

    def _read(self) -> None:
        for line in self._output:
            self.heard.append((time.monotonic(), line))
            self._lines.put(line)
        self._lines.put(None)

    @property
    def text(self) -> str:
        """Return the output that waits have read so far."""
        return "".join(self._seen)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the first match in past or future output."""
        deadline = time.monotonic() + WAIT_S
        while (match := re.search(pattern, self.text)) is None:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            assert line is not None, f"{pattern!r} was not printed:\n{self.text}"
            self._seen.append(line)
        return match

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a condition outside the output while the script runs."""
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert self.process.poll() is None and time.monotonic() < deadline, "\n".join(self.all_lines())
            time.sleep(POLL_S)

    def all_lines(self) -> list[str]:
        """Return all lines printed so far, whether or not a wait has read them."""
        if self.process.poll() is not None:
            self._reader.join(WAIT_S)
        with self._lines.mutex:
            left = [line for line in self._lines.queue if line is not None]
        return [line.rstrip("\n") for line in self._seen + left]

    def end(self) -> int:
        """Wait for the end, read all output and return the exit status."""
        status = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        while (line := self._lines.get(timeout=WAIT_S)) is not None:
            self._seen.append(line)
        self._lines.put(None)
        return status

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


class ShellJob:
    """A job's folder and the commands called in it.

    Args:
        folder: for this job alone.
        starter: forks commands of ``samebits``; None: each starts a new interpreter.
        settings: override those below.
    """

    def __init__(self, folder: Path, starter: WarmStarter | None = None, **settings: str) -> None:
        self.folder = folder
        self.starter = starter
        self.port = free_port()
        self.settings = {
            "SCHED_PORT": str(self.port),
            "WORKER_NUM": "3",
            "REGISTER_COOLDOWN": "0.5",
            "HEARTBEAT_INTERVAL": "0.25",
            "NODE_TIMEOUT": "3",
            **settings,
        }
        self.shells: list[Shell] = []
        self._links: list[SchedulerLink] = []
        self._ever: set[ProcessIdentity] = set()

    # ---- user commands

    def bare_environment(self) -> dict[str, str]:
        """Return the environment without any setting of a job."""
        return bare_environment()

    def shell(self, *words: str, folder: Path | None = None, **settings: str) -> Shell:
        """Start any program."""
        return self._keep(Shell.of(list(words), folder or self.folder, {**bare_environment(), **settings}))

    def run(self, *words: str, worker: Path = WORKER, options: tuple[str, ...] = (), **settings: str) -> Shell:
        """Start the command behind ``run.sh [options] tiny_worker.py words``, with this job's settings."""
        settings = {**self.settings, **settings}
        if not settings.get("MAX_RESTARTS") and not settings.get("MS_MAX_RESTARTS"):
            settings["MAX_RESTARTS"] = "0"
        settings.setdefault("SPARE_NUM", "0")
        return self.tool("run", *options, "--", str(worker), *words, **settings)

    def run_sh(self, *words: str, worker: Path = WORKER, options: tuple[str, ...] = (), **settings: str) -> Shell:
        """Start ``run.sh [options] tiny_worker.py words``, with this job's settings."""
        return self.shell("bash", str(RUN_SH), *options, str(worker), *words, **{**self.settings, **settings})

    def recover(self, *words: str, **settings: str) -> Shell:
        """Start the command behind ``recover.sh words``, without settings."""
        return self.tool("recover", *words, **settings)

    def recover_sh(self, *words: str, **settings: str) -> Shell:
        """Start ``recover.sh words``, without settings."""
        return self.shell("bash", str(RECOVER_SH), *words, **settings)

    def tool(self, *words: str, folder: Path | None = None, **settings: str) -> Shell:
        """Run ``samebits <words>``, without settings."""
        environment = {**bare_environment(), **settings}
        if self.starter is None or not self.starter.can_start(environment):
            return self.shell(sys.executable, *SAMEBITS, *words, folder=folder, **settings)
        return self._keep(Shell.forked(self.starter, list(words), folder or self.folder, environment))

    def _keep(self, shell: Shell) -> Shell:
        self.shells.append(shell)
        return shell

    def let_finish(self) -> None:
        """Let the workers that were started with ``UNTIL_TOLD`` end their training."""
        (self.folder / UNTIL_TOLD[1]).touch()

    # ---- observations

    @property
    def log_dir(self) -> Path:
        return self.folder / "device"

    def identity(self, name: str) -> ProcessIdentity:
        return self.identities()[name]

    def identities(self) -> dict[str, ProcessIdentity]:
        nodes = (path.stem.removeprefix("worker_") for path in sorted(self.log_dir.glob("worker_*.pid")))
        found = read_pid_files(self.log_dir, process_names(nodes))
        self._ever |= set(found.values())
        return found

    def running(self) -> list[str]:
        return [name for name, identity in self.identities().items() if identity.is_alive()]

    def log(self, name: str) -> str:
        return (self.log_dir / f"{name}.log").read_text()

    def proc_environment(self, name: str) -> dict[str, str]:
        """Return the environment a process of the job was started with."""
        words = Path(f"/proc/{self.identity(name).pid}/environ").read_bytes().decode().split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> ProcessIdentity:
        """Signal a process of the job; if that ends it, wait until it is gone."""
        identity = self.identity(name)
        assert send_signal(identity, number)
        if number is signal.SIGKILL:
            assert identity.wait_for_exit(WAIT_S)
        return identity

    def kill_everything(self, launcher: Shell) -> None:
        """kill -9 a launcher and every process of the job, and wait until all are gone."""
        launcher.process.kill()
        launcher.process.wait()
        self.kill_at_once(*self.identities())

    def kill_at_once(self, *names: str) -> None:
        """kill -9 these processes, even if the first death ends the others, and wait until all are gone."""
        identities = [self.identity(name) for name in names]
        for identity in identities:
            send_signal(identity, signal.SIGKILL)
        for identity in identities:
            assert identity.wait_for_exit(WAIT_S)

    def wait_view(self, wanted: Callable[[JobView], bool]) -> JobView:
        """Return the first snapshot pushed by the scheduler that satisfies the condition."""
        settings, _ = config.read({**self.settings, "ROLE": "scheduler"})
        link = SchedulerLink(settings)
        self._links.append(link)
        deadline = time.monotonic() + WAIT_S
        seen: list[object] = []
        while (left_s := deadline - time.monotonic()) > 0:
            select.select([link], [], [], left_s)
            for told in link.take():
                seen.append(told)
                if isinstance(told, JobView) and wanted(told):
                    return told
        raise AssertionError(f"no such snapshot: {seen[-3:]}")

    def wait_training(self, generation: int = 1) -> JobView:
        """Wait until all workers train in this generation and have made a few steps."""
        return self.wait_view(
            lambda view: (view.generation, view.phase, view.alive) == (generation, "training", 3) and view.step >= 3
        )

    def tails(self) -> str:
        """Return the end of every script's output and of every log."""
        logs = sorted(self.log_dir.glob("*.log"))
        ends = {path.name: path.read_text(errors="replace").splitlines() for path in logs}
        for number, shell in enumerate(self.shells):
            ends[f"shell {number}: {' '.join(map(str, shell.process.args))}"] = shell.all_lines()
        return "\n".join(f"--- {name}\n" + "\n".join(lines[-SHOWN_LINES:]) for name, lines in ends.items())

    # ---- the end

    def close(self, *, patience_s: float = WAIT_S) -> list[str]:
        """End whatever is left and return what that was: nothing after a test that went well.

        ``patience_s``: time for processes that the job's processes started (checkpoint writers, DataLoader workers) to
        end on their own.
        """
        for link in self._links:
            link.close()
        if self.log_dir.exists():
            self.identities()
        left = [str(identity) for identity in self._ever if identity.is_alive()]
        left += [" ".join(map(str, shell.process.args)) for shell in self.shells if shell.process.poll() is None]
        for shell in self.shells:
            if shell.process.poll() is None:
                shell.process.kill()
            shell.process.wait(WAIT_S)
        for identity in self._ever:
            send_signal(identity, signal.SIGKILL)
            identity.wait_for_exit(WAIT_S)
        return left + self._left_of_others(patience_s)

    def _left_of_others(self, patience_s: float) -> list[str]:
        """Return processes of this folder that no pid file names."""
        left, deadline = [], time.monotonic() + patience_s
        for identity in found_below(self.folder):
            if identity.wait_for_exit(max(0.0, deadline - time.monotonic())):
                continue
            with contextlib.suppress(OSError):  # it has ended meanwhile
                command = Path(f"/proc/{identity.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                left.append(f"process {identity.pid}: {command}")
            signal_process(identity, signal.SIGKILL)
            identity.wait_for_exit(WAIT_S)
        return left
