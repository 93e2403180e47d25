"""Reduce the gradients of an HSDP model within each shard group, so that their sum over the replicas has a fixed order.

With HSDP, each backward pass ends with an all-reduce over the replicas, whose order of additions depends on their
number. Virtual workers sum over the replicas themselves, in an order that does not. FSDP2's parameter groups are
therefore switched to FSDP over the shard dimension alone; their parameters stay sharded over the whole mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from samebits.training.sharding import regrouping
from samebits.training.sharding.regrouping import parameter_groups

__all__ = [
    "FIX",
    "ReplicaPlace",
    "reduce_over_replicas",
    "reduce_within_shard_groups",
    "shard_count",
    "unsupported",
]

FIX = (
    "Fix: fully_shard(model, mesh=…) over a device mesh of two dimensions, replicas and shards (or these two of three, "
    "with tensor parallelism), or leave global_batch out"
)


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """This rank's place among the replicas of a model in one generation.

    Attributes:
        index, count: the number of this rank's replica, and the number of replicas.
        shard, shards: this rank's index among the shards of its replica, and their number. Each has its own samples.
        across: the ranks that hold the same part, in the order of their replicas; None: all ranks.
        within: the groups of ranks inside this replica; empty without shards.
    """

    index: int
    count: int
    shard: int = 0
    shards: int = 1
    across: dist.ProcessGroup | None = None
    within: tuple[dist.ProcessGroup, ...] = ()


def unsupported(modules: Mapping[str, nn.Module]) -> str:
    """Return why the gradients of sharded modules cannot be summed over virtual workers, with the fix, or ""."""
    for name, module in modules.items():
        if regrouping.has_unmanaged(module):
            return f"parts of state.{name} that are DTensors without fully_shard, such as experts. {FIX}"
        infos = list(_infos([module]))
        if not infos or not all(map(_is_hsdp, infos)):
            return f"state.{name}, which is sharded, but not by fully_shard over a device mesh with replicas. {FIX}"
    return ""


def shard_count(use: regrouping.MeshUse, modules: Iterable[nn.Module]) -> int | None:
    """Return into how many shards each replica divides its samples; None if the mesh has a dimension of another kind.

    Args:
        use: how the mesh is used.
        modules: the modules, without a reason from :func:`unsupported`.
    """
    tensor_parallel = set[int]().union(*map(regrouping.tensor_parallel_dimensions, modules))
    if any(size > 1 and dim not in use.data_parallel | tensor_parallel for dim, size in enumerate(use.sizes)):
        return None
    return math.prod(use.sizes[dim] for dim in use.splits & use.data_parallel)


def reduce_within_shard_groups(modules: Iterable[nn.Module]) -> ReplicaPlace:
    """Reduce gradients within shard groups from now on, and return this rank's place in the present generation."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    held = list(modules)
    for module in held:
        for group in parameter_groups(module):
            whole = group.mesh_info
            if _is_hsdp(whole):
                _switch(group, FSDPMeshInfo(whole.mesh, shard_mesh_dim=whole.shard_mesh_dim))
    info = next(_infos(held))
    return ReplicaPlace(
        info.replicate_mesh_rank,
        info.replicate_mesh_size,
        info.shard_mesh_rank,
        info.shard_mesh_size,
        info.replicate_process_group,
        regrouping.groups_beside(info.mesh, info.replicate_mesh_dim),
    )


def reduce_over_replicas(modules: Iterable[nn.Module]) -> None:
    """Undo :func:`reduce_within_shard_groups`."""
    for module in modules:
        for group in parameter_groups(module):
            for param in group.fsdp_params[:1]:
                _switch(group, param.mesh_info)


def _switch(group: Any, info: object) -> None:
    if group.post_forward_mesh_info is group.mesh_info:  # otherwise FSDP2 would reshard to another mesh
        group.post_forward_mesh_info = info
    group.mesh_info = info


def _infos(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the mesh infos of the parameters, which :func:`reduce_within_shard_groups` does not change."""
    return (param.mesh_info for module in modules for group in parameter_groups(module) for param in group.fsdp_params)


def _is_hsdp(info: object) -> bool:
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    return isinstance(info, HSDPMeshInfo)
