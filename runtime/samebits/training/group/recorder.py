"""Record the collectives that one process group calls, in the process's ring buffer.

This module decides which parts of a call's arguments are recorded; the ring buffer is in ``store.collective_ring``.
It also saves torch's own record when a group is broken, to show the open collectives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from samebits import strict_json
from samebits.errors import StoreError
from samebits.service import log
from samebits.store import durable
from samebits.store.collective_ring import DTYPES, NOBODY, OPS, OTHER_DTYPE, CollectiveRing
from samebits.training import torch_private
from samebits.training.group.calling_place import calling_frame

__all__ = ["Recorder"]

_NAMES = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "_all_gather_base",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "allreduce_coalesced": "allreduce_coalesced",
    "allgather_coalesced": "ALLGATHER_coalesced",
    "all_gather_single": "all_gather_single",
    "all_gather_single_coalesced": "ALLGATHER_coalesced",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_single_coalesced": "REDUCE_SCATTER_coalesced",
}
"""Operation names by method of a process group."""
_OPS = {method: OPS.index(name) for method, name in _NAMES.items()}
_SEND, _RECEIVE = OPS.index("send"), OPS.index("recv")
_DTYPES = {getattr(torch, name): at for at, name in enumerate(DTYPES) if hasattr(torch, name)}
_IN_PLACE = {"allreduce", "broadcast", "reduce", "allreduce_coalesced"}


class Recorder:
    """Records the calls of one group.

    Args:
        ring: the process's ring; None: nothing is recorded.
        name, description: the group's, as in torch.
        ranks: the members' ranks in the generation.
    """

    __slots__ = ("_group", "_pairwise", "_ring")

    def __init__(self, ring: CollectiveRing | None, name: str, description: str, ranks: Sequence[int]) -> None:
        group = None if ring is None else ring.add_group(name, description, ranks)
        self._ring, self._group = (None, 0) if group is None else (ring, group)
        self._pairwise: dict[tuple[int, int], int] = {}  # op and peer → count

    def launched(self, method: str, sequence: int, args: Sequence[Any]) -> int | None:
        """Record a collective with these arguments; return its number, which :meth:`over` takes."""
        op = _OPS.get(method)
        if self._ring is None or op is None:
            return None
        output = _shape_of(args[0]) if args else _NOTHING
        given = output if method in _IN_PLACE or len(args) < 2 else _shape_of(args[1])
        return self._ring.launch(self._group, sequence, op, *given, *output, NOBODY, _place(self._ring))

    def launched_pairwise(self, method: str, args: Sequence[Any]) -> int | None:
        """Record a send or receive, and return a number for :meth:`over`."""
        if self._ring is None or not args:
            return None
        op, peer, sequence = _SEND if method == "send" else _RECEIVE, NOBODY, 0
        if method != "recv_anysource" and len(args) > 1:
            peer, sequence = args[1], self._next(op, args[1])
        shape = _shape_of(args[0])
        return self._ring.launch(self._group, sequence, op, *shape, *shape, peer, _place(self._ring))

    def named_sender(self, number: int | None, peer: int) -> None:
        """Set the sender of a receive from any rank."""
        if number is not None and self._ring is not None:
            self._ring.name_sender(number, peer, self._next(_RECEIVE, peer))

    def _next(self, op: int, peer: int) -> int:
        self._pairwise[op, peer] = number = self._pairwise.get((op, peer), 0) + 1
        return number

    def over(self, number: int | None) -> None:
        """Record the end of a launch."""
        if number is not None and self._ring is not None:
            self._ring.end(number)


def _place(ring: CollectiveRing) -> int:
    frame = calling_frame(3)  # skip this module's frames
    return 0 if frame is None else ring.place_of(frame)


_NOTHING: tuple[Sequence[int], int] = ((), OTHER_DTYPE)


def _shape_of(value: Any) -> tuple[Sequence[int], int]:
    """Return the shape of one tensor, or the element count of several, and the dtype of the first."""
    while type(value) in (list, tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, torch.Tensor):
        return value.shape, _DTYPES.get(value.dtype, OTHER_DTYPE)
    if type(value) not in (list, tuple) or not value:
        return _NOTHING  # options
    parts = [_shape_of(one) for one in value]
    return (sum(torch.Size(shape).numel() for shape, _ in parts),), parts[0][1]


# ---- torch's flight recorder
# torch records collectives in memory that is lost with the process, and a rank that hangs in a collective is soon
# ended. Its record is therefore written to LOG_DIR as soon as the group is broken, in a thread for which no recovery
# waits.

MOST_BYTES = 16 << 20


def write_flight_record(folder: Path, node: str, reason: str) -> Path | None:
    """Replace this node's file with the current record. Return None if it is empty or cannot be written.

    Args:
        folder: LOG_DIR; if it is missing, nothing is written.
        node: this process's node.
        reason: why the group was broken.
    """
    path = folder / f"flight_{node}.json"
    try:
        record = torch_private.flight_record()
        if not folder.is_dir() or not 0 < len(record) <= MOST_BYTES:
            return None
        read = strict_json.loads(record)
        if not read.get("entries"):
            return None
        durable.replace_note(path, json.dumps({"node": node, "broken": reason, "record": read}).encode())
    except (StoreError, RuntimeError, ValueError) as error:  # a failed device cannot be queried either
        log.warn(f"torch's record of its collectives could not be saved: {error}")
        return None
    return path
