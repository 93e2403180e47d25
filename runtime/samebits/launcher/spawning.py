"""Start processes of a job on this machine or, with the user's command, on another host.

Disk space, permissions and pid files are checked or reserved before the first process is started, so a failed start
changes nothing. Each process gets its own session, so Ctrl-C or a hang-up of a terminal does not reach it. Its output
is written to LOG_DIR/NAME.log and its identity to LOG_DIR/NAME.pid.

No local shell interprets the user's command for another host: it is split into words once, placeholders are replaced
within words, and the line for the remote shell is quoted. A host name or argument can therefore never become a command.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeAlias

from samebits import config
from samebits.config import OF_A_SHELL, Settings
from samebits.errors import ListenError, UsageError
from samebits.launcher.processes import SCHEDULER, end, node_of
from samebits.net.address import close_all, is_local, listen, port_of
from samebits.scheduler_hosts import names_one
from samebits.service.scheduler_address import listening_place
from samebits.store import durable, private
from samebits.store.child_processes import die_with
from samebits.store.process_identity import ProcessIdentity

EXAMPLE = "ssh -o BatchMode=yes {host} {command}"
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_KNOWN = ("host", "node", "command")


@dataclass(frozen=True, slots=True)
class Template:
    """The words of the user's command for starting a worker on another host, with placeholders."""

    words: tuple[str, ...]

    def filled(self, host: str, node: str, command: str) -> list[str]:
        """Return the command that starts a worker on ``host``. ``command`` is a line for the remote shell."""
        values = {"host": host, "node": node, "command": command}
        return [_PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in self.words]


def template_of(text: str) -> Template:
    """Parse the command that a user has written.

    Raises:
        UsageError: the text has an unknown placeholder, does not include the command or the host, or needs a shell.
    """

    def wrong(why: str, fix: str) -> UsageError:
        return UsageError(f"HOST_LAUNCH={text[:120]}: {why}. Fix: {fix}")

    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise wrong(f"it cannot be split into words ({error})", "close its quotes") from None
    names = [name for word in words for name in _PLACEHOLDER.findall(word)]
    if unknown := [name for name in names if name not in _KNOWN]:
        raise wrong(f"{{{unknown[0]}}} is no placeholder", "use {host}, {node} and {command}")
    if "command" not in names or not {"host", "node"} & {*names}:
        raise wrong("it names no {command}, or neither {host} nor {node}", f"--launch '{EXAMPLE}'")
    if shell := next((word for word in words if word in OF_A_SHELL), None):
        raise wrong(f"no shell reads it, and {shell!r} is a shell's", "put that into a script, and name the script")
    if _PLACEHOLDER.search(words[0]):
        raise wrong("its first word is the program, and no placeholder", f"--launch '{EXAMPLE}'")
    return Template(words)


def shell_line(folder: Path, environment: Mapping[str, str], words: Sequence[str]) -> str:
    """Return a line for a POSIX shell that runs a command in a folder with these variables.

    The shell remains as the parent process, so that a signal that ends the command becomes a status above 128.
    Otherwise, ssh(1) would report 255, which is also its status if it cannot connect.
    """
    told = [f"{name}={value}" for name, value in sorted(environment.items())]
    return f"cd {shlex.quote(str(folder))} && {shlex.join(['env', *told, *words])}; exit $?"


@functools.lru_cache(maxsize=4096)
def is_here(host: str) -> bool:
    """Return whether a host name or address belongs to this machine, without querying a name service."""
    names = {"localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}
    if host in names:
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return is_local(host)


LOCK_FILE = "start.lock"
_PLACE_BYTES = 64  # enough for a pid and a start time
# A launcher inside another job's process must not pass on that process's own variables.
OF_ONE_PROCESS = ("ROLE", "NODE_ID", "JOB_ID", "MS_ROLE", "MS_NODE_ID", "MS_JOB_ID")
_CANNOT_RUN = 127
_HEARD = (signal.SIGINT, signal.SIGTERM)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)

Spawn: TypeAlias = "Callable[[Program, str, int], int]"
"""A function that starts the process with this name and log as a child of the caller, and returns its pid."""


