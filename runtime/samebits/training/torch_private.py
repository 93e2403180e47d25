"""torch's private interfaces that SameBits relies on (groups, gloo, DDP, autograd), each behind one function.

Each function names what it relies on. ``tests/training/test_torch_private.py`` probes it on the installed torch, and
``python -m tests.torch_versions`` on every version in ``TRIED``. Differences between versions are
handled only here and, for FSDP2, in ``fsdp2_private``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import dataloader

_c10d: Any = distributed_c10d
_autograd: Any = torch.autograd.Variable
_gloo: Any = ProcessGroupGloo  # its options are missing from torch's stubs


# ---- torchrun


class WorkerFailures(logging.Handler):
    """The last failure of a worker process that torchrun's agent in this process has logged.

    torch tells a rendezvous that its agent requests another generation, but not why. Relies on the log record ``failed
    (exitcode: -9) local_rank: 0 (pid: 7) of binary: ...`` of ``torch.distributed.elastic.multiprocessing.api``.
    """

    _FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")

    def __init__(self) -> None:
        super().__init__()
        self._last = ""
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the failure that the record names, if it names one."""
        if (found := self._FAILED.search(record.getMessage())) is None:
            return
        code, rank, pid = map(int, found.groups())
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        self._last = f"local rank {rank} (pid {pid}) {how}"

    def take(self) -> str:
        """Return the last failure and forget it; "" if there was none."""
        last, self._last = self._last, ""
        return last


# ---- gloo


def gloo_device(address: str) -> object:
    """Return a transport that listens at an address and connects at once rather than in the first collective.

    Relies on ``ProcessGroupGloo.create_device(hostname=, lazy_init=)``.
    """
    device: object = _gloo.create_device(hostname=address, lazy_init=False)
    return device


def gloo_mesh(
    store: Store, rank: int, world_size: int, device: object, connect_timeout: timedelta, timeout: timedelta
) -> ProcessGroupGloo:
    """Connect all ranks, with one timeout for connecting and another for each collective.

    Relies on ``ProcessGroupGloo._Options`` with ``_timeout`` and ``_devices``, and on ``_set_default_timeout``.
    """
    options = _gloo._Options()
    options._timeout = connect_timeout
    options._devices = [device]
    mesh = ProcessGroupGloo(store, rank, world_size, options)
    mesh._set_default_timeout(timeout)
    return mesh


def key_of_gloo_rank(rank: int) -> str:
    """Return the store's key for a rank's listening address.

    Relies on gloo's ``rendezvous::Context`` beneath torch's prefix of the first context.
    """
    return f"0/{rank}"


# ---- process groups


