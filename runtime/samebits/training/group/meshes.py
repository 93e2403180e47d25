"""Device meshes that a script builds before ``elastic.run``, while its process is in a group of one.

The process's rank is not known until then: a spare learns its rank when it takes over a slot. A mesh of several ranks
is therefore built for one rank at first, with the declared dimensions and names. Each time a generation's group is
formed, the mesh gets the contents of a new mesh of the declared sizes, so the mesh objects that the script, FSDP2 and
every DTensor hold stay the same. All ranks build the groups in the order in which their script built the meshes.

If the job's number of replicas may change, the mesh of each generation has as many as the generation, and the declared
sizes are the largest.

A mesh that is built inside the function belongs to one call of it, as groups of ``dist.new_group`` do.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from samebits.errors import UsageError
from samebits.printable import counted
from samebits.training import fsdp2_private, torch_private
from samebits.training.group.calling_place import calling_place, is_library

__all__ = [
    "Declared",
    "Declaring",
    "declaration_of",
    "declare_alone",
    "declared",
    "form_all",
    "groups_of",
    "let_shrink",
    "place_in",
    "require_world",
    "root_of",
]

QUERY_ALONE = (
    "{call} of a device mesh {when} samebits.elastic.run: this process has no place in the mesh yet. "
    "Fix: call it inside the function that elastic.run calls"
)
_MANY = 64
_ENDED = "the groups of a device mesh that was built in an earlier call of the function that elastic.run runs"


@dataclass(frozen=True, slots=True)
class Declared:
    """The device mesh that a script asked for.

    Attributes:
        sizes: ranks along each dimension, outermost first.
        names: names of the dimensions; empty if they have none.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.sizes))
        return f"{sizes} ({', '.join(self.names)})" if self.names else sizes


class _DeclaredMesh(DeviceMesh):
    """A declared mesh as long as its process is alone.

    Only torch reads its sizes, rank and groups, because they are not the job's.
    """

    def __eq__(self, other: object) -> bool:
        # All such meshes have one rank now, so torch's cache would treat them as equal and mix them up.
        return self is other or (root_of(self) is root_of(other) and bool(super().__eq__(other)))

    __hash__ = DeviceMesh.__hash__

    def size(self, mesh_dim: int | None = None) -> int:
        _refuse_script("size()")
        return super().size(mesh_dim)

    @property
    def shape(self) -> tuple[int, ...]:
        _refuse_script("shape")
        return super().shape

    @property
    def mesh(self) -> torch.Tensor:
        _refuse_script("mesh")
        return super().mesh

    def get_rank(self) -> int:
        _refuse_script("get_rank()")
        return super().get_rank()

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        _refuse_script("get_local_rank()")
        return super().get_local_rank(mesh_dim)

    def get_coordinate(self) -> Any:
        _refuse_script("get_coordinate()")
        return super().get_coordinate()

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        _refuse_script("get_group()")
        return super().get_group(mesh_dim)

    def get_all_groups(self) -> list[dist.ProcessGroup]:
        _refuse_script("get_all_groups()")
        return super().get_all_groups()


def _refuse_script(call: str) -> None:
    code = sys._getframe(2).f_code
    # DTensor's dispatcher calls from C++, so its call seems to come from the line that uses a tensor.
    if call.removesuffix("()") in code.co_names and not is_library(code.co_filename):
        raise UsageError(f"{calling_place()}: {QUERY_ALONE.format(call=call, when=_meshes.alone())}")


_Mesh: TypeAlias = "weakref.ref[DeviceMesh]"


@dataclass(frozen=True, slots=True)
class _Part:
    """A slice of a declared mesh, or a concatenation of slices."""

    mesh: _Mesh
    root: DeviceMesh
    names: tuple[str, ...]