class Way(Enum):
    """How to build a worker's command from the user's arguments."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"

    def words(self, interpreter: str, script: str, args: Sequence[str]) -> list[str]:
        """Return the command."""
        if self is Way.PROGRAM:
            return [script, *args]
        return [interpreter, *(["-m"] if self is Way.MODULE else []), script, *args]


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a job's processes.

    ``environment`` has all variables except those that differ between processes.
    """

    folder: Path
    interpreter: str
    script: str
    args: tuple[str, ...]
    environment: Mapping[str, str]
    only_scheduler: Mapping[str, str]
    way: Way = Way.SCRIPT
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """The host of each node that runs elsewhere, started with ``HOST_LAUNCH`` from ``environment``."""
    job: str = ""
    """The job's id, if the launcher chose it; the processes then accept no other job's scheduler."""
    listening: tuple[int, ...] = ()
    """Descriptors of listening sockets that the scheduler inherits."""

    def words(self, name: str) -> list[str]:
        """Return the command of the process with this name."""
        if name == SCHEDULER:
            return [self.interpreter, "-P", "-m", "samebits", "scheduler"]
        node = node_of(name) or ""
        if node not in self.elsewhere:
            return self.worker_words()
        told = {**config.kept_environment(self.environment), **self._identity(), "ROLE": "worker", "NODE_ID": node}
        line = shell_line(self.folder, told, self.worker_words())
        return template_of(config.host_launch(self.environment)).filled(self.elsewhere[node], node, line)

    def worker_words(self) -> list[str]:
        """Return the command that runs a worker on its own host."""
        words = self.way.words(self.interpreter, self.script, self.args)
        if config.is_plain(self.environment):  # a small SameBits process keeps the seat and runs the script
            return [self.interpreter, "-P", "-m", "samebits", "plain", "--", *words]
        return words

    def environment_of(self, name: str) -> dict[str, str]:
        """Return the environment of the process with this name."""
        shared = {key: text for key, text in self.environment.items() if key not in OF_ONE_PROCESS} | self._identity()
        node = node_of(name)
        if node is None:
            return {**shared, **self.only_scheduler, "ROLE": "scheduler"}
        return {**shared, "ROLE": "worker", "NODE_ID": node}

    def _identity(self) -> dict[str, str]:
        identity = {config.START_FOLDER: str(self.folder)}
        return identity | ({"JOB_ID": self.job} if self.job else {})


def names_port(environment: Mapping[str, str]) -> bool:
    """Return whether the job's variables set a port, so that no other may be chosen."""
    return any(environment.get(f"{prefix}SCHED_PORT") for prefix in ("", config.PREFIX))


class Listener(NamedTuple):
    """The sockets that a scheduler will inherit, and its port if it is not SCHED_PORT."""

    sockets: tuple[socket.socket, ...] = ()
    chosen_port: int | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The sockets' descriptors in this process."""
        return tuple(one.fileno() for one in self.sockets)

    def close(self) -> None:
        """Close the sockets in this process. A scheduler that has inherited them keeps listening."""
        close_all(self.sockets)


def listen_for(settings: Settings, *, may_choose: bool = False) -> Listener:
    """Listen at the address of the job's scheduler, whose process inherits the sockets when it is started.

    Args:
        settings: the job's settings.
        may_choose: whether to use any free port if another process has the job's port.

    Raises:
        ListenError: this process cannot listen on the address or the port.
    """
    addresses, port = listening_place(settings)
    try:
        return Listener(tuple(listen(addresses, port)))
    except ListenError as error:
        if not (error.is_taken and may_choose and names_one(settings.sched_host)):  # all of several hosts know the port
            raise
        sockets = tuple(listen(addresses, 0))
        return Listener(sockets, port_of(sockets))


class BusyError(Exception):
    """Another process is starting processes in this folder."""


class StartLock:
    """The lock for starting processes or changing the set of nodes. Entering waits until it is free.

    Raises (from ``with``):
        BusyError: another process holds the lock, and ``wait`` is false.
    """

    def __init__(self, log_dir: Path, *, wait: bool = True) -> None:
        self._path = log_dir / LOCK_FILE
        self._waits = wait
        self._descriptor = -1

    def __enter__(self) -> StartLock:
        private.make_folder(self._path.parent)
        self._descriptor = private.open_to_append(self._path)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not self._waits:
                self.release()
                raise BusyError from None
            print(
                "samebits: another `run` or `recover` is starting processes here; waiting until it has finished",
                file=sys.stderr,
                flush=True,
            )
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Berth:
    """The reserved log file and pid file of a process that is about to be started."""

    def __init__(self, log_dir: Path, name: str) -> None:
        self.name = name
        self._log = log_dir / f"{name}.log"
        self._pid_file = log_dir / f"{name}.pid"
        os.close(private.open_to_append(self._log))
        self._reserved = durable.write_temporary(self._pid_file, b" " * _PLACE_BYTES, sync=False)

    def start(self, program: Program, spawn_it: Spawn) -> ProcessIdentity:
        """Start the process, and write its identity to the pid file.

        Raises:
            StoreError: the pid file could not be written; the process was ended.
        """
        log = private.open_to_append(self._log)
        try:
            identity = ProcessIdentity.of_child(spawn_it(program, self.name, log))
        finally:
            os.close(log)
        try:
            with durable.disk_errors(self._pid_file, "writing the pid file"):
                with os.fdopen(durable.reopen(self._reserved), "wb") as file:
                    file.write(identity.to_line().encode())
                    file.truncate()
                self._reserved.rename(self._pid_file)
        except BaseException:
            end(identity, 0.0)  # without a pid file, the process could not be found again
            raise
        return identity

    def give_up(self) -> None:
        """Release the reservation, either after the start or because nothing is started."""
        self._reserved.unlink(missing_ok=True)


