"""A ring buffer of a process's newest collectives, sends and receives, in shared memory.

The worker writes one record per launch, which takes a microsecond or two. Another process can read the ring without
running the worker's Python or waiting for its GIL, so it can also read that of a worker that is stopped or hangs in C.

A record that is read while it is being written may be wrong. Only the newest record can be affected, and readers look
only at processes that no longer make progress.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType

from samebits import strict_json
from samebits.store import process_identity
from samebits.store.process_identity import ProcessIdentity

_NAME = "samebits-collectives"
_MAGIC = b"SBRING2\n"
RECORDS = 2048
"""Records kept; older ones are overwritten."""
MOST_GROUPS = 16
MOST_RANKS = 1 << 20
MOST_PLACES = 512
"""Lines of the script that launch something."""
MOST_DIMENSIONS = 4
"""Dimensions of a shape that are stored; the last one is the product of all remaining dimensions."""
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"),
)
OTHER_DTYPE = len(DTYPES)
OPS = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "all_gather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "gather", "scatter"),
    *("all_to_all", "all_to_all_single", "barrier", "allreduce_coalesced", "ALLGATHER_coalesced"),
    *("REDUCE_SCATTER_coalesced", "all_gather_single", "reduce_scatter_single", "send", "recv"),
)
"""Names of operations, spelled as in torch's flight recorder."""
PAIRWISE = ("send", "recv")
NOBODY = -1
"""The peer of a collective, and of a receive from any rank until its sender is known."""

_HEAD = struct.Struct("<8sIIiiQQ")  # magic, records, groups, rank, world size, first record of the generation, records
_GROUP_BYTES = 1024
_TEXT_HEAD = struct.Struct("<H")
_GROUPS_AT = 256
_PLACES_AT = _GROUPS_AT + MOST_GROUPS * _GROUP_BYTES
_PLACE_BYTES = 512
_RECORDS_AT = _PLACES_AT + MOST_PLACES * _PLACE_BYTES
# number, number in the group, launched, completed, peer, place (from 1; 0: none), op, group, dtypes, dims, shapes
_RECORD = struct.Struct("<QQQQiHBBBBBB4x4q4q")
_SEQUENCE, _SEQUENCE_AT = struct.Struct("<Q"), 8
_OVER, _OVER_AT = struct.Struct("<Q"), 24
_PEER, _PEER_AT = struct.Struct("<i"), 32
_SIZE = _RECORDS_AT + RECORDS * _RECORD.size


@dataclass(frozen=True, slots=True)
class RingGroup:
    """A process group that has called a collective: torch's name, its description and its ranks."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """A line of the script that has called a collective."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


@dataclass(frozen=True, slots=True)
class Launched:
    """One collective, send or receive of one process; times are in ns since 1970.

    For an operation on several tensors, the shape is their total number of elements and the dtype is that of the first
    tensor.
    """

    number: int  # counts all launches of the process in this generation, from 0
    sequence: int  # from 1, the same on every rank: counted per group, or per pair of sender and receiver
    op: str
    group: RingGroup
    input_shape: tuple[int, ...]
    input_dtype: str
    output_shape: tuple[int, ...]
    output_dtype: str
    launched_ns: int
    over_ns: int | None  # None: its completion was not observed
    peer: int | None = None  # the other rank of a send or receive, as a rank in the group; None: any
    place: LaunchLine | None = None  # None: unknown

    @property
    def is_pairwise(self) -> bool:
        """Return whether this is a send or a receive."""
        return self.op in PAIRWISE

    def __str__(self) -> str:
        """Return a description such as ``all_reduce #812 (float32, 25000) at train.py:46, in flight``.

        That of a receive is, for example, ``recv from rank 1 #3 (float32, 10), over``.
        """
        shape = " × ".join(map(str, self.input_shape)) or "one number"
        state = "in flight" if self.over_ns is None else "over"
        at = "" if self.place is None else f" at {self.place}"
        number = f" #{self.sequence}" if self.sequence else ""
        return f"{self.op}{self._whom}{number} ({self.input_dtype}, {shape}){at}, {state}"

    @property
    def _whom(self) -> str:
        if not self.is_pairwise:
            return ""
        whom = "anybody" if self.peer is None else f"rank {self.group.ranks[self.peer]}"
        return f" {'to' if self.op == 'send' else 'from'} {whom}"


@dataclass(frozen=True, slots=True)
class RecordedCollectives:
    """The operations of the current generation in one process's ring, oldest first."""

    rank: int
    world_size: int
    launched: tuple[Launched, ...]
    groups: tuple[RingGroup, ...]


