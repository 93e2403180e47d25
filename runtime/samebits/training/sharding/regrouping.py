"""Shard modules when the first generation forms, and move them to the groups of each later generation.

Before the first generation, a process is in a group of one rank, in which ``fully_shard`` and ``parallelize_module``
leave every parameter unsharded. A script therefore builds its model as it would with DDP. The first generation shards
the parameters, which stay the same objects, as those functions would have done with that many ranks. After that only
process groups change; ranks, sizes and positions stay the same.

This uses private interfaces of FSDP2; ``fsdp2_private`` has those that differ between versions of torch.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samebits.core.messages import Sharding
from samebits.errors import UsageError
from samebits.printable import counted
from samebits.training import fsdp2_private, torch_private
from samebits.training.group import meshes
from samebits.training.group.group import discard
from samebits.training.sharding import filling, pieces
from samebits.training.sharding.pipeline import Pipeline

__all__ = [
    "MeshUse",
    "accumulates",
    "attach",
    "declare_meshes",
    "groups_beside",
    "has_unmanaged",
    "is_flattened",
    "let_shrink",
    "parameter_groups",
    "refuse_sequences",
    "require_supported",
    "reset",
    "tensor_parallel_dimensions",
    "use_of",
]

_STATE_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_FSDP1_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"
_EXPERTS, _SEQUENCE = "ep", "cp"
"""Names of mesh dimensions, as in torchtitan, since the use of these dimensions cannot be read from the tensors."""
_DECLINED = (
    "build it over the default mesh or one of init_device_mesh, or its slices by name, between samebits.init() and "
    "elastic.run; or run with ENABLE_RECOVERY=0"
)


@dataclass(frozen=True, slots=True)
class MeshUse:
    """How a mesh divides modules and data.

    Attributes:
        mesh: description of the mesh, for messages.
        root: the mesh.
        sizes: ranks along each dimension of the whole mesh.
        splits: the dimensions over which some tensor is split.
        model_parallel: the dimensions over which a layer, the stages of a pipeline or a sequence is divided.
        data_parallel: the dimensions whose ranks use different samples, even if they are also in ``model_parallel``.
    """

    mesh: str
    root: Any
    sizes: tuple[int, ...]
    splits: frozenset[int]
    model_parallel: frozenset[int]
    data_parallel: frozenset[int]

    @property
    def same_samples(self) -> frozenset[int]:
        """The mesh dimensions whose ranks compute with the same samples."""
        return self.model_parallel - self.data_parallel

    @property
    def shrinks(self) -> int | None:
        """The outermost dimension whose ranks hold the same part and use different samples; None: there is none."""
        same = self.same_samples
        dimensions = (dim for dim, size in enumerate(self.sizes) if size > 1 and dim not in self.splits | same)
        return next(dimensions, None)

    @property
    def sharding(self) -> Sharding:
        """How the mesh divides the job's ranks."""
        return Sharding(self.sizes, tuple(dim not in self.splits for dim in range(len(self.sizes))))

    def data_place(self, rank: int) -> tuple[int, int]:
        """Return the index of the data part that a rank uses, and the number of parts."""
        dimensions, same = range(len(self.sizes)), self.same_samples
        place = Sharding(self.sizes, tuple(dim in same for dim in dimensions)).key_of(rank)
        index, count = 0, 1
        for coordinate, dim in zip(place, (dim for dim in dimensions if dim not in same), strict=True):
            index, count = index * self.sizes[dim] + coordinate, count * self.sizes[dim]
        return index, count


def declare_meshes(module: nn.Module) -> None:
    """Declare the mesh of one rank that a tensor-parallel plan uses, so that a job with one worker can be recovered.

    Tensors over such a mesh would be unsharded in any job, so :func:`.meshes.require_world` refuses it in a larger one.
    """
    for _, tensor in _tensor_parallel(module):
        meshes.declare_alone(tensor.device_mesh)


