"""The page of one rank's generators: what its random numbers stood at lately, in memory that outlives kill -9.

::

    /dev/shm/samebits-<uid>/<job>/<slot>/page

    header: magic, job, slot | collectives launched | entry | entry | …

Here live the file's layout, its writer and its reader. Never here: torch, what a generator's state is made of, who goes
on from it. The one idea: an entry's hash is written last, over everything the entry says and whose page it is, so that
a kill at any instruction leaves an entry that is complete or is not there. An entry is written over the oldest of its
kind, so that a commit's is there until two later commits exist. Every process writes a file of its own, which begins
with what its predecessor's held and takes that one's name with its first commit: a process that was given up and wakes
again writes where nobody reads.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from samebits.core.point import Point
from samebits.errors import StoreError
from samebits.store import durable
from samebits.store.checkpoint.memory.memory_buffer import open_slot
from samebits.store.checkpoint.memory.memory_room import PAGE, is_page_held, open_room, room_path, try_lock

ENTRY_BYTES = 16 * 1024
PAGE_BYTES = mmap.PAGESIZE

_MAGIC = b"\x93SBPAG\x01\n"
_HEADER = struct.Struct("<8s64sq")
_COUNT_AT = 2048  # of the first page; in a cache line of its own
_COUNT = struct.Struct("=Q")
_FIELDS = struct.Struct("<QQqqqqQQQ")
_DIGEST_BYTES = 16
_SILENT = bytes(_DIGEST_BYTES)
_PAYLOAD_AT = _DIGEST_BYTES + _FIELDS.size
MAX_STATE_BYTES = ENTRY_BYTES - _PAYLOAD_AT


class EntryKind(enum.IntEnum):
    """When the generators stood so."""

    COMMIT = 1
    BEFORE_COLLECTIVE = 2


_PLACES = {EntryKind.COMMIT: (0, 1, 2), EntryKind.BEFORE_COLLECTIVE: (3, 4)}
"""Two stand while the third is being written; of those before a collective only the last counts."""

FILE_BYTES = PAGE_BYTES + ENTRY_BYTES * sum(map(len, _PLACES.values()))


@dataclass(frozen=True, slots=True)
class PageEntry:
    """What the generators stood at once.

    Attributes:
        sequence: grows with every entry of the page.
        kind: at a commit, or before a collective of the step after the last commit.
        point: the commit, or the last one before.
        commits: how many lie on the line up to that one.
        generation: in which the entry was written; a generation begins with a commit of an earlier one.
        collectives: how many this rank had launched since its page was begun, this one not counted.
        late_draws: at so many commits something had been drawn after the last collective before.
        state: of the generators.
    """

    sequence: int
    kind: EntryKind
    point: Point
    commits: int
    generation: int
    collectives: int
    late_draws: int
    state: bytes


@dataclass(frozen=True, slots=True)
class PageContent:
    """All complete entries of a page, the oldest first, and how many collectives its rank has launched."""

    entries: tuple[PageEntry, ...]
    collectives: int


class PageWriter:
    """A process's page; nobody finds it before its first commit.

    Args:
        base: a folder in memory; ``SHARED_MEMORY`` but in tests.
        job, slot: whose.

    Raises:
        StoreError: there is no memory for it, or something of its folder is not this user's alone.
    """

    def __init__(self, base: Path, job: str, slot: int) -> None:
        self.path = room_path(base, job, slot) / PAGE
        self._temporary = self.path.with_name(f"{PAGE}.new")
        before = _found(base, self.path, job, slot)
        room = open_room(base, self.path.parent)
        if room is None:
            raise StoreError(f"{self.path.parent}: was removed while it was made. Fix: see who empties {base}")
        self._room, self._descriptor = room, -1
        self._is_found = False
        header = _HEADER.pack(_MAGIC, job.encode(), slot)
        self._whose = xxhash.xxh3_128(header)
        try:
            with durable.disk_errors(self.path, "making the page of the generators"):
                self._memory = self._made()
        except BaseException:
            self.close()
            raise
        view = self._view = memoryview(self._memory)
        view[: len(header)] = header
        self._count = view[_COUNT_AT : _COUNT_AT + _COUNT.size].cast("Q")  # one store: it is never torn
        self._entries: list[PageEntry] = []
        self._next = dict.fromkeys(EntryKind, 0)
        self._sequence = 0
        if before is not None:
            self._count[0] = before.collectives
            for one in before.entries:
                self.write(
                    one.kind,
                    one.point,
                    one.commits,
                    one.generation,
                    one.late_draws,
                    one.state,
                    collectives=one.collectives,
                )
        _open_pages.add(self)

    def _made(self) -> mmap.mmap:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary.name, dir_fd=self._room)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._temporary.name, flags, durable.FILE_MODE, dir_fd=self._room)
        try:
            os.posix_fallocate(descriptor, 0, FILE_BYTES)  # else a full /dev/shm is a SIGBUS in the midst of a step
            memory = mmap.mmap(descriptor, FILE_BYTES, flags=mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        # Opened once more: the mapping keeps the first one, and with it would keep the lock.
        self._descriptor = os.open(self._temporary.name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._room)
        try_lock(self._descriptor)
        if hasattr(mmap, "MADV_DONTFORK"):
            memory.madvise(mmap.MADV_DONTFORK)  # a forked child must not write here
        return memory

    @property
    def collectives(self) -> int:
        """How many this rank has launched."""
        return self._count[0]

    def launching(self) -> None:
        """A collective is launched next."""
        self._count[0] += 1

    def write(
        self,
        kind: EntryKind,
        point: Point,
        commits: int,
        generation: int,
        late_draws: int,
        state: bytes,
        *,
        collectives: int | None = None,
    ) -> None:
        """Add an entry, as :class:`PageEntry` has it.

        Raises:
            StoreError: the state is too large.
        """
        if len(state) > MAX_STATE_BYTES:
            raise StoreError(
                f"{self.path}: the generators' states have {len(state)} bytes, at most {MAX_STATE_BYTES} are kept"
            )
        self._sequence += 1
        counted = self._count[0] if collectives is None else collectives
        fields = _FIELDS.pack(
            self._sequence, kind, point.step, point.generation, commits, generation, counted, late_draws, len(state)
        )
        digest = self._whose.copy()
        digest.update(fields)
        digest.update(state)
        places = _PLACES[kind]
        start = PAGE_BYTES + places[self._next[kind]] * ENTRY_BYTES
        self._next[kind] = (self._next[kind] + 1) % len(places)
        view, fields_at, state_at = self._view, start + _DIGEST_BYTES, start + _PAYLOAD_AT
        view[start:fields_at] = _SILENT
        view[state_at : state_at + len(state)] = state
        view[fields_at:state_at] = fields
        view[start:fields_at] = digest.digest()

    def content(self) -> PageContent:
        """What a reader would find."""
        return _decode(self._view, self._whose)

    def publish(self) -> None:
        """From now on the page of the slot is this one."""
        if not self._is_found:
            with durable.disk_errors(self.path, "naming the page of the generators"):
                os.rename(self._temporary.name, PAGE, src_dir_fd=self._room, dst_dir_fd=self._room)
            self._is_found = True

    def discard(self) -> None:
        """Nobody will look for it."""
        if self._is_found and self._room >= 0:
            with contextlib.suppress(OSError):  # it is gone, or another process's by now
                named, ours = os.stat(PAGE, dir_fd=self._room), os.fstat(self._descriptor)
                if (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino):
                    os.unlink(PAGE, dir_fd=self._room)
        self.close()

    def close(self) -> None:
        """Let go of it; what is in it stays."""
        for descriptor in (self._descriptor, self._room):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._room = -1


def read_page(base: Path, job: str, slot: int) -> bytes | None:
    """The page of a slot, as the last process that had one left it, or writes it; None where there is none.

    :func:`decode_page` says what is in it, here or on the host to which it is sent.

    Raises:
        StoreError: what is there is another job's or another slot's, damaged, or not this user's alone.
    """
    path = room_path(base, job, slot) / PAGE
    with _room(base, path.parent) as room:
        descriptor = None if room is None else open_slot(room, path, os.O_RDONLY)
        if descriptor is None:
            return None
        try:
            with durable.disk_errors(path, "reading the page of the generators"):
                data = os.pread(descriptor, FILE_BYTES + 1, 0)
        finally:
            os.close(descriptor)
    decode_page(data, job, slot, str(path))
    return data


def decode_page(data: bytes | memoryview, job: str, slot: int, whence: str) -> PageContent:
    """What is in a page; an entry that is not complete by its hash is left out.

    Args:
        data: as :func:`read_page` gave them.
        job, slot: whose the page must be.
        whence: where it lies, for people.

    Raises:
        StoreError: it is another job's or another slot's, or no page.
    """
    header = _HEADER.pack(_MAGIC, job.encode(), slot)
    if len(data) != FILE_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise StoreError(f"{whence}: {len(data)} bytes that are no page of this version, expected {FILE_BYTES}")
    if data[: len(header)] != header:
        raise StoreError(f"{whence}: it is the page of another job or slot, expected slot {slot} of job {job}")
    return _decode(memoryview(data), xxhash.xxh3_128(header))


def orphaned_pages(base: Path, job: str) -> Iterator[int]:
    """The slots whose pages on this host no live process writes any more."""
    names: list[str] = []
    with contextlib.suppress(OSError):  # nothing is kept here, or it is not this user's
        names = [entry.name for entry in room_path(base, job, 0).parent.iterdir()]
    for slot in sorted(int(name) for name in names if name.isdecimal()):
        with contextlib.suppress(StoreError), _room(base, room_path(base, job, slot)) as room:
            if room is not None and not is_page_held(room):
                yield slot


def _found(base: Path, path: Path, job: str, slot: int) -> PageContent | None:
    """What a predecessor's page holds; nothing where it cannot be used, which its reader has said."""
    try:
        data = read_page(base, job, slot)
        return None if data is None else decode_page(data, job, slot, str(path))
    except StoreError:
        return None


