"""Lock a folder for one live writer, and show a second one which process holds the lock.

It is a kernel lock (flock, through filelock, on the file ``lock``), so the lock ends with its holder, even after
``kill -9``. A forked child does not inherit it. The kernel does not report the holder, so the file ``lock.holder``
beside the lock names it, for messages and for waiting. No decision relies on that file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import filelock

from samebits import strict_json
from samebits.errors import LockedError, StoreError
from samebits.store import durable
from samebits.store.process_identity import ProcessIdentity

LOCK_FILE = "lock"
HOLDER_FILE = "lock.holder"

_MAX_HOLDER_FILE_BYTES = 64 * 1024
_POLL_S = 0.1  # how soon a lock that its live holder released is noticed
ENDING_POLL_S = 0.002
ENDS_WITHIN_S = 10.0  # enough for the kernel to free 200 GB; a process stuck in the kernel is not awaited for longer


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that holds a lock. ``role`` describes it, such as "scheduler" or "worker 3"."""

    identity: ProcessIdentity
    host: str
    role: str

    def __str__(self) -> str:
        return f"{self.role} (pid {self.identity.pid} on {self.host})"

    @classmethod
    def this_process(cls, role: str) -> LockHolder:
        """Describe the current process under this role."""
        return cls(ProcessIdentity.current(), socket.gethostname(), role)

    @classmethod
    def read(cls, path: Path, doing: str) -> LockHolder | None:
        """Return the holder that the file names; None if there is no file or it is not a note."""
        with durable.disk_errors(path, doing):
            try:
                with os.fdopen(durable.open_regular(path), "rb") as file:
                    data = file.read(_MAX_HOLDER_FILE_BYTES)
            except FileNotFoundError:
                return None
        return cls.parse(data)

    @classmethod
    def parse(cls, data: bytes) -> LockHolder | None:
        """Parse what :meth:`note` wrote, or return None if ``data`` is something else."""
        try:
            fields = strict_json.loads(data.partition(b"\n")[0])
            identity = ProcessIdentity.from_line(f"{fields['pid']} {fields['started_at']}")
            return cls(identity, str(fields["host"]), str(fields["role"]))
        except (ValueError, KeyError, TypeError):
            return None  # not a note; the lock still counts, only its holder is unknown

    def note(self) -> bytes:
        """Return the bytes that :meth:`read` decodes."""
        identity = self.identity
        fields = {"pid": identity.pid, "started_at": identity.started_at, "host": self.host, "role": self.role}
        return (json.dumps(fields) + "\n").encode()

    def is_on_this_host(self) -> bool:
        """Return whether the holder's pid is valid on this host."""
        return self.host == socket.gethostname()

    def is_ending(self) -> bool:
        """Return whether the holder was killed or is exiting on this host, and may still hold resources."""
        return self.is_on_this_host() and self.identity.is_ending()

    def is_gone(self) -> bool:
        """Return whether the holder has certainly ended; always False for a process on another host."""
        return self.is_on_this_host() and not self.identity.is_alive()


def read_holder(directory: Path) -> LockHolder | None:
    """Return the last holder that has not released the folder's lock; it may be dead.

    Returns:
        None if there is no note.
    """
    return LockHolder.read(directory / HOLDER_FILE, "reading the folder's lock holder")


def is_locked(directory: Path) -> bool:
    """Return whether a live process on any host holds the folder's lock; changes nothing."""
    try:
        descriptor = durable.open_regular(directory / LOCK_FILE)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


