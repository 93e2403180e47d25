"""Copying a state's tensors into a memory slot: all that training waits for when it saves.

Here lives where each tensor's bytes belong in a slot, and the copying; what a slot is, and who reads it, is
``store.checkpoint``'s. The one idea: as long as names, dtypes and shapes are those of the save before, everything but
the copying itself is remembered: the order of the tensors, the data file's header, and a view of the slot for each. The
first saves find the memory of their slots reserved, by a thread that did so while training went on.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from samebits.errors import StoreError
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
from samebits.training.checkpoint import copying
from samebits.training.checkpoint.pinning import PinnedMemory
from samebits.training.state import snapshot
from samebits.training.state.snapshot import NamedTensors

_NO_DIGEST = bytes(16)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the tensors of a state belong.

    Attributes:
        kinds: names, dtypes, shapes and layouts: what must be the same for the plan to fit.
        order: the tensors' places in the state, in the order of the file.
        header: the data file's beginning.
        starts: of each tensor's bytes in the data file, in the order of the file.
        data_bytes: of the data file.
    """

    kinds: list[Any]
    order: list[int]
    header: bytes
    starts: list[int]
    data_bytes: int


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A slot's memory, as it is filled.

    Attributes:
        plan: that it was made for.
        views: a tensor for each of the plan, in the order of the file.
        pinned: all of it, where an accelerator copies into it.
    """

    plan: _Plan
    views: list[torch.Tensor]
    pinned: PinnedMemory | None


class Staging:
    """Fills the slots of one room, and remembers how.

    Args:
        room: the rank's slots.
    """

    def __init__(self, room: MemoryRoom) -> None:
        self._room = room
        self._plan: _Plan | None = None
        self._mapped: dict[MemoryBuffer, _Mapped] = {}
        self._aside = ThreadPoolExecutor(1, "samebits-reserve")
        self._reserving: dict[MemoryBuffer, Future[bool]] = {}

    def prepare(self, header: PointHeader, tensors: NamedTensors, tree: Tree, layout: Tree) -> None:
        """Begin to reserve room for points such as this one, beside the training, in every slot that holds none.

        Where that fails, the save that needs it says so.

        Raises:
            CheckpointError: the state cannot be saved faithfully; the message names the value.
        """
        plan = self._plan_for(tensors)
        manifest_bytes = len(_unproven(header, tree, layout, plan))
        for slot in self._room.empty_slots():
            self._let_go(slot)  # of memory that was given back since
            self._reserving[slot] = self._aside.submit(slot.reserve, manifest_bytes, plan.data_bytes)

    def stage(self, header: PointHeader, tensors: NamedTensors, tree: Tree, layout: Tree) -> tuple[str, int]:
        """Copy a point into a slot and seal it; the slot's name and the point's sequence.

        Raises:
            CheckpointError: the state cannot be saved faithfully; the message names the value.
            StoreError: there is not enough memory of that kind.
        """
        plan = self._plan_for(tensors)
        manifest = _unproven(header, tree, layout, plan)
        slot = self._room.next_slot()
        if (reserving := self._reserving.pop(slot, None)) is not None:
            with contextlib.suppress(StoreError):  # it is tried again
                reserving.result()
        sources = [tensors[index][1] for index in plan.order]
        views = self._views_into(slot, plan, len(manifest), sources)
        slot.open()
        copying.copy(views, sources)
        return slot.path.name, self._room.seal(slot, header.point, manifest, plan.data_bytes)

    def _plan_for(self, tensors: NamedTensors) -> _Plan:
        kinds = [(name, tensor.dtype, tensor.shape, tensor.layout) for name, tensor in tensors]
        if self._plan is None or self._plan.kinds != kinds:
            self._plan = _plan(kinds, tensors)
        return self._plan

    def close(self) -> None:
        """Nothing of the slots' memory is used any more: it is given back, or left to who finds it."""
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
    """The manifest, as long as it will be; the writer puts the digests in."""
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
    """A tensor for each of the plan, in the order of the file, in the memory of the data file's bytes."""
    views = []
    for index, start in zip(plan.order, plan.starts, strict=True):
        _, dtype, shape, _ = plan.kinds[index]
        end = start + dtype.itemsize * shape.numel()
        views.append(everything[start:end].view(dtype).view(shape))
    return views