@contextlib.contextmanager
def reserved(log_dir: Path, names: Sequence[str]) -> Iterator[list[Berth]]:
    """Context manager that reserves berths for these processes and removes the unused ones at the end.

    Raises:
        StoreError: a file cannot be created, or does not belong to this user; nothing was changed.
    """
    private.make_folder(log_dir)
    berths: list[Berth] = []
    try:
        for name in names:
            berths.append(Berth(log_dir, name))
        yield berths
    finally:
        for berth in berths:
            with durable.disk_errors(log_dir, "removing what was not used"):
                berth.give_up()


def launch(
    berths: Sequence[Berth], program: Program, started: list[ProcessIdentity], spawn_worker: Spawn | None = None
) -> None:
    """Start a process in each berth as a child of the caller, and add it to ``started``.

    ``spawn_worker`` starts the workers' processes; None means :func:`spawn`.

    SIGHUP is ignored in the meantime, because it could end the caller between the start of a process and the writing of
    its pid file.

    Raises:
        StoreError: a process could not be started; those started before it keep running.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for berth in berths:
            makes = spawn if spawn_worker is None or berth.name == SCHEDULER else spawn_worker
            started.append(berth.start(program, makes))
    finally:
        signal.signal(signal.SIGHUP, before)


def hear_signals() -> None:
    """Unblock SIGINT and SIGTERM.

    Our shell scripts block them until Python is running, so that Ctrl-C prints no traceback.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)


def spawn(program: Program, name: str, log: int) -> int:
    """Start the process with this name, and return its pid."""
    inherited = program.listening if name == SCHEDULER else ()
    return execute(program.words(name), program.environment_of(name), program.folder, log, inherited)


def execute(
    words: Sequence[str], environment: Mapping[str, str], folder: Path, log: int, inherited: Sequence[int] = ()
) -> int:
    """Start a process that leads its own session and ignores terminal signals, and return its pid.

    Args:
        words: the command.
        environment: the process's environment.
        folder: its working directory.
        log: the descriptor for its output.
        inherited: descriptors of listening sockets that the process takes over, as in sd_listen_fds(3).
    """
    # A signal that arrives before the program runs must not be handled by a handler of this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    until_it_runs, runs = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(runs)
        os.read(until_it_runs, 1)  # until then, the child leads no session and looks like another program's process
        os.close(until_it_runs)
        return pid
    try:
        os.setsid()
        if config.dies_with_starter(environment):
            die_with(parent)
        for number in (signal.SIGTERM, *_IGNORED_BY_PYTHON):
            signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        environment = {**environment, **_handed_over(inherited)}
        os.chdir(folder)
        os.execvpe(words[0], list(words), environment)
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else words[0]
        os.write(2, os.fsencode(f"samebits: {where} in {folder} cannot be run: {error.strerror}\n"))
    finally:
        os._exit(_CANNOT_RUN)


def _handed_over(descriptors: Sequence[int]) -> dict[str, str]:
    """In the new process, move the inherited descriptors to the numbers that its program expects.

    Returns:
        The variables that announce the descriptors.
    """
    if not descriptors:
        return {}
    first = config.FIRST_INHERITED
    above = first + len(descriptors)  # so that no descriptor is overwritten before it is copied
    copies = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in descriptors]
    for number, copy in enumerate(copies, first):
        os.dup2(copy, number)
    return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(descriptors))}


_NAMES_A_DEVICE = re.compile(r"\s*([0-9]|GPU-|MIG-)")


def device_files(folder: Path = Path("/dev")) -> int:
    """Return the number of this machine's NVIDIA devices, or of its Ascend devices if there are none."""
    for kind in ("nvidia", "davinci"):
        count = sum(re.fullmatch(rf"{kind}[0-9]+", entry.name) is not None for entry in folder.glob(f"{kind}*"))
        if count:
            return count
    return 0


def usable_devices(environment: Mapping[str, str], devices: int) -> int:
    """Return how many of the machine's ``devices`` a job with this environment may use.

    As in CUDA, a list of visible devices ends at the first entry that names no device, such as -1 or NoDevFiles.
    """
    if (environment.get("DEVICE") or environment.get("MS_DEVICE")) == "cpu" or not devices:
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES", environment.get("ASCEND_RT_VISIBLE_DEVICES", "all"))
    if visible == "all":
        return devices
    count = 0
    for device in visible.split(","):
        if not _NAMES_A_DEVICE.match(device):
            break
        count += 1
    return count
