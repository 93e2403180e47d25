"""An append-only file of opaque payloads that survives ``kill -9`` and detects damage.

:meth:`Journal.append` returns once a complete batch is on disk, with one fsync. Until then, nothing in the batch may be
sent. ``journal_format`` defines the bytes. The caller takes the folder's ``DirectoryLock`` first,
so that only one process writes.

A lock can be lost, for example on a network file system, so a writer may also hold a claim (``term_claim``). A writer
whose claim was taken over does no harm, at whichever instruction it resumes:

- An append checks the claim after its fsync, and fails if the claim is gone.
- A writer appends only to the file that it created itself, which the next writer replaced when it opened the journal.
- A replacement of the journal checks the claim between its last byte and its rename. A writer that claims later removes
  the temporary file of the replacement. So the rename fails, or it happens before the later writer reads.

If the claim is in etcd, the journal there (``etcd.etcd_journal``) is authoritative. It is written first, in a
transaction that compares the claim, and the file is a copy for all readers of the folder.

The state after a failed append is defined. If the write failed (for example, because the disk is full), the partial
batch is cut off and the journal stays usable. If the fsync failed, the state of the disk is unknown, and a second fsync
would falsely succeed, because the kernel forgets the failed pages (fsync(2), "fsyncgate"). The journal then refuses
further writes, and the next start reads what is on the disk.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from samebits.errors import ClaimRemovedError, ForeignFolderError, JournalDamagedError, StoreError, SupersededError
from samebits.etcd_place import EtcdPlace
from samebits.printable import printable
from samebits.spelling import spelled
from samebits.store import durable, journal_format
from samebits.store.etcd.etcd_journal import JOURNALS, EtcdJournal, read_etcd_journal
from samebits.store.etcd.gateway import EtcdGateway
from samebits.store.journal_format import JournalFault, JournalFormatError, JournalPayloads
from samebits.store.term_claim import TermClaim

JOURNAL_FILE = "journal"
KEYS_FOLDER = "keys"
"""The folder below RECOVERY_PATH with the second journal, for the durable keys."""
PLACE_FILE = "etcd"
"""A file with the etcd prefix of the journal of which the folder's is a copy; absent in other folders."""

MAX_TORN_FILES = 8

_TORN_NAME = re.compile(r"journal\.torn-([0-9]{1,9})")
_TEMPORARY_NAME = re.compile(r"\.(journal(\.torn-\d+)?|etcd)\.tmp-")
_MOVE_ASIDE = f"`{spelled('run', '--fresh')}` moves the folder aside and starts a new job"


@dataclass(frozen=True, slots=True)
class TornTail:
    """An incomplete append at the end of a journal, left by a crash.

    Nothing in it was ever sent, and it is cut off.
    """

    path: Path
    offset: int
    size_bytes: int
    reason: str
    kept_in: Path | None  # the file with the bytes cut off; None for a reader, which cuts nothing off

    def __str__(self) -> str:
        kept = f"; they are kept in {self.kept_in.name}" if self.kept_in else ""
        return (
            f"{self.path}: the last {self.size_bytes} bytes, from byte {self.offset}, are an append that a crash "
            f"interrupted ({self.reason}); they are ignored{kept}"
        )


@dataclass(frozen=True, slots=True)
class JournalContents:
    """The content of a journal that was read without the lock."""

    payloads: list[bytes]
    torn_tail: TornTail | None


def read_journal(directory: Path) -> JournalContents | None:
    """Read the folder's journal without the lock, and without changing it; None if there is none.

    An append in progress looks like a torn tail.

    Raises:
        JournalDamagedError: the file is damaged, not a journal, or has a different version.
    """
    path = directory / JOURNAL_FILE
    data = _read_file(path)
    if data is None:
        return None
    contents = _decode(path, data)
    return JournalContents(contents.payloads, _torn_tail(path, contents, len(data), None))


def refresh_copies(directory: Path, gateway: EtcdGateway) -> None:
    """Copy the journals in etcd to the folder; the caller holds the folder's lock.

    A journal that is missing in etcd is not changed in the folder.

    Raises:
        ForeignFolderError: the folder holds another job's journal.
        JournalDamagedError: the data in etcd is not a journal.
        StoreError: etcd or the disk reports an error.
    """
    for folder in (directory, directory / KEYS_FOLDER):
        payloads = read_etcd_journal(gateway, _etcd_name(folder))
        if folder == directory:
            _require_copy(directory, gateway.place, payloads)
        if not payloads:
            continue
        if folder == directory:
            _mark_copy(directory, gateway.place)
        try:
            here = read_journal(folder)
        except JournalDamagedError:
            here = None
        if here is None or here.payloads != payloads:
            durable.make_directory(folder)
            durable.write_file_atomically(folder / JOURNAL_FILE, journal_format.encode_file(payloads, _new_nonce()))


