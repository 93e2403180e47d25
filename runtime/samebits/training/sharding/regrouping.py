"""Shard FSDP2 modules when the first generation forms, and move them to each later generation's group.

Before there is a generation, a process is a group of one, where ``fully_shard`` leaves every parameter whole. So a
script builds its model as it would with DDP, and the first generation cuts the parameters, which stay the same objects,
as ``fully_shard`` would have done on that many ranks. From then on only process groups change; ranks, sizes and
positions stay.

This uses private interfaces of FSDP2; where they differ between versions of torch, ``fsdp2_private`` has them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samebits.core.messages import Sharding
from samebits.errors import UsageError
from samebits.training import fsdp2_private, torch_private
from samebits.training.group import meshes
from samebits.training.group.group import discard
from samebits.training.sharding import pieces

__all__ = ["accumulates", "attach", "is_flattened", "require_supported", "reset", "sharding_of"]

_STATE_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_FSDP1_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"
_DECLINED = (
    "build it with fully_shard(module) on the default mesh or one of init_device_mesh with one or two dimensions, or "
    "run with ENABLE_RECOVERY=0"
)


def require_supported(name: str, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise if something in the module cannot move to another group.

    Raises:
        UsageError: names it, and what to do instead.
    """
    if is_flattened(module):
        raise UsageError(
            f"{name} is in FullyShardedDataParallel (FSDP1), whose groups end with their generation; shard it with "
            "fully_shard(module) of torch.distributed.fsdp, or run with ENABLE_RECOVERY=0"
        )
    managed = {id(param.sharded_param) for group in _groups(module) for param in group.fsdp_params}
    for path, parameter in module.named_parameters():
        if parameter.is_meta:
            raise UsageError(
                f"{name}.{path} is on the meta device: call to_empty() and give it values before elastic.run"
            )
        if pieces.is_distributed(parameter) and id(parameter) not in managed:
            raise UsageError(
                f"{name}.{path} is a DTensor that no fully_shard module manages (tensor parallelism, "
                f"distribute_tensor): it cannot ride to another group; {_DECLINED}"
            )
    for group in _groups(module):
        reason = _unsupported(group)
        if reason:
            raise UsageError(f"{name} ({type(group.modules[0]).__name__}) uses {reason}; {_DECLINED}")
    for optimizer in optimizers:
        for path, moment in _moments(optimizer):
            if moment.device_mesh.size() > 1:
                raise UsageError(f"{name}: the optimizer's {path} is sharded before there is a group; {_DECLINED}")


def _unsupported(group: Any) -> str:
    infos = [group.mesh_info, *(param.mesh_info for param in group.fsdp_params)]
    for one in infos:
        if reason := _unsupported_mesh(one):
            return reason
    if any(param.is_dtensor for param in group.fsdp_params):
        return "parameters that were DTensors before (tensor parallelism)"
    if group.post_forward_mesh_info not in (None, group.mesh_info):
        return "reshard_after_forward with a number, which is another mesh"
    if fsdp2_private.has_reduce_scatter_group(group.mesh_info):
        return "set_separate_reduce_scatter_group: a group that ends with its generation"
    return ""


def _unsupported_mesh(info: Any) -> str:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    declaration = meshes.declaration_of(info.mesh)
    if type(info) not in (FSDPMeshInfo, HSDPMeshInfo) or fsdp2_private.is_part_of_larger_mesh(info):
        return "some dimensions of a larger mesh (dp_mesh_dims, replicate)"
    if declaration is None and (info.mesh.ndim != 1 or torch_private.root_of_mesh(info.mesh) is not info.mesh):
        return "a mesh that is a part of another one, or was not built between samebits.init() and elastic.run"
    return ""


def sharding_of(module: nn.Module, world_size: int) -> tuple[str, Sharding]:
    """Return the mesh that a module is sharded over, in words, and how it divides the job's ranks.

    Raises:
        UsageError: ``fully_shard`` was called with different meshes.
    """
    found = {}
    for info in _mesh_infos(module):
        declaration = meshes.declaration_of(info.mesh)
        replicates = fsdp2_private.replicates(info)
        if declaration is None:
            found["the default mesh"] = Sharding((world_size,), replicates)
        else:
            found[str(declaration)] = Sharding(declaration.sizes, replicates)
    if len(found) != 1:
        raise UsageError(
            f"{type(module).__name__} is sharded over several meshes: {'; '.join(sorted(found))}. Fix: give every "
            "fully_shard() the same mesh"
        )
    return found.popitem()


