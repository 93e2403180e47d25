"""The memory slots of one rank, at most two, and the points found in them after a crash.

::

  /dev/shm/samebits-<uid>/<job>/<slot>/{a,b}         the points that the rank of this slot saves on this host
  /dev/shm/samebits-<uid>/<job>/<slot>/page          the states of its random number generators (``kept_generators``)
  /dev/shm/samebits-<uid>/<job>/<slot>.copy/{a,b}    copies of points that it saved on another host
  /dev/shm/samebits-<uid>/<job>/<slot>.commit/{a,b}  its newest commits, if its state is sharded (``shard_copies``)

``memory_buffer`` defines the content of a slot. Every user can write to /dev/shm, so only entries that belong to this
user alone are used, and they are checked on open descriptors, since a name could be replaced between check and use. The
kernel's lock on the folder shows whether a live process uses it, so that leftovers of finished jobs can be removed.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import re
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from samebits.core.point import Point
from samebits.errors import CheckpointError, LockedError, StoreError
from samebits.store import durable
from samebits.store.checkpoint.folder import FoundPoint
from samebits.store.checkpoint.memory_buffer import (
    BufferStage,
    MemoryBuffer,
    hashed,
    open_slot,
    read_header,
    read_manifest,
)
from samebits.store.checkpoint.point_format import decode_manifest
from samebits.store.lock import ENDING_POLL_S, ENDS_WITHIN_S
from samebits.store.process_identity import lock_holder

SHARED_MEMORY = Path("/dev/shm")
NAMES = ("a", "b")
PAGE = "page"
SWEPT_AFTER_S = 3600.0
"""How long another job's slots must be untouched and unlocked before a job of the same user frees them."""

_JOB = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}", re.ASCII)
_MOST_SWEPT = 256
_ATTEMPTS = 8


class _Worth(enum.IntEnum):
    """What is lost if a slot is filled, in rising order; new memory is worth less than a point that is nowhere else."""

    NOTHING = 0
    UNWANTED = 1
    ON_DISK = 2
    NEW_MEMORY = 3
    NEEDED = 4


def _none(_point: Point) -> bool:
    """Select no point."""
    return False


class RoomKind(enum.Enum):
    """The content of a room's slots; the value is the suffix of its folder's name."""

    SAVED = ""  # the points that the rank saves; its writer hashes them and writes them to disk
    COPIED = ".copy"  # points that another rank has saved
    COMMITTED = ".commit"  # the rank's newest commits; not hashed until they are read

    @property
    def usable_from(self) -> BufferStage:
        """The earliest stage at which a slot's content counts as a point.

        A commit only has to outlive its process, and memory that a killed process filled and sealed is complete.
        """
        return BufferStage.SEALED if self is RoomKind.COMMITTED else BufferStage.HASHED


