"""One point in memory that outlives its process: a plain file in /dev/shm, mapped, with a header that is flipped last.

::

    header (one page) | manifest.msgpack, and room for a longer one | data.safetensors, from a page's start on

The steps of filling it are: reserve, open, copy (the caller's), seal, hash. The bytes lie as they will lie on disk, so
that the writer streams them out unchanged. The header says what is true of them and carries a hash of itself, so a
kill at any instruction leaves a slot that is what its header says, or has no header. The data is hashed where it lies,
before it is written to disk or, if it is large, beside that.

A slot goes through three stages: open (no header: bytes are being copied), sealed (all bytes are there, unproven, good
only for the writer that hashes them at once), hashed (its manifest holds the digests: it may be found after a crash).

A file in /dev/shm counts as memory of the process that fills it, so room in the file system is not enough: how much
memory may be reserved is read from proc(5) and the control groups' files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from samebits.errors import CheckpointError, StoreError
from samebits.store import durable
from samebits.store.checkpoint.point_format import (
    MAX_MANIFEST_BYTES,
    Manifest,
    PointHeader,
    decode_manifest,
    encode_manifest,
)

HEADER_BYTES = mmap.PAGESIZE

_FIELDS = struct.Struct("<8sQQQQQ")
_MAGIC = b"\x93SBSLT\x01\n"
_DIGEST_BYTES = 16
_SPOKEN_BYTES = _FIELDS.size + _DIGEST_BYTES
_SILENT = bytes(_SPOKEN_BYTES)
_MANIFEST_SLACK_BYTES = 64 * 1024
_SHARE_OF_AVAILABLE = 0.8
_MADV_POPULATE_WRITE = 23  # madvise(2); Python has no name for it
_MAPPED_AT_ONCE = 16 * 1024 * 1024


class Stage(enum.IntEnum):
    """How far a slot's content is; a slot without any has no header."""

    SEALED = 1
    HASHED = 2


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot says of itself.

    Attributes:
        sequence: grows with every point of the slot's rank; the newer of two slots has the greater.
        stage: what may be done with it.
        manifest_bytes: of the manifest, which begins behind the header.
        data_offset, data_bytes: where the data file's bytes lie.
    """

    sequence: int
    stage: Stage
    manifest_bytes: int
    data_offset: int
    data_bytes: int

    def encode(self) -> bytes:
        """The bytes of the header, its own hash last."""
        sizes = (self.manifest_bytes, self.data_offset, self.data_bytes)
        fields = _FIELDS.pack(_MAGIC, self.sequence, self.stage, *sizes)
        return fields + xxhash.xxh3_128_digest(fields)


def decode_header(data: bytes, file_bytes: int) -> SlotHeader | None:
    """The header of a slot's file; None where it holds nothing.

    Raises:
        CheckpointError: these bytes were not written as a header, or say what the file cannot hold.
    """
    spoken = data[:_SPOKEN_BYTES]
    if not any(spoken):
        return None
    fields, digest = spoken[: _FIELDS.size], spoken[_FIELDS.size :]
    if len(spoken) < _SPOKEN_BYTES or digest != xxhash.xxh3_128_digest(fields):
        raise CheckpointError("its header is torn: the hash of it differs")
    magic, sequence, stage, manifest_bytes, data_offset, data_bytes = _FIELDS.unpack(fields)
    if magic != _MAGIC or stage not in set(Stage):
        raise CheckpointError("its header is of another format: it was made by another version of this program")
    is_in_order = HEADER_BYTES + manifest_bytes <= data_offset and data_offset + data_bytes <= file_bytes
    if not is_in_order or manifest_bytes > MAX_MANIFEST_BYTES or data_offset % HEADER_BYTES:
        raise CheckpointError(f"its header describes another file than this one of {file_bytes} bytes")
    return SlotHeader(sequence, Stage(stage), manifest_bytes, data_offset, data_bytes)


class BufferGoneError(StoreError):
    """Somebody removed the slot's file, or its folder, under the process that uses it; a room opened anew has both."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path}: was removed while it was in use (see who empties {path.parents[2]}; systemd-logind does at a "
            "user's last logout, unless RemoveIPC=no)"
        )


