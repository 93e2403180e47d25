"""Copy a state's tensors into a memory slot, the only part of a save that training waits for.

While names, dtypes and shapes stay those of the previous save, everything but the copying is reused: the order of the
tensors, the data file's header, and a view of the slot for each tensor. For the first saves, a thread reserves the
slots' memory while training continues.

torch's own copy divides each large tensor between its threads and is fastest if the target is aligned to cache lines.
In a file without gaps only some tensors are aligned, and for small tensors synchronizing the threads costs more than
copying the bytes. Unaligned and small tensors are therefore copied with plain memmove, each by one thread. An
accelerator's tensors are copied by its own engine into the slot's pages, which NVIDIA's driver is asked to pin. Other
drivers, or a driver that refuses, copy through a buffer of their own, which is slower but yields the same bytes.

(Pinning was written without an accelerator at hand: its tests check the calls to torch and their order.)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from samebits.core.point import Point
from samebits.errors import StoreError
from samebits.service import log
from samebits.store.checkpoint import (
    CHUNK_BYTES,
    Manifest,
    MemoryBuffer,
    MemoryRoom,
    PointHeader,
    TensorPart,
    Tree,
    encode_header,
    encode_manifest,
    in_file_order,
)
from samebits.store.checkpoint.memory_room import NAMES
from samebits.training.state import snapshot
from samebits.training.state.snapshot import NamedTensors

_NO_DIGEST = bytes(16)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The positions of a state's tensors in the data file.

    Attributes:
        kinds: names, dtypes, shapes and layouts, which must match for the plan to apply.
        order: the tensors' indices in the state, in the order of the file.
        header: the first bytes of the data file.
        starts: the offset of each tensor in the data file, in the order of the file.
        data_bytes: size of the data file.
    """

    kinds: list[Any]
    order: list[int]
    header: bytes
    starts: list[int]
    data_bytes: int


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A slot's memory, prepared for a plan.

    Attributes:
        plan: the plan it was made for.
        views: one tensor per tensor of the plan, in the order of the file.
        pinned: the pinned memory, if an accelerator copies into it.
    """

    plan: _Plan
    views: list[torch.Tensor]
    pinned: PinnedMemory | None


class Staging:
    """Fills the slots of one room, reusing earlier preparations.

    Args:
        room: the rank's slots.
    """

    def __init__(self, room: MemoryRoom) -> None:
        self._room = room
        self._plan: _Plan | None = None
        self._mapped: dict[MemoryBuffer, _Mapped] = {}
        self._aside = ThreadPoolExecutor(1, "samebits-reserve")
        self._reserving: dict[MemoryBuffer, Future[bool]] = {}

    def prepare(self, header: PointHeader, tensors: NamedTensors, tree: Tree, layout: Tree, *, slots: int = 2) -> None:
        """Start reserving memory for points like this one, in a separate thread.

        If that fails, the save that needs the memory reports it.

        Args:
            header, tensors, tree, layout: the point.
            slots: the number of slots that have memory afterwards; only empty ones are reserved.

        Raises:
            CheckpointError: the state cannot be saved faithfully; the message names the value.
        """
        plan = self._plan_for(tensors)
        manifest_bytes = len(_unproven(header, tree, layout, plan))
        empty = self._room.empty_slots()
        for slot in empty[: max(0, len(empty) - len(NAMES) + slots)]:
            self._let_go(slot)  # its memory has been freed since
            self._reserving[slot] = self._aside.submit(slot.reserve, manifest_bytes, plan.data_bytes)

    def stage(
        self,
        header: PointHeader,
        tensors: NamedTensors,
        tree: Tree,
        layout: Tree,
        is_unwanted: Callable[[Point], bool] = lambda point: False,
        is_on_disk: Callable[[Point], bool] = lambda point: False,
    ) -> tuple[str, int]:
        """Copy a point into a slot and seal it; return the slot's name and the point's sequence number.

        Args:
            header, tensors, tree, layout: the point.
            is_unwanted: returns whether a point's slot is to be filled before the slots of other points.
            is_on_disk: returns whether a point's slot may be filled before another slot is given memory.

        Raises:
            CheckpointError: the state cannot be saved faithfully; the message names the value.
            StoreError: not enough shared memory.
        """
        plan = self._plan_for(tensors)
        manifest = _unproven(header, tree, layout, plan)
        slot = self._room.next_slot(is_unwanted, is_on_disk)
        if (reserving := self._reserving.pop(slot, None)) is not None:
            with contextlib.suppress(StoreError):  # _views_into reserves again
                reserving.result()
        sources = [tensors[index][1] for index in plan.order]
        views = self._views_into(slot, plan, len(manifest), sources)
        slot.open()
        copy(views, sources)
        return slot.path.name, self._room.seal(slot, header.point, manifest, plan.data_bytes)

    def _plan_for(self, tensors: NamedTensors) -> _Plan:
        kinds = [(name, tensor.dtype, tensor.shape, tensor.layout) for name, tensor in tensors]
        if self._plan is None or self._plan.kinds != kinds:
            self._plan = _plan(kinds, tensors)
        return self._plan

    def close(self) -> None:
        """Stop using the slots' memory; it is then freed, or left for the next process."""
        self._aside.shutdown(cancel_futures=True)
        for slot in list(self._mapped):
            self._let_go(slot)

    def _let_go(self, slot: MemoryBuffer) -> None:
        mapped = self._mapped.pop(slot, None)
        if mapped is not None and mapped.pinned is not None:
            mapped.pinned.release()

    def _views_into(
        self, slot: MemoryBuffer, plan: _Plan, manifest_bytes: int, sources: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        known = self._mapped.get(slot)
        if known is not None and known.plan is plan and not slot.needs_room(manifest_bytes, plan.data_bytes):
            return known.views
        self._let_go(slot)
        slot.reserve(manifest_bytes, plan.data_bytes)
        slot.open()  # before the first byte changes
        data = slot.data(plan.data_bytes)
        data[: len(plan.header)] = plan.header
        everything = torch.frombuffer(data, dtype=torch.uint8)
        device = next((source.device for source in sources if not source.is_cpu), None)
        pinned = None if device is None else PinnedMemory(everything, device)
        mapped = self._mapped[slot] = _Mapped(plan, _views(everything, plan), pinned)
        return mapped.views


def _unproven(header: PointHeader, tree: Tree, layout: Tree, plan: _Plan) -> bytes:
    """Return the manifest at its final length. The writer fills in the digests later."""
    chunks = (_NO_DIGEST,) * -(-plan.data_bytes // CHUNK_BYTES)
    return encode_manifest(Manifest(header, layout, tree, plan.data_bytes, CHUNK_BYTES, chunks))


def _plan(kinds: list[Any], tensors: NamedTensors) -> _Plan:
    parts = [TensorPart(name, snapshot.dtype_name(name, tensor), tuple(tensor.shape), b"") for name, tensor in tensors]
    places = {part.name: index for index, part in enumerate(parts)}
    in_order = in_file_order(parts)
    order = [places[part.name] for part in in_order]
    header = encode_header(in_order)
    starts, position = [], len(header)
    for index in order:
        starts.append(position)
        tensor = tensors[index][1]
        position += tensor.numel() * tensor.element_size()
    return _Plan(kinds, order, header, starts, position)


def _views(everything: torch.Tensor, plan: _Plan) -> list[torch.Tensor]:
    """Return a tensor for each tensor of the plan, in file order, that views the data file's bytes."""
    views = []
    for index, start in zip(plan.order, plan.starts, strict=True):
        _, dtype, shape, _ = plan.kinds[index]
        end = start + dtype.itemsize * shape.numel()
        views.append(everything[start:end].view(dtype).view(shape))
    return views


SMALL_BYTES = 1024 * 1024
_CACHE_LINE_BYTES = 64
_WORTH_SHARING_BYTES = 8 * 1024 * 1024
_MOST_THREADS = 8

_Move = tuple[int, int, int]  # target, source, bytes


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, a contiguous CPU tensor of the same dtype and shape."""
    moves: list[_Move] = []
    others: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    elsewhere: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if not source.is_cpu:
            elsewhere[0].append(target)
            elsewhere[1].append(source)
            continue
        size = target.nbytes
        address = target.data_ptr()
        is_plain = source.is_contiguous() and not source.is_conj() and not source.is_neg()
        if is_plain and (size < SMALL_BYTES or address % _CACHE_LINE_BYTES):
            moves.append((address, source.data_ptr(), size))
        else:
            others[0].append(target)
            others[1].append(source)
    shares = _shares(moves, threads())
    pending = [_pool().submit(_move, share) for share in shares[1:]]
    _move(shares[0])
    if others[0]:
        with torch.no_grad():
            torch._foreach_copy_(*others)
    if elsewhere[0]:
        fetch(*elsewhere)
    for one in pending:
        one.result()


def threads() -> int:
    """Return the number of threads that share large copies: torch's own number, up to a limit."""
    return min(torch.get_num_threads(), _MOST_THREADS)


def loading_threads(local_world_size: int) -> int:
    """Return the number of threads with which each rank loads.

    The ranks of a host share its cores, because none of them trains at that time.
    """
    return min(max(torch.get_num_threads(), len(os.sched_getaffinity(0)) // local_world_size), _MOST_THREADS)


def _move(moves: Sequence[_Move]) -> None:
    for move in moves:
        ctypes.memmove(*move)


def _shares(moves: list[_Move], count: int) -> list[list[_Move]]:
    """Divide the copies among threads so that each has about the same number of bytes; few bytes get one thread."""
    total = sum(size for _, _, size in moves)
    if count == 1 or total < _WORTH_SHARING_BYTES:
        return [moves]
    shares: list[list[_Move]] = [[]]
    taken = 0
    for move in moves:
        if taken * count >= total * len(shares):
            shares.append([])
        shares[-1].append(move)
        taken += move[2]
    return shares


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="samebits-copy")


class PinnedMemory:
    """Pins memory until :meth:`release`. Does nothing unless an NVIDIA device copies into it.

    Args:
        memory: bytes on the CPU, whose pages stay mapped until :meth:`release`.
        device: the device whose tensors are copied into it.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._address = 0
        if device.type != "cuda" or memory.nbytes == 0:
            return
        with torch.cuda.device(device):  # else it would be pinned, and a context created, on device 0
            error = int(_driver().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if error:
            _forget_error(device)
            log.warn(
                f"checkpoints are copied through the driver's own buffer, which is slower: {memory.nbytes} bytes could "
                f"not be pinned (cudaHostRegister: error {error}); see `ulimit -l`"
            )
            return
        self._address = memory.data_ptr()

    def release(self) -> None:
        """Unpin the memory before it is freed. Further calls do nothing."""
        address, self._address = self._address, 0
        if address:
            _driver().cudaHostUnregister(address)


def _forget_error(device: torch.device) -> None:
    """Clear CUDA's last error, which torch would otherwise raise at the training script's next kernel.

    A runtime call that fails leaves its error to the thread's next cudaGetLastError (CUDA Runtime API, Error Handling),
    with which torch checks each launch.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def _driver() -> Any:
    cudart: Any = torch.cuda.cudart  # untyped
    return cudart()


def fetch(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy accelerator tensors to the host while computations continue, and wait for the copies."""
    streams = {device: _stream_of(device) for device in {source.device for source in sources}}
    for device, stream in streams.items():
        stream.wait_stream(torch.accelerator.current_stream(device))  # work launched before may still change them
        with stream, torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                if source.device == device:
                    target.copy_(source, non_blocking=True)
    for stream in streams.values():
        stream.synchronize()


@functools.cache
def _stream_of(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
