"""A sealed slot as its writer sees it: hashed where it lies, then handed on as the two files it will be on disk.

Here live hashing a slot and marking it hashed; filling one is ``memory_slot``'s, writing to disk is ``writing``'s. The
one idea: the data is mapped read-only, and manifest and header are written with one call each, so that a kill between
them leaves a slot that is still only sealed. Nobody needs a hash to write the data file: of a large one that is done
beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from samebits.errors import CheckpointError
from samebits.store import durable
from samebits.store.checkpoint.format.manifest import Manifest, PointHeader, decode_manifest, encode_manifest
from samebits.store.checkpoint.memory.memory_buffer import (
    HEADER_BYTES,
    SlotHeader,
    Stage,
    open_slot,
    read_header,
    read_manifest,
)

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
