"""Access FSDP2's internals that differ between torch versions, with one function per difference.

Each function names what it relies on; ``tests/training/test_fsdp2_private.py`` probes it. Internals that are the same
in all tested versions are used directly in ``sharding/regrouping.py``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn


def groups_of(state: Any) -> Sequence[Any]:
    """Return the parameter groups of an ``FSDPState``.

    Relies on ``_fsdp_param_groups``, or before torch 2.12 on ``_fsdp_param_group``: one, or None.
    """
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def is_part_of_larger_mesh(info: Any) -> bool:
    """Return whether ``fully_shard`` was given some dimensions of a mesh, possible since torch 2.12.

    Relies on ``FSDPMeshInfo.is_spmd_mesh``.
    """
    return bool(getattr(info, "is_spmd_mesh", False))


def has_reduce_scatter_group(info: Any) -> bool:
    """Return whether gradients are reduced over their own process group, which torch 2.13 introduced.

    Relies on ``FSDPMeshInfo.reduce_scatter_process_group``.
    """
    return getattr(info, "reduce_scatter_process_group", None) is not None


def tensor_parallel_spec(param: Any) -> Any:
    """Return the ``DTensorSpec`` that a parameter had before ``fully_shard``; None if it was not a DTensor.

    Relies on ``FSDPParam.is_dtensor`` and ``_unsharded_dtensor_spec``, or before torch 2.13 on ``_tp_spec``.
    """
    if not param.is_dtensor:
        return None
    return param._unsharded_dtensor_spec if hasattr(param, "_unsharded_dtensor_spec") else param._tp_spec


def refresh(info: Any) -> None:
    """Make a ``DataParallelMeshInfo`` read sizes, ranks and groups from its mesh again.

    Relies on ``__post_init__`` reading all of them.
    """
    info.__post_init__()


def replace_post_forward_mesh(mesh_for: Callable[[int, Any], Any]) -> None:
    """Let ``mesh_for(number, mesh_info)`` determine the mesh for ``fully_shard(reshard_after_forward=number)``.

    If ``mesh_for`` returns a number or a bool instead, torch gets that as ``reshard_after_forward``. A second call has
    no effect, and neither has a call before FSDP2 is imported.

    Relies on ``_get_post_forward_mesh_info(reshard_after_forward, mesh_info)``, which two modules of FSDP2 hold, and on
    ``HSDPMeshInfo`` for a mesh of (replicas, ranks that share a copy).
    """
    for module in (sys.modules.get(f"torch.distributed.fsdp._fully_shard.{name}") for name in _POST_FORWARD):
        inner: Any = getattr(module, "_get_post_forward_mesh_info", None)
        if inner is not None and not hasattr(inner, "__wrapped__"):
            module._get_post_forward_mesh_info = _with_mesh(inner, mesh_for)  # type: ignore[union-attr]


def _with_mesh(inner: Callable[[Any, Any], Any], mesh_for: Callable[[int, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(inner)
    def info_of(reshard_after_forward: Any, mesh_info: Any) -> Any:
        is_number = type(reshard_after_forward) is int
        mesh = mesh_for(reshard_after_forward, mesh_info) if is_number else reshard_after_forward
        if isinstance(mesh, int):
            return inner(mesh, mesh_info)
        from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    return info_of


_POST_FORWARD = ("_fully_shard", "_fsdp_init")


def give_mesh_group(mesh: Any, pg: dist.ProcessGroup) -> None:
    """Make a mesh of one dimension use this group from now on.

    Relies on ``DeviceMesh._dim_group_names``, and on ``_pg_registry``, the mesh's own dictionary of groups since torch
    2.11.
    """
    mesh._dim_group_names = [pg.group_name]
    if hasattr(mesh, "_pg_registry"):
        mesh._pg_registry = {pg.group_name: pg}


def groups_held_by(mesh: Any) -> object:
    """Return the object that keeps a mesh's groups alive: ``DeviceMesh._pg_registry``; None before torch 2.11."""
    return getattr(mesh, "_pg_registry", None)


def cut_parameter(param: Any, whole: nn.Parameter) -> None:
    """Make an ``FSDPParam`` create its ``sharded_param`` from a whole parameter, on its current mesh.

    Relies on ``_init_sharded_param``, which takes the mesh since torch 2.12 and then assigns a new ``_orig_param_uid``;
    since torch 2.15 it reads the parameter's ``grad_dtype``.
    """
    if getattr(param, "_has_sharded_grad_dtype_override", False):
        whole.grad_dtype = param.sharded_grad_dtype
    mesh = (param.mesh_info,) if "mesh_info" in inspect.signature(param._init_sharded_param).parameters else ()
    number = getattr(param, "_orig_param_uid", None)
    param._init_sharded_param(whole, param.device, lambda _: param.fsdp_placement, *mesh)
    if number is not None:
        param._orig_param_uid = number


def drop_gradients(param: Any) -> None:
    """Remove all gradients of an ``FSDPParam``, reduced or not.

    Relies on ``_unsharded_param``, which exists after a forward pass, and on ``unsharded_accumulated_grad``, which
    since torch 2.15 is an alias of that parameter's gradient.
    """
    param.sharded_param.grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None
    if "unsharded_accumulated_grad" in vars(param):
        param.unsharded_accumulated_grad = None


def reset_iteration(root: Any) -> None:
    """Discard what an interrupted forward or backward pass left in a root ``FSDPState`` and those below it.

    Relies on ``_reset_iter_state``, or before torch 2.13 on the attributes that it resets.
    """
    if hasattr(root, "_reset_iter_state"):
        root._reset_iter_state()
        return
    stream, shared, below = root._device_handle.current_stream(), root._comm_ctx, root._state_ctx
    scattered = vars(shared).get("reduce_scatter_states", [getattr(shared, "reduce_scatter_state", None)])
    for one in (shared.all_gather_state, *scattered):
        _wait_for_event(stream, one)
    shared.all_gather_state = None
    if hasattr(shared, "reduce_scatter_states"):
        shared.reduce_scatter_states.clear()
    else:
        shared.reduce_scatter_state = None  # before torch 2.12
    shared.post_forward_order.clear()
    idle = type(root._training_state).IDLE
    for state in below.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for group in groups_of(state):
            _reset_group(group, stream, idle)
    below.iter_forward_root = None
    below.post_backward_final_callback_queued = False


def _reset_group(group: Any, stream: Any, idle: object) -> None:
    _wait_for_event(stream, group._all_reduce_state)
    for event in (group._post_reduce_event, group._reshard_after_forward_event):
        if event is not None:
            stream.wait_event(event)
    group._all_gather_result = group._all_reduce_state = group._partial_reduce_output = None
    group._post_reduce_event = group._reshard_after_forward_event = None
    group._post_forward_indices.clear()
    group._training_state = idle
    group._to_sharded()


def _wait_for_event(stream: Any, holder: Any) -> None:
    """Make the stream wait for the holder's event, if it has one."""
    if holder is not None and holder.event is not None:
        stream.wait_event(holder.event)
