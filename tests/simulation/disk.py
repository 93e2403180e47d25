"""An in-memory file system that crashes as badly as fsync(2) allows, below the real code of ``samebits.store``.

It models files, names, the page cache, and the calls of ``os`` and ``pathlib`` that the journal makes. At every call
that changes something the process may die before, inside or after it, or the device may refuse it. A killed process
leaves what it wrote in the page cache. Power loss leaves of unsynced content any prefix, torn at any byte, possibly at
its full length with a hole in it; of unsynced names, any prefix of their changes.
"""

from __future__ import annotations

import errno
import io
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from samebits.store import durable, journal
from samebits.store.etcd import etcd_journal

SECTOR_BYTES = 512
ABOVE = ".."  # the folder's own folder: it exists, and nothing ever happens to it

_Names = dict[str, "File"]


class Killed(BaseException):
    """The process ended inside a disk call: nothing after it happens, not even cleanup."""


@dataclass(slots=True, eq=False)
class File:
    """One file: its visible content, its content on the device, and the changes in between."""

    cached: bytearray = field(default_factory=bytearray)
    synced: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes]] = field(default_factory=list)  # (offset, bytes); no bytes: cut at offset

    def write(self, offset: int, data: bytes) -> None:
        _change(self.cached, offset, data)
        self.unsynced.append((offset, data))

    def sync(self) -> None:
        for offset, data in self.unsynced:
            _change(self.synced, offset, data)
        self.unsynced.clear()

    def forget(self) -> None:
        """An fsync has failed: the kernel drops the changes and will not try again."""
        self.unsynced.clear()

    def lose_power(self, rng: random.Random) -> None:
        kept = self.unsynced[: rng.randint(0, len(self.unsynced))]
        for offset, data in kept[:-1]:
            _change(self.synced, offset, data)
        for offset, data in kept[-1:]:
            _change(self.synced, offset, _torn(data, rng))
        self.unsynced.clear()
        self.cached = bytearray(self.synced)


def _change(content: bytearray, offset: int, data: bytes) -> None:
    if not data:
        del content[offset:]
        return
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _torn(data: bytes, rng: random.Random) -> bytes:
    """Return all of the bytes, or the first of them, or all but some of the blocks."""
    match rng.randrange(4 if data else 1):
        case 0:
            return data
        case 1:
            return data[: rng.randint(1, len(data))]
        case 2:
            whole = rng.randint(0, len(data))
            return data[:whole] + bytes(len(data) - whole)
        case _:
            hole = rng.randrange(0, len(data), SECTOR_BYTES)
            size = min(SECTOR_BYTES, len(data) - hole)
            return data[:hole] + rng.randbytes(size) + data[hole + size :]


class Disk:
    """One machine's disk with one folder on it, and the faults of its next calls."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._names: _Names = {}
        self._synced_names: _Names = {}
        self._unsynced_names: list[Callable[[_Names], None]] = []
        self._open: dict[int, File | None] = {}  # by descriptor; None: the folder
        self._above = File()
        self._descriptors = 2
        self._fuse: int | None = None  # how many calls until one dies
        self._fuse_error = 0  # the error it fails with; 0: the process dies
        self._is_dead = False
        self.watch_change: list[Callable[[], None]] = []
        self.folder = MemoryPath(self, "")
        self.os = MemoryOs(self)

    # ---- faults

    def light_fuse(self, calls: int, error: int = 0) -> None:
        """Let the process die in the n-th next call that changes the disk, or let that call fail with ``error``."""
        self._fuse, self._fuse_error = calls, error

    def put_out_fuse(self) -> None:
        """Cancel the fault."""
        self._fuse = None

    def begin_process(self) -> None:
        """A new process uses the disk; what the last one had open is closed."""
        self._open.clear()
        self._fuse, self._is_dead = None, False

    def lose_power(self) -> None:
        """The machine loses power."""
        for change in self._unsynced_names[: self._rng.randint(0, len(self._unsynced_names))]:
            change(self._synced_names)
        self._unsynced_names.clear()
        self._names = dict(self._synced_names)
        for file in dict.fromkeys(self._names.values()):
            file.lose_power(self._rng)

    def wipe(self) -> None:
        """Delete everything in the folder."""
        self._names, self._synced_names = {}, {}
        self._unsynced_names.clear()

    def names(self) -> list[str]:
        """Return the names in the folder."""
        return list(self._names)

    def file(self, name: str) -> File | None:
        """Return the file of this name."""
        return self._names.get(name)

    def mounted(self) -> Mounted:
        """Within the block the code of ``samebits.store`` works on this disk."""
        return Mounted(self.os)

    # ---- calls that change something

    def change(self, happen: Callable[[], None], half: Callable[[], None] | None = None) -> None:
        """Apply one such call; if it is the process's last, all, half or none of it."""
        if self._is_dead:
            raise Killed
        for watch in self.watch_change:
            watch()
        if self._fuse is None:
            happen()
            return
        self._fuse -= 1
        if self._fuse >= 0:
            happen()
            return
        self._fuse = None
        self._is_dead = self._fuse_error == 0
        drawn = self._rng.randrange(3)
        if drawn == 0 and self._is_dead:
            happen()
        elif drawn == 1 and half is not None:
            half()
        if self._is_dead:
            raise Killed
        raise OSError(self._fuse_error, os.strerror(self._fuse_error))

    def name_changes(self, happen: Callable[[_Names], None]) -> None:
        """A creation, a rename or a removal."""

        def both() -> None:
            happen(self._names)
            self._unsynced_names.append(happen)

        self.change(both)

    def open(self, name: str, flags: int) -> int:
        """Return a descriptor; writing is always at the end, as the journal overwrites no open file."""
        if name not in ("", ABOVE) and name not in self._names:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            file = File()
            self.name_changes(lambda names: names.__setitem__(name, file))
        if self._is_dead:
            raise Killed
        self._descriptors += 1
        self._open[self._descriptors] = self._above if name == ABOVE else self._names.get(name)
        return self._descriptors

    def randbytes(self, size: int) -> bytes:
        """The machine's random numbers."""
        return self._rng.randbytes(size)

    def write(self, descriptor: int, view: memoryview) -> int:
        """Append to the file."""
        file = self._open[descriptor]
        assert file is not None
        data, end = bytes(view), len(file.cached)
        self.change(lambda: file.write(end, data), lambda: file.write(end, data[: self._rng.randint(1, len(data))]))
        return len(data)

    def cut(self, descriptor: int, length: int) -> None:
        """ftruncate to a shorter length."""
        file = self._open[descriptor]
        assert file is not None and length <= len(file.cached)
        if length < len(file.cached):
            self.change(lambda: file.write(length, b""))

    def fsync(self, descriptor: int) -> None:
        """Sync a file's bytes or the folder's names."""
        file = self._open[descriptor]
        if file is None:
            self.change(self._sync_names)
            return
        try:
            self.change(file.sync)
        except OSError:
            file.forget()
            raise

    def _sync_names(self) -> None:
        self._synced_names = dict(self._names)
        self._unsynced_names.clear()

    def close(self, descriptor: int) -> None:
        """Closing twice is an error, as on a real system."""
        if not self._is_dead:
            del self._open[descriptor]