class DirectoryLock:
    """An exclusive lock on one directory for its live writer.

    As a context manager, it calls :meth:`acquire` and :meth:`release`.

    Args:
        directory: the folder; created, with its parents, if missing.
        role: this process's name in other processes' messages, e.g. "scheduler" or "worker 3".
        is_needed: if false, a file system without locks is accepted, because something else prevents a second writer.

    Attributes:
        is_unknown_here: the file system has no locks, so no lock is held.
    """

    def __init__(self, directory: Path, role: str, *, is_needed: bool = True) -> None:
        self.directory = directory
        self.role = role
        self._is_needed = is_needed
        self.is_unknown_here = False
        # The lock belongs to the process, whichever thread acquired it (thread_local). There is no soft fallback,
        # because a lock that consists of a file's existence would survive kill -9.
        self._lock = self._new_lock()
        self._descriptor = -1

    def _new_lock(self) -> filelock.BaseFileLock:
        return filelock.FileLock(
            self.directory / LOCK_FILE,
            mode=durable.FILE_MODE,
            thread_local=False,
            fallback_to_soft=False,
            on_acquired=self._borrow,
        )

    @property
    def descriptor(self) -> int:
        """Return the descriptor of the held lock, for a child that writes on behalf of this process.

        A process that inherits the descriptor keeps the folder locked until it exits, even after this process has
        died. :meth:`release` unlocks the folder in any case, so call it only after the child has exited.
        """
        if not self.is_held:
            raise LockedError(f"{self.directory}: this process does not hold the lock; acquire it before passing it on")
        return self._descriptor

    def _borrow(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def is_held(self) -> bool:
        """Return whether this object holds the lock."""
        return self._lock.is_locked

    def acquire(self, wait_s: float = 0.0, on_wait: Callable[[str], None] | None = None) -> None:
        """Acquire the lock. Wait at most ``wait_s`` seconds for its holder to exit or release it.

        Args:
            wait_s: 0 means one attempt. If the kernel is ending the holder, its end is awaited in any case.
            on_wait: called with a sentence about the holder, first at once and then whenever the sentence changes.

        Raises:
            LockedError: another process, or another lock object of this process, holds the lock; the message names it.
        """
        if self.is_held:
            raise LockedError(
                f"{self.directory}: this process already holds the lock; release it before acquiring it again"
            )
        durable.make_missing_directory(self.directory)
        deadline_s = time.monotonic() + wait_s
        said, is_last = None, False
        while not self._try_acquire():
            holder = read_holder(self.directory)
            text = self._held_by(holder)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                if is_last or left_s < -ENDS_WITHIN_S:
                    raise LockedError(f"{text}. Fix: end that process, or choose another folder")
                is_last = holder is None or not holder.is_ending()  # it may have just ended, so make one more attempt
                time.sleep(0 if is_last else ENDING_POLL_S)
                continue
            if on_wait is not None and text != said:
                on_wait(text)
                said = text
            _pause(holder, min(_POLL_S, left_s))

    def renew(self) -> None:
        """Reacquire the lock if its file was removed.

        A lock on an unlinked file does not exclude other processes.

        Raises:
            LockedError: another process has locked the folder since then; the old lock is still held.
        """
        if self.is_held and not self._is_file_there():
            before, descriptor = self._lock, self._descriptor
            self._lock = self._new_lock()
            if not self._try_acquire():
                self._lock, self._descriptor = before, descriptor
                raise LockedError(self._held_by(read_holder(self.directory)))
            before.release()
        self._write_note()

    def _is_file_there(self) -> bool:
        with durable.disk_errors(self.directory / LOCK_FILE, "checking the folder's lock"):
            try:
                return os.path.samestat(os.fstat(self._descriptor), (self.directory / LOCK_FILE).stat())
            except FileNotFoundError:
                return False

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self.is_held:
            try:
                if self._is_note_ours():
                    with durable.disk_errors(self.directory / HOLDER_FILE, "removing the lock's note"):
                        (self.directory / HOLDER_FILE).unlink(missing_ok=True)
            finally:
                with durable.disk_errors(self.directory / LOCK_FILE, "releasing the lock"):
                    self._lock.release()

    def __enter__(self) -> DirectoryLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _try_acquire(self) -> bool:
        with durable.disk_errors(self.directory / LOCK_FILE, "locking the folder"):
            try:
                self._lock.acquire(blocking=False)
            except filelock.Timeout:
                return False
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
                    raise
                if not self._is_needed:
                    self.is_unknown_here = True
                    self._write_note()
                    return True
                raise StoreError(
                    f"{self.directory}: its file system has no locks, so two writers could write at once. Fix: "
                    "choose a folder on a local disk"
                ) from error
        try:
            self._write_note()
        except BaseException:
            self._lock.release()
            raise
        return True

    def _write_note(self) -> None:
        durable.replace_note(self.directory / HOLDER_FILE, LockHolder.this_process(self.role).note())

    def _is_note_ours(self) -> bool:
        """Return whether the note is missing or names this process.

        If the lock was lost, the note may name a new holder.
        """
        return read_holder(self.directory) in (None, LockHolder.this_process(self.role))

    def _held_by(self, holder: LockHolder | None) -> str:
        if holder is None:
            return f"{self.directory}: locked by an unknown process"
        if holder.is_gone():
            return f"{self.directory}: locked, although {holder}, its last known holder, is gone"
        if holder.is_on_this_host() and holder.identity.pid == os.getpid():
            return f"{self.directory}: locked by this process itself, as {holder}"
        return f"{self.directory}: locked by {holder}"


def _pause(holder: LockHolder | None, at_most_s: float) -> None:
    """Wait for ``at_most_s``, or until the holder exits if it can be watched."""
    if holder is not None and holder.is_on_this_host() and holder.identity.is_alive():
        holder.identity.wait_for_exit(at_most_s)
    else:
        time.sleep(at_most_s)
