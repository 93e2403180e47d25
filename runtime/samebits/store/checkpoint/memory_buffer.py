"""A memory slot: one point in a mapped file in /dev/shm, which survives its process.

::

  header (one page) | manifest.msgpack, and room for a longer one | data.safetensors, from a page's start on

To fill a slot: reserve, open, copy (by the caller), seal, hash. The bytes have the layout of the files on disk, so the
writer writes them out unchanged. The header states which bytes are valid, is written last, and contains its own hash.
So a kill at any instruction leaves a slot that matches its header or has no header. The data is hashed in place, before
it is written to disk or, if it is large, at the same time.

A slot has three stages. Open: there is no header, and bytes are being copied. Sealed: all bytes are present but not
hashed; only the writer, which hashes them next, may use them. Hashed: the manifest has the digests, and the point can
be found after a crash.

The kernel charges a file in /dev/shm to the process that fills it, so free space in the file system is not enough. The
amount of memory that may be reserved is read from proc(5) and the control groups' files.
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


class BufferStage(enum.IntEnum):
    """The stage of a slot's content; an empty slot has no header."""

    SEALED = 1
    HASHED = 2


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The header of a slot.

    Attributes:
        sequence: increases with every point of the rank, so the newer of two slots has the greater number.
        stage: determines how the content may be used.
        manifest_bytes: the size of the manifest, which follows the header.
        data_offset: where the data file's bytes begin.
        data_bytes: size of the data file.
    """

    sequence: int
    stage: BufferStage
    manifest_bytes: int
    data_offset: int
    data_bytes: int

    def encode(self) -> bytes:
        """Return the bytes of the header, which end with their own hash."""
        sizes = (self.manifest_bytes, self.data_offset, self.data_bytes)
        fields = _FIELDS.pack(_MAGIC, self.sequence, self.stage, *sizes)
        return fields + xxhash.xxh3_128_digest(fields)


def decode_header(data: bytes, file_bytes: int) -> SlotHeader | None:
    """Decode the header of a slot's file; None if the slot is empty.

    Raises:
        CheckpointError: the bytes are not a valid header, or describe more than the file can hold.
    """
    spoken = data[:_SPOKEN_BYTES]
    if not any(spoken):
        return None
    fields, digest = spoken[: _FIELDS.size], spoken[_FIELDS.size :]
    if len(spoken) < _SPOKEN_BYTES or digest != xxhash.xxh3_128_digest(fields):
        raise CheckpointError("its header is torn: its hash differs")
    magic, sequence, stage, manifest_bytes, data_offset, data_bytes = _FIELDS.unpack(fields)
    if magic != _MAGIC or stage not in set(BufferStage):
        raise CheckpointError("its header has the format of another version of this program")
    is_in_order = HEADER_BYTES + manifest_bytes <= data_offset and data_offset + data_bytes <= file_bytes
    if not is_in_order or manifest_bytes > MAX_MANIFEST_BYTES or data_offset % HEADER_BYTES:
        raise CheckpointError(f"its header does not describe this file of {file_bytes} bytes")
    return SlotHeader(sequence, BufferStage(stage), manifest_bytes, data_offset, data_bytes)


class BufferGoneError(StoreError):
    """The slot's file or its folder was removed while in use; opening the room again creates both."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} was removed while in use (see what empties {path.parents[2]}; systemd-logind does at a "
            "user's last logout, unless RemoveIPC=no)"
        )