def require_supported(
    name: str, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], pipeline: Pipeline | None = None
) -> None:
    """Raise if a part of the module cannot be moved to another group.

    Args:
        name, module: the module and its name in the state.
        optimizers: the optimizers of the state.
        pipeline: the pipeline whose stages the module contains, if any.

    Raises:
        UsageError: the message names the part and what to do instead.
    """
    if is_flattened(module):
        raise UsageError(
            f"{name} is in FullyShardedDataParallel (FSDP1), whose groups end with their generation. Fix: shard it "
            "with "
            "fully_shard(module) of torch.distributed.fsdp, or run with ENABLE_RECOVERY=0"
        )
    staged = set() if pipeline is None else set(map(id, pipeline.parameters()))
    filling.require_fillable(name, module, lambda one: pieces.is_distributed(one) or id(one) in staged)
    for path, tensor in _tensor_parallel(module):
        if meshes.root_of(tensor.device_mesh) is None:
            raise UsageError(
                f"{name}.{path} is a DTensor over a mesh that was not built between samebits.init() and elastic.run; "
                f"{_DECLINED}"
            )
    for group in parameter_groups(module):
        reason = _unsupported(group)
        if reason:
            raise UsageError(f"{name} ({type(group.modules[0]).__name__}) uses {reason}; {_DECLINED}")
    for optimizer in optimizers:
        for path, moment in _moments(optimizer):
            if moment.device_mesh.size() > 1:
                raise UsageError(
                    f"{name}: the optimizer's {path} was sharded before the process group existed; {_DECLINED}"
                )


def _unsupported(group: Any) -> str:
    infos = [group.mesh_info, *(param.mesh_info for param in group.fsdp_params)]
    for one in infos:
        if reason := _unsupported_mesh(one):
            return reason
    after = group.post_forward_mesh_info
    if after not in (None, group.mesh_info) and meshes.root_of(after.mesh) is None:
        return "reshard_after_forward with a number"
    if fsdp2_private.has_reduce_scatter_group(group.mesh_info):
        return "set_separate_reduce_scatter_group: a group that ends with its generation"
    return ""


def _unsupported_mesh(info: Any) -> str:
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo

    if type(info) not in (DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo) or fsdp2_private.is_part_of_larger_mesh(info):
        return "some dimensions of a larger mesh (dp_mesh_dims)"
    is_default = info.mesh.ndim == 1 and torch_private.root_of_mesh(info.mesh) is info.mesh
    if meshes.root_of(info.mesh) is None and not is_default:
        return "a mesh that is a part of another one, or was not built between samebits.init() and elastic.run"
    return ""


def refuse_sequences() -> None:
    """Refuse a mesh dimension for context parallelism if no model is sharded.

    Its ranks would otherwise use different samples.
    """
    for one in meshes.declared():
        if _SEQUENCE in one.names:
            raise UsageError(
                f'the device mesh {one} has a dimension "{_SEQUENCE}" for context parallelism, whose ranks use the '
                "same samples, and no model of the state is sharded over this mesh. Fix: apply "
                "fully_shard(model, mesh=…) with the mesh or a slice of it, or give the dimension another name"
            )


def use_of(name: str, module: nn.Module, world_size: int, pipeline: Pipeline | None = None) -> MeshUse:
    """Return how a module is divided over its mesh; ``pipeline`` as for :func:`require_supported`.

    Raises:
        UsageError: the module's tensors are over different meshes.
    """
    roots: dict[int, Any] = {}
    splits: set[int] = set()
    model_parallel: set[int] = set()
    data_parallel: set[int] = set()
    for tensor in _distributed(module):
        root = _root_of(tensor.device_mesh)
        roots[id(root)] = root
        dimensions = _dimensions(root, tensor.device_mesh)
        splits |= {dim for dim, one in zip(dimensions, tensor.placements, strict=True) if not one.is_replicate()}
    if pipeline is not None:  # a pipeline's ranks compute with the same samples, one after the other
        roots[id(pipeline.root)] = pipeline.root
        dimension = _dimensions(pipeline.root, pipeline.mesh)
        splits.update(dimension)
        model_parallel.update(dimension)
    for mesh in _tensor_parallel_meshes(module):
        model_parallel.update(_dimensions(_root_of(mesh), mesh))
    for group in parameter_groups(module):  # fully_shard averages gradients over these ranks
        mesh = group.mesh_info.mesh
        data_parallel.update(_dimensions(_root_of(mesh), mesh))
    found = {_words(root): root for root in roots.values()}
    if len(found) != 1:
        raise UsageError(
            f"state.{name} ({type(module).__name__}) is sharded over several meshes: {'; '.join(sorted(found))}. Fix: "
            "give every fully_shard() and parallelize_module() the same mesh, or slices of it"
        )
    words, root = found.popitem()
    declaration = meshes.declaration_of(root)
    sizes = declaration.sizes if declaration is not None else (world_size,) if root.ndim == 1 else tuple(root.shape)
    names = dict(enumerate(root.mesh_dim_names or ()))
    data_parallel |= {dim for dim, name in names.items() if name == _EXPERTS}
    sequence = {dim for dim, name in names.items() if name == _SEQUENCE}
    return MeshUse(
        words, root, sizes, frozenset(splits), frozenset(model_parallel | sequence), frozenset(data_parallel - sequence)
    )