@contextlib.contextmanager
def _room(base: Path, path: Path) -> Iterator[int | None]:
    room = open_room(base, path, make=False)
    try:
        yield room
    finally:
        if room is not None:
            os.close(room)


def _decode(data: memoryview, whose: xxhash.xxh3_128) -> PageContent:
    entries = []
    for place in range(sum(map(len, _PLACES.values()))):
        entry = _entry(data[PAGE_BYTES + place * ENTRY_BYTES :][:ENTRY_BYTES], whose)
        if entry is not None:
            entries.append(entry)
    entries.sort(key=lambda one: one.sequence)
    return PageContent(tuple(entries), _COUNT.unpack_from(data, _COUNT_AT)[0])


def _entry(data: memoryview, whose: xxhash.xxh3_128) -> PageEntry | None:
    """The entry there; None where none is, or one that was not completed."""
    fields = data[_DIGEST_BYTES:_PAYLOAD_AT]
    sequence, kind, step, of, commits, generation, collectives, late_draws, size = _FIELDS.unpack(fields)
    if size > MAX_STATE_BYTES or kind not in set(EntryKind):
        return None
    state = data[_PAYLOAD_AT : _PAYLOAD_AT + size]
    digest = whose.copy()
    digest.update(fields)
    digest.update(state)
    if digest.digest() != data[:_DIGEST_BYTES]:
        return None
    return PageEntry(
        sequence, EntryKind(kind), Point(step, of), commits, generation, collectives, late_draws, bytes(state)
    )


_open_pages: weakref.WeakSet[PageWriter] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for page in list(_open_pages):
        page.close()


os.register_at_fork(after_in_child=_let_go_in_child)