def attach(modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Make the modules train on the default group, which a generation has just formed.

    Raises:
        UsageError: they are sharded over another number of ranks, or as another rank.
    """
    pg, rank, world_size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert pg is not None, "a generation has a group"
    old = [one for module in modules for one in _held_groups(module)]
    for module in modules:
        reset(module)
        mesh = next(group.mesh_info.mesh for group in _groups(module))
        if meshes.declaration_of(mesh) is not None:
            _enter_mesh(module, optimizers)
            continue
        before = (mesh.size(), mesh.get_coordinate()[0])
        if before == (world_size, rank):
            _move(module, pg)
        elif before == (1, 0):
            _shard(module, optimizers, pg)
        else:
            raise UsageError(
                f"{type(module).__name__} is sharded over {before[0]} ranks, this one being rank {before[1]}, and the "
                f"generation has {world_size}, this one being rank {rank}: sharded state needs a world of fixed size "
                "(MIN_WORKER_NUM and MAX_WORKER_NUM as WORKER_NUM). For another size write a point with `samebits "
                "ckpt export --format dcp` and begin anew with samebits.elastic.load_dcp"
            )
    discard([old])  # elsewhere, since freeing the last group waits for its threads


def accumulates(module: nn.Module) -> bool:
    """Return whether it holds gradients that are not reduced yet (``set_requires_gradient_sync(False)``)."""
    return any(
        param.unsharded_accumulated_grad is not None
        or (hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None)
        for group in _groups(module)
        for param in group.fsdp_params
    )


def reset(module: nn.Module) -> None:
    """Discard what an interrupted step has left: parameters are sharded again, nothing is awaited."""
    for group in _groups(module):
        group._all_gather_result = None  # its work ends with the group, and waiting for it would raise
        for param in group.fsdp_params:
            fsdp2_private.drop_gradients(param)
    for state in _states(module):
        if state._is_root:
            fsdp2_private.reset_iteration(state)


def _enter_mesh(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Take a module into the groups that its declared mesh has now; the first time its parameters are whole.

    Raises:
        UsageError: its parameters are cut for another place in the mesh.
    """
    is_new = False
    for info in _mesh_infos(module):
        before, now = fsdp2_private.place_in(info), fsdp2_private.refresh(info)
        is_new |= before != now
        if before != now and any(size != 1 for size, _ in before):
            raise UsageError(
                f"{type(module).__name__} is sharded for the place {before} (size and rank along each dimension) in "
                f"its mesh, and this generation has given this process the place {now}: a sharded rank cannot take "
                "another rank's place. Fix: restart this process"
            )
    if is_new:
        _cut(module, optimizers)


# --- one group to the next --------------------------------------------------------------------------------------------


def _move(module: nn.Module, pg: dist.ProcessGroup) -> None:
    for info in _mesh_infos(module):
        fsdp2_private.give_mesh_group(info.mesh, pg)
        info.shard_process_group = pg
    for _, parameter in pieces.paths_of(dict(module.named_parameters()), ""):
        # An operator's result may have an equal mesh that torch has cached.
        fsdp2_private.give_mesh_group(parameter.device_mesh, pg)


# --- from whole to sharded --------------------------------------------------------------------------------------------


def _shard(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], pg: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    # Not with torch's own function: that may be a collective, which other ranks need not join.
    kind = next(info.mesh.device_type for info in _mesh_infos(module))
    mesh = DeviceMesh(kind, torch.arange(pg.size()), _init_backend=False)
    fsdp2_private.give_mesh_group(mesh, pg)
    for info in _mesh_infos(module):
        info.mesh, info.shard_process_group = mesh, pg
        info.shard_mesh_size, info.shard_mesh_rank = pg.size(), pg.rank()
    _cut(module, optimizers)


def _cut(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Let each parameter, and its moments, be this rank's part; all are whole."""
    cut = {id(param.sharded_param) for group in _groups(module) for param in group.fsdp_params}
    for group in _groups(module):
        for param in group.fsdp_params:
            _shard_parameter(param)
    for optimizer in optimizers:
        for parameter, moments in optimizer.state.items():
            if id(parameter) in cut:
                moments.update(
                    (name, pieces.cut_like(pieces.local(one), parameter))
                    for name, one in list(moments.items())
                    if pieces.is_distributed(one)
                )


def _shard_parameter(param: Any) -> None:
    """Shard a whole parameter as ``fully_shard`` does; the parameter stays the same object."""
    parameter = param.sharded_param
    whole = nn.Parameter(pieces.local(parameter).to(param.device), requires_grad=parameter.requires_grad)
    fsdp2_private.cut_parameter(param, whole)
    parameter._local_tensor, parameter._spec = param.sharded_param._local_tensor, param.sharded_param._spec
    param.sharded_param = parameter
    param._setattr_on_modules(parameter)
    if param.post_forward_mesh_info is not None:
        param._init_sharded_post_forward_param_metadata(whole)
    param.all_gather_outputs = []  # from a forward pass in the group of one
    vars(param).pop("_unsharded_param", None)


def is_flattened(module: nn.Module) -> bool:
    """Return whether FSDP1 has wrapped the module or a part of it."""
    found = sys.modules.get(_FSDP1_MODULE)
    return found is not None and any(isinstance(one, found.FullyShardedDataParallel) for one in module.modules())


# --- finding ----------------------------------------------------------------------------------------------------------


def _states(module: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's state of every module it was applied to; several modules may share one."""
    found = sys.modules.get(_STATE_MODULE)
    if found is None:
        return
    seen: set[int] = set()
    for one in module.modules():
        state = found._get_module_fsdp_state(one)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield state


def _groups(module: nn.Module) -> list[Any]:
    return [group for state in _states(module) for group in fsdp2_private.groups_of(state)]


def _mesh_infos(module: nn.Module) -> Iterable[Any]:
    """Return each mesh info once, as the calls of ``fully_shard`` created them."""
    return {id(one): one for group in _groups(module) for one in _infos_of(group)}.values()


def _infos_of(group: Any) -> Iterator[Any]:
    yield group.mesh_info
    for param in group.fsdp_params:
        yield param.mesh_info


def _held_groups(module: nn.Module) -> Iterator[object]:
    """Yield what keeps the last generation's group alive: FSDP2, and the meshes, each with its own registry."""
    for info in _mesh_infos(module):
        yield info.shard_process_group
        yield getattr(info, "replicate_process_group", None)
        yield fsdp2_private.groups_held_by(info.mesh)
    for _, parameter in pieces.paths_of(dict(module.named_parameters()), ""):
        yield fsdp2_private.groups_held_by(parameter.device_mesh)


def _moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for moments in optimizer.state.values():
        for name, one in moments.items():
            if pieces.is_distributed(one):
                yield name, one
