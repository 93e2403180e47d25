"""Keep a rank's random number generators in a page of shared memory that outlives kill -9 of its process.

::

    /dev/shm/samebits-<uid>/<job>/<slot>/page

    header: magic, job, slot | collectives launched | entry | entry | …

The states are written at every commit and, if they have changed, before every collective. No rank commits a step before
this rank has launched the step's collectives. So the page holds the states of the commit that the survivors have,
unless numbers are drawn between a step's last collective and its commit; ``core.restore`` decides whether a page can be
used.

An entry's hash is written last and covers the entry and its owner, so after a kill at any instruction an entry is
either complete or absent. Each process writes to a file of its own, which replaces its predecessor's at its first
commit. A process that was given up and resumes later therefore writes to a file that no reader opens.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import xxhash

from samebits.core.messages import KeptCommit, LiveStep, OrphanedPage, Page
from samebits.core.point import Point
from samebits.errors import CheckpointError, StoreError
from samebits.service import log
from samebits.store import checkpoint as checkpoints
from samebits.store import durable
from samebits.store.checkpoint import memory_room
from samebits.store.checkpoint.memory_buffer import open_slot
from samebits.store.checkpoint.memory_room import PAGE, opened_room, room_path
from samebits.training.state.generators import Generators, unpack

_MAGIC = b"\x93SBPAG\x02\n"
_HEADER = struct.Struct("<8s64sq")
_COUNT_AT = 2048  # offset of the collective count, in a cache line of its own
_SEAL_BYTES = 16
_SIZE = struct.Struct("<I")
ENTRY_BYTES = 16 * 1024
MAX_CONTENT_BYTES = ENTRY_BYTES - _SEAL_BYTES - _SIZE.size
ENTRIES_OF_KIND = {True: 3, False: 2}
"""Two commits stay intact while a third is written; of the entries made before collectives, only the last counts."""
ENTRIES_AT = mmap.PAGESIZE
FILE_BYTES = ENTRIES_AT + ENTRY_BYTES * sum(ENTRIES_OF_KIND.values())


class KeptGeneratorStates(NamedTuple):
    """The generators' states at a commit, or before a collective of the next step.

    Attributes:
        is_commit: True at a commit, False before a collective.
        point, commits: the last commit, and the number of commits up to it.
        generation: the generation that wrote the entry; its first entry is a commit of an earlier generation.
        collectives: number of collectives this rank had launched since its page was created.
        draws_late: whether numbers were ever drawn between a step's last collective and its commit.
        state: packed by :class:`Generators`.
    """

    is_commit: bool
    point: Point
    commits: int
    generation: int
    collectives: int
    draws_late: bool
    state: bytes


class Content(NamedTuple):
    """A page's complete entries, oldest first, and the number of collectives that its rank has called."""

    slot: int
    entries: tuple[KeptGeneratorStates, ...] = ()
    collectives: int = 0

    @property
    def commits(self) -> list[KeptGeneratorStates]:
        """The entries at commits."""
        return [entry for entry in self.entries if entry.is_commit]