def _require_copy(directory: Path, place: EtcdPlace, payloads: Sequence[bytes] | None) -> None:
    """Raise unless the folder's journal is a copy of etcd's, which has these payloads.

    If etcd has no journal, the journal of a folder that is not a copy may be written there.
    """
    known = _read_file(directory / PLACE_FILE)
    if known is None:
        here = read_journal(directory) if payloads else None
        if here is not None and here.payloads != payloads:
            raise ForeignFolderError(
                f"RECOVERY_PATH={place}: {directory} holds another job's journal, not a copy of the one in etcd; "
                "nothing was changed. Fix: change to another folder, or unset RECOVERY_PATH to run this folder's "
                "job"
            )
    elif known.decode(errors="replace").strip() != place.prefix:
        raise ForeignFolderError(
            f"RECOVERY_PATH={place}: {directory} is the copy of a journal under the prefix "
            f"{printable(known.decode(errors='replace').strip())} of an etcd; nothing was changed. Fix: export "
            "RECOVERY_PATH with that prefix, or change to another folder"
        )


def _mark_copy(directory: Path, place: EtcdPlace) -> None:
    if not (directory / PLACE_FILE).exists():
        durable.make_directory(directory)
        durable.write_file_atomically(directory / PLACE_FILE, f"{place.prefix}\n".encode())


def _require_no_copy(directory: Path) -> None:
    """Raise if the folder's journal is a copy of one in etcd, which is authoritative."""
    known = _read_file(directory / PLACE_FILE)
    if known is not None:
        prefix = printable(known.decode(errors="replace").strip())
        raise ForeignFolderError(
            f"RECOVERY_PATH={directory} is the copy of a journal in an etcd. Fix: export "
            f"RECOVERY_PATH=etcd://<its hosts>{prefix}; if that etcd is lost for good, remove {directory / PLACE_FILE} "
            "and start again"
        )


