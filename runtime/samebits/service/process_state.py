"""Observe processes on this host from outside: their state, their last activity, and their end.

- :class:`LifeSign`, :class:`DeathWatch`: a robust mutex (pthread_mutexattr_setrobust(3)) that a process holds while it
  lives. The kernel passes the mutex on before it frees a killed process's memory (44 ms per GB) and closes its
  connections. The mutex is in an unnamed file (memfd_create(2)) that others open through /proc, so nothing has to be
  removed.
- :func:`look`: the kernel's state of a process, and when its control thread last ran Python.
- :class:`ProcessObserver`: chooses this host's silent workers to report to a scheduler, perhaps on another host.

``core.hangs`` interprets the observations.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from samebits.core.hangs import Doing, ProcessState
from samebits.core.values import Int, Value
from samebits.printable import printable
from samebits.service import clock, status
from samebits.store.process_identity import ProcessIdentity

_NAME = "samebits-life-sign"
_SIZE_BYTES = 4096
_MUTEX_BYTES = 64  # glibc's mutex has 40 or 48; the session follows
_BEAT_AT = 256
_BEAT = struct.Struct("d")
_HARMLESSLY = os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # the pid may be reused by now
_SHARED = _ROBUST = 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST

_libc = ctypes.CDLL(None)


class Whereabouts(Value, frozen=True):
    """Where to find a process's sign of life on its host, and to whom it belongs."""

    host: str
    pid: Int
    descriptor: Int
    session: str


class LifeSign:
    """This process's sign of life, held by a thread that ends only with the process.

    Raises:
        OSError: the kernel does not support such files.
    """

    def __init__(self, host: str, session: str) -> None:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _SIZE_BYTES)
        self._mapped = mmap.mmap(descriptor, _SIZE_BYTES)
        self._mapped[_MUTEX_BYTES : _MUTEX_BYTES + len(session)] = session.encode()
        self._mutex = _mutex_in(self._mapped)
        attributes = ctypes.create_string_buffer(_MUTEX_BYTES)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, _SHARED)
        _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
        _libc.pthread_mutex_init(self._mutex, attributes)
        self.whereabouts = Whereabouts(host, os.getpid(), descriptor, session)

    @classmethod
    def if_possible(cls, host: str, session: str) -> LifeSign | None:
        """Return the sign, or None without kernel support.

        Without a sign, only a closed connection shows a death.
        """
        try:
            return cls(host, session)
        except (AttributeError, OSError):
            return None

    def hold(self) -> None:
        """Hold the sign, so that the end of the calling thread counts as the process's death."""
        # The kernel reads the lock when the thread ends, so the interpreter must not unmap it before that.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._mutex))
        _libc.pthread_mutex_lock(self._mutex)

    def beat(self) -> None:
        """Record that the control thread is running Python now, for ``quiet_s`` in other processes."""
        _BEAT.pack_into(self._mapped, _BEAT_AT, clock.now_s())

    def beat_no_more(self) -> None:
        """Stop recording, because the control thread has ended, which does not concern the process's health."""
        _BEAT.pack_into(self._mapped, _BEAT_AT, 0.0)

    def give_up(self) -> None:
        """Release the sign, so that the end of the process does not count as a death.

        Call this only once, in the thread that holds the sign.
        """
        _libc.pthread_mutex_unlock(self._mutex)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._mutex))
        os.close(self.whereabouts.descriptor)


class WatchedSign:
    """Another process's sign of life, opened by this process.

    Raises:
        OSError: the sign is missing or belongs to another session, because the process is gone or in another container.
    """

    def __init__(self, at: Whereabouts) -> None:
        descriptor = os.open(f"/proc/{at.pid}/fd/{at.descriptor}", _HARMLESSLY)
        try:
            if os.fstat(descriptor).st_size != _SIZE_BYTES:
                raise FileNotFoundError(f"pid {at.pid} has something else there")
            self._mapped = mmap.mmap(descriptor, _SIZE_BYTES)
        finally:
            os.close(descriptor)
        if self._mapped[_MUTEX_BYTES : _MUTEX_BYTES + len(at.session)] != at.session.encode():
            raise FileNotFoundError(f"the sign of pid {at.pid} is another session's")
        self._mutex = _mutex_in(self._mapped)

    def wait_for_death(self) -> bool:
        """Block until the process has died (return True) or has released its sign (return False)."""
        found = _libc.pthread_mutex_lock(self._mutex)
        if found in (0, errno.EOWNERDEAD):
            _libc.pthread_mutex_unlock(self._mutex)  # not marked consistent, so that other waiters are notified too
        return found in (errno.EOWNERDEAD, errno.ENOTRECOVERABLE)