class MemoryBuffer:
    """A slot that its rank's trainer fills; the caller holds the lock of its room.

    Args:
        path: the slot's file, for messages and for finding the point by name.
        directory: an open descriptor of the file's folder, already checked to belong to this user.
    """

    def __init__(self, path: Path, directory: int) -> None:
        self.path = path
        self._directory = directory
        self._memory: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._data_offset = 0

    def header(self) -> SlotHeader | None:
        """Return the slot's header; None if the slot is empty or its content cannot be used."""
        descriptor = open_slot(self._directory, self.path, os.O_RDONLY)
        if descriptor is None:
            return None
        try:
            return read_header(descriptor)
        except CheckpointError:
            return None  # reported when points are listed; here the slot only needs to be filled
        finally:
            os.close(descriptor)

    @property
    def is_reserved(self) -> bool:
        """Whether the slot's file has memory, mapped here or left by an earlier process."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(self.path.name, dir_fd=self._directory, follow_symlinks=False).st_blocks > 0
        return False

    def needs_room(self, manifest_bytes: int, data_bytes: int) -> bool:
        """Return whether a point of this size needs new memory."""
        if self._memory is None or self._data_offset < HEADER_BYTES + manifest_bytes:
            return True
        return self._data_offset + data_bytes > len(self._view)

    def reserve(self, manifest_bytes: int, data_bytes: int) -> bool:
        """Reserve memory for a point of this size; return whether it was remapped.

        If so, the old content is gone and all views must be recreated. Existing memory is reused, even that of an
        earlier process, because the kernel takes several times as long to clear new memory as it takes to fill it.

        Raises:
            BufferGoneError: the slot's folder is gone.
            StoreError: there is not enough memory; the reservation is released.
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
                f"{self.path}: a copy needs {missing_bytes} bytes of memory, too many of the {available} that are "
                "available (see `free` and the container's limit)"
            )
        os.pwrite(descriptor, _SILENT, 0)  # clear the header before the file changes
        os.ftruncate(descriptor, size_bytes)
        os.posix_fallocate(descriptor, 0, size_bytes)  # otherwise a full /dev/shm raises SIGBUS while copying
        self._memory = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED)
        if hasattr(mmap, "MADV_DONTFORK"):
            self._memory.madvise(mmap.MADV_DONTFORK)  # an orphaned child must not keep the memory
        _map_all(self._memory)
        self._view = memoryview(self._memory)

    def open(self) -> None:
        """Mark the slot as empty, so that bytes may be copied into :meth:`data`."""
        self._view[:_SPOKEN_BYTES] = _SILENT

    def data(self, data_bytes: int) -> memoryview:
        """Return the page-aligned view for the data file's bytes."""
        return self._view[self._data_offset : self._data_offset + data_bytes]

    def seal(self, sequence: int, manifest: bytes, data_bytes: int, stage: BufferStage = BufferStage.SEALED) -> None:
        """Mark all bytes as present; until the slot is hashed, the manifest has no digests.

        Raises:
            BufferGoneError: the slot's file was removed, so no writer could find it.
        """
        self._view[HEADER_BYTES : HEADER_BYTES + len(manifest)] = manifest
        header = SlotHeader(sequence, stage, len(manifest), self._data_offset, data_bytes)
        self._view[:_SPOKEN_BYTES] = header.encode()
        with durable.disk_errors(self.path, "sealing the memory slot"):
            try:
                os.utime(self.path.name, dir_fd=self._directory)  # a store through a mapping does not update file times
            except FileNotFoundError:
                raise BufferGoneError(self.path) from None

    def discard(self) -> None:
        """Release the memory; existing views of it must not be used again."""
        self.close()
        descriptor = open_slot(self._directory, self.path, os.O_WRONLY)
        if descriptor is None:
            return
        try:
            os.ftruncate(descriptor, 0)  # frees the memory at once, even if a view remains
        finally:
            os.close(descriptor)
        os.unlink(self.path.name, dir_fd=self._directory)

    def close(self) -> None:
        """Drop the mapping; the memory is unmapped when its last view is released."""
        self._view = memoryview(b"")
        self._memory = None
        self._data_offset = 0


