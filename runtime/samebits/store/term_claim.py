"""Claim a term, which decides which scheduler's journal counts, even if a lock is lost.

A lock (``DirectoryLock``) normally keeps a second scheduler out. But a shared file system may have no locks (Lustre
without flock), or may give the lock to another process while its holder is stopped or cut off. So a new scheduler first
removes the old one's claim and then reads the journal; and a scheduler that appends checks its own claim after the
fsync and before it sends anything. If the claim still exists, the new scheduler will read the append. If not, nothing
in the append is ever sent. No clock is involved.

A claim is a file ``term.N`` that contains its owner's name and is created exclusively. :meth:`TermClaim.take` creates
it, gives up if there is a higher one, and removes all lower ones. Of two schedulers that claim at the same time, at
least the one whose file is created second sees the other's, so they cannot both continue. No scheduler removes the
highest claim, so a number is never assigned twice.

A user may remove the claim, with or without the folder. Its owner then claims a higher term in the same way and reads
the journal once more. If there is no journal, or only the owner's own, no record unknown to the owner can have been
sent, and it rewrites the journal from memory (``Journal.begin_again``).

If the journal is in etcd, the claim is made there first (``etcd.etcd_journal``), with the same number, and is
authoritative; the file protects the folder's copy.

The check is fchmodat(2) on the claim's name, relative to a descriptor of the folder, because the folder may be moved
while a job runs. The answer must not come from a cache. For some seconds, an NFS client answers stat(2) and open(2)
from cached attributes (nfs(5), "acregmin"), and under a delegation it may not send changed times (RFC 9754). But a
changed mode is a SETATTR that the server answers, with ESTALE for a file that another client has removed (RFC 8881,
section 18.30). The file itself is not kept open, because a server may preserve an open file. Lustre and CephFS revoke a
client's cached information about a name before that name is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path

from samebits.core.records import MAX_TERM
from samebits.errors import ClaimRemovedError, StoreError, SupersededError
from samebits.spelling import spelled
from samebits.store import durable
from samebits.store.etcd.etcd_journal import EtcdClaim, TakeOver
from samebits.store.etcd.gateway import EtcdGateway
from samebits.store.lock import LockHolder

_CLAIM = re.compile(r"term\.([1-9][0-9]{0,17})")
_GONE = (errno.ENOENT, errno.ESTALE)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def highest_claim(directory: Path) -> int:
    """Return the highest term claimed in the folder; 0 if there is no claim or no folder."""
    return max(_claims(directory), default=0)


class TermClaim:
    """The claim of one scheduler start in one folder.

    Attributes:
        number: the term, higher than all terms that were claimed before or that ``floor`` reported.
        in_etcd: the claim in etcd, if the journal is in one.
    """

    def __init__(self, directory: Path, number: int, in_etcd: EtcdClaim | None = None) -> None:
        self._directory = directory
        self._path = _path(directory, number)
        self._note = b""
        self._made = (0, 0, 0)
        with durable.disk_errors(directory, "opening the folder of a claim"):
            self._folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._folder)
        self.number = number
        self.in_etcd = in_etcd

    @classmethod
    def take(
        cls,
        directory: Path,
        role: str,
        floor: Callable[[], int] = lambda: 0,
        gateway: EtcdGateway | None = None,
        take_over: TakeOver | None = None,
    ) -> TermClaim:
        """Claim the next term; once this returns, no earlier claim is valid.

        Args:
            directory: the folder; created, with its parents, if missing.
            role: this process's name in other processes' messages, e.g. "scheduler on port 8000".
            floor: returns the highest term in the folder's journal; called before the claim is made.
            gateway: a client of etcd that holds the journal, if there is one.
            take_over: a further condition and change in etcd, made together with the claim.

        Raises:
            LockedError: the condition of ``take_over`` is not true; nothing was claimed.
            SupersededError: another scheduler claimed the same term, or a higher one, at the same moment.
            StoreError: the disk or etcd reports an error, or the last term is higher than any job can reach.
        """
        durable.make_directory(directory)
        number = max(floor(), highest_claim(directory)) + 1
        if number > MAX_TERM:
            raise StoreError(
                f"{directory}: the last term there is {number - 1}, and a job can have at most {MAX_TERM} scheduler "
                f"starts: another program has left {_path(directory, number - 1).name}, or the journal is damaged. "
                f"Fix: remove that file; or `{spelled('run', '--fresh')}` moves the folder aside"
            )
        holder, in_etcd = LockHolder.this_process(role).note(), None
        if gateway is not None:
            in_etcd = EtcdClaim.take(gateway, holder, number - 1, take_over)
            number = in_etcd.number
        claim = cls(directory, number, in_etcd)
        claim._create(holder + os.urandom(16).hex().encode())
        claims = _claims(directory)
        if max(claims, default=0) > claim.number:
            with durable.disk_errors(claim._path, "taking a claim back"):
                claim._path.unlink(missing_ok=True)
            raise claim._superseded()
        for number in claims:
            if number < claim.number:
                with durable.disk_errors(_path(directory, number), "removing an earlier scheduler's claim"):
                    _path(directory, number).unlink(missing_ok=True)
        durable.fsync_dir(directory)
        return claim

    @property
    def tag(self) -> str:
        """Return the part of temporary file names that identifies this claim."""
        return f"{self.number}-"

    def require(self) -> None:
        """Raise unless the claim is still valid.

        If this returns, any later claimant reads everything that is durable by now.

        Raises:
            SupersededError: another scheduler, which the message names, has taken over the claim.
            ClaimRemovedError: the claim is gone, and no scheduler has claimed this term or a later one.
            StoreError: the claim cannot be checked on the disk or in the etcd.
        """
        if self.in_etcd is not None:
            self.in_etcd.require()
        self.require_file()

    def require_file(self) -> None:
        """Check only the claim in the folder, like :meth:`require`.

        The check takes one fchmodat(2); see the module's docstring. If a user has emptied the folder, another scheduler
        may have claimed the same number, so the file's content is compared as well; or, if strangers' connections have
        taken every descriptor, its inode, time and size.
        """
        with durable.disk_errors(self._path, "checking this scheduler's claim"):
            try:
                os.chmod(self._path.name, durable.FILE_MODE, dir_fd=self._folder)
                if self._read() == self._note:
                    return
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR and self._made == _identity(
                    os.stat(self._path.name, dir_fd=self._folder)
                ):
                    return
                if error.errno not in _GONE:
                    raise
            if highest_claim(self._directory) >= self.number:
                raise self._superseded()
            raise ClaimRemovedError(
                f"{self._directory}: this scheduler's claim, {self._path.name}, was removed, or the whole folder "
                f"was. Fix: leave the files of a running job alone; `{spelled('stop')}` ends it first"
            )

    def _read(self) -> bytes:
        descriptor = os.open(
            self._path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._folder
        )
        try:
            return os.read(descriptor, len(self._note) + 1)
        finally:
            os.close(descriptor)

    def _create(self, note: bytes) -> None:
        with durable.disk_errors(self._path, "claiming a term"):
            try:
                descriptor = durable.create(self._path)
            except FileExistsError:
                raise self._superseded() from None
            try:
                durable.write_all(descriptor, note)
                self._note = note
                os.fsync(descriptor)
                self._made = _identity(os.fstat(descriptor))
            except (
                OSError
            ):  # e.g. a full disk; nothing was sent in this term, and the next start does not need this claim
                with contextlib.suppress(OSError):
                    self._path.unlink()
                raise
            finally:
                os.close(descriptor)
        durable.fsync_dir(self._directory)

    def _superseded(self) -> SupersededError:
        number, owner = 0, None
        with contextlib.suppress(Exception):  # the name is informational only
            number = highest_claim(self._directory)
            owner = LockHolder.read(_path(self._directory, number), "reading a claim")
        who = str(owner) if owner is not None else "another scheduler"
        why = f"{who} has claimed term {number}" if number else f"{self._path.name} was removed"
        return SupersededError(
            f"{self._directory}: {why}, so this scheduler, of term {self.number}, has stopped and sent nothing that it "
            "wrote since. Fix: nothing to do; the job continues with the other one; to run its scheduler here again, "
            "end that one first"
        )


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_size


def _path(directory: Path, number: int) -> Path:
    return directory / f"term.{number}"


def _claims(directory: Path) -> list[int]:
    with durable.disk_errors(directory, "looking for claims"):
        try:
            names = os.listdir(directory)  # noqa: PTH208 - names are all that is needed
        except FileNotFoundError:
            return []
    return [number for name in names if (number := _number_in(name)) is not None and number <= MAX_TERM]


def impossible_claims(directory: Path) -> list[str]:
    """Return the names of files that look like claims of impossibly high terms.

    Such files are ignored.
    """
    with durable.disk_errors(directory, "looking for claims"):
        return sorted(name for name in os.listdir(directory) if (_number_in(name) or 0) > MAX_TERM)  # noqa: PTH208


def _number_in(name: str) -> int | None:
    found = _CLAIM.fullmatch(name)
    return None if found is None else int(found[1])
