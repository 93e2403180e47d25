"""The processes of a job on this machine: their pid files, how one ended, and the only place that sends a signal.

What is ended, and when, is decided elsewhere. The one idea: a process is its pid and its start time, and only this
user's own pid files say which ones are the job's: what a scheduler or a worker tells of a process anybody may have made
up. A signal goes through a descriptor of exactly that process, opened before the start time is compared, so it can
never hit a stranger.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from samebits.core.lines import number_of, root_of
from samebits.printable import printable
from samebits.store import durable
from samebits.store.process_identity import ProcessIdentity, read_pid_file

SCHEDULER = "scheduler"
_WORKER_PREFIX = "worker_"
_TAIL_BYTES = 8192
_SHOWN_CHARACTERS = 300
_OURS = "samebits: "


def process_names(nodes: Iterable[str]) -> list[str]:
    """The names of a job's processes, as in their logs and pid files; the scheduler first, then these nodes."""
    return [SCHEDULER, *map(name_of, nodes)]


def node_of(name: str) -> str | None:
    """The node id of a worker; none for the scheduler."""
    return None if name == SCHEDULER else name.removeprefix(_WORKER_PREFIX)


def name_of(node: str) -> str:
    """The name of the worker with this node id."""
    return f"{_WORKER_PREFIX}{node}"


def replaced_names(log_dir: Path, nodes: Iterable[str]) -> list[str]:
    """Workers in whose place these nodes, or earlier ones, were started, where they left a log; the newest first."""
    there = set(nodes)
    left = {node for log in log_dir.glob(f"{_WORKER_PREFIX}*.log") if (node := node_of(log.stem)) and node not in there}
    return [name_of(node) for node in sorted(left, key=lambda node: (root_of(node), -number_of(node)))]


def spoken(name: str) -> str:
    """The name in a sentence: ``worker 3``, ``the scheduler``."""
    node = node_of(name)
    return "the scheduler" if node is None else f"worker {node}"


def read_pid_files(log_dir: Path, names: Iterable[str]) -> dict[str, ProcessIdentity]:
    """The last process that was started under each name, alive or not.

    Raises:
        StoreError: a file is no pid file.
    """
    found = {name: read_pid_file(log_dir / f"{name}.pid") for name in names}
    return {name: identity for name, identity in found.items() if identity is not None}


def runs_in(identity: ProcessIdentity, folder: Path, log: Path) -> bool:
    """Whether the process works in exactly this folder, or writes exactly this log: a copy of either is another one."""
    process = Path(f"/proc/{identity.pid}")
    for own, ours in ((process / "cwd", folder), (process / "fd" / "1", log), (process / "fd" / "2", log)):
        try:
            if own.samefile(ours):
                return identity.is_alive()
        except OSError:
            continue  # gone, or another user's
    return False


@dataclass(frozen=True, slots=True)
class Death:
    """How a process ended; neither is known of a process that another one started."""

    status: int | None = None
    signal: int | None = None

    @property
    def is_bad(self) -> bool:
        """Whether it is known that the process did not end as its program meant to."""
        return self.signal is not None or bool(self.status)

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                return f"was killed by signal {self.signal} ({signal.Signals(self.signal).name})"
            except ValueError:
                return f"was killed by signal {self.signal}"
        return "is gone" if self.status is None else f"ended with status {self.status}"


def reap(identity: ProcessIdentity) -> Death | None:
    """How the process ended; none while it runs. Call it once for each that has ended: a child is then let go."""
    try:
        pid, status = os.waitpid(identity.pid, os.WNOHANG)
    except ChildProcessError:
        return None if identity.is_alive() else Death()
    if pid == 0:
        return None
    if os.WIFSIGNALED(status):
        return Death(signal=os.WTERMSIG(status))
    return Death(status=os.WEXITSTATUS(status))


def is_own_child(identity: ProcessIdentity) -> bool:
    """Whether this process started it, or became what started it: then its status can be read."""
    try:
        os.waitid(os.P_PID, identity.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def watch(identity: ProcessIdentity) -> int | None:
    """A descriptor that becomes readable when the process ends; none where it is gone already. The caller closes it."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    if identity.is_alive() or _is_ended_child(identity.pid):
        return descriptor
    os.close(descriptor)
    return None


def send_signal(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Signal exactly this process; false where it is gone, or none that our scripts can have started as this user."""
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
    """Whether it is this user's, and leads a session of its own, as what ``spawning`` starts."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid() and os.getsid(pid) == pid
    except (FileNotFoundError, ProcessLookupError):
        return False


def end(identity: ProcessIdentity, grace_s: float) -> None:
    """Have the process end: SIGTERM, SIGKILL after ``grace_s``, or at once where it is stopped; then it is gone."""
    if not is_stopped(identity) and send_signal(identity, signal.SIGTERM) and identity.wait_for_exit(grace_s):
        return
    while send_signal(identity, signal.SIGKILL):
        identity.wait_for_exit(grace_s)


def is_stopped(identity: ProcessIdentity) -> bool:
    """Whether the process was halted (SIGSTOP, a debugger): it hears nothing but SIGKILL."""
    try:
        stat = Path(f"/proc/{identity.pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(b")") + 2 :][:1] in (b"T", b"t")


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank, or an empty text.

    A sentence of ours is whole, since its end is what to do; any other line is shortened.
    """
    try:
        with os.fdopen(durable.open_regular(log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last.removeprefix(_OURS) if last.startswith(_OURS) else printable(last, _SHOWN_CHARACTERS)


def _is_ended_child(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False