class MemoryRoom:
    """The memory slots of one rank of one job on this host.

    They are locked for this process and for processes that inherit the lock.

    Args:
        base: a folder in memory; ``SHARED_MEMORY`` except in tests.
        job: id of the points' job.
        slot: the points' slot.
        kind: the content of the memory slots.

    Raises:
        LockedError: another live process uses the memory slots.
        StoreError: there is no such folder, or something in it does not belong to this user alone.
    """

    def __init__(self, base: Path, job: str, slot: int, *, kind: RoomKind = RoomKind.SAVED) -> None:
        self.path = room_path(base, job, slot, kind=kind)
        self._base, self._job, self._rank_slot, self._kind = base, job, slot, kind
        self.descriptor = _lock(base, self.path)
        self._slots = [MemoryBuffer(self.path / name, self.descriptor) for name in NAMES]
        try:
            headers = [slot.header() for slot in self._slots]
        except StoreError:
            self.let_go()
            raise
        self.sequence = max((header.sequence for header in headers if header is not None), default=0)
        self._points: dict[int, Point] = {}  # points sealed by this object, by sequence
        let_go_in_children(self)

    def next_slot(
        self, is_unwanted: Callable[[Point], bool] = _none, is_on_disk: Callable[[Point], bool] = _none
    ) -> MemoryBuffer:
        """Return the slot to fill.

        It is an unusable slot if there is one, else one whose point is unwanted, else the older one. A point that is
        also on disk need not stay in memory, so its slot is filled before memory is taken for another slot.
        """

        def worth(slot: MemoryBuffer) -> tuple[_Worth, int]:
            header, point = slot.header(), self._point_of(slot)
            if header is None or point is None:
                return (_Worth.NOTHING if slot.is_reserved else _Worth.NEW_MEMORY), 0
            if is_unwanted(point):
                return _Worth.UNWANTED, header.sequence
            return (_Worth.ON_DISK if is_on_disk(point) else _Worth.NEEDED), header.sequence

        return min(self._slots, key=worth)

    def empty_slots(self) -> list[MemoryBuffer]:
        """Return the slots without usable content."""
        return [slot for slot in self._slots if slot.header() is None]

    def seal(
        self,
        slot: MemoryBuffer,
        point: Point,
        manifest: bytes,
        data_bytes: int,
        stage: BufferStage = BufferStage.SEALED,
    ) -> int:
        """Mark all bytes of the slot's point as present; return its sequence number.

        Args:
            slot: a filled slot of this room.
            point: the point in it.
            manifest: the manifest's bytes; if ``stage`` is ``HASHED``, they include the digests of the verified data.
            data_bytes: the size of the data file.
            stage: the slot's new stage.
        """
        self.sequence += 1
        self._points[self.sequence] = point
        self._points.pop(self.sequence - len(NAMES), None)
        slot.seal(self.sequence, manifest, data_bytes, stage)
        return self.sequence

    def points(self) -> list[FoundPoint]:
        """Return the usable points; their data is not verified yet."""
        found = []
        for slot in self._slots:
            with contextlib.suppress(StoreError):  # reported by :func:`points_in_memory`
                one = _inspect(self.descriptor, slot.path, self._job, self._rank_slot, self._kind)
                found += [] if one is None else [one]
        return found

    def forget(self, is_unwanted: Callable[[Point], bool]) -> None:
        """Empty the slots whose point is unwanted; call it only when no save is in progress."""
        for slot in self._slots:
            point = self._point_of(slot)
            if point is not None and is_unwanted(point):
                slot.discard()

    def _point_of(self, slot: MemoryBuffer) -> Point | None:
        """Return the slot's point if training can resume from it.

        If this process sealed the point, its manifest is not read, because a training step waits.
        """
        header = slot.header()
        if header is None or header.stage < self._kind.usable_from:
            return None
        if header.sequence in self._points:
            return self._points[header.sequence]
        try:
            found = _inspect(self.descriptor, slot.path, self._job, self._rank_slot, self._kind)
        except CheckpointError:
            return None
        return None if found is None else found.point

    @property
    def size_bytes(self) -> int:
        """Return the bytes of memory that the slots use."""
        return _bytes_in(self.descriptor)

    def hash(self, point: Point) -> FoundPoint:
        """Return a point of this room, hashing it now if necessary.

        Read the point before its slot is refilled.

        Raises:
            CheckpointError: the room does not hold the point.
        """
        for slot in self._slots:
            if self._point_of(slot) == point:
                with hashed(slot.path, self.descriptor):
                    pass
                found = _inspect(self.descriptor, slot.path, self._job, self._rank_slot, self._kind)
                if found is not None and found.point == point:
                    return found
        raise CheckpointError(f"{self.path}: {point} is gone")

    def close(self) -> None:
        """Close the slots; their content stays."""
        for slot in self._slots:
            slot.close()
        self.let_go()

    def let_go(self) -> None:
        """Close only this process's copy of the lock, as a forked child does."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def room_path(base: Path, job: str, slot: int, *, kind: RoomKind = RoomKind.SAVED) -> Path:
    """Return the folder that holds one rank's memory slots of this kind."""
    if not _JOB.fullmatch(job):
        raise StoreError(f"job {job!r}: expected a name of letters, digits, '-' and '_', as schedulers choose it")
    return base / f"samebits-{os.geteuid()}" / job / f"{slot}{kind.value}"


def copied_slots(base: Path, job: str) -> list[int]:
    """Return the slots of which any process stores copies on this host."""
    return slots_in_memory(base, job, RoomKind.COPIED)


def slots_in_memory(base: Path, job: str, kind: RoomKind = RoomKind.SAVED) -> list[int]:
    """Return the slots that have a room of this kind on this host."""
    names: list[str] = []
    with contextlib.suppress(OSError):  # nothing is kept here, or it belongs to another user
        names = [entry.name for entry in room_path(base, job, 0).parent.iterdir()]
    rooms = [_slot_and_kind(name) for name in names]
    return sorted(room[0] for room in rooms if room is not None and room[1] is kind)


def _slot_and_kind(name: str) -> tuple[int, RoomKind] | None:
    """Return the slot and kind in a room's name; None for other names."""
    number, dot, rest = name.partition(".")
    kinds = [kind for kind in RoomKind if kind.value == dot + rest]
    return (int(number), kinds[0]) if number.isdecimal() and kinds else None