class MemoryBuffer:
    """A slot as its rank's trainer fills it; whoever has one holds the lock of the room it is in.

    Args:
        path: for messages, and for who looks for the point by name.
        directory: an open descriptor of the folder the file is in, checked to be this user's.
    """

    def __init__(self, path: Path, directory: int) -> None:
        self.path = path
        self._directory = directory
        self._memory: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._data_offset = 0

    def header(self) -> SlotHeader | None:
        """What it holds; None for nothing, and for what nobody can use."""
        descriptor = open_slot(self._directory, self.path, os.O_RDONLY)
        if descriptor is None:
            return None
        try:
            return read_header(descriptor)
        except CheckpointError:
            return None  # whoever looks for points says so; here it is a slot to be filled
        finally:
            os.close(descriptor)

    def needs_room(self, manifest_bytes: int, data_bytes: int) -> bool:
        """Whether a point of that size fits only into new memory."""
        if self._memory is None or self._data_offset < HEADER_BYTES + manifest_bytes:
            return True
        return self._data_offset + data_bytes > len(self._view)

    def reserve(self, manifest_bytes: int, data_bytes: int) -> bool:
        """Have room for a point of that size: whether it is mapped anew, so that views into it must be made anew.

        The old content is gone then; no view of it may be used any more. The memory it was in is taken over, also a
        predecessor's: to clear new memory takes several times as long as to fill it.

        Raises:
            BufferGoneError: its folder is gone.
            StoreError: there is not so much memory; what was reserved is given back.
        """
        if not self.needs_room(manifest_bytes, data_bytes):
            return False
        data_offset = HEADER_BYTES + _in_pages(manifest_bytes * 2 + _MANIFEST_SLACK_BYTES)
        size_bytes = data_offset + _in_pages(data_bytes)
        self.close()
        descriptor = open_slot(self._directory, self.path, os.O_RDWR)
        with durable.disk_errors(self.path, f"reserving {size_bytes} bytes of memory"):
            if descriptor is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                try:
                    descriptor = os.open(self.path.name, flags, durable.FILE_MODE, dir_fd=self._directory)
                except FileNotFoundError:
                    raise BufferGoneError(self.path) from None
            try:
                self._reserve(descriptor, size_bytes)
            except BaseException:
                self.discard()
                raise
            finally:
                os.close(descriptor)
        self._data_offset = data_offset
        return True

    def _reserve(self, descriptor: int, size_bytes: int) -> None:
        found = os.fstat(descriptor)
        missing_bytes, available = size_bytes - min(found.st_size, found.st_blocks * 512), available_bytes()
        if available is not None and missing_bytes > available * _SHARE_OF_AVAILABLE:
            raise StoreError(
                f"{self.path}: {missing_bytes} bytes of memory are needed and {available} are available (see `free` "
                "and the container's limit): the rest is left to the training"
            )
        os.pwrite(descriptor, _SILENT, 0)  # before the file is another one than its header says
        os.ftruncate(descriptor, size_bytes)
        os.posix_fallocate(descriptor, 0, size_bytes)  # else a full /dev/shm is a SIGBUS while copying
        self._memory = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED)
        if hasattr(mmap, "MADV_DONTFORK"):
            self._memory.madvise(mmap.MADV_DONTFORK)  # a child that is left over must not keep the memory
        _map_all(self._memory)
        self._view = memoryview(self._memory)

    def open(self) -> None:
        """From now on it holds nothing: bytes may be copied into :meth:`data`."""
        self._view[:_SPOKEN_BYTES] = _SILENT

    def data(self, data_bytes: int) -> memoryview:
        """Where the bytes of the data file belong, page-aligned."""
        return self._view[self._data_offset : self._data_offset + data_bytes]

    def seal(self, sequence: int, manifest: bytes, data_bytes: int, stage: Stage = Stage.SEALED) -> None:
        """All bytes are there. Before the slot is hashed the manifest has no digests.

        Raises:
            BufferGoneError: they are, in memory that has no name any more: no writer would find them.
        """
        self._view[HEADER_BYTES : HEADER_BYTES + len(manifest)] = manifest
        header = SlotHeader(sequence, stage, len(manifest), self._data_offset, data_bytes)
        self._view[:_SPOKEN_BYTES] = header.encode()
        with durable.disk_errors(self.path, "sealing the memory slot"):
            try:
                os.utime(self.path.name, dir_fd=self._directory)  # a store through a mapping changes no file time
            except FileNotFoundError:
                raise BufferGoneError(self.path) from None

    def discard(self) -> None:
        """Give the memory back. Who still has a view of it must not look at it again."""
        self.close()
        descriptor = open_slot(self._directory, self.path, os.O_WRONLY)
        if descriptor is None:
            return
        try:
            os.ftruncate(descriptor, 0)  # at once, also where a view is left
        finally:
            os.close(descriptor)
        os.unlink(self.path.name, dir_fd=self._directory)

    def close(self) -> None:
        """Let go of the mapping; it goes with the last view of it."""
        self._view = memoryview(b"")
        self._memory = None
        self._data_offset = 0


