"""Horovod's PyTorch API: ``import samebits.horovod as hvd`` replaces ``import horovod.torch as hvd``.

A script written for ``horovod.torch`` need not change its calls; each has the meaning of its SameBits counterpart.
"""

from __future__ import annotations

from samebits.errors import CommunicationError as HorovodInternalError
from samebits.errors import HostsUpdatedInterrupt
from samebits.horovod import elastic
from samebits.horovod.collectives import (
    Average,
    Compression,
    Max,
    Min,
    ReduceOp,
    Sum,
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from samebits.horovod.optimizer import DistributedOptimizer

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
