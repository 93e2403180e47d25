"""Encode and decode the bytes of a journal file, and distinguish a torn end from damage.

This module does no I/O.

::

  file   = magic "\\x93SBJRNL\\n" | version u32 | 0 u32 | nonce u64 | born u64 | checksum u64, then batches
  batch  = marker "\\xf5SBb" | count u32 | body size u32 | body checksum u64 | head checksum u64 | body
  body   = length u32 × count | payloads, one after the other                      (all little-endian)

One append is one batch, one write and one fsync. So only the last batch of a file can be torn. A torn batch is dropped
completely, and nothing in it was ever sent. These rules distinguish a torn end from a damaged middle:

- A batch that ends before the end of the file was followed by another append, which began only after this one was
  synced. If such a batch is invalid, it was changed later: it is damaged.
- If a batch's head is invalid, its length is unknown. If a valid batch head follows anywhere in the file, the invalid
  one had been synced: it is damaged. Otherwise it is the torn end.
- ``born`` is the size of the file when it was renamed into place, written completely and synced (a new journal or a
  compaction). Invalid data below that offset, or a file shorter than that, is damage and never a torn end.

A changed byte inside the last, synced batch looks like a torn write; no journal can distinguish the two without a
second copy. The batch is cut off in the same way, and the bytes cut off are kept. Nor does a file that ends at the end
of a batch show whether more batches existed; the job's workers reveal that when they resume
(``core.rounds.rendezvous``).

Checksums are xxh3_64. Every marker-like byte sequence is tried as a batch head; 64 bits make a chance match practically
impossible, but 32 would not. xxh3_64 is several times faster than zlib.crc32, and it takes a seed: the file's nonce
plus the batch's own offset. So a batch is valid at only one offset of one file. No payload, and no block of an older
file that a crash left on the disk, can be mistaken for a batch.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import xxhash

MAGIC = b"\x93SBJRNL\n"
VERSION = 1
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_JOURNAL_BYTES = 1024 * 1024 * 1024

_MARKER = b"\xf5SBb"
_FILE_HEAD = struct.Struct("<8sIIQQ")
_BATCH_HEAD = struct.Struct("<4sIIQ")
_CHECKSUM = struct.Struct("<Q")
FILE_HEAD_BYTES = _FILE_HEAD.size + _CHECKSUM.size
BATCH_HEAD_BYTES = _BATCH_HEAD.size + _CHECKSUM.size
_LENGTH_BYTES = 4


class JournalFault(Enum):
    """The fault that makes a journal file unusable."""

    FOREIGN = "is not a journal"
    UNKNOWN_VERSION = "was written by another version of this program"
    DAMAGED = "was changed after it was written"


class JournalFormatError(Exception):
    """The bytes cannot be decoded; ``offset`` is where decoding failed."""

    def __init__(self, fault: JournalFault, offset: int, found: str) -> None:
        super().__init__(found)
        self.fault = fault
        self.offset = offset
        self.found = found


@dataclass(frozen=True, slots=True)
class JournalPayloads:
    """The payloads of a journal file, in order; any bytes after ``end`` are a torn end."""

    nonce: int
    born_bytes: int
    payloads: list[bytes]
    end: int
    torn: str | None  # the fault of the bytes after ``end``; None if there are none


def encode_file(payloads: Sequence[bytes], nonce: int) -> bytes:
    """Encode a complete new journal file with these payloads."""
    batches = []
    offset = FILE_HEAD_BYTES
    for batch in _in_batches(payloads):
        encoded = encode_batch(batch, nonce, offset)
        batches.append(encoded)
        offset += len(encoded)
    head = _FILE_HEAD.pack(MAGIC, VERSION, 0, nonce, offset)
    return b"".join([head, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)), *batches])


def encode_batch(payloads: Sequence[bytes], nonce: int, offset: int) -> bytes:
    """Encode one append, valid only at ``offset`` of the file with this nonce."""
    body = b"".join([struct.pack(f"<{len(payloads)}I", *map(len, payloads)), *payloads])
    seed = _seed(nonce, offset)
    head = _BATCH_HEAD.pack(_MARKER, len(payloads), len(body), xxhash.xxh3_64_intdigest(body, seed))
    return b"".join([head, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head, seed)), body])


def body_bytes(payloads: Sequence[bytes]) -> int:
    """Return the size in bytes of the body of a batch of these payloads."""
    return sum(map(len, payloads)) + _LENGTH_BYTES * len(payloads)


def decode_file(data: bytes) -> JournalPayloads:
    """Decode a journal file.

    Raises:
        JournalFormatError: the file is not a journal, or is damaged before its torn end.
    """
    nonce, born_bytes = _decode_file_head(data)
    if len(data) < born_bytes:
        raise JournalFormatError(
            JournalFault.DAMAGED, len(data), f"the file ends here, but it was published with {born_bytes} bytes"
        )
    payloads: list[bytes] = []
    offset = FILE_HEAD_BYTES
    while offset < len(data):
        batch = _decode_batch(data, offset, _seed(nonce, offset))
        if isinstance(batch, _Bad):
            _raise_if_damaged(data, nonce, born_bytes, offset, batch)
            return JournalPayloads(nonce, born_bytes, payloads, offset, batch.reason)
        payloads += batch.payloads
        offset = batch.end
    return JournalPayloads(nonce, born_bytes, payloads, offset, None)


def decode_batch(data: bytes, nonce: int, offset: int) -> list[bytes]:
    """Decode a single append that was stored as :func:`encode_batch` encoded it.

    Raises:
        JournalFormatError: ``data`` is not exactly that append.
    """
    batch = _decode_batch(data, 0, _seed(nonce, offset))
    if isinstance(batch, _Bad):
        raise JournalFormatError(JournalFault.DAMAGED, 0, batch.reason)
    if batch.end != len(data):
        raise JournalFormatError(JournalFault.DAMAGED, batch.end, "more bytes follow the batch")
    return batch.payloads


@dataclass(frozen=True, slots=True)
class _FrameBatch:
    payloads: list[bytes]
    end: int


@dataclass(frozen=True, slots=True)
class _Bad:
    reason: str
    end: int | None  # where the batch would end; None if its head is bad


def _decode_file_head(data: bytes) -> tuple[int, int]:
    if data[: len(MAGIC)] != MAGIC:
        raise JournalFormatError(
            JournalFault.FOREIGN, 0, f"it begins with {data[: len(MAGIC)]!r}, a journal with {MAGIC!r}"
        )
    if len(data) < FILE_HEAD_BYTES:
        raise JournalFormatError(JournalFault.DAMAGED, len(data), "the file ends inside its own head")
    head = data[: _FILE_HEAD.size]
    _, version, _, nonce, born_bytes = _FILE_HEAD.unpack(head)
    (checksum,) = _CHECKSUM.unpack_from(data, _FILE_HEAD.size)
    if checksum != xxhash.xxh3_64_intdigest(head):
        raise JournalFormatError(JournalFault.DAMAGED, 0, "the checksum of the file's head does not match")
    if version != VERSION:
        raise JournalFormatError(
            JournalFault.UNKNOWN_VERSION, 8, f"format version {version}, but this program reads {VERSION}"
        )
    return nonce, born_bytes


def _decode_batch(data: bytes, offset: int, seed: int) -> _FrameBatch | _Bad:
    if len(data) - offset < BATCH_HEAD_BYTES:
        return _Bad("the file ends inside the head of a batch", None)
    if not _is_good_head(data, offset, seed):
        return _Bad("the checksum of the batch's head does not match", None)
    _, count, body_size, checksum = _BATCH_HEAD.unpack_from(data, offset)
    start = offset + BATCH_HEAD_BYTES
    end = start + body_size
    if body_size > MAX_BODY_BYTES or count * _LENGTH_BYTES > body_size:
        return _Bad(f"the batch's head announces {count} payloads in {body_size} bytes", end)
    if end > len(data):
        return _Bad(f"the file ends {end - len(data)} bytes before the batch does", end)
    body = memoryview(data)[start:end]
    if checksum != xxhash.xxh3_64_intdigest(body, seed):
        return _Bad("the checksum of the batch's payloads does not match", end)
    lengths = struct.unpack_from(f"<{count}I", body)
    ends = list(itertools.accumulate(lengths, initial=start + count * _LENGTH_BYTES))
    if ends[-1] != end:
        return _Bad("the lengths of the batch's payloads do not match its size", end)
    return _FrameBatch([data[first:last] for first, last in itertools.pairwise(ends)], end)


def _raise_if_damaged(data: bytes, nonce: int, born_bytes: int, offset: int, bad: _Bad) -> None:
    if offset < born_bytes:
        raise JournalFormatError(JournalFault.DAMAGED, offset, f"{bad.reason}, in the part the file was published with")
    if bad.end is not None and bad.end < len(data):
        raise JournalFormatError(JournalFault.DAMAGED, offset, f"{bad.reason}, and later batches follow it")
    later = data.find(_MARKER, offset + 1)
    while later >= 0:
        if len(data) - later >= BATCH_HEAD_BYTES and _is_good_head(data, later, _seed(nonce, later)):
            raise JournalFormatError(
                JournalFault.DAMAGED, offset, f"{bad.reason}, and a good batch follows at byte {later}"
            )
        later = data.find(_MARKER, later + 1)


def _is_good_head(data: bytes, offset: int, seed: int) -> bool:
    head_end = offset + _BATCH_HEAD.size
    (checksum,) = _CHECKSUM.unpack_from(data, head_end)
    head = data[offset:head_end]
    return head.startswith(_MARKER) and bool(checksum == xxhash.xxh3_64_intdigest(head, seed))


def _seed(nonce: int, offset: int) -> int:
    return (nonce + offset) % 2**64


def _in_batches(payloads: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Split payloads into batches of bounded size; a snapshot may exceed the limit of one append."""
    first, size = 0, 0
    for index, payload in enumerate(payloads):
        size += len(payload) + _LENGTH_BYTES
        if size > MAX_BODY_BYTES and index > first:
            yield payloads[first:index]
            first, size = index, len(payload) + _LENGTH_BYTES
    if first < len(payloads):
        yield payloads[first:]