class Journal:
    """The journal of one folder, opened for writing by the holder of the folder's lock.

    Only one thread may use it.

    Attributes:
        torn_tail: the part that :meth:`open` cut off, to be logged; None if there was none.
    """

    def __init__(
        self,
        path: Path,
        descriptor: int,
        contents: JournalPayloads,
        torn_tail: TornTail | None,
        claim: TermClaim | None,
        in_etcd: EtcdJournal | None = None,
    ) -> None:
        self._path = path
        self._claim = claim
        self._in_etcd = in_etcd
        self._descriptor = descriptor
        self._nonce = contents.nonce
        self._size_bytes = contents.end
        self._compacted_bytes = contents.born_bytes
        self._broken: str | None = None
        self._is_unclaimed = False  # the removed claim is the only reason why the journal is broken
        self.torn_tail = torn_tail

    @classmethod
    def open(cls, directory: Path, claim: TermClaim | None = None) -> tuple[Journal, list[bytes]]:
        """Open the folder's journal, or create an empty one; return it and its payloads in order.

        All returned payloads are durable. An append that was killed before its fsync may exist only in the page cache,
        so the file is rewritten and synced, unless nothing was appended since it was published and there is no claim. A
        torn tail is cut off and kept beside the journal as ``journal.torn-<n>``.

        Args:
            directory: the folder; created if missing.
            claim: a claim taken before this call. Without one, only the folder's lock keeps other writers out. With a
                claim in etcd, the payloads are those of the journal there; if etcd has no journal, the payloads
                of the folder's are written to it.

        Raises:
            SupersededError: another writer took over the claim.
            ForeignFolderError: the journals in etcd and in the folder belong to different jobs.
            JournalDamagedError: the file is damaged, not a journal, or has a different version; nothing was changed.
            StoreError: the disk or etcd reports an error.
        """
        durable.make_directory(directory)
        in_etcd, counting = None, None
        if claim is not None and claim.in_etcd is not None:
            in_etcd, counting = EtcdJournal.load(claim.in_etcd, _etcd_name(directory))
            if directory.name != KEYS_FOLDER:
                _require_copy(directory, claim.in_etcd.gateway.place, counting)
                if not counting and not (directory / PLACE_FILE).exists():
                    counting = None  # the move of this folder's journal into the etcd was killed
        elif claim is not None:
            _require_no_copy(directory)
        path = directory / JOURNAL_FILE
        remove_leftovers(directory)
        data, torn_tail = _read_file(path), None
        payloads: list[bytes] = []
        if data is not None:
            contents = _decode(path, data)
            payloads = contents.payloads
            if claim is None and contents.end == contents.born_bytes and not contents.torn:
                return cls(path, _open_to_append(path), contents, None, None), payloads
            # Rewrite the bytes instead of syncing them. If their fsync failed in an earlier process, the next fsync
            # reports success without writing anything ("fsyncgate").
            kept_in = _keep_aside(path, data[contents.end :]) if contents.torn else None
            torn_tail = _torn_tail(path, contents, len(data), kept_in)
        if counting is not None:
            payloads = counting
        elif in_etcd is not None and payloads:
            in_etcd.compact(payloads)
        if claim is not None and claim.in_etcd is not None and directory.name != KEYS_FOLDER:
            _mark_copy(directory, claim.in_etcd.gateway.place)
        nonce = _new_nonce()
        data = journal_format.encode_file(payloads, nonce)
        descriptor = _put_in_place(_write_temporary(path, data, claim), path, claim)
        contents = JournalPayloads(nonce, len(data), payloads, len(data), None)
        return cls(path, descriptor, contents, torn_tail, claim, in_etcd), payloads

    @property
    def term(self) -> int:
        """Return the number of the writer's claim; 0 without a claim."""
        return 0 if self._claim is None else self._claim.number

    @property
    def size_bytes(self) -> int:
        """Return the file's size in bytes."""
        return self._size_bytes

    @property
    def compacted_bytes(self) -> int:
        """Return the file's size after its last compaction, to decide when the next one is due."""
        return self._compacted_bytes

    @property
    def goes_on(self) -> bool:
        """Return whether the journal can be appended to.

        After a failed append, this tells whether the append was undone.
        """
        return self._descriptor >= 0 and self._broken is None and (self._in_etcd is None or self._in_etcd.goes_on)

    def append(self, payloads: Sequence[bytes]) -> None:
        """Make all these payloads durable, or none, with one write and one fsync.

        An empty batch has no effect.

        Raises:
            StoreError: the payloads are not durable; the module's docstring describes the journal's state.
            SupersededError: another writer took over the claim. Nothing in the batch may be sent, even if the batch is
                on disk.
            ClaimRemovedError: nothing in the batch may be sent before :meth:`begin_again`.
        """
        self._require_usable()
        if not payloads:
            return
        if (body_bytes := journal_format.body_bytes(payloads)) > journal_format.MAX_BODY_BYTES:
            raise StoreError(
                f"{self._path}: an append of {body_bytes} bytes exceeds the limit of {journal_format.MAX_BODY_BYTES} "
                "bytes. Fix: split it"
            )
        self._write_to_etcd(lambda journal: journal.append(payloads))
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
        if self._claim is not None:
            self._confirm(self._claim.require_file)  # the etcd has already compared the claim there

    def require_claim(self) -> None:
        """Raise, and stop writing, unless this writer's claim is valid or it needs none.

        Raises:
            SupersededError: another writer took over the claim.
            StoreError: the claim cannot be checked.
        """
        if self._claim is not None:
            self._confirm(self._claim.require)

    def _confirm(self, require: Callable[[], None]) -> None:
        try:
            require()
        except BaseException as error:
            self._break(error)
            raise

    def _write_to_etcd(self, write: Callable[[EtcdJournal], None]) -> None:
        """Write to etcd's journal, if there is one.

        A lost claim breaks this journal; after other failures it may stay usable.
        """
        if self._in_etcd is None:
            return
        try:
            write(self._in_etcd)
        except (SupersededError, ClaimRemovedError) as error:
            self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        self._is_unclaimed = self._broken is None and isinstance(error, ClaimRemovedError)
        self._broken = f"its claim could not be confirmed: {error}"

    def compact(self, payloads: Sequence[bytes]) -> None:
        """Replace the entire journal with these payloads; a crash leaves the old or the new one.

        Raises:
            StoreError: the old journal is still in place and usable, unless the next append raises as well.
            SupersededError: another writer took over the claim.
            ClaimRemovedError: the claim's file was removed; see :meth:`begin_again`.
        """
        self._require_usable()
        self._write_to_etcd(lambda journal: journal.compact(payloads))
        self._replace(payloads)

    def _replace(self, payloads: Sequence[bytes]) -> None:
        nonce = _new_nonce()
        data = journal_format.encode_file(payloads, nonce)
        if len(data) > journal_format.MAX_JOURNAL_BYTES:
            raise StoreError(f"{self._path}: a snapshot of {len(data)} bytes is too large to be read back")
        temporary = _write_temporary(self._path, data, self._claim)
        try:
            descriptor = _put_in_place(temporary, self._path, self._claim)
        except BaseException as error:
            # Once the rename may have happened, a crash can leave either file, so an append to one of them could be
            # lost.
            self._is_unclaimed = self._broken is None and isinstance(error, ClaimRemovedError)
            self._broken = f"a compaction failed: {error}"
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._nonce = nonce
        self._size_bytes = self._compacted_bytes = len(data)

    def begin_again(self, payloads: Sequence[bytes], claim: TermClaim) -> None:
        """Rewrite the entire journal after a :class:`ClaimRemovedError`.

        Args:
            payloads: all payloads that this writer knows, including those that it was about to append.
            claim: a claim taken since the error.

        Raises:
            SupersededError: another writer has written the journal, or has taken over the claim.
            ClaimRemovedError: the new claim was removed as well.
            StoreError: the disk reports an error, or an append failed before; the next start reads what is on the disk.
        """
        if self._broken is not None and not self._is_unclaimed:
            self._require_usable()
        remove_leftovers(self._path.parent)  # including a file that a superseded writer is about to publish
        data = _read_file(self._path)
        if data is not None and _decode(self._path, data).nonce != self._nonce:
            raise SupersededError(
                f"{self._path}: another scheduler has written this journal since its folder, or this scheduler's "
                f"claim, was removed, so this one has stopped. Fix: `{spelled('recover')}` continues with that journal"
            )
        self._claim, self._broken, self._is_unclaimed = claim, None, False
        if self._in_etcd is not None and claim.in_etcd is not None:
            in_etcd = claim.in_etcd
            self._write_to_etcd(lambda journal: journal.begin_again(payloads, in_etcd))
        self._replace(payloads)

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
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
                f"{self._path}: nothing more is written, because {self._broken}. Fix: end this process and start it "
                f"again (`{spelled('recover')}`); it continues from what is on the disk"
            )

    def _cut_back(self, error: BaseException) -> None:
        """Cut off the bytes of a failed append, or mark the journal as broken if that fails too."""
        try:
            os.ftruncate(self._descriptor, self._size_bytes)
            os.fsync(self._descriptor)
        except OSError as second:
            self._broken = f"an append failed ({error}) and could not be undone ({second})"


