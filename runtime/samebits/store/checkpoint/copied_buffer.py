"""Copy a hashed memory slot to another host, in pieces.

The manifest and the data file form one stream, in this order. The manifest has the hash of every chunk, so the receiver
verifies each chunk as it completes, in its final place in memory. A point that changed in transit, or in its slot while
it was being read, never becomes a copy.

The receiver overwrites nothing until the complete manifest has arrived and matches the offer, and the newest copy stays
until the new one is complete. The sender refills a slot two saves later even if it is still being read. By then the
same bytes are on disk, and the sender reads the rest from there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.store import durable
from samebits.store.checkpoint.folder import DATA_FILE, MANIFEST_FILE, FoundPoint, point_name, rank_directory
from samebits.store.checkpoint.memory_buffer import (
    BufferStage,
    MemoryBuffer,
    SlotHeader,
    open_slot,
    read_header,
    read_manifest,
)
from samebits.store.checkpoint.memory_room import MemoryRoom
from samebits.store.checkpoint.point_format import MAX_MANIFEST_BYTES, Manifest, decode_manifest
from samebits.store.checkpoint.point_store import Location
from samebits.store.checkpoint.pruning import is_abandoned
from samebits.store.checkpoint.reading import require_digest

_DIGEST_BYTES = 16
MAX_DATA_BYTES = 1 << 46
"""More than any rank's state; larger numbers are not valid in system calls."""


@dataclass(frozen=True, slots=True)
class CopyOffer:
    """The point that is about to be copied.

    Attributes:
        job: id of the point's job.
        slot: the point's slot.
        point: its step and generation.
        digest: xxh3_128 of its manifest; identifies an existing copy.
        manifest_bytes: size of the manifest, the first part of the stream.
        data_bytes: size of the data file, the second part.
    """

    job: str
    slot: int
    point: Point
    digest: bytes
    manifest_bytes: int
    data_bytes: int

    @property
    def stream_bytes(self) -> int:
        """Return the total size of the stream."""
        return self.manifest_bytes + self.data_bytes


class OutgoingCopy:
    """The hashed point of one slot, held open for reading.

    Args:
        descriptor: the slot's open file.
        header: the slot's header.
        manifest_data: the manifest's bytes, read from the slot.
        folder: the folder with the rank's points; None for an object store.

    Attributes:
        offer: describes the point.
        sequence: the sequence number of the slot's content.
    """

    def __init__(self, descriptor: int, header: SlotHeader, manifest_data: bytes, folder: Path | None) -> None:
        manifest = decode_manifest(manifest_data)
        whose = manifest.header
        self.sequence = header.sequence
        self.offer = CopyOffer(
            whose.job,
            whose.slot,
            whose.point,
            xxhash.xxh3_128_digest(manifest_data),
            len(manifest_data),
            header.data_bytes,
        )
        self._descriptor = descriptor
        self._header: SlotHeader | None = header
        self._data_offset, self._data_bytes = header.data_offset, header.data_bytes
        self._manifest_data = manifest_data
        self._durable = None if folder is None else folder / point_name(whose.point)

    def piece(self, offset: int, size_bytes: int) -> bytes | None:
        """Return a part of the stream, or None if the data is no longer available.

        Args:
            offset: where the part begins in the stream.
            size_bytes: the maximum length; less is returned only at the end of the manifest or of the stream.
        """
        begin = offset - len(self._manifest_data)
        if begin < 0:
            return self._manifest_data[offset : offset + size_bytes]
        size_bytes = min(size_bytes, self._data_bytes - begin)
        try:
            data = os.pread(self._descriptor, size_bytes, self._data_offset + begin)
        except OSError:
            return None  # a disk failure; the point's own writer reports it
        if len(data) == size_bytes and self._is_unchanged():
            return data
        return self.piece(offset, size_bytes) if self._turns_to_disk() else None

    def _is_unchanged(self) -> bool:
        """Return whether the slot still holds this point.

        A slot's header is cleared before the slot is refilled. A point on disk never changes.
        """
        if self._header is None:
            return True
        try:
            return read_header(self._descriptor) == self._header
        except CheckpointError:
            return False

    def _turns_to_disk(self) -> bool:
        """Switch to the data file on disk if it holds this exact point; return whether it does."""
        if self._durable is None or self._header is None:
            return False
        try:
            with os.fdopen(durable.open_regular(self._durable / MANIFEST_FILE), "rb") as file:
                if file.read(len(self._manifest_data) + 1) != self._manifest_data:
                    return False
            descriptor = durable.open_regular(self._durable / DATA_FILE)
        except OSError:
            return False  # never written, or removed because a newer point is being saved
        os.close(self._descriptor)
        self._descriptor, self._data_offset, self._header = descriptor, 0, None
        return True

    def close(self) -> None:
        """Close the slot."""
        os.close(self._descriptor)


def outgoing_copy(directory: int, path: Path, root: Location | None = None) -> OutgoingCopy | None:
    """Return the slot's hashed point, ready to be sent; None if there is none.

    Args:
        directory: an open descriptor of the slot's folder.
        path: the slot's file.
        root: the job's checkpoint folder, to which the point is written as well.

    Raises:
        CheckpointError: the slot's content cannot be used.
    """
    descriptor = open_slot(directory, path, os.O_RDONLY)
    if descriptor is None:
        return None
    try:
        header = read_header(descriptor)
        if header is not None and header.stage is BufferStage.HASHED:
            folder = rank_directory(root, int(path.parent.name)) if isinstance(root, Path) else None
            return OutgoingCopy(descriptor, header, read_manifest(descriptor, header), folder)
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


