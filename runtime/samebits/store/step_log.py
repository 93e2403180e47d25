"""Record the inputs of one rank's steps on disk, each before the step is taken.

::

  <root>/<slot>/steps/00000003_from_step_0000000801      a segment: a file in ``journal_format``
  <root>/<slot>/steps/{lock,lock.holder}                  the lock that admits one live writer

Only the process that began a segment appends to it, in batches that each have a hash and an fsync. So any segment may
have a torn end. A torn end belongs to a step that was never taken, and is cut off. To keep the log short, segments are
removed once no kept restore point can need them.

The log is evidence; recovery does not need it. If the log is damaged, the records before the damage are used, the
damage is reported, and training continues. Only another job's log is refused. ``step_record`` defines the entries.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import ForeignFolderError, StoreError
from samebits.spelling import spelled
from samebits.store import durable, journal_format, step_record
from samebits.store.checkpoint.folder import oldest_step_in
from samebits.store.journal_format import JournalFormatError
from samebits.store.step_record import History, LogHeader, StepEntry, StepEntryError, StepRecord

STEPS_FOLDER = "steps"
SEGMENT_BYTES = 4 * 1024 * 1024

_SEGMENT_NAME = re.compile(r"(\d{8,})_from_step_(\d{10,})", re.ASCII)
_TEMPORARY_NAME = re.compile(r"\.\d{8,}_from_step_\d{10,}\.tmp-", re.ASCII)


@dataclass(frozen=True, slots=True)
class Segment:
    """One file as it was read: its entries up to ``end``, and the fault of the bytes after it."""

    path: Path
    header: LogHeader | None
    entries: list[StepEntry]
    end: int
    torn: str | None
    problem: str | None

    @property
    def last_step(self) -> int:
        """Return the highest recorded step; 0 without a record."""
        return max((entry.step for entry in self.entries if isinstance(entry, StepRecord)), default=0)


@dataclass(slots=True)
class _Kept:
    """What pruning needs to know about a segment."""

    path: Path
    last_step: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class FoundLog:
    """The content of a log that was read without the lock."""

    header: LogHeader | None
    history: History
    problems: list[str]


def read_step_log(directory: Path, *, after_step: int = 0) -> FoundLog | None:
    """Read the log in a rank's folder (``<root>/<slot>``), or return None if there is none.

    Nothing is changed. A record that is being written looks like a torn end, and is left out.

    Raises:
        StoreError: the disk reports an error.
    """
    segments = list(_read_segments(directory / STEPS_FOLDER))
    if not segments:
        return None
    history = History.of((entry for one in segments for entry in one.entries), after_step=after_step)
    header = next((one.header for one in reversed(segments) if one.header is not None), None)
    return FoundLog(header, history, [one.problem for one in segments if one.problem is not None])


class StepLogWriter:
    """The log of one slot, opened by the holder of its folder's lock.

    Only one thread may use it.

    Attributes:
        problems: damage that :meth:`open` found or cut off, to be logged.
        last_step: the newest record's step; 0 if there is none.
    """

    def __init__(self, directory: Path, header: LogHeader, oldest_step: Callable[[], int] | None = None) -> None:
        self.problems: list[str] = []
        self.last_step = 0
        self._rank_directory = directory
        self._directory = directory / STEPS_FOLDER
        self._header = header
        self._oldest_step = oldest_step or (lambda: oldest_step_in(directory))
        self._segments: list[_Kept] = []  # oldest first; the last one is being written
        self._path: Path | None = None  # of the current segment
        self._descriptor = -1
        self._nonce = 0
        self._size_bytes = 0
        self._number = 0

    @classmethod
    def open(cls, directory: Path, header: LogHeader, oldest_step: Callable[[], int] | None = None) -> StepLogWriter:
        """Open the log in a rank's folder, or create one; torn ends are cut off.

        Args:
            directory: the rank's folder.
            header: the job, slot and node that the log belongs to.
            oldest_step: returns the step of the oldest point to which the rank may return, or 0 if unknown. By default,
                this folder is searched for points.

        Raises:
            ForeignFolderError: the log belongs to another job; nothing was changed.
            StoreError: the disk reports an error.
        """
        writer = cls(directory, header, oldest_step)
        durable.make_directory(writer._directory)
        segments = list(_read_segments(writer._directory))
        for one in segments:
            if one.header is not None and one.header.job != header.job:
                raise ForeignFolderError(
                    f"{one.path} was written by job {one.header.job}, but this is job {header.job}. Fix: "
                    f"`{spelled('run', '--fresh')}` moves the checkpoint folder aside, or move that file away"
                )
        writer._take_up(segments)
        return writer

    def _take_up(self, segments: Sequence[Segment]) -> None:
        with durable.disk_errors(self._directory, "removing a killed writer's files"):
            for entry in list(self._directory.iterdir()):
                if _TEMPORARY_NAME.match(entry.name):
                    entry.unlink()
        for one in segments:
            if one.torn is not None:
                _cut(one)
                self.problems.append(
                    f"{one.path}: an incomplete record that a crash left behind was removed from byte {one.end} on "
                    f"({one.torn}); its step had not begun"
                )
            if one.problem is not None:
                self.problems.append(one.problem)
            self._segments.append(_Kept(one.path, one.last_step, one.problem is None))
            self._number = max(self._number, _number_of(one.path))
        self.last_step = History.of(entry for one in segments for entry in one.entries).last_step

    def line_after(self, step: int) -> dict[int, StepRecord]:
        """Read the newest comparable record of every step after ``step`` from the disk.

        Raises:
            StoreError: the disk reports an error.
        """
        found = read_step_log(self._rank_directory, after_step=step)
        return {} if found is None else found.history.line

    def append(self, entries: Sequence[StepEntry]) -> None:
        """Make all these entries durable, or none, with one write and one fsync.

        Raises:
            StoreError: the entries are not durable. The next append begins a new segment if this segment's content is
                unknown.
        """
        payloads = [step_record.pack(entry) for entry in entries]
        if self._descriptor < 0 or self._size_bytes >= SEGMENT_BYTES:
            self._begin_segment(payloads, entries[-1].step)
        else:
            self._append(payloads)
        self.last_step = max((one.step for one in entries if isinstance(one, StepRecord)), default=self.last_step)
        if self._path is not None:
            self._segments[-1].last_step = max(self._segments[-1].last_step, self.last_step)

    def _begin_segment(self, payloads: Sequence[bytes], step: int) -> None:
        """Begin a file with these entries, and remove segments that no kept point needs."""
        self.close()
        nonce = int.from_bytes(os.urandom(8), "little")
        data = journal_format.encode_file([step_record.pack_header(self._header), *payloads], nonce)
        path = self._directory / f"{self._number + 1:08d}_from_step_{step:010d}"
        durable.write_file_atomically(path, data)
        self._number += 1
        self._segments.append(_Kept(path, step, True))
        with durable.disk_errors(path, "opening the segment"):
            self._descriptor = durable.reopen(path, os.O_APPEND)
        self._path, self._nonce, self._size_bytes = path, nonce, len(data)
        with contextlib.suppress(StoreError):  # the next segment retries the removal
            self._prune()

    def _append(self, payloads: Sequence[bytes]) -> None:
        assert self._path is not None, "an open segment has a path"
        if journal_format.body_bytes(payloads) > journal_format.MAX_BODY_BYTES:
            raise StoreError(f"{self._path}: a record of {journal_format.body_bytes(payloads)} bytes is too large")
        batch = journal_format.encode_batch(payloads, self._nonce, self._size_bytes)
        with durable.disk_errors(self._path, f"appending {len(batch)} bytes"):
            try:
                durable.write_all(self._descriptor, batch)
                os.fsync(self._descriptor)
            except BaseException:
                # After a failed fsync, the disk's content is unknown, and a second fsync would falsely succeed
                # (fsync(2)).
                self._give_up_segment()
                raise
        self._size_bytes += len(batch)

    def _give_up_segment(self) -> None:
        # Only the first failure is reported; bytes that cannot be cut off are a torn end or a valid record.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._size_bytes)
        self.close()

    def _prune(self) -> None:
        """Remove the oldest segments whose steps all precede the oldest point of this rank."""
        oldest, removed = self._oldest_step(), False
        with durable.disk_errors(self._directory, "removing old segments"):
            while len(self._segments) > 1 and self._bound_of_oldest() <= oldest:
                self._segments[0].path.unlink(missing_ok=True)
                del self._segments[0]
                removed = True
        if removed:
            durable.fsync_dir(self._directory)

    def _bound_of_oldest(self) -> int:
        """Return an upper bound of the oldest segment's steps.

        A damaged segment may have had more steps than can be read.
        """
        first, second = self._segments[:2]
        return first.last_step if first.is_whole else max(first.last_step, second.last_step)

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._path = -1, None


def _read_segments(directory: Path) -> Iterator[Segment]:
    with durable.disk_errors(directory, "listing the segments"):
        try:
            names = [entry.name for entry in directory.iterdir() if _SEGMENT_NAME.fullmatch(entry.name)]
        except FileNotFoundError:
            return
    for path in sorted((directory / name for name in names), key=_number_of):
        with durable.disk_errors(path, "reading the step log"):
            try:
                with os.fdopen(durable.open_regular(path), "rb") as file:
                    data = file.read()
            except FileNotFoundError:  # its writer removed it meanwhile
                continue
        yield _decode(path, data, directory.parent.name)


def _number_of(path: Path) -> int:
    return int(path.name.partition("_")[0])


def _decode(path: Path, data: bytes, slot: str) -> Segment:
    problem, torn = None, None
    try:
        contents = journal_format.decode_file(data)
        payloads, end, torn = contents.payloads, contents.end, contents.torn
    except JournalFormatError as error:
        problem = f"{path} was changed after it was written (byte {error.offset}: {error.found})"
        payloads, end = _before(data, error.offset), error.offset
    try:
        header = step_record.unpack_header(payloads[0]) if payloads else None
        entries = [step_record.unpack(payload) for payload in payloads[1:]]
    except StepEntryError as error:
        return Segment(path, None, [], end, None, f"{path}: {error}; it is ignored")
    if header is not None and str(header.slot) != slot:
        return Segment(
            path, header, [], end, None, f"{path} is the log of slot {header.slot}, not of {slot}; it is ignored"
        )
    if problem is not None:
        problem += f"; the {len(entries)} entries before that are used"
    return Segment(path, header, entries, end, torn, problem)


def _before(data: bytes, offset: int) -> list[bytes]:
    """Return the payloads of a damaged file before the damage."""
    try:
        return journal_format.decode_file(data[:offset]).payloads
    except JournalFormatError:
        return []


def _cut(segment: Segment) -> None:
    with durable.disk_errors(segment.path, "cutting off a torn end"):
        descriptor = durable.reopen(segment.path)
        try:
            os.ftruncate(descriptor, segment.end)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