def _etcd_name(directory: Path) -> str:
    """Return the name that the folder's journal has in an etcd."""
    return JOURNALS[directory.name == KEYS_FOLDER]


def _open_to_append(path: Path) -> int:
    """Open the existing journal for appending, and make its name durable."""
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
    """Give the file the journal's name, and return a descriptor that appends to this exact file."""
    try:
        return _rename(temporary, path, claim)
    except StoreError:
        if claim is not None:
            claim.require()  # a writer that took over the claim also removed the file; report that first
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
                    f"{path} has {size_bytes} bytes, but a journal has at most "
                    f"{journal_format.MAX_JOURNAL_BYTES}, so the file is not as it was written. Fix: {_MOVE_ASIDE}"
                )
            return file.read(size_bytes)


def _decode(path: Path, data: bytes) -> JournalPayloads:
    try:
        return journal_format.decode_file(data)
    except JournalFormatError as error:
        fix = "run the version that wrote it, or " if error.fault is JournalFault.UNKNOWN_VERSION else ""
        raise JournalDamagedError(
            f"{path}: this file {error.fault.value} (byte {error.offset}: {error.found}); nothing was changed. Fix: "
            f"{fix}{_MOVE_ASIDE}"
        ) from None


def _torn_tail(path: Path, contents: JournalPayloads, size_bytes: int, kept_in: Path | None) -> TornTail | None:
    if contents.torn is None:
        return None
    return TornTail(path, contents.end, size_bytes - contents.end, contents.torn, kept_in)


def remove_leftovers(directory: Path) -> None:
    """Remove temporary files of the journal and of torn ends that another writer left.

    Nothing in them was ever sent. If their writer's claim was taken over, the writer may still be alive and try to
    rename one of them.
    """
    with durable.disk_errors(directory / JOURNAL_FILE, "removing a killed writer's files"):
        for entry in list(directory.iterdir()):
            if _TEMPORARY_NAME.match(entry.name):
                entry.unlink(missing_ok=True)


def _keep_aside(path: Path, tail: bytes) -> Path:
    """Write the torn bytes to ``journal.torn-<n>``; only the newest few of these files are kept."""
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
