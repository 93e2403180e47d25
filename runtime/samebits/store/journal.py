"""The journal: an append-only file of opaque payloads that outlives kill -9 and says so when it was damaged.

Opening, appending, compacting and reading live here; the bytes' layout is ``journal_format``'s, the payloads' meaning
is the core's, and that only one process writes is the folder's lock's (``DirectoryLock``, taken first). The one idea is
"save, then speak": :meth:`Journal.append` returns when a whole drained batch is on disk with one fsync, and until then
nothing of it may leave the process.

Where the lock may be lost, its writer has a claim as well (``term_claim``), and a writer whose claim was taken does no
harm at whichever instruction it wakes: an append asks for the claim after its fsync, and is not done where that is
gone; what it writes to is the file that it made itself, which the next one's opening has replaced; and a file that is
to replace the journal asks between its last byte and its rename. If the claim stood then, whoever claims later finds
that file under its temporary name and removes it, so the rename fails, or comes before the later one has read.

After a failed append the state is defined. If writing failed (no space, for one), what was written of the batch is cut
off again and the journal goes on. If the fsync failed, nobody can know what the disk holds, and a second fsync would
lie (the kernel forgets the failed pages: fsync(2), "fsyncgate"): the journal refuses to go on, and the next start reads
what is really there.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from samebits.errors import ClaimRemovedError, JournalDamagedError, StoreError, SupersededError
from samebits.spelling import spelled
from samebits.store import durable, journal_format
from samebits.store.journal_format import Contents, Fault, JournalFormatError
from samebits.store.term_claim import TermClaim

JOURNAL_FILE = "journal"
MAX_TORN_FILES = 8

_TORN_NAME = re.compile(r"journal\.torn-([0-9]{1,9})")
_TEMPORARY_NAME = re.compile(r"\.journal(\.torn-\d+)?\.tmp-")
_MOVE_ASIDE = f"`{spelled('run', '--fresh')}` moves the folder aside and starts a new job"


@dataclass(frozen=True, slots=True)
class TornTail:
    """The end of a journal that a crash kept from being written whole: it was never spoken of, and it was cut off."""

    path: Path
    offset: int
    size_bytes: int
    reason: str
    kept_in: Path | None  # where the cut bytes are; none for a reader, who cuts nothing

    def __str__(self) -> str:
        kept = f"; they are kept in {self.kept_in.name}" if self.kept_in else ""
        return (
            f"{self.path}: the last {self.size_bytes} bytes, from byte {self.offset} on, are an append that a crash "
            f"interrupted ({self.reason}) and are left out{kept}"
        )


@dataclass(frozen=True, slots=True)
class JournalContents:
    """What a reader without the lock finds."""

    payloads: list[bytes]
    torn_tail: TornTail | None


def read_journal(directory: Path) -> JournalContents | None:
    """Read the folder's journal without the lock and without changing anything; none where there is none.

    A writer may be at work: an append that is under way looks like a torn tail.

    Raises:
        JournalDamagedError: it is damaged, foreign, or of another version.
    """
    path = directory / JOURNAL_FILE
    data = _read_file(path)
    if data is None:
        return None
    contents = _decode(path, data)
    return JournalContents(contents.payloads, _torn_tail(path, contents, len(data), None))


class Journal:
    """The journal of one folder, opened for writing by the holder of the folder's lock. One thread uses it.

    Attributes:
        torn_tail: what :meth:`open` had to cut off, to be logged; none if nothing.
    """

    def __init__(
        self, path: Path, descriptor: int, contents: Contents, torn_tail: TornTail | None, claim: TermClaim | None
    ) -> None:
        self._path = path
        self._claim = claim
        self._descriptor = descriptor
        self._nonce = contents.nonce
        self._size_bytes = contents.end
        self._compacted_bytes = contents.born_bytes
        self._broken: str | None = None
        self._is_unclaimed = False  # broken by that alone
        self.torn_tail = torn_tail

    @classmethod
    def open(cls, directory: Path, claim: TermClaim | None = None) -> tuple[Journal, list[bytes]]:
        """Open the folder's journal, or make an empty one; the payloads come back in the order of their appends.

        What is returned is durable: the file is synced first, since an append that was killed before its own fsync may
        so far be in the page cache only. A torn tail is cut off and kept beside the journal as ``journal.torn-<n>``.

        Args:
            directory: made where it is missing.
            claim: taken before; without one only the folder's lock keeps others from writing.

        Raises:
            SupersededError: the claim was taken by another one.
            JournalDamagedError: it is damaged, foreign, or of another version; nothing was changed.
            StoreError: the disk refuses.
        """
        durable.make_directory(directory)
        path = directory / JOURNAL_FILE
        remove_leftovers(directory)
        data, torn_tail = _read_file(path), None
        payloads: list[bytes] = []
        if data is not None:
            contents = _decode(path, data)
            payloads = contents.payloads
            if claim is None and contents.end == contents.born_bytes and not contents.torn:
                return cls(path, _open_to_append(path), contents, None, None), payloads
            # Written anew, not synced again: where an fsync of these bytes has failed before, in this process's
            # predecessor or in the one before that, the next one reports success and writes nothing ("fsyncgate").
            kept_in = _keep_aside(path, data[contents.end :]) if contents.torn else None
            torn_tail = _torn_tail(path, contents, len(data), kept_in)
        nonce = _new_nonce()
        data = journal_format.encode_file(payloads, nonce)
        descriptor = _put_in_place(_write_temporary(path, data, claim), path, claim)
        return cls(path, descriptor, Contents(nonce, len(data), payloads, len(data), None), torn_tail, claim), payloads

    @property
    def term(self) -> int:
        """The number of its writer's claim; 0 without one."""
        return 0 if self._claim is None else self._claim.number

    @property
    def size_bytes(self) -> int:
        """The file's size."""
        return self._size_bytes

    @property
    def compacted_bytes(self) -> int:
        """The size the file had after its last compaction; the growth since then tells when the next one is due."""
        return self._compacted_bytes

    @property
    def goes_on(self) -> bool:
        """Whether it can be appended to: after a failed append it says whether that was taken back."""
        return self._descriptor >= 0 and self._broken is None

    def append(self, payloads: Sequence[bytes]) -> None:
        """Make all these payloads durable: one write, one fsync, all of them or none. An empty batch costs nothing.

        Raises:
            StoreError: they are not durable; the module's text says in which state the journal is then.
            SupersededError: another one has taken the claim: whatever the disk holds of them, nobody is to be told.
            ClaimRemovedError: nobody is to be told before :meth:`begin_again`, either.
        """
        self._require_usable()
        if not payloads:
            return
        if (body_bytes := journal_format.body_bytes(payloads)) > journal_format.MAX_BODY_BYTES:
            raise StoreError(
                f"{self._path}: one append of {body_bytes} bytes; at most {journal_format.MAX_BODY_BYTES} fit: split it"
            )
        batch = journal_format.encode_batch(payloads, self._nonce, self._size_bytes)
        with durable.disk_errors(self._path, f"appending {len(batch)} bytes"):
            try:
                durable.write_all(self._descriptor, batch)
            except BaseException as error:
                self._cut_back(error)
                raise
            try:
                os.fsync(self._descriptor)
            except BaseException as error:
                self._broken = f"an fsync failed: {error}"
                self._cut_back(error)
                raise
        self._size_bytes += len(batch)
        self.require_claim()

    def require_claim(self) -> None:
        """Return if this writer's claim stands, or it needs none; nothing is written from then on if it does not.

        Raises:
            SupersededError: another one has taken it.
            StoreError: the disk does not say.
        """
        if self._claim is not None:
            try:
                self._claim.require()
            except BaseException as error:
                self._is_unclaimed = self._broken is None and isinstance(error, ClaimRemovedError)
                self._broken = f"its claim could not be confirmed: {error}"
                raise

    def compact(self, payloads: Sequence[bytes]) -> None:
        """Replace the whole journal by these payloads; a crash at any moment leaves the old one or the new one.

        Raises:
            StoreError: the old journal is in place and goes on, unless the message of the next append says otherwise.
            SupersededError: another one has taken the claim.
            ClaimRemovedError: a person has removed it; see :meth:`begin_again`.
        """
        self._require_usable()
        nonce = _new_nonce()
        data = journal_format.encode_file(payloads, nonce)
        if len(data) > journal_format.MAX_JOURNAL_BYTES:
            raise StoreError(f"{self._path}: a snapshot of {len(data)} bytes could never be read back")
        temporary = _write_temporary(self._path, data, self._claim)
        try:
            descriptor = _put_in_place(temporary, self._path, self._claim)
        except BaseException as error:
            # From the rename on, either file may be the one that a crash leaves: an append to one of them could vanish.
            self._is_unclaimed = self._broken is None and isinstance(error, ClaimRemovedError)
            self._broken = f"a compaction failed: {error}"
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._nonce = nonce
        self._size_bytes = self._compacted_bytes = len(data)

    def begin_again(self, payloads: Sequence[bytes], claim: TermClaim) -> None:
        """Write the whole journal anew, after a :class:`ClaimRemovedError`.

        Args:
            payloads: everything this writer knows, with what it was about to append.
            claim: taken since.

        Raises:
            SupersededError: the journal there is another writer's, or the claim was taken.
            ClaimRemovedError: the claim was removed as well.
            StoreError: the disk refuses, or an append has failed before: the next start reads what is on the disk.
        """
        if self._broken is not None and not self._is_unclaimed:
            self._require_usable()
        remove_leftovers(self._path.parent)  # what another one is about to publish, whose claim was taken by this one
        data = _read_file(self._path)
        if data is not None and _decode(self._path, data).nonce != self._nonce:
            raise SupersededError(
                f"{self._path}: another scheduler has written this journal since its folder, or this scheduler's "
                f"claim, was removed, so this one has stopped. Fix: `{spelled('recover')}` goes on with that journal"
            )
        self._claim, self._broken, self._is_unclaimed = claim, None, False
        self.compact(payloads)

    def close(self) -> None:
        """Let go of the file; again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _require_usable(self) -> None:
        if self._descriptor < 0:
            raise StoreError(f"{self._path}: the journal is closed; open it again")
        if self._broken is not None:
            raise StoreError(
                f"{self._path}: nothing more is written, because {self._broken}; end this process and start it again "
                f"(`{spelled('recover')}`): it goes on from what is on the disk"
            )

    def _cut_back(self, error: BaseException) -> None:
        """Take the bytes of a failed append off again; where even that fails, refuse to go on."""
        try:
            os.ftruncate(self._descriptor, self._size_bytes)
            os.fsync(self._descriptor)
        except OSError as second:
            self._broken = f"an append failed ({error}) and could not be taken back ({second})"


def _open_to_append(path: Path) -> int:
    """A descriptor of the journal that is there, whose name is durable."""
    with durable.disk_errors(path, "opening the journal"):
        descriptor = durable.reopen(path, os.O_APPEND)
    try:
        durable.fsync_dir(path.parent)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write_temporary(path: Path, data: bytes, claim: TermClaim | None) -> Path:
    return durable.write_temporary(path, data, tag="" if claim is None else claim.tag)


def _put_in_place(temporary: Path, path: Path, claim: TermClaim | None) -> int:
    """Give the file the journal's name; the descriptor to append to it by is of this file, whatever has the name."""
    try:
        return _rename(temporary, path, claim)
    except StoreError:
        if claim is not None:
            claim.require()  # whoever took it has removed the file: that is the cause, and no fault of a disk
        raise