def open_slot(directory: int, path: Path, flags: int) -> int | None:
    """Open a slot's file in its folder, if it is a plain file of this user's that is nowhere else; None without one.

    Raises:
        StoreError: something else has its name.
    """
    with durable.disk_errors(path, "opening the memory slot"):
        try:
            descriptor = os.open(path.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
        except FileNotFoundError:
            return None
        found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        os.close(descriptor)
        raise StoreError(f"{path}: is no plain file of this user's alone; remove it")
    return descriptor


def read_header(descriptor: int) -> SlotHeader | None:
    """As :func:`decode_header`, of an open slot."""
    return decode_header(os.pread(descriptor, _SPOKEN_BYTES, 0), os.fstat(descriptor).st_size)


def read_manifest(descriptor: int, header: SlotHeader) -> bytes:
    """The bytes of an open slot's manifest."""
    return os.pread(descriptor, header.manifest_bytes, HEADER_BYTES)


def _map_all(memory: mmap.mmap) -> None:
    """Map every page now, not one by one while a step waits; in slices, because Python waits as well (mmap does not
    give its lock away).
    """
    with contextlib.suppress(OSError):  # before Linux 5.14
        for start in range(0, len(memory), _MAPPED_AT_ONCE):
            memory.madvise(_MADV_POPULATE_WRITE, start, min(_MAPPED_AT_ONCE, len(memory) - start))


def _in_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


BESIDE_BYTES = 1 << 30
"""From here on the hash, which takes a quarter of the time that writing does, is worth a thread beside that.

At 64 and 512 MiB that made a save durable no sooner, cost half as much processor again, and slowed the training down.
"""


@dataclass(frozen=True, slots=True)
class HashedPoint:
    """A point in memory and its hashes, or these as soon as they are known: the bytes of its two files.

    Attributes:
        header: whose it is.
        data: the data file.
    """

    header: PointHeader
    data: memoryview
    _manifest: Future[bytes]

    def manifest_data(self) -> bytes:
        """The manifest's file, as soon as the hashes are known.

        Raises:
            StoreError: the slot could not be marked.
        """
        return self._manifest.result()


@contextlib.contextmanager
def hashed(path: Path, directory: int, on_hashed: Callable[[], object] = lambda: None) -> Iterator[HashedPoint]:
    """Hash a sealed slot, unless that was done: before the block, or beside it, and then by its end.

    Args:
        path: of the slot, for messages.
        directory: an open descriptor of its folder.
        on_hashed: called, perhaps in a thread of its own, as soon as the slot says that it is.

    Raises:
        CheckpointError: nothing is sealed there, or it is not what was sealed.
    """
    descriptor = open_slot(directory, path, os.O_RDWR)
    if descriptor is None:
        raise CheckpointError(f"{path}: there is no such memory slot")
    try:
        header = read_header(descriptor)
        if header is None:
            raise CheckpointError(f"{path}: nothing is sealed in this memory slot")
        manifest_data = read_manifest(descriptor, header)
        manifest = decode_manifest(manifest_data)
        if manifest.data_bytes != header.data_bytes:
            raise CheckpointError(f"{path}: its header and its manifest are of two points")
        end = header.data_offset + header.data_bytes
        # Not closed here: an error on its way up may still hold a view, and the mapping goes with the last of them.
        memory = mmap.mmap(descriptor, end, mmap.MAP_SHARED, mmap.PROT_READ)
        data = memoryview(memory)[header.data_offset :]

        def hash_and_say() -> bytes:
            is_done = header.stage is Stage.HASHED
            encoded = manifest_data if is_done else _hash(descriptor, path, header, manifest, data)
            on_hashed()
            return encoded

        if len(data) < BESIDE_BYTES:
            hashes = Future[bytes]()
            hashes.set_result(hash_and_say())
            yield HashedPoint(manifest.header, data, hashes)
        else:
            with ThreadPoolExecutor(1, "samebits-hash") as beside:
                yield HashedPoint(manifest.header, data, beside.submit(hash_and_say))
    finally:
        os.close(descriptor)


def _hash(descriptor: int, path: Path, header: SlotHeader, manifest: Manifest, data: memoryview) -> bytes:
    size = manifest.chunk_bytes
    digests = [xxhash.xxh3_128_digest(data[start : start + size]) for start in range(0, len(data), size)]
    encoded = encode_manifest(dataclasses.replace(manifest, chunks=tuple(digests)))  # as long: digests are of one size
    with durable.disk_errors(path, "marking the memory slot as hashed"):
        os.pwrite(descriptor, encoded, HEADER_BYTES)
        os.pwrite(descriptor, dataclasses.replace(header, stage=Stage.HASHED).encode(), 0)
    return encoded


_RECLAIMABLE = ("inactive_file", "active_file")


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least of what the machine and this process's control groups (version 2) have left; None where none tells."""
    return min((left for left, _ in _rooms(proc, groups)), default=None)


def taken_share(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The greatest share that is taken of the machine's memory or of a limit of this process's control groups.

    None where nothing tells.
    """
    return max((max(0.0, 1 - left / limit) for left, limit in _rooms(proc, groups) if limit > 0), default=None)


def _rooms(proc: Path, groups: Path) -> list[tuple[int, int]]:
    """What is left and the limit, of the machine and of each control group that has one."""
    rooms = [_on_machine(proc)]
    with contextlib.suppress(OSError, ValueError):
        line = (proc / "self" / "cgroup").read_text().strip().rpartition("\n")[2]
        group = groups / line.removeprefix("0::").lstrip("/")
        while group != groups.parent:
            rooms.append(_in_group(group))
            group = group.parent
    return [one for one in rooms if one is not None]


def _on_machine(proc: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        found = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("MemTotal:", "MemAvailable:")}
        if "MemAvailable:" in found:
            return found["MemAvailable:"], found.get("MemTotal:", 0)
    return None


def _in_group(group: Path) -> tuple[int, int] | None:
    """None where there is no limit (``max``) or no such file."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + sum(int(counts[name]) for name in _RECLAIMABLE if name in counts), limit
    return None