class IncomingCopy:
    """A point that is being received, in order, into the least valuable slot of a room.

    Args:
        room: where copies of the offered slot are kept.
        offer: describes the point.

    Raises:
        CheckpointError: no rank can have saved such a point.
    """

    def __init__(self, room: MemoryRoom, offer: CopyOffer) -> None:
        _require_possible(offer)
        self.offer = offer
        self.received_bytes = 0
        self._room = room
        self._manifest_data = bytearray()
        self._manifest: Manifest | None = None
        self._slot: MemoryBuffer | None = None  # None until the manifest is complete
        self._data = memoryview(b"")
        self._compared_bytes = 0  # of the data

    def take(self, piece: bytes | memoryview) -> bool:
        """Store the next bytes of the stream; return whether the point is complete.

        A complete point can be found from now on.

        Raises:
            CheckpointError: the point is not the one that was offered, or its hashes differ.
            StoreError: there is no memory for it; the newest copy stays.
        """
        if self.received_bytes + len(piece) > self.offer.stream_bytes:
            raise CheckpointError(f"more than the {self.offer.stream_bytes} bytes that were offered")
        of_manifest = piece[: max(0, self.offer.manifest_bytes - self.received_bytes)]
        if of_manifest:
            self._manifest_data += of_manifest
        of_data = piece[len(of_manifest) :]
        start = self.received_bytes + len(of_manifest) - self.offer.manifest_bytes
        self.received_bytes += len(piece)
        if self.received_bytes < self.offer.manifest_bytes:
            return False
        manifest, slot = self._manifest or self._decoded(), self._slot or self._opened()
        if of_data:
            self._data[start : start + len(of_data)] = of_data
        self._compare(manifest, self.received_bytes - self.offer.manifest_bytes)
        if self.received_bytes < self.offer.stream_bytes:
            return False
        self._room.seal(slot, self.offer.point, bytes(self._manifest_data), self.offer.data_bytes, BufferStage.HASHED)
        self._data.release()
        self._room.forget(self._is_abandoned)
        return True

    def _is_abandoned(self, point: Point) -> bool:
        return is_abandoned(point, self.offer.point)

    def _opened(self) -> MemoryBuffer:
        """Open the slot to fill; this discards its old content."""
        slot = self._room.next_slot(self._is_abandoned)
        slot.reserve(self.offer.manifest_bytes, self.offer.data_bytes)
        slot.open()
        self._slot, self._data = slot, slot.data(self.offer.data_bytes)
        return slot

    def _decoded(self) -> Manifest:
        """Decode the complete manifest and compare it with the offer."""
        offer = self.offer
        if xxhash.xxh3_128_digest(self._manifest_data) != offer.digest:
            raise CheckpointError(f"its manifest of {offer.manifest_bytes} bytes differs from the one that was offered")
        manifest = decode_manifest(bytes(self._manifest_data))
        whose = manifest.header
        if (whose.job, whose.slot, whose.point, manifest.data_bytes) != (
            offer.job,
            offer.slot,
            offer.point,
            offer.data_bytes,
        ):
            raise CheckpointError(f"its manifest is that of slot {whose.slot} of job {whose.job}, {whose.point}")
        self._manifest = manifest
        return manifest

    def _compare(self, manifest: Manifest, filled_bytes: int) -> None:
        """Verify every chunk that is complete by now."""
        size = manifest.chunk_bytes
        while self._compared_bytes < filled_bytes:
            start, end = self._compared_bytes, min(self._compared_bytes + size, self.offer.data_bytes)
            if end > filled_bytes:
                return
            digest = xxhash.xxh3_128_digest(self._data[start:end])
            require_digest(digest, end - start, f"the copy of slot {self.offer.slot}", manifest, start // size)
            self._compared_bytes = end


def _require_possible(offer: CopyOffer) -> None:
    """Refuse an offer that no rank can make."""
    if not 0 < offer.manifest_bytes <= MAX_MANIFEST_BYTES or not 0 <= offer.data_bytes <= MAX_DATA_BYTES:
        raise CheckpointError(f"a manifest of {offer.manifest_bytes} bytes, {offer.data_bytes} of data")
    if offer.slot < 0 or offer.point.step < 0 or offer.point.generation < 1:
        raise CheckpointError(f"{offer.point} of slot {offer.slot}: no rank can have saved that")
    if len(offer.digest) != _DIGEST_BYTES:
        raise CheckpointError(f"a manifest's digest of {len(offer.digest)} bytes, expected {_DIGEST_BYTES}")


def has_copy(room: MemoryRoom, offer: CopyOffer) -> bool:
    """Return whether the room already has this exact point."""
    return any(found.point == offer.point and _digest_of(room, found) == offer.digest for found in room.points())


def _digest_of(room: MemoryRoom, found: FoundPoint) -> bytes:
    descriptor = open_slot(room.descriptor, found.path, os.O_RDONLY)
    if descriptor is None:
        return b""
    with durable.disk_errors(found.path, "reading the manifest"):
        try:
            header = read_header(descriptor)
            return b"" if header is None else xxhash.xxh3_128_digest(read_manifest(descriptor, header))
        finally:
            os.close(descriptor)