class _Meshes:
    """The meshes of this process, in the order in which they were built.

    Declared meshes are kept for good, because each generation builds their groups in this order on every rank. If
    garbage collection decided which remain, ranks could differ. Slices and meshes built inside a generation build no
    groups later, so they are held weakly.
    """

    def __init__(self) -> None:
        self._construct: Any = None  # torch's own constructor, while it is replaced
        self._alone: Callable[[], str] | None = None
        self._builds = False  # True while a mesh is built only for its contents
        self._roots: list[tuple[DeviceMesh, Declared]] = []
        self._parts: dict[int, _Part] = {}  # by id
        self._passing: list[_Mesh] = []  # built inside a generation
        self._of_one: list[_Mesh] = []  # built with one rank while the process is alone
        self._resharded: dict[tuple[int, int], DeviceMesh] = {}  # by id of a declared mesh and number of ranks
        self._shrinking: tuple[DeviceMesh, int] | None = None  # a declared mesh, and the dimension that may shrink

    def alone(self) -> str:
        """Return ``before`` or ``after``, depending on whether training has finished."""
        return "before" if self._alone is None else self._alone()

    def declare(self, alone: Callable[[], str]) -> None:
        self._alone, self._shrinking = alone, None
        if torch_private.uses_pipelines():
            torch_private.follow_pipelines(self._refuse_pipeline)
        if self._construct is None:
            self._construct = DeviceMesh.__init__
            DeviceMesh.__init__ = self._constructor(self._construct)  # type: ignore[method-assign]

    def end(self) -> None:
        self._alone = None

    def _refuse_pipeline(self, built: object, _: object) -> None:
        if self._alone is not None:
            raise UsageError(
                f"{calling_place()}: {type(built).__name__}(…) {self._alone()} samebits.elastic.run: this process has "
                "no stage yet. Fix: give the parts of all stages to TorchState(nn.ModuleList(parts), …, "
                'pipeline=mesh["pp"]), and build stages and schedules in the function that elastic.run calls'
            )

    def _constructor(self, construct: Any) -> Callable[..., None]:
        @functools.wraps(construct)
        def build(mesh: DeviceMesh, *args: Any, **named: Any) -> None:
            if self._builds:
                construct(mesh, *args, **named)
            else:
                self._build(mesh, torch_private.mesh_plan(construct, mesh, args, named), args, named)

        return build

    def _build(self, mesh: DeviceMesh, plan: torch_private.MeshPlan, args: Any, named: Any) -> None:
        if plan.root is not None:
            self._construct(mesh, *args, **named)
            if (root := self.root_of(plan.root)) is not None:
                self._require_slice(root, plan)
                if len(self._parts) % _MANY == 0:  # torch itself slices meshes too
                    self._drop_unused_parts()
                self._parts[id(mesh)] = _Part(weakref.ref(mesh), root, plan.names)
                if self._alone is not None:
                    mesh.__class__ = _DeclaredMesh
        elif self._alone is None or plan.sizes == (1,):
            self._construct(mesh, *args, **named)
            if self._alone is not None:
                self._of_one.append(weakref.ref(mesh))
                fsdp2_private.replace_post_forward_mesh(self._post_forward_mesh)
            elif plan.has_groups:
                self._passing.append(weakref.ref(mesh))
        else:
            _require_plain(plan)
            one = torch.zeros((1,) * len(plan.sizes), dtype=torch.int)
            self._construct(mesh, plan.device_type, one, mesh_dim_names=plan.names or None)
            self._roots.append((mesh, Declared(plan.sizes, plan.names)))
            mesh.__class__ = _DeclaredMesh
            fsdp2_private.replace_post_forward_mesh(self._post_forward_mesh)

    def _post_forward_mesh(self, number: int, info: Any) -> DeviceMesh | int:
        """Return the mesh over which ``fully_shard(reshard_after_forward=number)`` shards after a forward pass.

        All calls with the same number share one mesh. As in torch, one rank means False and all ranks mean True. In a
        process that is not alone, the number is returned for torch to handle.

        Raises:
            UsageError: there is no such mesh.
        """
        if self._alone is None:
            return number
        if number == 1:
            return False
        declaration = self.declaration_of(info.mesh)
        if declaration is None:
            raise UsageError(
                f"{calling_place()}: reshard_after_forward={number} needs a whole device mesh, not the default mesh or "
                "a slice. Fix: fully_shard(…, mesh=init_device_mesh(device, sizes)), or reshard_after_forward=True"
            )
        sharded = declaration.sizes[info.shard_mesh_dim]
        if number < 1 or sharded % number:
            raise UsageError(
                f"{calling_place()}: reshard_after_forward={number} does not divide the {counted(sharded, 'rank')} "
                f"that the device mesh {declaration} shards over. Fix: pass a divisor of {sharded}, or True"
            )
        if number == sharded:
            return True
        key = (id(info.mesh), number)
        if key not in self._resharded:
            ranks = torch.arange(math.prod(declaration.sizes), dtype=torch.int).view(-1, number)
            self._resharded[key] = DeviceMesh(info.mesh.device_type, ranks)
        return self._resharded[key]

    def declare_alone(self, mesh: DeviceMesh) -> None:
        if self.root_of(mesh) is None and any(one() is mesh for one in self._of_one):
            self._roots.append((mesh, Declared((1,), tuple(mesh.mesh_dim_names or ()))))

    def _drop_unused_parts(self) -> None:
        self._parts = {key: part for key, part in self._parts.items() if part.mesh() is not None}

    def _require_slice(self, root: DeviceMesh, plan: torch_private.MeshPlan) -> None:
        declaration = self.declaration_of(root)
        assert declaration is not None, "only slices of a declared mesh come here"
        if plan.has_groups or not set(plan.names) <= set(declaration.names):
            raise UsageError(
                f"{calling_place()}: a flattened or regrouped mesh ({', '.join(plan.names)}) of the device mesh "
                f"{declaration} is not supported. Fix: use the mesh and its slices by dimension names, or run with "
                "ENABLE_RECOVERY=0"
            )

    def declared(self) -> list[Declared]:
        return [declaration for _, declaration in self._roots]

    def declaration_of(self, mesh: object) -> Declared | None:
        return next((declaration for one, declaration in self._roots if one is mesh), None)

    def root_of(self, mesh: object) -> DeviceMesh | None:
        for root, _ in self._roots:
            if root is mesh:
                return root
        part = self._parts.get(id(mesh))
        return part.root if part is not None and part.mesh() is mesh else None

    def let_shrink(self, root: DeviceMesh, dimension: int) -> None:
        resharded = {id(one) for one in self._resharded.values()}
        for mesh, declaration in self._roots:
            if mesh is not root and id(mesh) not in resharded and math.prod(declaration.sizes) > 1:
                raise UsageError(
                    f"the device mesh {declaration} is not the one that the state is sharded over "
                    f"({self.declaration_of(root)}), so the number of workers cannot change. Fix: leave out "
                    "MIN_WORKER_NUM and MAX_WORKER_NUM, or build only one mesh before elastic.run"
                )
        self._shrinking = (root, dimension)

    @property
    def may_shrink(self) -> bool:
        return self._shrinking is not None

    def place_in(self, root: DeviceMesh) -> tuple[int, ...]:
        place = list(root.get_coordinate() or ())
        if self._shrinking is not None and self._shrinking[0] is root:
            del place[self._shrinking[1]]
        return tuple(place)

    def _sizes_in(self, world_size: int, mesh: DeviceMesh, declaration: Declared) -> tuple[int, ...]:
        """Return the sizes of a declared mesh in a generation of this size.

        Raises:
            UsageError: the generation's ranks do not fill the mesh.
        """
        sizes = declaration.sizes
        if self._shrinking is not None:
            root, dimension = self._shrinking
            at = dimension if mesh is root else 0  # a mesh of reshard_after_forward has the sizes (ranks ÷ N, N)
            others = math.prod(sizes) // sizes[at]
            sizes = (*sizes[:at], world_size // others, *sizes[at + 1 :])
        if self._shrinking is not None and math.prod(sizes) != world_size:
            raise UsageError(f"{counted(world_size, 'rank')} cannot fill the device mesh {declaration} evenly")
        return sizes

    def groups_of(self, rank: int, world_size: int) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for mesh, declaration in self._roots:
            try:
                sizes = self._sizes_in(world_size, mesh, declaration)
            except UsageError:
                return []
            if len(sizes) == 1 or math.prod(sizes) != world_size:
                continue  # torch uses the default group, or refuses the mesh
            place, stride = rank, world_size
            for size in sizes:
                stride //= size
                first = rank - place // stride * stride
                place %= stride
                found.append(tuple(range(first, first + size * stride, stride)))
        return found

    def form_all(self) -> list[object]:
        held: list[object] = []
        for one in self._passing:
            passed = one()
            if passed is not None:
                torch_private.end_mesh(passed, _ENDED)
        self._passing.clear()
        torch_private.follow_context_parallel(_require_attention)
        self._builds = True
        try:
            for mesh, declaration in self._roots:
                sizes = self._sizes_in(dist.get_world_size(), mesh, declaration)
                ranks = torch.arange(math.prod(sizes), dtype=torch.int).view(sizes)
                fresh = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=declaration.names or None)
                held.append(torch_private.become_mesh(mesh, fresh))
                mesh.__class__ = DeviceMesh
            self._drop_unused_parts()
            for part in self._parts.values():
                if (sliced := part.mesh()) is not None:
                    held.append(torch_private.become_mesh(sliced, part.root[part.names]))
                    sliced.__class__ = DeviceMesh
        finally:
            self._builds = False
        return held