def dress_group(group: dist.ProcessGroup, mesh: ProcessGroupGloo, name: str, description: str) -> None:
    """Make ``mesh`` the backend of ``group`` for every device type that gloo serves, and set the group's two names.

    Relies on ``_set_default_backend``, ``_register_backend``, ``_set_group_name``, ``_set_group_desc`` of a group.
    """
    kind = dist.ProcessGroup.BackendType.GLOO
    kind_of_name: Any = getattr(_c10d, "GroupName", str)  # a separate type in some versions
    group._set_default_backend(kind)
    for device_type in dist.Backend.backend_capability[dist.Backend.GLOO]:
        group._register_backend(torch.device(device_type), kind, mesh)
    group._set_group_name(kind_of_name(name))
    group._set_group_desc(description)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> object:
    """Return a group's backend for a device, or None. Relies on ``ProcessGroup._get_backend``."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def connect_device(group: dist.ProcessGroup, device: torch.device) -> None:
    """Create the group's communicator for this device now rather than in its first collective.

    Relies on ``ProcessGroup.bound_device_id`` and ``Backend.eager_connect_single_device``, as
    ``_new_process_group_helper`` uses them; the latter does nothing for a backend that connects by itself.
    """
    bound: Any = group
    bound.bound_device_id = device
    group._get_backend(device).eager_connect_single_device(device)


def first_nccl() -> str:
    """Return the name of torch's first NCCL backend, for which abort and error handling are written.

    The name is ``nccl``, unless ``nccl-legacy`` creates a different backend than ``nccl``, as in torch 2.15
    (pytorch#192281). Relies on ``dist.is_backend_available``, which registers one of torch's backends on request, and
    on ``Backend._plugins``, which has no ``nccl`` before torch 2.14.
    """
    if not dist.is_backend_available(_LEGACY_NCCL):
        return dist.Backend.NCCL
    plugins: Any = dist.Backend._plugins
    register: Any = getattr(dist.Backend, "_ensure_backend_registered", None)
    if register is not None:
        register(dist.Backend.NCCL)
    creators = [getattr(plugins.get(name.upper()), "creator_fn", None) for name in (dist.Backend.NCCL, _LEGACY_NCCL)]
    return dist.Backend.NCCL if creators[0] == creators[1] else _LEGACY_NCCL


_LEGACY_NCCL = "nccl-legacy"


@dataclass(frozen=True, slots=True)
class BackendAbilities:
    """The abilities of a group's backend that decide how SameBits uses the backend.

    Attributes:
        aborts_by_reason: the backend is aborted by ``abort_hccl_comm(reason)``, which a group's ``abort`` does not call
            (HCCL).
        aborts_pairs: an abort also ends the communicators that sends and receives create for each pair of ranks.
        counts: the backend's sequence number grows with each collective.
    """

    aborts_by_reason: bool
    aborts_pairs: bool
    counts: bool


def abilities_of(backend: object, device: torch.device) -> BackendAbilities:
    """Return what a backend for this device can do, whatever its name and torch's version are.

    Recognizes ProcessGroupNCCL by ``_group_start`` and ``_group_end``, which ProcessGroupNCCL2, ProcessGroupNCCLLazy
    and backends written in Python lack. Relies on ``abort_hccl_comm`` of ProcessGroupHCCL, and on the attribute
    ``wrapped_pg`` of the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL puts around a backend. The sequence numbers of
    HCCL and of CUDA backends other than ProcessGroupNCCL are not used.
    """
    bare = getattr(backend, "wrapped_pg", backend)
    by_reason = hasattr(bare, "abort_hccl_comm")
    is_first = all(hasattr(bare, name) for name in _BRACKETS)
    counts = hasattr(bare, "_get_sequence_number_for_group") and not by_reason and (is_first or device.type != "cuda")
    return BackendAbilities(by_reason, is_first, counts)


_BRACKETS = ("_group_start", "_group_end")


def leaves_pairs_open(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a GPU's backend, such as torch's second NCCL backend, cannot abort sends and receives."""
    return device.type == "cuda" and not abilities_of(backend_of(group, device), device).aborts_pairs


COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Methods of a group that every rank calls, in any supported version of torch."""
PAIRWISE = ("recv", "recv_anysource", "send")


def before_launches(told: Callable[[], object]) -> None:
    """Call ``told`` before each collective, send or receive that Python launches on a group of torch's own class.

    Installed once per process. Relies on ``ProcessGroup`` being a class whose methods can be replaced. Launches from
    C++ (DDP's reducer, a compiled graph) are not seen.
    """
    kind: Any = dist.ProcessGroup
    for name in (*COLLECTIVES, *PAIRWISE):
        method = getattr(kind, name, None)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(kind, name, _told_before(method, told))


def _told_before(method: Callable[..., dist.Work], told: Callable[[], object]) -> Callable[..., dist.Work]:
    @functools.wraps(method)
    def launch(*args: Any, **kwargs: Any) -> dist.Work:
        told()
        return method(*args, **kwargs)

    return launch


def launched(groups: Sequence[dist.ProcessGroup], device: torch.device) -> int | None:
    """Return how many collectives these groups have launched for the device; None if a backend does not count them.

    Sends and receives do not count. Relies on ``_get_sequence_number_for_group`` of a backend, which ProcessGroupNCCL
    increments with each collective.
    """
    backends: list[Any] = [backend_of(group, device) for group in groups]
    if not all(abilities_of(one, device).counts for one in backends):
        return None
    try:
        return sum(int(one._get_sequence_number_for_group()) for one in backends)
    except RuntimeError:
        return None


def abort_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Abort a group's communicators; callable from any thread, and for several groups only at the same time.

    NCCL's abort waits for the whole device, so for the kernels of other communicators too (pytorch#119797). Calls
    between ``_group_start`` and ``_group_end`` do not help: NCCL's group is the calling thread's, and
    ``ProcessGroupNCCL::abort`` calls NCCL in a thread of its own. There it brackets the communicators of this group,
    including those of pairs of ranks.

    Relies on ``ProcessGroup.abort``, which releases the GIL, and on ``ProcessGroupHCCL.abort_hccl_comm(reason)``, since
    a group does not call HCCL's own ``abort``.
    """
    backend: Any = backend_of(group, device)
    if abilities_of(backend, device).aborts_by_reason:
        getattr(backend, "wrapped_pg", backend).abort_hccl_comm("its group was broken")
    else:
        group.abort()


def flight_record() -> bytes:
    """Return, as JSON, the collectives that torch's flight recorder lists as open; empty if it records none.

    Relies on ``_dump_nccl_trace_json``, or in a torch without NCCL on ``_dump_fr_trace_json``, with the arguments
    ``includeCollectives`` and ``onlyActive``. The recorder is on unless TORCH_FR_BUFFER_SIZE=0.
    """
    module: Any = torch._C._distributed_c10d
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    dump = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    return b"" if dump is None else bytes(dump(includeCollectives=True, onlyActive=True))


def registered_backend(device_type: str) -> str | None:
    """Return the backend that a package has registered for its own kind of device; None for torch's own kinds.

    Relies on ``torch._C._get_privateuse1_backend_name`` and ``Backend.default_device_backend_map``.
    """
    if device_type != torch._C._get_privateuse1_backend_name():
        return None
    return dist.Backend.default_device_backend_map.get(device_type)


def install_default_group(pg: dist.ProcessGroup, store: Store, world_size: int) -> None:
    """Install a group as the default group, as ``init_process_group`` does after building its group.

    Relies on ``distributed_c10d._world``'s dictionaries, ``_process_group_name``, ``_update_default_pg``, and on
    ``_register_pg_in_world``, or before torch 2.13 on ``_register_process_group`` and what that function sets.
    ``dist.new_group`` then calls the group's ``new_group``; before torch 2.13 through :func:`asks_default_group`.
    """
    if "new_group" not in _c10d._new_group_with_tag.__code__.co_names:
        _c10d._new_process_group_helper = asks_default_group(_c10d._new_process_group_helper)
    world = _c10d._world
    name = _c10d._process_group_name([], use_hashed_name=False)
    backend = dist.Backend(dist.Backend.GLOO)
    config = str(_c10d.BackendConfig(backend))
    ranks = {rank: rank for rank in range(world_size)}
    if hasattr(_c10d, "_register_pg_in_world"):
        _c10d._register_pg_in_world(
            pg,
            backend_name=backend,
            store=store,
            group_name=name,
            backend_config=config,
            rank_mapping=ranks,
            add_to_default_tag=True,
        )
    else:
        _register_by_hand(pg, backend, store, name, config, ranks)
        world.tags_to_pg.setdefault("", []).append(pg)
    _c10d._update_default_pg(pg)
    world.pg_coalesce_state.clear()


def _register_by_hand(
    pg: dist.ProcessGroup, backend: str, store: Store, name: str, config: str, ranks: Mapping[int, int]
) -> None:
    """Register as torch 2.13's ``_register_pg_in_world`` does, for versions that have it inside a longer function."""
    world, tag = _c10d._world, f"ptd:{name}"
    world.pg_map[pg], world.pg_names[pg], world.pg_backend_config[pg] = (backend, store), name, config
    _c10d._register_process_group(name, pg)
    world.pg_group_ranks[pg] = dict(ranks)
    world.tags_to_pg.setdefault(tag, []).append(pg)
    world.pg_to_tag[pg] = tag


def asks_default_group(helper: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``_new_process_group_helper`` that calls the default group's ``new_group``, if it has one.

    Relies on how ``_new_group_with_tag`` calls it, on its result, and on what :func:`_register_by_hand` does.
    """
    if hasattr(helper, "__wrapped__"):
        return helper

    @functools.wraps(helper)
    def asking(
        size: int, rank: int, ranks: Sequence[int], backend: str, store: Store, name: str, *rest: Any, **options: Any
    ) -> Any:
        make = getattr(dist.group.WORLD, "new_group", None)
        if not ranks or make is None:
            return helper(size, rank, ranks, backend, store, name, *rest, **options)
        pg = make(
            list(ranks),
            timeout=options["timeout"],
            pg_options=options["backend_options"],
            group_name=name,
            group_desc=options["group_desc"],
        )
        if pg is None:
            return _c10d.GroupMember.NON_GROUP_MEMBER, None
        own_store = dist.PrefixStore(f"{name}/", store)
        places = {one: place for place, one in enumerate(ranks)}
        _register_by_hand(pg, backend, own_store, name, str(_c10d.BackendConfig(backend)), places)
        return pg, own_store

    return asking


def is_registered(pg: object) -> bool:
    """Return whether torch knows this group. Relies on ``_world.pg_map``."""
    return pg in _c10d._world.pg_map


def subgroups_of(pg: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Return the groups other than the default one; empty if ``pg`` is not the default.

    Relies on ``_world.pg_map`` and ``_world.default_pg``.
    """
    world = _c10d._world
    return [group for group in list(world.pg_map) if group is not pg] if world.default_pg is pg else []


def uninstall_default_group(pg: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Remove the default group as ``destroy_process_group`` does; return the subgroups removed with it.

    Relies on ``_world``'s dictionaries, ``_update_default_pg`` and ``_unregister_all_process_groups``.
    """
    world = _c10d._world
    if world.default_pg is not pg:
        return []  # the script has destroyed the group itself
    subgroups = subgroups_of(pg)
    _c10d._update_default_pg(None)
    for registry in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        registry.clear()
    _c10d._unregister_all_process_groups()
    world.group_count = 0
    return subgroups


# ---- device meshes


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """The arguments of a ``DeviceMesh`` constructor call.

    Attributes:
        device_type: as torch names it.
        sizes, ranks: the mesh's sizes and ranks; empty if it is a part of another mesh.
        names: names of the dimensions; empty if they have none.
        root: the mesh that it is a part of.
        has_groups: whether the constructor creates the mesh's groups.
        has_options: whether options for these groups were given.
    """

    device_type: str
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    root: DeviceMesh | None
    has_groups: bool
    has_options: bool


def mesh_plan(
    construct: Callable[..., None], mesh: DeviceMesh, args: Sequence[Any], named: Mapping[str, Any]
) -> MeshPlan:
    """Read the arguments of ``DeviceMesh.__init__``.

    Relies on the names of its arguments, and on ``_MeshLayout.remap_to_tensor``, whose first result is the whole mesh
    if the layout contains every rank of the map.
    """
    bound = inspect.signature(construct).bind(mesh, *args, **named).arguments
    names, root = tuple(bound.get("mesh_dim_names") or ()), bound.get("_root_mesh")
    options = bound.get("backend_override")
    has_options = options is not None and any(one != (None, None) for one in options)
    placed = torch.empty(0, dtype=torch.int)
    if root is None:
        layout: Any = bound.get("_layout")
        given = bound.get("mesh")
        placed = layout.remap_to_tensor(bound["_rank_map"])[0] if given is None else torch.as_tensor(given).cpu()
    return MeshPlan(
        device_type=bound["device_type"],
        sizes=tuple(placed.shape),
        ranks=tuple(placed.flatten().tolist()),
        names=names,
        root=root,
        has_groups=bool(bound.get("_init_backend", True)),
        has_options=has_options,
    )


def become_mesh(mesh: DeviceMesh, fresh: DeviceMesh) -> object:
    """Give a mesh the contents of a new one; return the objects that held the old mesh's groups.

    Relies on a mesh's contents being its ``__dict__``, in which its hash is recomputed.
    """
    before = dict(vars(mesh))
    vars(mesh).clear()
    vars(mesh).update(vars(fresh))
    return before


def root_of_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that this one was sliced from. Relies on ``DeviceMesh._get_root_mesh``."""
    return mesh._get_root_mesh()


def end_mesh(mesh: DeviceMesh, reason: str) -> None:
    """Make every request for one of a mesh's groups fail with the reason.

    Relies on ``DeviceMesh._dim_group_names``, by which groups are found, and on ``_pg_registry``.
    """
    bare: Any = mesh
    bare._dim_group_names = [reason for _ in bare._dim_group_names]
    if hasattr(bare, "_pg_registry"):
        bare._pg_registry = {}


@functools.cache
def strided_shard() -> Any:
    """Return the placement class of a dimension that FSDP2 splits after tensor parallelism has split it.

    Relies on ``placement_types._StridedShard(dim, split_factor=)`` and on how it is printed.
    """
    from torch.distributed.tensor import placement_types

    return placement_types._StridedShard


def follow_context_parallel(told: Callable[[DeviceMesh], object]) -> None:
    """Call ``told`` with the mesh at each beginning of ``context_parallel``, before any tensor is changed.

    A call before the script imports ``context_parallel`` has no effect; a later call replaces ``told``. Relies on
    ``_context_parallel_buffers(mesh, ...)``, which ``context_parallel`` calls to divide the sequences.
    """
    experimental = sys.modules.get("torch.distributed.tensor.experimental")
    if experimental is None:
        return
    names = inspect.unwrap(experimental.context_parallel).__globals__
    if "_context_parallel_buffers" not in names:
        return
    divide = inspect.unwrap(names["_context_parallel_buffers"])

    @functools.wraps(divide)
    def divided(mesh: DeviceMesh, *args: Any, **named: Any) -> Any:
        told(mesh)
        return divide(mesh, *args, **named)

    names["_context_parallel_buffers"] = divided


# ---- pipelines


def uses_pipelines() -> bool:
    """Return whether the script has imported ``torch.distributed.pipelining``, whose import takes long."""
    return "torch.distributed.pipelining.schedules" in sys.modules


def follow_pipelines(told: Callable[[Any, dict[str, Any]], None]) -> None:
    """Call ``told`` with each pipeline stage and schedule before it is initialized, and with its arguments by name.

    A later call replaces ``told``. Relies on all stages deriving from ``_PipelineStageBase`` and all schedules from
    ``_PipelineSchedule``, which have no ``__new__`` of their own.
    """
    from torch.distributed.pipelining import schedules, stage

    def build(kind: Any, *args: Any, **named: Any) -> Any:
        built = object.__new__(kind)
        given = inspect.signature(kind.__init__).bind(built, *args, **named).arguments
        given.pop(next(iter(given)))
        given.update(given.pop("kwargs", {}))
        told(built, given)
        built._samebits_given = given
        return built

    bases: tuple[Any, ...] = (stage._PipelineStageBase, schedules._PipelineSchedule)
    for base in bases:
        base.__new__ = build


def renew_pipelined(built: Any, group: dist.ProcessGroup) -> None:
    """Reinitialize a tracked stage or schedule; a stage gets this group in place of its previous one.

    Custom functions of a schedule are kept. Relies on ``_comp_type_to_function_map``.
    """
    given = built._samebits_given
    if given.get("group") is not None:
        given["group"] = group
    functions = getattr(built, "_comp_type_to_function_map", None)
    built.__init__(**given)
    if functions is not None:
        built._comp_type_to_function_map = functions


# ---- data


def follow_batches(told: Callable[[float, object], object]) -> None:
    """From now on, call ``told`` for each batch, with the ``time.perf_counter()`` of its request and its sampler.

    The sampler is a ``DataLoader``'s batch sampler if it has one, and None for an iterable dataset. Installed once per
    process. Relies on ``_BaseDataLoaderIter.__next__`` and ``_index_sampler``, which every iterator of a ``DataLoader``
    has.
    """
    iterator: Any = dataloader._BaseDataLoaderIter
    next_batch = iterator.__next__
    if hasattr(next_batch, "__wrapped__"):
        return

    @functools.wraps(next_batch)
    def timed(self: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return next_batch(self)
        finally:
            told(began_s, None if self._dataset_kind == _ITERABLE else self._index_sampler)

    iterator.__next__ = timed


def before_fetches(told: Callable[[Any], Any]) -> None:
    """Call ``told`` with the indices of each batch of a map-style dataset; ``told`` returns the indices to fetch.

    Also called in the worker processes of a loader. Installed once per process. Relies on
    ``_MapDatasetFetcher.fetch(possibly_batched_index)``, which a loader looks up for each batch.
    """
    from torch.utils.data._utils import fetch

    fetcher: Any = fetch._MapDatasetFetcher
    inner = fetcher.fetch
    if hasattr(inner, "__wrapped__"):
        return

    @functools.wraps(inner)
    def asked(self: Any, indices: Any) -> Any:
        return inner(self, told(indices))

    fetcher.fetch = asked


_ITERABLE: Any = dataloader._DatasetKind.Iterable


def statuses_of_loader(traceback: TracebackType | None) -> list[int]:
    """Return the exit statuses of the ``DataLoader`` processes whose death raised an error.

    Relies on ``_MultiProcessingDataLoaderIter._workers``, whose methods raise "exited unexpectedly".
    """
    while traceback is not None:
        iterator = traceback.tb_frame.f_locals.get("self")
        if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
            return [one.exitcode for one in iterator._workers if one.exitcode is not None]
        traceback = traceback.tb_next
    return []


# ---- autograd

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the calling backward pass, or -1 outside. Relies on ``torch._C._current_graph_task_id``."""

before_backward_ends: Callable[[Callable[[], None]], None] = _autograd._execution_engine.queue_callback
"""Call a function before the current backward pass ends. Relies on the engine's ``queue_callback``."""


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place. Relies on ``Tensor._version``."""
    return tensor._version


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return :func:`version_of` each tensor; called at every commit, where separate calls would be most of the cost."""
    return [one._version for one in tensors]


def versions_among(values: Iterable[object]) -> list[int]:
    """Return :func:`version_of` each tensor among the values, and -1 for anything else."""
    everything: list[Any] = list(values)
    try:
        return [one._version for one in everything]
    except AttributeError:  # rare: some values are not tensors; calling getattr for each value costs more
        return [getattr(one, "_version", -1) for one in everything]


_data: Any = vars(torch._C.TensorBase)["data"]


def watch_data(
    parameter: torch.Tensor, read: Callable[[torch.Tensor, torch.Tensor], None], assign: Callable[[torch.Tensor], None]
) -> None:
    """Call ``read`` with a tensor and its ``.data`` when a script reads it, and ``assign`` before a script sets it.

    A change through ``.data`` does not increase the version. All tensors of the parameter's class are watched,
    permanently, but only for the classes ``nn.Parameter`` and ``DTensor``. Relies on these being Python classes that
    inherit ``data``, so that a property of their own takes precedence, and on torch.compile tracing ``.data`` past it.
    """
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    kind: Any = next((one for one in (dtensor, torch.nn.Parameter) if one in type(parameter).__mro__), None)
    if kind is None or "data" in vars(kind):
        return

    def get(self: torch.Tensor) -> torch.Tensor:
        alias: torch.Tensor = _data.__get__(self)
        read(self, alias)
        return alias

    def put(self: torch.Tensor, value: torch.Tensor) -> None:
        assign(self)
        _data.__set__(self, value)

    kind.data = property(get, put)


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.data`` without notifying watchers."""
    alias: torch.Tensor = _data.__get__(tensor)
    return alias


def give_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Set ``tensor.data`` without notifying watchers."""
    _data.__set__(tensor, data)


def is_alive(reference: weakref.ref[torch.Tensor]) -> bool:
    """Return whether a weakly referenced tensor still exists.

    Relies on ``Tensor._fix_weakref``, as ``torch.utils.weak`` does: torch may have held the last reference.
    """
    tensor: Any = reference()
    if tensor is not None:
        tensor._fix_weakref()
    return tensor is not None


def count_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Suppress a schedule's warning that it is stepped before its optimizer. Relies on ``Optimizer._opt_called``."""
    stepped: Any = optimizer
    stepped._opt_called = True


# ---- DistributedDataParallel and its reducer


def lay_out_if_due(ddp: DistributedDataParallel) -> bool:
    """Lay the buckets out in the order of the first iteration, if due; this broadcasts rank 0's order.

    Relies on ``Reducer._rebuild_buckets`` returning whether it rebuilt them, and on ``DDP._has_rebuilt_buckets``.
    """
    if not ddp.reducer._rebuild_buckets():
        return False
    ddp._has_rebuilt_buckets = True
    return True


def is_laid_out(ddp: DistributedDataParallel) -> bool:
    """Return whether the layout of the buckets is final. Relies on ``DDP._has_rebuilt_buckets``."""
    return bool(ddp._has_rebuilt_buckets)


def is_learning(ddp: DistributedDataParallel) -> bool:
    """Return whether a static graph is between its first iteration and its second, which lays out its buckets.

    Relies on ``DDP._static_graph_delay_allreduce_enqueued``.
    """
    return bool(ddp.static_graph and not is_laid_out(ddp) and ddp._static_graph_delay_allreduce_enqueued)


def buckets_of(ddp: DistributedDataParallel) -> Sequence[Any]:
    """Return the buckets, each with ordered ``parameters()``. Relies on ``Reducer._get_zeros_like_grad_buckets``."""
    buckets: Sequence[Any] = ddp.reducer._get_zeros_like_grad_buckets()
    return buckets


def parameters_of(ddp: DistributedDataParallel) -> tuple[Sequence[torch.Tensor], Sequence[bool]]:
    """Return the parameters that require gradients, and for each whether its gradient is sparse.

    These are the parameters of a wrapper's first reducer. Relies on ``DDP._build_params_for_reducer``.
    """
    parameters, sparse = ddp._build_params_for_reducer()
    return parameters, sparse


def unhook_reducer(ddp: DistributedDataParallel) -> None:
    """Detach the current reducer from gradients. Relies on ``Reducer._remove_autograd_hooks``."""
    ddp.reducer._remove_autograd_hooks()


def new_reducer(ddp: DistributedDataParallel, parameters: Sequence[torch.Tensor], sparse: Sequence[bool]) -> None:
    """Create a reducer as in a new wrapper, on these parameters in this order.

    Relies on ``DDP._build_debug_param_to_name_mapping``, ``DDP._ddp_init_helper``, and ``_set_static_graph`` of reducer
    and logger.
    """
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        assert ddp.logger is not None
        ddp.logger._set_static_graph()


def lay_out_as_given(ddp: DistributedDataParallel) -> bool:
    """Make a new reducer lay out its buckets as if gradients had arrived in the order of its parameters.

    Relies on ``Reducer._push_all_rebuilt_params``, which DDP's ``join`` uses for ranks that have run out of data.
    """
    ddp.reducer._push_all_rebuilt_params()
    return lay_out_if_due(ddp)


def give_reducer_group(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Make the reducer use this group from now on. Relies on ``Reducer._update_process_group``."""
    ddp.reducer._update_process_group(group)


def make_buffers_rank_0s(ddp: DistributedDataParallel) -> None:
    """Broadcast the buffers as a forward pass would. Relies on ``DDP._sync_buffers``."""
    ddp._sync_buffers()


def build_replicated(module: torch.nn.Module) -> None:
    """Build the DistributedDataParallel of every module that the composable ``replicate()`` was applied to.

    Otherwise its first forward pass builds it. Relies on ``_ReplicateState`` under ``contract.STATE_KEY`` of a module,
    on ``lazy_init``, and on the arguments in ``_init_args``, which are empty afterwards.
    """
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")
    if composable is None:
        return
    key: Any = sys.modules["torch.distributed._composable.contract"].STATE_KEY
    for one in module.modules():
        for state in vars(one).get(key, {}).values():
            if isinstance(state, composable._ReplicateState) and state._init_args:
                state.lazy_init()


def reduces_past_reducer(ddp: DistributedDataParallel) -> bool:
    """Return whether some gradients bypass the reducer. Relies on ``DDP._delay_all_reduce_params``."""
    return bool(ddp._delay_all_reduce_params)


def uses_python_reducer(ddp: DistributedDataParallel) -> bool:
    """Return whether there are no buckets at all. Relies on ``DDP._use_python_reducer``."""
    return bool(ddp._use_python_reducer)


def ends_by_hand(ddp: DistributedDataParallel) -> bool:
    """Return whether the script itself ends each backward pass, which is possible since torch 2.15.

    Relies on ``DDP.require_manual_backward_finalization``.
    """
    return bool(getattr(ddp, "require_manual_backward_finalization", False))


# ---- the tested versions of torch


TRIED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The versions of torch that were tested, in order; docs/reference/support-matrix.md has the results."""


def not_tried(version: str) -> str:
    """Return a warning if this version is outside the tested range, else an empty string.

    Args:
        version: as in ``torch.__version__``; only its first two numbers count.
    """
    oldest, newest = _series(TRIED[0]), _series(TRIED[-1])
    if oldest <= _series(version) <= newest:
        return ""
    return (
        f"torch {version} was not tested: {_dotted(oldest)} to {_dotted(newest)} were. Fix: install one of those, or "
        f"test it in a checkout with `python -m tests.torch_versions {version.partition('+')[0]}`"
    )


def _series(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; empty if it does not begin with two."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def _dotted(series: tuple[int, ...]) -> str:
    return ".".join(map(str, series))