class DeathWatch:
    """Watches other processes on this host, each in its own blocked thread.

    Args:
        tell: called with a dead process's session, in the thread that watched the process.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._watched: set[str] = set()  # by session

    def watch(self, at: Whereabouts) -> bool:
        """Watch a process from now on; return False if its sign cannot be opened."""
        if at.session in self._watched:
            return True
        try:
            sign = WatchedSign(at)
        except OSError:
            return False
        self._watched.add(at.session)
        threading.Thread(target=self._wait, args=(sign, at.session), name="samebits-watch", daemon=True).start()
        return True

    def _wait(self, sign: WatchedSign, session: str) -> None:
        if sign.wait_for_death():
            self._tell(session)
        self._watched.discard(session)


def quiet_s(pid: int) -> float | None:
    """Return the seconds since the process's control thread last ran Python; None if unknown."""
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if _is_a_sign(entry):
                descriptor = os.open(entry, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    (beat_at,) = _BEAT.unpack(os.pread(descriptor, _BEAT.size, _BEAT_AT))
                finally:
                    os.close(descriptor)
                age_s = clock.now_s() - beat_at
                return age_s if beat_at > 0 and age_s >= 0 else None
    except (OSError, struct.error):  # the process belongs to another user, is gone, or has no sign
        return None
    return None


def _is_a_sign(entry: Path) -> bool:
    try:
        return str(entry.readlink()).startswith(f"/memfd:{_NAME} ")
    except OSError:  # a descriptor closed meanwhile
        return False


def _mutex_in(mapped: mmap.mmap) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * _MUTEX_BYTES).from_buffer(mapped)


MOST_THREADS = 64
_STATES = {"T": Doing.STOPPED, "t": Doing.TRACED, "D": Doing.DISK}


def look(identity: ProcessIdentity) -> ProcessState | None:
    """Return the process's state; None if it is gone or not visible."""
    try:
        stat = Path(f"/proc/{identity.pid}/stat").read_bytes()
    except OSError:
        return None
    state = stat[stat.rindex(b")") + 2 :][:1].decode(errors="replace")
    seen = ProcessState(_STATES.get(state, Doing.RUNS), quiet_s(identity.pid))
    return seen if identity.is_alive() else None  # checked last, so that the result cannot describe a reused pid


def threads(pid: int) -> list[str]:
    """Describe each thread of a process: its name, state and wait in the kernel."""
    lines = []
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))[:MOST_THREADS]
    except OSError:
        return []
    for task in tasks:
        try:
            stat, waits_in = (task / "stat").read_bytes(), _line(task / "wchan")
        except OSError:  # a thread that has ended
            continue
        state = stat[stat.rindex(b")") + 2 :][:1].decode(errors="replace")
        waits = f", waits in {waits_in}" if waits_in not in ("", "0") else ""
        lines.append(f"thread {task.name} ({_line(task / 'comm')}): state {state}{waits}")
    return lines


def _line(file: Path) -> str:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return ""
    return printable(text[:100].strip())


MOST_LOOKS = 64
"""The maximum number of processes examined in one round."""
LOOKS_A_LEASE = 4


class ProcessObserver:
    """Inspects this host's processes at an interval that depends on the lease.

    Args:
        lease_s: NODE_TIMEOUT.
        see: examines one process.
    """

    def __init__(self, lease_s: float, see: Callable[[ProcessIdentity], ProcessState | None] = look) -> None:
        self._lease_s, self._see = lease_s, see
        self._due_at = float("-inf")

    def look(self, here: Mapping[str, ProcessIdentity], now: float) -> list[status.ForHistory]:
        """Return the reports about these processes (by node) that are due. May be called at any rate."""
        if now < self._due_at:
            return []
        self._due_at = now + self._lease_s / LOOKS_A_LEASE
        found: list[status.ForHistory] = []
        for node, identity in list(here.items())[:MOST_LOOKS]:
            seen = self._see(identity)
            if seen is not None and self._is_odd(seen):
                found.append(status.process_seen(node, identity, seen))
        return found

    def _is_odd(self, seen: ProcessState) -> bool:
        return seen.doing is not Doing.RUNS or (seen.quiet_s is not None and seen.quiet_s >= self._lease_s / 2)