class CollectiveRing:
    """The ring's writer. As torch requires, only one thread at a time launches in a group.

    Args:
        memory: ``_SIZE`` bytes of shared memory.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._number = 0
        self._first = 0
        self._groups = self._places = 0
        # Keeps each code object alive, so that its id stays unique.
        self._known: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self._rank, self._world_size = 0, 0
        self._head()

    def begin(self, rank: int, world_size: int) -> None:
        """Start a generation; operations of earlier ones are no longer shown."""
        self._first, self._groups = self._number, 0
        self._rank, self._world_size = rank, world_size
        self._head()

    def add_group(self, name: str, description: str, ranks: Sequence[int]) -> int | None:
        """Return a group's number for :meth:`launch`, or None if there is no room to record it."""
        text = json.dumps([name, description, _as_text(ranks)]).encode()
        if self._groups >= MOST_GROUPS or len(text) > _GROUP_BYTES - _TEXT_HEAD.size:
            return None
        place = self._groups
        _write_text(self._memory, _GROUPS_AT + place * _GROUP_BYTES, text)
        self._groups += 1
        self._head()
        return place

    def place_of(self, frame: FrameType) -> int:
        """Return the number of the frame's current line for :meth:`launch`, or 0 if there is no room."""
        code = frame.f_code
        at = (id(code), frame.f_lasti)
        known = self._known.get(at)
        if known is not None:
            return known[0]
        if len(self._known) >= MOST_PLACES:
            return 0
        place = self._add_place(code.co_filename, frame.f_lineno, code.co_name)
        self._known[at] = place, code
        return place

    def _add_place(self, file: str, line: int, function: str) -> int:
        text = json.dumps([file, line, function]).encode()
        if len(text) > _PLACE_BYTES - _TEXT_HEAD.size:
            return 0
        _write_text(self._memory, _PLACES_AT + self._places * _PLACE_BYTES, text)
        self._places += 1
        return self._places

    def launch(
        self,
        group: int,
        sequence: int,
        op: int,
        input_shape: Sequence[int],
        input_dtype: int,
        output_shape: Sequence[int],
        output_dtype: int,
        peer: int = NOBODY,
        place: int = 0,
    ) -> int:
        """Record a launch and return its number, for :meth:`end`.

        Args:
            group: from :meth:`add_group`.
            sequence: 0 if not known yet, as for a receive from any rank.
            op: index into ``OPS``.
            input_shape: elements per dimension.
            input_dtype: index into ``DTYPES``.
            output_shape: elements per dimension.
            output_dtype: index into ``DTYPES``.
            peer: the other rank of a send or receive, as a rank in the group.
            place: from :meth:`place_of`.
        """
        number = self._number
        self._number = number + 1
        _RECORD.pack_into(
            self._memory,
            _RECORDS_AT + number % RECORDS * _RECORD.size,
            *(number + 1, sequence, time.time_ns(), 0, peer, place, op, group, input_dtype, output_dtype),
            *(len(input_shape), len(output_shape), *_four(input_shape), *_four(output_shape)),
        )
        return number

    def end(self, number: int) -> None:
        """Record that an operation completed."""
        if self._number - number <= RECORDS:
            at = _RECORDS_AT + number % RECORDS * _RECORD.size + _OVER_AT
            _OVER.pack_into(self._memory, at, time.time_ns())

    def name_sender(self, number: int, peer: int, sequence: int) -> None:
        """Record the sender with which a receive from any rank was matched."""
        if self._number - number <= RECORDS:
            at = _RECORDS_AT + number % RECORDS * _RECORD.size
            _PEER.pack_into(self._memory, at + _PEER_AT, peer)
            _SEQUENCE.pack_into(self._memory, at + _SEQUENCE_AT, sequence)

    def _head(self) -> None:
        _HEAD.pack_into(
            self._memory, 0, _MAGIC, RECORDS, self._groups, self._rank, self._world_size, self._first, self._number
        )


def _write_text(memory: mmap.mmap, at: int, text: bytes) -> None:
    memory[at + _TEXT_HEAD.size : at + _TEXT_HEAD.size + len(text)] = text
    _TEXT_HEAD.pack_into(memory, at, len(text))


def _text_in(memory: bytes, at: int, room: int) -> bytes:
    (size,) = _TEXT_HEAD.unpack_from(memory, at)
    return memory[at + _TEXT_HEAD.size : at + min(_TEXT_HEAD.size + size, room)]


def _four(shape: Sequence[int]) -> tuple[int, int, int, int]:
    if len(shape) == 1:  # a gradient bucket
        return (shape[0], 1, 1, 1)
    rest = 1
    for one in shape[MOST_DIMENSIONS - 1 :]:
        rest *= one
    first = (*shape[: MOST_DIMENSIONS - 1], 1, 1, 1)
    return (first[0], first[1], first[2], rest)