class PageWriter:
    """Writes this process's page, which replaces the previous process's page with one rename.

    Args:
        base: the folder in memory.
        job: the job's id.
        before: the entries that the page begins with, and its slot.

    Attributes:
        view: the page's bytes.
        collectives: a view of one item, the number of collectives this rank has launched.

    Raises:
        StoreError: not enough memory, a state is too large, or the folder is not private to this user.
    """

    def __init__(self, base: Path, job: str, before: Content) -> None:
        self.slot, self.path = before.slot, room_path(base, job, before.slot) / PAGE
        self._written, self._lock = {True: 0, False: 0}, -1
        self._header = header = _HEADER.pack(_MAGIC, job.encode(), self.slot)
        memory_room.let_go_in_children(self)
        with opened_room(base, self.path.parent, make=True) as room, durable.disk_errors(self.path, "making the page"):
            if room is None:
                raise StoreError(
                    f"{self.path.parent} was removed while it was being created. Fix: find out what empties {base}"
                )
            temporary = f"{PAGE}.new"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=room)
            self.view = memoryview(_new_file(room, temporary))
            self.view[: len(header)] = header
            self.collectives = self.view[_COUNT_AT : _COUNT_AT + 8].cast("Q")  # one store, so it is never torn
            self.collectives[0] = before.collectives
            try:
                # A second descriptor: the mapping keeps the first one open and would keep the lock with it.
                self._lock = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC, dir_fd=room)
                memory_room.try_lock(self._lock)
                for entry in before.entries:
                    self.add(entry)
                os.rename(temporary, PAGE, src_dir_fd=room, dst_dir_fd=room)
            except BaseException:
                self.let_go()
                raise

    def add(self, entry: KeptGeneratorStates) -> None:
        """Write an entry in place of the oldest of its kind.

        Raises:
            StoreError: its state is too large.
        """
        content = msgpack.packb((sum(self._written.values()), *entry))
        if len(content) > MAX_CONTENT_BYTES:
            raise StoreError(f"{self.path}: states of {len(entry.state)} bytes need {len(content)} of {ENTRY_BYTES}")
        place = self._written[entry.is_commit] % ENTRIES_OF_KIND[entry.is_commit]
        start = ENTRIES_AT + ENTRY_BYTES * (place if entry.is_commit else ENTRIES_OF_KIND[True] + place)
        self._written[entry.is_commit] += 1
        sized = _SIZE.pack(len(content)) + content
        self.view[start : start + _SEAL_BYTES] = bytes(_SEAL_BYTES)
        self.view[start + _SEAL_BYTES :][: len(sized)] = sized
        self.view[start : start + _SEAL_BYTES] = xxhash.xxh3_128_digest(self._header + sized)

    def let_go(self) -> None:
        """Release the lock. The page remains until its room is removed."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class KeptGenerators:
    """The generator page of this process's slot, and the pages that this process can send to other ranks.

    Args:
        job: the job's id.
        memory: the folder in memory; other than ``checkpoints.SHARED_MEMORY`` only in tests.

    Attributes:
        lent: pages of other slots that were offered, until the generation begins.
    """

    def __init__(self, job: str, *, memory: Path = checkpoints.SHARED_MEMORY) -> None:
        self._job, self._memory = job, memory
        self._page: PageWriter | None = None
        self._generators: Generators | None = None
        self._version = 0  # of the generators' states in the page
        self._last: KeptGeneratorStates | None = None  # the last commit in the page
        self._live_step: LiveStep | None = None
        self._offered = Content(-1)
        self.lent: dict[int, bytes] = {}
        self._has_failed = False

    def committed(self, generators: Generators | None, slot: int, generation: int, point: Point, commits: int) -> None:
        """Write the current states as those of this commit, or of the beginning of a generation."""
        if generators is None or self._has_failed:
            return
        before = self._offered if self._offered.slot == slot else Content(slot)
        draws_late = any(entry.draws_late for entry in before.entries)
        if self._page is not None and self._page.slot != slot:
            self.let_go()
        page, last, collectives = self._page, self._last, before.collectives
        if page is not None and last is not None:
            draws_late, collectives = last.draws_late, page.collectives[0]
            if (last.point, last.commits) != (point, commits):  # otherwise a generation begins at this process's commit
                step = LiveStep(collectives - last.collectives, generators.version != self._version)
                self._live_step = step if last.commits + 1 == commits else None
                draws_late |= self._live_step is not None and self._live_step.draws_late
        entry = KeptGeneratorStates(True, point, commits, generation, collectives, draws_late, generators.packed())
        try:
            if page is None:
                self._page = PageWriter(self._memory, self._job, before._replace(entries=(*before.entries, entry)))
            else:
                page.add(entry)
        except StoreError as error:
            self._failed(error)
            return
        self._last, self._generators, self._version = entry, generators, generators.version

    def before_collective(self) -> None:
        """Write the states if they have changed. Called before each collective."""
        page, generators, last = self._page, self._generators, self._last
        if page is None or generators is None or last is None:
            return
        generators.look()
        if generators.version != self._version:
            self._version = generators.version
            try:
                page.add(last._replace(is_commit=False, state=generators.packed()))
            except StoreError as error:
                self._failed(error)
                return
        page.collectives[0] += 1

    def _failed(self, error: StoreError) -> None:
        self._has_failed = True
        self.let_go()
        log.warn(
            "generator states are saved only in checkpoints, so after a loss, training returns to a checkpoint: "
            f"{error}"
        )

    def live_step(self, point: Point | None, commits: int) -> LiveStep | None:
        """Describe the step that led to this commit, or return None if this process does not hold the commit."""
        last = self._last
        return self._live_step if last is not None and (last.point, last.commits) == (point, commits) else None

    # ---- offering: uses the page as it was read once, since a dying predecessor may still write to it

    def offer(self, slot: int) -> Page | None:
        """Describe the page of this process's slot, from which :meth:`states_at` reads, or return None."""
        self._offered = self._read(slot)[1]
        return _described(self._offered)

    def offer_orphaned(self, slot: int) -> tuple[OrphanedPage, ...]:
        """Describe the pages of other slots on this host whose processes are gone.

        Their replacements may be on another host.
        """
        pages = []
        for other in memory_room.slots_in_memory(self._memory, self._job):
            data, content = self._read(other, only_orphaned=True) if other != slot else (b"", Content(other))
            if (page := _described(content)) is not None:
                self.lent[other] = data
                pages.append(OrphanedPage(other, page))
        return tuple(pages)

    def borrow(self, slot: int, data: memoryview, whence: str) -> None:
        """Use another rank's copy of this slot's page instead of the page that was offered.

        Raises:
            StoreError: ``data`` is not a page, or belongs to another slot.
        """
        self._offered = decoded(data, self._job, slot, whence)

    def states_at(self, point: Point, commits: int) -> dict[str, Any]:
        """Return the generators' states at a commit, from the offered page.

        Raises:
            CheckpointError: the page has no such commit, or its content is not valid.
        """
        own = self._offered.commits
        for entry in reversed(own):
            if (entry.point, entry.commits) == (point, commits):
                return unpack(entry.state)
        if own and (own[-1].generation, own[-1].commits + 1) == (point.generation, commits):
            return unpack(self._offered.entries[-1].state)  # as they were before that commit's last collective
        raise CheckpointError(f"the page of the generators has nothing of {point}, commit {commits}")

    def _read(self, slot: int, *, only_orphaned: bool = False) -> tuple[bytes, Content]:
        page = self._page if self._page is not None and self._page.slot == slot else None
        try:
            data = read_page(self._memory, self._job, slot, only_orphaned=only_orphaned) if page is None else page.view
            return (b"", Content(slot)) if data is None else (bytes(data), decoded(data, self._job, slot, "the page"))
        except StoreError as error:
            log.warn(f"ignored the page with the generators of slot {slot}: {error}")
            return b"", Content(slot)

    def let_go(self) -> None:
        """Stop writing. The page remains until its room is removed."""
        if self._page is not None:
            self._page.let_go()
        self._page = self._last = None