def _rename(temporary: Path, path: Path, claim: TermClaim | None) -> int:
    with durable.disk_errors(path, "replacing the journal"), durable.removed_on_failure(temporary):
        descriptor = durable.reopen(temporary, os.O_APPEND)
        try:
            if claim is not None:
                claim.require()
            durable.publish(temporary, path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _read_file(path: Path) -> bytes | None:
    with durable.disk_errors(path, "reading the journal"):
        try:
            file = os.fdopen(durable.open_regular(path), "rb")
        except FileNotFoundError:
            return None
        with file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > journal_format.MAX_JOURNAL_BYTES:
                raise StoreError(
                    f"{path}: {size_bytes} bytes; a journal has at most {journal_format.MAX_JOURNAL_BYTES}: this is "
                    f"not what was written; {_MOVE_ASIDE}"
                )
            return file.read(size_bytes)


def _decode(path: Path, data: bytes) -> Contents:
    try:
        return journal_format.decode_file(data)
    except JournalFormatError as error:
        fix = "run the version that wrote it, or " if error.fault is Fault.UNKNOWN_VERSION else ""
        raise JournalDamagedError(
            f"{path}: this file {error.fault.value} (byte {error.offset}: {error.found}); nothing was changed; "
            f"{fix}{_MOVE_ASIDE}"
        ) from None


def _torn_tail(path: Path, contents: Contents, size_bytes: int, kept_in: Path | None) -> TornTail | None:
    if contents.torn is None:
        return None
    return TornTail(path, contents.end, size_bytes - contents.end, contents.torn, kept_in)


def remove_leftovers(directory: Path) -> None:
    """Temporary files that another writer left, of the journal and of torn ends: nothing was ever spoken of them.

    That one may live and rename one of them at this moment, if its claim was taken since.
    """
    with durable.disk_errors(directory / JOURNAL_FILE, "removing what a killed writer left"):
        for entry in list(directory.iterdir()):
            if _TEMPORARY_NAME.match(entry.name):
                entry.unlink(missing_ok=True)


def _keep_aside(path: Path, tail: bytes) -> Path:
    """Write the torn bytes to ``journal.torn-<n>``; of many, the newest few are kept."""
    with durable.disk_errors(path, "keeping a torn end"):
        numbers = sorted(
            int(match[1]) for entry in path.parent.iterdir() if (match := _TORN_NAME.fullmatch(entry.name))
        )
        kept_in = path.with_name(f"journal.torn-{numbers[-1] + 1 if numbers else 1}")
        durable.write_file_atomically(kept_in, tail)
        for number in itertools.islice(numbers, max(0, len(numbers) + 1 - MAX_TORN_FILES)):
            path.with_name(f"journal.torn-{number}").unlink()
    return kept_in


def _new_nonce() -> int:
    return int.from_bytes(os.urandom(8), "little")