def points_in_memory(
    base: Path, job: str, slot: int, *, kind: RoomKind = RoomKind.SAVED
) -> tuple[list[FoundPoint], list[str]]:
    """Return a rank's usable points in memory, newest first, and the problems found.

    There is a sentence for each unusable slot. A slot that was being filled when its process died is empty and not
    reported.
    """
    path = room_path(base, job, slot, kind=kind)
    points: list[FoundPoint] = []
    problems: list[str] = []
    try:
        with opened_room(base, path) as room:
            if room is None:
                return [], []
            for name in NAMES:
                try:
                    found = _inspect(room, path / name, job, slot, kind)
                except StoreError as error:
                    text = str(error)
                    problems.append(text if text.startswith(str(path)) else f"{path / name}: {text}")
                else:
                    points += [] if found is None else [found]
    except StoreError as error:
        problems.append(str(error))
    return sorted(points, key=lambda found: found.point, reverse=True), problems


@dataclass(frozen=True, slots=True)
class RoomInUse:
    """A folder of memory slots, with its size and whether a live process uses it."""

    path: Path
    size_bytes: int
    is_locked: bool


def rooms_of(base: Path, job: str) -> list[RoomInUse]:
    """Return all rooms of a job on this host, including copies of other hosts' points."""
    above = room_path(base, job, 0).parent
    found = []
    with contextlib.suppress(OSError):  # nothing is kept here
        for path in sorted(above.iterdir()):
            if _slot_and_kind(path.name) is None:
                continue
            with contextlib.suppress(StoreError), opened_room(base, path) as room:  # another user's memory is left out
                if room is not None:
                    found.append(RoomInUse(path, _bytes_in(room), is_locked(room)))
    return found


def newest_in_memory(base: Path, job: str) -> Point | None:
    """Return the newest hashed point of any rank of the job in this host's memory; None if there is none."""
    rooms = [_slot_and_kind(room.path.name) for room in rooms_of(base, job)]
    points = [points_in_memory(base, job, room[0], kind=room[1])[0] for room in rooms if room is not None]
    return max((found.point for each in points for found in each), default=None)


def free_rooms(base: Path, job: str) -> list[Path]:
    """Free all rooms of the job that no live process uses, and return their paths."""
    return [room.path for room in rooms_of(base, job) if _remove(base, room.path, lambda descriptor: True)]


def _bytes_in(descriptor: int) -> int:
    """Return the memory that the room's slots use (stat(2): blocks have 512 bytes)."""
    total = 0
    for name in NAMES:
        with contextlib.suppress(FileNotFoundError):
            total += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks * 512
    return total


def is_being_hashed(base: Path, job: str, slot: int) -> bool:
    """Return whether a live process is hashing a sealed point, which will soon be usable."""
    path = room_path(base, job, slot)
    with contextlib.suppress(StoreError), opened_room(base, path) as room:
        return room is not None and is_locked(room) and any(_is_sealed(room, path / name) for name in NAMES)
    return False


def remove_room(base: Path, job: str, slot: int, *, kind: RoomKind = RoomKind.SAVED) -> bool:
    """Free a rank's slots unless a live process uses them; return whether they are gone."""
    return _remove(base, room_path(base, job, slot, kind=kind), lambda descriptor: True)


def sweep(base: Path, job: str, now_s: float | None = None) -> list[Path]:
    """Remove unlocked rooms of this user's other jobs that were not filled for an hour.

    Args:
        base: as for :class:`MemoryRoom`.
        job: the job whose slots are kept.
        now_s: the current time, in seconds since 1970.

    Returns:
        The paths of the removed rooms.
    """
    before_s = (time.time() if now_s is None else now_s) - SWEPT_AFTER_S
    rooms = _rooms_of_others(base, job)
    return [path for path in rooms if _remove(base, path, lambda room: _newest_change_s(room) <= before_s)]


def _remove(base: Path, path: Path, may_go: Callable[[int], bool]) -> bool:
    with contextlib.ExitStack() as opened:
        try:
            room = opened.enter_context(opened_room(base, path))
        except StoreError:
            return False  # not this user's memory
        if room is None or not may_go(room) or not try_lock(room):
            return False
        for name in NAMES:
            MemoryBuffer(path / name, room).discard()
        if not _is_page_held(room):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(PAGE, dir_fd=room)
    with contextlib.suppress(OSError):  # other ranks of the job have slots, or there are other files
        path.rmdir()
        path.parent.rmdir()
    return True


def _inspect(descriptor: int, path: Path, job: str, slot: int, kind: RoomKind) -> FoundPoint | None:
    """Return the point of one slot; it must be hashed, or sealed in a room of commits.

    Raises:
        CheckpointError: the content cannot be used.
    """
    opened = open_slot(descriptor, path, os.O_RDONLY)
    if opened is None:
        return None
    try:
        header = read_header(opened)
        if header is None:
            return None
        manifest = decode_manifest(read_manifest(opened, header))
        if header.stage < kind.usable_from:
            raise CheckpointError(f"of {manifest.header.point}: its writer died before hashing it")
    finally:
        os.close(opened)
    whose = manifest.header
    if (whose.job, whose.slot) != (job, slot) or manifest.data_bytes != header.data_bytes:
        raise CheckpointError(f"its manifest is that of slot {whose.slot} of job {whose.job}, {whose.point}")
    return FoundPoint(path, whose.point, manifest, None, header.data_offset)


