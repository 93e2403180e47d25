"""Find, signal and reap the job's processes on this machine. Signals are sent only from this module.

A process is identified by its pid and start time. Only this user's own pid files are trusted, because a scheduler or a
worker can claim anything about a process. A signal is sent through a descriptor that is opened before the start time is
compared, so it cannot reach another process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from samebits import config
from samebits.config import Settings
from samebits.core.replacement_names import number_of, root_of
from samebits.errors import StoreError
from samebits.net.address import loopback
from samebits.printable import IN_LOGS, printable
from samebits.store import durable, private
from samebits.store.process_identity import ProcessIdentity, read_pid_file

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
OUT_OF_MEMORY = "out of memory"
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
SETTLED_S = 5.0  # from the count of a kill to the end of its victim, whose memory is freed first
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes a number near 2^63 where v2 writes "max"


@dataclass(slots=True)
class _Group:
    kills: Path
    limit: Path
    seen: int  # kills that are explained, or too old to explain anything
    newest: int = 0
    newest_at: float = 0.0


class MemoryKills:
    """Counts the out-of-memory kills in the control groups of watched processes."""

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._groups: dict[Path, _Group] = {}
        self._of: dict[str, Path] = {}

    def watch(self, name: str, pid: int) -> None:
        """Start counting kills in the control group of this process, under this name."""
        self._of.pop(name, None)
        for kills, limit in self._files(pid):
            count = _count(kills)
            if count is not None:
                self._groups.setdefault(kills, _Group(kills, limit, count))
                self._of[name] = kills
                return

    def look(self, now: float) -> None:
        """Discard old kills, which do not explain later deaths.

        Call this regularly.
        """
        for group in self._groups.values():
            count = _count(group.kills) or 0
            if count != group.newest:
                group.newest, group.newest_at = count, now
            elif now - group.newest_at >= SETTLED_S:
                group.seen = max(group.seen, count)

    def cause(self, name: str) -> str:
        """Return why SIGKILL ended this process if its control group has counted an unexplained kill, or ""."""
        group = self._groups.get(self._of.get(name, Path()))
        if group is None or (_count(group.kills) or 0) <= group.seen:
            return ""
        group.seen += 1
        limit = _limit_bytes(group.limit)
        if limit:
            return f"{OUT_OF_MEMORY} (the kernel's limit for its control group, {limit / 2**30:.2f} GiB)"
        return f"{OUT_OF_MEMORY} (the kernel's choice: its control group has no limit of its own)"

    def _files(self, pid: int) -> list[tuple[Path, Path]]:
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            _, controllers, path = line.split(":", 2)
            inside = path.lstrip("/")
            if controllers == "":
                folder = self._cgroups / inside
                found.append((folder / "memory.events", folder / "memory.max"))
            elif "memory" in controllers.split(","):
                folder = self._cgroups / "memory" / inside
                found.append((folder / "memory.oom_control", folder / "memory.limit_in_bytes"))
        return found


def _count(file: Path) -> int | None:
    try:
        found = _KILLS.search(file.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def _limit_bytes(file: Path) -> int:
    """Return the control group's own limit in bytes, or 0 if there is none."""
    try:
        text = file.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT_BYTES else 0


SCHEDULER = "scheduler"
_WORKER_PREFIX = "worker_"
_TAIL_BYTES = 8192
_SHOWN_CHARACTERS = 300
_OURS = "samebits: "


def process_names(nodes: Iterable[str]) -> list[str]:
    """Return the names of a job's processes in logs and pid files, the scheduler's first."""
    return [SCHEDULER, *map(name_of, nodes)]


def node_of(name: str) -> str | None:
    """Return the node id of a worker, or None for the scheduler."""
    return None if name == SCHEDULER else name.removeprefix(_WORKER_PREFIX)


def name_of(node: str) -> str:
    """Return the name of the worker with this node id."""
    return f"{_WORKER_PREFIX}{node}"


def replaced_names(log_dir: Path, nodes: Iterable[str]) -> list[str]:
    """Return the names of replaced workers that have left a log, newest first.

    The workers are those that ``nodes`` or their predecessors have replaced.
    """
    there = set(nodes)
    left = {node for log in log_dir.glob(f"{_WORKER_PREFIX}*.log") if (node := node_of(log.stem)) and node not in there}
    return [name_of(node) for node in sorted(left, key=lambda node: (root_of(node), -number_of(node)))]


def spoken(name: str) -> str:
    """Return the name in the form used in sentences: ``worker 3``, ``the scheduler``."""
    node = node_of(name)
    return "the scheduler" if node is None else f"worker {node}"


def read_pid_files(log_dir: Path, names: Iterable[str]) -> dict[str, ProcessIdentity]:
    """Return the last process started under each name, whether it is alive or not.

    Raises:
        StoreError: a file is not a valid pid file.
    """
    found = {name: read_pid_file(log_dir / f"{name}.pid") for name in names}
    return {name: identity for name, identity in found.items() if identity is not None}