def _require_plain(plan: torch_private.MeshPlan) -> None:
    if plan.ranks != tuple(range(math.prod(plan.sizes))) or plan.has_options:
        raise UsageError(
            f"{calling_place()}: a device mesh {' x '.join(map(str, plan.sizes))} of ranks {plan.ranks} "
            f"{'with a backend_override ' if plan.has_options else ''}is not supported. Fix: init_device_mesh(device, "
            "sizes, mesh_dim_names=…), which places the ranks in their order"
        )


def _require_attention(mesh: DeviceMesh) -> None:
    if mesh.device_type == "cpu":
        raise UsageError(
            f"{calling_place()}: torch's context_parallel() has no attention operator for the CPU. Fix: in the model, "
            "gather the keys and values of all ranks with all_gather_tensor_autograd, or use an accelerator"
        )


_meshes = _Meshes()  # one per process, since it replaces torch's only constructor


class Declaring:
    """Makes mesh constructors build meshes of several ranks for this process alone, until :meth:`end`.

    Args:
        alone: returns ``before`` or ``after``, the side of training that the process is on.
    """

    def __init__(self, alone: Callable[[], str]) -> None:
        _meshes.declare(alone)

    def end(self) -> None:
        """Build meshes over the default group again. Further calls do nothing."""
        _meshes.end()