def open_slot(directory: int, path: Path, flags: int) -> int | None:
    """Open a slot's file if it is a plain file of this user with one link.

    Returns:
        None if there is no such file.

    Raises:
        StoreError: something else has this name.
    """
    with durable.disk_errors(path, "opening the memory slot"):
        try:
            descriptor = os.open(path.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
        except FileNotFoundError:
            return None
        found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        os.close(descriptor)
        raise StoreError(f"{path} is not a plain file of this user alone. Fix: remove it")
    return descriptor


def read_header(descriptor: int) -> SlotHeader | None:
    """Decode the header of an open slot; see :func:`decode_header`."""
    return decode_header(os.pread(descriptor, _SPOKEN_BYTES, 0), os.fstat(descriptor).st_size)


def read_manifest(descriptor: int, header: SlotHeader) -> bytes:
    """Return the bytes of an open slot's manifest."""
    return os.pread(descriptor, header.manifest_bytes, HEADER_BYTES)


def _map_all(memory: mmap.mmap) -> None:
    """Map every page now, so that no training step waits for page faults.

    The pages are mapped in slices, because ``mmap`` does not release the GIL.
    """
    with contextlib.suppress(OSError):  # before Linux 5.14
        for start in range(0, len(memory), _MAPPED_AT_ONCE):
            memory.madvise(_MADV_POPULATE_WRITE, start, min(_MAPPED_AT_ONCE, len(memory) - start))


def _in_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


BESIDE_BYTES = 1 << 30
"""From this size on, hashing runs in a thread beside the writing, which takes four times as long.

At 64 and 512 MiB, a thread did not make a save durable sooner, took 50% more CPU time, and slowed training down.
"""


@dataclass(frozen=True, slots=True)
class HashedPoint:
    """A point in memory, and the bytes of its two files; hashing may still be in progress.

    Attributes:
        header: identifies the point.
        data: the data file.
    """

    header: PointHeader
    data: memoryview
    _manifest: Future[bytes]

    def manifest_data(self) -> bytes:
        """Wait for the hashes, and return the bytes of the manifest file.

        Raises:
            StoreError: the slot could not be marked.
        """
        return self._manifest.result()


@contextlib.contextmanager
def hashed(path: Path, directory: int, on_hashed: Callable[[], object] = lambda: None) -> Iterator[HashedPoint]:
    """Hash a sealed slot before the ``with`` block or while it runs.

    A slot that is already hashed is not hashed again.

    Args:
        path: the slot's file, for messages.
        directory: an open descriptor of its folder.
        on_hashed: called, possibly in a separate thread, once the slot is marked as hashed.

    Raises:
        CheckpointError: the slot is not sealed, or its header and manifest disagree.
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
            raise CheckpointError(f"{path}: its header and its manifest belong to different points")
        end = header.data_offset + header.data_bytes
        # Not closed here: a propagating error may still hold a view, and the last view to be released unmaps it.
        memory = mmap.mmap(descriptor, end, mmap.MAP_SHARED, mmap.PROT_READ)
        data = memoryview(memory)[header.data_offset :]

        def hash_and_say() -> bytes:
            is_done = header.stage is BufferStage.HASHED
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
    # The encoded manifest keeps its length, since all digests have the same size.
    encoded = encode_manifest(dataclasses.replace(manifest, chunks=tuple(digests)))
    with durable.disk_errors(path, "marking the memory slot as hashed"):
        os.pwrite(descriptor, encoded, HEADER_BYTES)
        os.pwrite(descriptor, dataclasses.replace(header, stage=BufferStage.HASHED).encode(), 0)
    return encoded


_RECLAIMABLE = ("inactive_file", "active_file")


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how much memory this process may still use, or None if unknown.

    This is the least of what the machine and this process's control groups (v2) have left.
    """
    return min((left for left, _ in _rooms(proc, groups)), default=None)


def taken_share(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the used share of the machine's memory or of a control group's limit.

    Returns:
        The greatest of these shares, or None if unknown.
    """
    return max((max(0.0, 1 - left / limit) for left, limit in _rooms(proc, groups) if limit > 0), default=None)


def _rooms(proc: Path, groups: Path) -> list[tuple[int, int]]:
    """Return the bytes left and the limit for the machine and each control group with a limit."""
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
    """Return the bytes left and the limit; None if there is no limit (``max``) or no such file."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + sum(int(counts[name]) for name in _RECLAIMABLE if name in counts), limit
    return None