def _is_sealed(descriptor: int, path: Path) -> bool:
    header = MemoryBuffer(path, descriptor).header()
    return header is not None and header.stage is BufferStage.SEALED


def _rooms_of_others(base: Path, job: str) -> list[Path]:
    ours = room_path(base, job, 0).parent.parent
    found: list[Path] = []
    with contextlib.suppress(OSError):  # whatever cannot be listed stays
        for entry in ours.iterdir():
            if entry.name != job and _JOB.fullmatch(entry.name):
                found += [room for room in entry.iterdir() if _slot_and_kind(room.name) is not None]
    return found[:_MOST_SWEPT]


def _newest_change_s(descriptor: int) -> float:
    changes = [os.fstat(descriptor).st_mtime]
    for name in (*NAMES, PAGE):
        with contextlib.suppress(FileNotFoundError):
            changes.append(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mtime)
    return max(changes)


def _lock(base: Path, path: Path) -> int:
    """Open and lock the room's folder; create it if missing."""
    for _ in range(_ATTEMPTS):
        descriptor = open_room(base, path)
        if descriptor is None:
            continue  # another job's sweep has just removed it
        if not _lock_once_free(descriptor):
            os.close(descriptor)
            raise LockedError(
                f"{path}: another running process is using the memory slots of this rank. Fix: stop that process first"
            )
        if os.fstat(descriptor).st_nlink > 0:
            return descriptor
        os.close(descriptor)
    raise StoreError(f"{path} is removed each time it is created. Fix: find out what else writes below {base}")


@contextlib.contextmanager
def opened_room(base: Path, path: Path, *, make: bool = False) -> Iterator[int | None]:
    """Open a room for the block, as :func:`open_room` does."""
    room = open_room(base, path, make=make)
    try:
        yield room
    finally:
        if room is not None:
            os.close(room)


def open_room(base: Path, path: Path, *, make: bool = True) -> int | None:
    """Open a room level by level; None if it is missing or was just removed.

    Raises:
        StoreError: a level does not belong to this user alone.
    """
    with durable.disk_errors(base, "opening the shared memory"):
        above = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in path.relative_to(base).parts:
        try:
            level = _open_level(above, name, path, make=make)
        finally:
            os.close(above)
        if level is None:
            return None
        above = level
    return above


def _open_level(above: int, name: str, path: Path, *, make: bool) -> int | None:
    with durable.disk_errors(path, "opening the memory slots"):
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, durable.DIRECTORY_MODE, dir_fd=above)
        try:
            level = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        except FileNotFoundError:
            return None
    found = os.fstat(level)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(level)
        raise StoreError(
            f"{path}: the entry {name} does not belong to this user alone (see `ls -ld`). Fix: remove {name}"
        )
    return level


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder for this process; return whether that succeeded."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_once_free(descriptor: int) -> bool:
    """Lock an open folder for this process; return False if another live process uses it.

    A process that the kernel is ending is awaited: its connections may be closed long before its locks, so that its
    replacement is here first.
    """
    deadline_s, unseen = time.monotonic() + ENDS_WITHIN_S, 0
    while not try_lock(descriptor):
        holder = lock_holder(os.fstat(descriptor))
        unseen += holder is None  # just released, or locked for a moment by :func:`is_locked`
        is_alive = holder is not None and not holder.is_ending()
        if is_alive or unseen > _ATTEMPTS or time.monotonic() > deadline_s:
            return try_lock(descriptor)
        time.sleep(ENDING_POLL_S)
    return True


def _is_page_held(room: int) -> bool:
    """Return whether a live process holds the page of an open room."""
    try:
        page = os.open(PAGE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=room)
    except OSError:
        return False  # there is no page, or it cannot be opened
    try:
        return is_locked(page)
    finally:
        os.close(page)


def is_locked(descriptor: int) -> bool:
    """Return whether another process holds the lock.

    The test takes a shared lock, which is released when the descriptor is closed.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def is_used(descriptor: int) -> bool:
    """Return whether a process holds the lock that the kernel is not ending."""
    if not is_locked(descriptor):
        return False
    holder = lock_holder(os.fstat(descriptor))
    return holder is None or not holder.is_ending()


class _Holder(Protocol):
    def let_go(self) -> None:
        """Close the descriptor that holds the lock."""


_holders: weakref.WeakSet[_Holder] = weakref.WeakSet()


def let_go_in_children(holder: _Holder) -> None:
    """Make forked children close the holder's lock, so that only this process holds it."""
    _holders.add(holder)


def _let_go_in_child() -> None:
    for holder in list(_holders):
        holder.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