def declared() -> list[Declared]:
    """Return the meshes that the script asked for, in the order of its calls."""
    return _meshes.declared()


def declaration_of(mesh: object) -> Declared | None:
    """Return what the script declared for this mesh, or None if the mesh was not declared."""
    return _meshes.declaration_of(mesh)


def declare_alone(mesh: DeviceMesh) -> None:
    """Declare a mesh of one rank that was built while this process was alone; ignore any other mesh.

    Such a mesh is not declared when it is built, because it may be the default mesh of ``fully_shard``, which grows to
    the job's size.
    """
    _meshes.declare_alone(mesh)


def root_of(mesh: object) -> DeviceMesh | None:
    """Return the declared mesh of which ``mesh`` is a slice, ``mesh`` itself if it is declared, or None."""
    return _meshes.root_of(mesh)


def let_shrink(root: DeviceMesh, dimension: int) -> None:
    """Let a declared mesh have fewer ranks along a dimension in generations with fewer ranks.

    Raises:
        UsageError: another mesh of several ranks was declared.
    """
    _meshes.let_shrink(root, dimension)


def place_in(root: DeviceMesh) -> tuple[int, ...]:
    """Return this rank's coordinate in a mesh, without the dimension that may shrink."""
    return _meshes.place_in(root)


def groups_of(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Return the ranks of each group that :func:`form_all` will make for this rank in a generation of this size."""
    return _meshes.groups_of(rank, world_size)


def form_all() -> list[object]:
    """Give each declared mesh and its slices new groups within the current default group. A collective.

    Returns:
        The objects that held the previous groups, for :func:`.group.discard`.
    """
    return _meshes.form_all()


def require_world(least: int, most: int) -> None:
    """Raise if the declared meshes do not fit the job.

    Raises:
        UsageError: a mesh's number of ranks differs from the job's, or the job's number of ranks can change although no
            dimension of the mesh may shrink.
    """
    for one in declared():
        if least != most and not _meshes.may_shrink:
            raise UsageError(
                f"MIN_WORKER_NUM={least} and MAX_WORKER_NUM={most}: a device mesh ({one}) needs a world of fixed size. "
                "Fix: set both to WORKER_NUM, or leave them out"
            )
        if math.prod(one.sizes) != most:
            raise UsageError(
                f"a device mesh {one} has {counted(math.prod(one.sizes), 'rank')} and the job "
                f"{counted(most, 'worker')}. Fix: "
                f"init_device_mesh with sizes whose product is {most}, or start the job with -n {math.prod(one.sizes)}"
            )
