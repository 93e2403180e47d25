"""Identify a process by its pid and its start time, also in pid files.

The kernel reuses pids, but no two processes share both a pid and the start time that ``/proc/<pid>/stat`` reports
(proc(5), field 22). A zombie no longer holds any file, lock or socket, so it counts as dead. Nothing here sends a
signal.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import math
import os
import select
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import StoreError
from samebits.store import private

_DEAD_STATES = frozenset("ZXx")
_PF_EXITING = 0x4  # linux/sched.h
_MAX_PID_FILE_BYTES = 4096
_MOST_DIGITS = 19  # of a 64-bit number
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, distinct from any later one with the same pid.

    ``started_at`` is in clock ticks after boot. Compare it; do not calculate with it.
    """

    pid: int
    started_at: int

    def __str__(self) -> str:
        return f"pid {self.pid}"

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return the calling process; not cached, so that the result is right after a fork too."""
        identity = cls.of(os.getpid())
        if identity is None:
            raise StoreError(
                f"/proc/{os.getpid()}/stat is not readable, so this process cannot be identified. Fix: mount /proc"
            )
        return identity

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the live process with this pid; None if there is none or it is a zombie."""
        started_at = _started_at(pid)
        return None if started_at is None else cls(pid, started_at)

    @classmethod
    def of_child(cls, pid: int) -> ProcessIdentity:
        """Return this process's child, which may have ended but has not been reaped yet."""
        stat = _stat_of(pid)
        return cls(pid, 0 if stat is None else stat.started_at)

    def is_alive(self) -> bool:
        """Return whether exactly this process is still running, and is not a zombie."""
        return _started_at(self.pid) == self.started_at

    def is_ending(self) -> bool:
        """Return whether this process was killed or is exiting, and may still hold resources.

        Memory is freed first, at 40 ms per GB, then locks.
        """
        stat = _stat_of(self.pid)
        return stat is not None and stat.started_at == self.started_at and stat.is_ending

    def wait_for_exit(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for this process to exit; return whether it is gone."""
        deadline_s = time.monotonic() + timeout_s
        try:
            watched: int | None = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EMFILE):
                raise
            watched = None  # an old kernel, a sandbox, or no free descriptor: poll
        exits = select.poll()  # select() cannot handle a scheduler's many descriptors
        if watched is not None:
            exits.register(watched, select.POLLIN)
        try:
            while self.is_alive():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                if watched is None:
                    time.sleep(min(_POLL_S, left_s))
                else:
                    exits.poll(math.ceil(left_s * 1000))
            return True
        finally:
            if watched is not None:
                os.close(watched)

    def to_line(self) -> str:
        """Return ``"<pid> <started_at>\\n"``, a pid file's content; pid first, for ``read`` in a shell script."""
        return f"{self.pid} {self.started_at}\n"

    @classmethod
    def from_line(cls, line: str) -> ProcessIdentity:
        """Parse a line of :meth:`to_line`; raise :class:`ValueError` for anything else."""
        words = line.split()
        are_numbers = all(word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS for word in words)
        if len(words) != 2 or not are_numbers or int(words[0]) == 0:
            raise ValueError(f"expected '<pid> <start time>', found {line[:80]!r}")
        return cls(int(words[0]), int(words[1]))


def launcher_of_session() -> ProcessIdentity | None:
    """Return the process that started the current session, such as torchrun's agent; None if it has ended.

    A shell between the two processes makes no difference, because it belongs to the same session.
    """
    leader = _stat_of(os.getsid(0))
    return ProcessIdentity.of(os.getppid() if leader is None else leader.parent)


@functools.cache
def host_id() -> str:
    """Return ``<host name>#<digest>``, which is equal only for processes in one pid namespace.

    Hosts created from one image may share their name, and containers on one host do not share pids. So the digest
    includes the boot id and the pid namespace (pid_namespaces(7)).
    """
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):  # without /proc, only the name is used
        found += [Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())]
    return f"{found[0]}#{hashlib.blake2b(repr(found).encode(), digest_size=4).hexdigest()}"


@functools.cache
def machine_id() -> bytes:
    """Return four bytes that identify the machine until it reboots, also in containers."""
    found = socket.gethostname()
    with contextlib.suppress(OSError):
        found = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.blake2b(found.encode(), digest_size=4).digest()


def lock_holder(file: os.stat_result) -> ProcessIdentity | None:
    """Return the process that has locked this file exclusively (flock(2)), even if it is ending; None if none is seen.

    Processes of other pid namespaces are not seen (proc_locks(5)).
    """
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            match line.split():
                case [_, "FLOCK", _, "WRITE", pid, where, *_] if where == place:
                    stat = _stat_of(int(pid))
                    return None if stat is None else ProcessIdentity(int(pid), stat.started_at)
    return None


def read_pid_file(path: Path) -> ProcessIdentity | None:
    """Return the process that a pid file names, alive or not; None if there is no file.

    Raises:
        StoreError: the file is not a pid file, or belongs to another user.
    """
    data = private.read(path, _MAX_PID_FILE_BYTES)
    if data is None:
        return None
    try:
        return ProcessIdentity.from_line(data.decode("ascii"))
    except ValueError as error:
        raise StoreError(
            f"{path} is not a pid file of a job ({error}). Fix: remove it if no such process runs"
        ) from None


def _started_at(pid: int) -> int | None:
    stat = _stat_of(pid)
    return None if stat is None or stat.is_dead else stat.started_at


@dataclass(frozen=True, slots=True)
class _Stat:
    """The fields of ``/proc/<pid>/stat`` that are used; they describe the first thread."""

    is_dead: bool
    is_ending: bool
    started_at: int
    parent: int


def _stat_of(pid: int) -> _Stat | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, field 2, may contain blanks and parentheses, so the fields begin after the last ")".
    fields = stat[stat.rindex(b")") + 2 :].split()
    is_dead = fields[0].decode() in _DEAD_STATES
    parent, flags, threads, started_at, pending = (int(fields[number - 3]) for number in (4, 9, 20, 22, 31))
    is_killed = bool(pending & 1 << (signal.SIGKILL - 1))
    # A dead first thread stays a zombie until the last thread has ended.
    return _Stat(is_dead, threads > 1 if is_dead else bool(flags & _PF_EXITING) or is_killed, started_at, parent)


def find_memory(pid: int, name: str, flags: int = os.O_RDONLY) -> int | None:
    """Open a process's memory file (memfd_create(2)) of this name.

    Returns:
        None if there is no such file, or it cannot be opened.
    """
    try:
        if Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
            return None
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
                if str(entry.readlink()).startswith(f"/memfd:{name} "):
                    return os.open(entry, flags | os.O_CLOEXEC)
    except OSError:
        return None
    return None