def let_shrink(use: MeshUse, least: int, most: int) -> int:
    """Let the number of replicas change with the number of workers, and return the dimension of the replicas.

    Raises:
        UsageError: no dimension of the mesh may shrink, or not to this number of workers.
    """
    bounds = f"MIN_WORKER_NUM={least} and MAX_WORKER_NUM={most}"
    if use.shrinks is None or meshes.root_of(use.root) is None:
        raise UsageError(
            f"{bounds}: the state is sharded over {use.mesh}, in which no dimension holds replicas, so the number of "
            "workers cannot change. Fix: set both to WORKER_NUM, or leave them out; for another size, write a point "
            "with `samebits ckpt export --format dcp` and load it with samebits.elastic.load_dcp"
        )
    group = math.prod(use.sizes) // use.sizes[use.shrinks]
    if least % group:
        raise UsageError(
            f"{bounds}: of the device mesh {use.mesh}, only whole shard groups of {counted(group, 'worker')} can be "
            f"left out. Fix: set MIN_WORKER_NUM to a multiple of {group}"
        )
    meshes.let_shrink(use.root, use.shrinks)
    return use.shrinks


def _words(root: Any) -> str:
    declaration = meshes.declaration_of(root)
    return "the default mesh" if declaration is None else str(declaration)


def _root_of(mesh: Any) -> Any:
    return meshes.root_of(mesh) or torch_private.root_of_mesh(mesh)


def _dimensions(root: Any, mesh: Any) -> list[int]:
    """Return the dimensions of the root mesh that belong to a slice."""
    if mesh is root or mesh.mesh_dim_names is None:
        return list(range(mesh.ndim))
    return [root.mesh_dim_names.index(name) for name in mesh.mesh_dim_names]


def attach(
    modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], pipeline: Pipeline | None = None
) -> None:
    """Switch the modules to the default group of the generation that has just formed.

    Raises:
        UsageError: the modules are sharded over a different number of ranks, or for a different rank.
    """
    pg, rank, world_size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert pg is not None, "a generation has a group"
    old = [one for module in modules for one in _held_groups(module)]
    for module in modules:
        reset(module)
        mesh: Any = next((one.device_mesh for one in _distributed(module)), None if pipeline is None else pipeline.mesh)
        if (root := meshes.root_of(mesh)) is not None:
            _enter_mesh(module, root, optimizers)
            continue
        before = (mesh.size(), mesh.get_coordinate()[0])
        if before == (world_size, rank):
            _move(module, pg)
        elif before == (1, 0):
            _shard(module, optimizers, pg)
        else:
            raise UsageError(
                f"{type(module).__name__} is sharded over {before[0]} ranks (this process is rank {before[1]}), "
                f"but the generation has {world_size} (this process is rank {rank}). A sharded state needs a "
                "world of fixed size. Fix: set MIN_WORKER_NUM and MAX_WORKER_NUM to WORKER_NUM; for another "
                "size, write a point with `samebits ckpt export --format dcp` and start over with "
                "samebits.elastic.load_dcp"
            )
    discard([old])  # in another thread, since freeing the last group waits for its threads