def remove_dead_pid_files(log_dir: Path) -> None:
    """Remove the pid files of dead workers, because other programs may reuse the pids."""
    for path in log_dir.glob(f"{_WORKER_PREFIX}*.pid"):
        with contextlib.suppress(StoreError):  # not a valid pid file of this user
            if (identity := read_pid_file(path)) is not None and not identity.is_alive():
                path.unlink(missing_ok=True)


def runs_in(identity: ProcessIdentity, folder: Path, log: Path) -> bool:
    """Return whether the process uses exactly this folder or log, not a copy of it."""
    process = Path(f"/proc/{identity.pid}")
    for own, ours in ((process / "cwd", folder), (process / "fd" / "1", log), (process / "fd" / "2", log)):
        try:
            if own.samefile(ours):
                return identity.is_alive()
        except OSError:
            continue  # the process is gone, or belongs to another user
    return False


@dataclass(frozen=True, slots=True)
class Death:
    """How a process ended. Status and signal are None if this process did not start it."""

    status: int | None = None
    signal: int | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the process is known to have ended in a way that its program did not intend."""
        return self.signal is not None or bool(self.status)

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                return f"was killed by signal {self.signal} ({signal.Signals(self.signal).name})"
            except ValueError:
                return f"was killed by signal {self.signal}"
        return "is gone" if self.status is None else f"ended with status {self.status}"


def reap(identity: ProcessIdentity) -> Death | None:
    """Return how the process ended, or None while it is running.

    Call this only once after the end, since it reaps a child.
    """
    try:
        pid, status = os.waitpid(identity.pid, os.WNOHANG)
    except ChildProcessError:
        return None if identity.is_alive() else Death()
    if pid == 0:
        return None
    if os.WIFSIGNALED(status):
        return Death(signal=os.WTERMSIG(status))
    return Death(status=os.WEXITSTATUS(status))


def resident_bytes(identity: ProcessIdentity) -> int:
    """Return the process's resident memory; 0 if it is gone."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{identity.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def is_own_child(identity: ProcessIdentity) -> bool:
    """Return whether this process started the other one, possibly before an exec.

    The exit status can be read only from a child.
    """
    try:
        os.waitid(os.P_PID, identity.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def watch(identity: ProcessIdentity) -> int | None:
    """Return a descriptor that becomes readable when the process ends, or None if it is gone.

    The caller closes the descriptor.
    """
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    if identity.is_alive() or _is_ended_child(identity.pid):
        return descriptor
    os.close(descriptor)
    return None


def send_signal(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Send a signal to exactly this process.

    Returns:
        False if the process is gone, or cannot belong to this user's job.
    """
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        if not (identity.is_alive() and _is_ours(identity.pid)):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def _is_ours(pid: int) -> bool:
    """Return whether the process belongs to this user and leads its own session.

    Every process that ``spawning`` starts leads its own session.
    """
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid() and os.getsid(pid) == pid
    except (FileNotFoundError, ProcessLookupError):
        return False


def end(identity: ProcessIdentity, grace_s: float) -> None:
    """End the process and wait: send SIGTERM, then SIGKILL after ``grace_s`` seconds.

    A stopped process gets SIGKILL at once.
    """
    if not is_stopped(identity) and send_signal(identity, signal.SIGTERM) and identity.wait_for_exit(grace_s):
        return
    while send_signal(identity, signal.SIGKILL):
        identity.wait_for_exit(grace_s)


def is_stopped(identity: ProcessIdentity) -> bool:
    """Return whether the process is stopped (by SIGSTOP or a debugger), so that only SIGKILL has an effect."""
    try:
        stat = Path(f"/proc/{identity.pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(b")") + 2 :][:1] in (b"T", b"t")


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank, or "".

    A SameBits message is returned in full, because it ends with the fix. Any other line is shortened.
    """
    try:
        with os.fdopen(durable.open_regular(log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last.removeprefix(_OURS) if last.startswith(_OURS) else printable(last, _SHOWN_CHARACTERS, IN_LOGS)


def _is_ended_child(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


# ---- the dashboard's process
#
# The job does not depend on the page: if the page cannot start, a message is printed and the job continues.

DASHBOARD_LOG = "dashboard.log"
DASHBOARD_LINGER_S = 600
DASHBOARD_NEEDS = ("starlette", "uvicorn")


def start_dashboard(settings: Settings, folder: Path) -> str:
    """Start the page of this folder's job if DASHBOARD requests it.

    Returns:
        A sentence about the page, or an empty string.
    """
    port = settings.dashboard.port
    if port is None:
        return ""
    missing = [name for name in DASHBOARD_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        return f"DASHBOARD={port}: no page, for it needs {needs}. Fix: pip install 'samebits[dashboard]'"
    try:
        log = private.open_to_append(settings.log_dir / DASHBOARD_LOG)
    except StoreError as error:
        return f"DASHBOARD={port}: no page: {error}"
    try:
        subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "samebits", "dashboard"),
                *("--port", str(port), "--linger", str(DASHBOARD_LINGER_S)),
            ],
            cwd=folder,
            env=config.whole_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        return f"DASHBOARD={port}: no page: {error}"
    finally:
        os.close(log)
    host = f"[{loopback()}]" if ":" in loopback() else loopback()
    return f"the dashboard is at http://{host}:{port}/; {settings.log_dir / DASHBOARD_LOG} says more"