class Mounted:
    """Puts a disk's ``os`` into the modules that write the journal, and restores them."""

    MODULES: tuple[Any, ...] = (journal, durable, etcd_journal)

    def __init__(self, memory_os: MemoryOs) -> None:
        self._os = memory_os

    def __enter__(self) -> None:
        self._before = [module.os for module in self.MODULES]
        for module in self.MODULES:
            module.os = self._os

    def __exit__(self, *_: object) -> None:
        for module, its_os in zip(self.MODULES, self._before, strict=True):
            module.os = its_os


class MemoryOs:
    """The part of ``os`` that the journal uses, on a disk in memory."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.write, self.fsync, self.ftruncate, self.close = disk.write, disk.fsync, disk.cut, disk.close

    def __getattr__(self, name: str) -> Any:
        if not name.isupper():
            raise AttributeError(f"os.{name} is not simulated: the store has begun to use it")
        return getattr(os, name)  # a constant

    @staticmethod
    def access(path: MemoryPath, mode: int) -> bool:
        return True

    @staticmethod
    def strerror(number: int) -> str:
        return os.strerror(number)

    @staticmethod
    def getpid() -> int:
        return 1

    def urandom(self, size: int) -> bytes:
        return self._disk.randbytes(size)

    def open(self, path: MemoryPath, flags: int, mode: int = 0o600) -> int | MemoryFile:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY):
            return self._disk.open(path.name, flags)
        return path.open("rb")

    @staticmethod
    def fdopen(file: MemoryFile, mode: str) -> MemoryFile:
        return file

    @staticmethod
    def fstat(file: MemoryFile) -> MemoryFile:
        return file


class MemoryFile(io.BytesIO):
    """A file that is open for reading."""

    st_mode = stat.S_IFREG

    def fileno(self) -> MemoryFile:  # type: ignore[override]
        return self

    @property
    def st_size(self) -> int:
        return len(self.getbuffer())


class MemoryPath:
    """The part of ``pathlib.Path`` that the journal uses; the folder itself has the empty name."""

    def __init__(self, disk: Disk, name: str) -> None:
        self._disk = disk
        self.name = name

    def __str__(self) -> str:
        return f"recovery/{self.name}"

    @property
    def parent(self) -> MemoryPath:
        return self._disk.folder if self.name else MemoryPath(self._disk, ABOVE)

    @property
    def parents(self) -> tuple[MemoryPath, ...]:
        return ()

    def __truediv__(self, name: str) -> MemoryPath:
        return MemoryPath(self._disk, name)

    def with_name(self, name: str) -> MemoryPath:
        return MemoryPath(self._disk, name)

    def exists(self) -> bool:
        return not self.name or self._disk.file(self.name) is not None

    def is_dir(self) -> bool:
        return not self.name

    def iterdir(self) -> Iterator[MemoryPath]:
        return (MemoryPath(self._disk, name) for name in self._disk.names())

    def open(self, mode: str) -> MemoryFile:
        file = self._disk.file(self.name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name)
        return MemoryFile(file.cached)

    def rename(self, target: MemoryPath) -> None:
        name, new = self.name, target.name
        self._disk.name_changes(lambda names: names.__setitem__(new, names.pop(name)))

    def unlink(self, missing_ok: bool = False) -> None:
        name = self.name
        if self._disk.file(name) is not None or not missing_ok:
            self._disk.name_changes(lambda names: names.pop(name) and None)