def _as_text(ranks: Sequence[int]) -> str:
    """Return ``0-4095``, or the numbers separated by commas."""
    first, last = (ranks[0], ranks[-1]) if ranks else (0, -1)
    if list(ranks) == list(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, ranks))


_ring: CollectiveRing | None = None


def open_ring() -> CollectiveRing | None:
    """Return this process's ring, created once, or None if the kernel has no memfd_create."""
    global _ring
    if _ring is None and hasattr(os, "memfd_create"):
        try:
            descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.truncate(descriptor, _SIZE)
            # The descriptor stays open, so that other processes can find the memory.
            _ring = CollectiveRing(mmap.mmap(descriptor, _SIZE))
        except OSError:
            return None
    return _ring


def read(identity: ProcessIdentity) -> RecordedCollectives | None:
    """Return the content of a process's ring.

    Returns:
        None if the process is gone, belongs to another user or has no ring.
    """
    descriptor = process_identity.find_memory(identity.pid, _NAME) if identity.is_alive() else None
    if descriptor is None:
        return None
    try:
        if os.fstat(descriptor).st_size != _SIZE:
            return None
        return contents_of(os.pread(descriptor, _SIZE, 0))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def contents_of(memory: bytes) -> RecordedCollectives | None:
    """Decode a copy of a ring's memory, without invalid records; None if it is not a ring."""
    if len(memory) != _SIZE:
        return None
    magic, records, groups, rank, world_size, first, _ = _HEAD.unpack_from(memory)
    if magic != _MAGIC or records != RECORDS or groups > MOST_GROUPS or not 0 <= rank <= world_size <= MOST_RANKS:
        return None
    known = [_group_in(memory, place) for place in range(groups)]
    places = [None, *(_place_in(memory, place) for place in range(MOST_PLACES))]
    found = [_launched_in(memory, place, first, known, places) for place in range(RECORDS)]
    launched = sorted((one for one in found if one is not None), key=lambda one: one.number)
    newest = launched[-1].number if launched else 0
    return RecordedCollectives(
        rank,
        world_size,
        tuple(one for one in launched if newest - one.number < RECORDS),
        tuple(one for one in known if one is not None),
    )


def _group_in(memory: bytes, place: int) -> RingGroup | None:
    try:
        name, description, ranks = strict_json.loads(_text_in(memory, _GROUPS_AT + place * _GROUP_BYTES, _GROUP_BYTES))
        begin, dash, end = ranks.partition("-")
        numbers = tuple(range(int(begin), int(end) + 1)[:MOST_RANKS] if dash else map(int, ranks.split(",")))
    except (ValueError, TypeError, AttributeError):
        return None
    return RingGroup(name, description, numbers) if isinstance(name, str) and isinstance(description, str) else None


def _place_in(memory: bytes, place: int) -> LaunchLine | None:
    try:
        file, line, function = strict_json.loads(_text_in(memory, _PLACES_AT + place * _PLACE_BYTES, _PLACE_BYTES))
    except (ValueError, TypeError):
        return None
    if not (isinstance(file, str) and type(line) is int and isinstance(function, str)):
        return None
    return LaunchLine(file, line, function) if f"{file}{function}".isprintable() else None


def _launched_in(
    memory: bytes, place: int, first: int, groups: Sequence[RingGroup | None], places: Sequence[LaunchLine | None]
) -> Launched | None:
    number, sequence, launched_ns, over_ns, peer, at, op, group, dtype_in, dtype_out, dims_in, dims_out, *shapes = (
        _RECORD.unpack_from(memory, _RECORDS_AT + place * _RECORD.size)
    )
    number -= 1
    known = groups[group] if group < len(groups) else None
    if number < first or number % RECORDS != place or op >= len(OPS) or known is None:
        return None
    if not NOBODY <= peer < len(known.ranks):
        return None
    return Launched(
        number - first,
        sequence,
        OPS[op],
        known,
        tuple(shapes[: min(dims_in, MOST_DIMENSIONS)]),
        _dtype(dtype_in),
        tuple(shapes[MOST_DIMENSIONS : MOST_DIMENSIONS + min(dims_out, MOST_DIMENSIONS)]),
        _dtype(dtype_out),
        launched_ns,
        over_ns or None,
        None if peer == NOBODY else peer,
        places[at] if at < len(places) else None,
    )


def _dtype(number: int) -> str:
    return DTYPES[number] if number < OTHER_DTYPE else "other"