def read_page(base: Path, job: str, slot: int, *, only_orphaned: bool = False) -> bytes | None:
    """Read the page of a slot.

    Return None if there is none, or if ``only_orphaned`` is set and a live process writes it.

    Raises:
        StoreError: the page is not private to this user.
    """
    path = room_path(base, job, slot) / PAGE
    with opened_room(base, path.parent) as room:
        descriptor = None if room is None else open_slot(room, path, os.O_RDONLY)
    if descriptor is None:
        return None
    try:
        with durable.disk_errors(path, "reading the page of the generators"):
            is_wanted = not only_orphaned or not memory_room.is_used(descriptor)
            return os.pread(descriptor, FILE_BYTES + 1, 0) if is_wanted else None
    finally:
        os.close(descriptor)


def decoded(data: bytes | memoryview, job: str, slot: int, whence: str) -> Content:
    """Decode the complete entries of a page. Entries whose hash does not match are left out.

    Raises:
        StoreError: ``data`` is not a page, or belongs to another job or slot; the message begins with ``whence``.
    """
    header, data, entries = _HEADER.pack(_MAGIC, job.encode(), slot), memoryview(data), {}
    if len(data) != FILE_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise StoreError(
            f"{whence}: these {len(data)} bytes are not a page of this version, which has {FILE_BYTES} bytes"
        )
    if data[: len(header)] != header:
        raise StoreError(f"{whence}: it is the page of another job or slot, expected slot {slot} of job {job}")
    for start in range(ENTRIES_AT, FILE_BYTES, ENTRY_BYTES):
        (size,) = _SIZE.unpack_from(data, start + _SEAL_BYTES)
        sized = data[start + _SEAL_BYTES :][: _SIZE.size + min(size, MAX_CONTENT_BYTES)]
        if xxhash.xxh3_128_digest(header + sized) == data[start : start + _SEAL_BYTES]:
            number, is_commit, point, *others = msgpack.unpackb(sized[_SIZE.size :])
            entries[number] = KeptGeneratorStates(is_commit, Point(*point), *others)
    return Content(slot, tuple(entries[number] for number in sorted(entries)), data[_COUNT_AT:][:8].cast("Q")[0])


def _described(content: Content) -> Page | None:
    """Describe a page for the scheduler, or return None if it has no commit."""
    commits = content.commits
    if not commits:
        return None
    last, kept = commits[-1], tuple(KeptCommit(entry.point, entry.commits) for entry in commits)
    collectives, draws_late = content.collectives - last.collectives, content.entries[-1].draws_late
    return Page(kept, last.generation, last.commits + 1, collectives, draws_late)


def _new_file(room: int, name: str) -> mmap.mmap:
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=room)
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)  # otherwise a full /dev/shm would raise SIGBUS during a step
        memory = mmap.mmap(descriptor, FILE_BYTES, flags=mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)  # a forked child must not write here
    return memory