def accumulates(module: nn.Module) -> bool:
    """Return whether the module holds gradients that are not reduced yet (``set_requires_gradient_sync(False)``)."""
    return any(
        param.unsharded_accumulated_grad is not None
        or (hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None)
        for group in parameter_groups(module)
        for param in group.fsdp_params
    )


def reset(module: nn.Module) -> None:
    """Discard what an interrupted step has left: reshard the parameters and drop pending work."""
    for group in parameter_groups(module):
        group._all_gather_result = None  # its work ends with the group, and waiting for it would raise
        for param in group.fsdp_params:
            fsdp2_private.drop_gradients(param)
    for state in _states(module):
        if state._is_root:
            fsdp2_private.reset_iteration(state)


_places: weakref.WeakKeyDictionary[nn.Module, tuple[int, ...]] = weakref.WeakKeyDictionary()
"""The coordinates for which modules are cut (:func:`.meshes.place_in`); only for modules over declared meshes."""


def _enter_mesh(module: nn.Module, root: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Move a module to the current groups of its declared mesh. The first time, shard its parameters.

    Raises:
        UsageError: the parameters are cut for a different place in the mesh.
    """
    before, now = _places.get(module), meshes.place_in(root)
    if before not in (None, now):
        raise UsageError(
            f"{type(module).__name__} is sharded for position {before} in its mesh {tuple(root.shape)}, but this "
            f"generation has assigned position {now} to this process, and a sharded rank cannot take another "
            "rank's position. Fix: restart this process"
        )
    for info in _mesh_infos(module):
        fsdp2_private.refresh(info)
    if before is None:
        _cut(module, optimizers)
        _places[module] = now


# --- one group to the next --------------------------------------------------------------------------------------------


def _move(module: nn.Module, pg: dist.ProcessGroup) -> None:
    for info in _mesh_infos(module):
        fsdp2_private.give_mesh_group(info.mesh, pg)
        fsdp2_private.refresh(info)
    for tensor in _distributed(module):
        # An operator's result may refer to an equal mesh from torch's cache.
        fsdp2_private.give_mesh_group(tensor.device_mesh, pg)


# --- from whole to sharded --------------------------------------------------------------------------------------------


def _shard(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], pg: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    # torch's own function may be a collective, in which the other ranks may not take part.
    kind = next(info.mesh.device_type for info in _mesh_infos(module))
    mesh = DeviceMesh(kind, torch.arange(pg.size()), _init_backend=False)
    fsdp2_private.give_mesh_group(mesh, pg)
    for info in _mesh_infos(module):
        info.mesh = mesh
        fsdp2_private.refresh(info)
    _cut(module, optimizers)


def _cut(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Replace each unsharded parameter and its moments by this rank's shard."""
    apart = [tensor for _, tensor in _tensor_parallel(module)]
    groups = parameter_groups(module)
    cut = {id(param.sharded_param) for group in groups for param in group.fsdp_params} | set(map(id, apart))
    for group in groups:
        for param in group.fsdp_params:
            _shard_parameter(param)
    for tensor in apart:
        part: Any = pieces.cut_like(pieces.local(tensor), tensor)
        # A new spec is needed, because the old spec's hash is that of the mesh of one rank.
        tensor._local_tensor, tensor._spec = part._local_tensor, part._spec
    for optimizer in optimizers:
        for parameter, moments in optimizer.state.items():
            if id(parameter) in cut:
                moments.update(
                    (name, pieces.cut_like(pieces.local(one), parameter))
                    for name, one in list(moments.items())
                    if pieces.is_distributed(one)
                )


def _shard_parameter(param: Any) -> None:
    """Shard a parameter as ``fully_shard`` does. The parameter object stays the same."""
    parameter = param.sharded_param
    whole = pieces.local(parameter)
    if not whole.is_meta:
        whole = whole.to(param.device)
    spec = fsdp2_private.tensor_parallel_spec(param)
    if spec is not None:
        whole = pieces.cut_for(whole, spec.mesh, spec.placements)
    whole = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    fsdp2_private.cut_parameter(param, whole)
    parameter._local_tensor, parameter._spec = param.sharded_param._local_tensor, param.sharded_param._spec
    param.sharded_param = parameter
    param._setattr_on_modules(parameter)
    if param.post_forward_mesh_info is not None:
        param._init_sharded_post_forward_param_metadata(whole)
    param.all_gather_outputs = []  # left by a forward pass in the group of one
    vars(param).pop("_unsharded_param", None)


def is_flattened(module: nn.Module) -> bool:
    """Return whether FSDP1 has wrapped the module or one of its submodules."""
    found = sys.modules.get(_FSDP1_MODULE)
    return found is not None and any(isinstance(one, found.FullyShardedDataParallel) for one in module.modules())


# --- finding ----------------------------------------------------------------------------------------------------------


def _states(module: nn.Module) -> Iterator[Any]:
    """Yield the FSDP2 states of a module and its submodules; several modules may share one."""
    found = sys.modules.get(_STATE_MODULE)
    if found is None:
        return
    seen: set[int] = set()
    for one in module.modules():
        state = found._get_module_fsdp_state(one)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield state


def parameter_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's groups of parameters that are gathered and reduced together."""
    return [group for state in _states(module) for group in fsdp2_private.groups_of(state)]


def _distributed(module: nn.Module) -> Iterator[Any]:
    """Yield every DTensor of the module."""
    yield from (one for _, one in _named_tensors(module) if pieces.is_distributed(one))


def _tensor_parallel(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the DTensors that are not managed by ``fully_shard``, with their paths."""
    managed = {id(param.sharded_param) for group in parameter_groups(module) for param in group.fsdp_params}
    for path, tensor in _named_tensors(module):
        if pieces.is_distributed(tensor) and id(tensor) not in managed:
            yield path, tensor


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def tensor_parallel_dimensions(module: nn.Module) -> set[int]:
    """Return the dimensions of the module's mesh over which its layers are divided."""
    return {dim for mesh in _tensor_parallel_meshes(module) for dim in _dimensions(_root_of(mesh), mesh)}


def has_unmanaged(module: nn.Module) -> bool:
    """Return whether a DTensor of the module is not managed by ``fully_shard``."""
    return next(_tensor_parallel(module), None) is not None


def groups_beside(mesh: Any, dimension: int) -> tuple[dist.ProcessGroup, ...]:
    """Return this rank's groups along all dimensions of a whole mesh but one of its slice ``mesh``."""
    root = _root_of(mesh)
    left_out = _dimensions(root, mesh)[dimension]
    return tuple(root.get_group(dim) for dim in range(root.ndim) if dim != left_out)


def _tensor_parallel_meshes(module: nn.Module) -> Iterator[Any]:
    """Yield the meshes of tensors that were DTensors before ``fully_shard``, or are DTensors without it."""
    for _, tensor in _tensor_parallel(module):
        yield tensor.device_mesh
    for group in parameter_groups(module):
        for param in group.fsdp_params:
            spec = fsdp2_private.tensor_parallel_spec(param)
            if spec is not None:
                yield spec.mesh


def _mesh_infos(module: nn.Module) -> Iterable[Any]:
    """Return each mesh info once; the calls of ``fully_shard`` created them."""
    return {id(one): one for group in parameter_groups(module) for one in _infos_of(group)}.values()


def _infos_of(group: Any) -> Iterator[Any]:
    yield group.mesh_info
    if group.post_forward_mesh_info is not None:
        yield group.post_forward_mesh_info
    for param in group.fsdp_params:
        yield param.mesh_info


def _held_groups(module: nn.Module) -> Iterator[object]:
    """Yield the objects that keep the last generation's group alive: FSDP2's, and the meshes' registries."""
    for info in _mesh_infos(module):
        yield getattr(info, "shard_process_group", None)
        yield getattr(info, "replicate_process_group", None)
        yield fsdp2_private.groups_held_by(info.mesh)
    for tensor in _distributed(module):
        yield fsdp2_private.groups_held_by(tensor.device_mesh)


def _moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for moments in optimizer.state.values():
        for name, one in moments.items():
            if pieces.is_distributed(one):
                yield name, one
