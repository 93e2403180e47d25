"""Move DistributedDataParallel wrappers from group to group without changing their bucket layout.

The sum of a bucket over the ranks is reproducible bit for bit, but a gradient's bits depend on its position in the
bucket. After its first iteration, DDP rebuilds its buckets in the order in which gradients arrived. The layout, and
whether it is final, is therefore part of the restore point, and every rank gets a new reducer with exactly that layout.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from samebits.errors import LayoutError, UsageError
from samebits.spelling import spelled
from samebits.training import torch_private
from samebits.training.group import device as devices
from samebits.training.group.breakable_group import BreakableGroup, ReducerGroup
from samebits.training.group.group import Group, discard

__all__ = [
    "Layout",
    "are_finite",
    "attach",
    "attach_all",
    "capture",
    "capture_all",
    "fingerprint",
    "generation_ended",
    "gradients_are_finite",
    "install",
    "require_all_among",
]


@dataclass(frozen=True, slots=True)
class Layout:
    """The gradient buckets of a wrapper, and the order of the gradients in each bucket.

    ``buckets`` are names of ``ddp.module.named_parameters()``, in the order in which buckets are reduced. ``rebuilt``
    marks the final layout; otherwise this is the initial layout, which DDP replaces after its first iteration.
    """

    buckets: tuple[tuple[str, ...], ...]
    rebuilt: bool

    def to_plain(self) -> list[Any]:
        """Return the layout as lists, strings and a bool, for msgpack."""
        return [[list(bucket) for bucket in self.buckets], self.rebuilt]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Layout:
        """Rebuild a layout from the result of :meth:`to_plain`."""
        buckets, rebuilt = plain
        return cls(tuple(tuple(bucket) for bucket in buckets), bool(rebuilt))


def fingerprint(layout: Layout) -> str:
    """Return 16 hex digits that are equal if and only if the layouts are."""
    return hashlib.sha256(json.dumps(layout.to_plain()).encode()).hexdigest()[:16]


# --- reading ----------------------------------------------------------------------------------------------------------


def capture(ddp: DistributedDataParallel) -> Layout:
    """Return the layout that the next backward pass will use.

    Between the first and the second iteration, DDP knows its final layout but has not built it. This function builds
    it, with one small broadcast from rank 0 that the next forward pass would otherwise make. Every rank must therefore
    call it at the same point of its program, such as a commit.

    Raises:
        UsageError: after exactly one iteration of a wrapper with ``static_graph=True``.
    """
    known = _captured.get(ddp)
    if known is not None and known[0] is ddp.reducer and known[1].rebuilt:
        return known[1]
    if not torch_private.lay_out_if_due(ddp) and torch_private.is_learning(ddp):
        raise UsageError(
            "DistributedDataParallel(static_graph=True) learns its graph in its first two iterations, so no restore "
            "point can be made after the first one. Fix: set save_checkpoint_steps to 2 or more, or leave static_graph "
            "out"
        )
    if known is not None and known[0] is ddp.reducer and not torch_private.is_laid_out(ddp):
        return known[1]
    layout = _read(ddp)
    _captured[ddp] = (ddp.reducer, layout)
    return layout


_captured: weakref.WeakKeyDictionary[Module, tuple[Reducer, Layout]] = weakref.WeakKeyDictionary()
"""The last layout read from each wrapper, with the reducer that had it. A final layout is read only once."""


def _read(ddp: DistributedDataParallel) -> Layout:
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    ordered = tuple(tuple(names[id(parameter)] for parameter in bucket.parameters()) for bucket in _buckets(ddp))
    return Layout(ordered, torch_private.is_laid_out(ddp))


def _buckets(ddp: DistributedDataParallel) -> Sequence[Any]:
    with _WithoutMemory():
        return torch_private.buckets_of(ddp)


class _WithoutMemory(TorchDispatchMode):
    """A mode in which tensors are created with a shape but without memory.

    A reducer reveals its buckets only by returning zeros of their size. For 1 GB this takes a third of a second, and
    memory that a rank may not have.
    """

    def __init__(self) -> None:
        initialize: Any = super().__init__  # untyped in torch
        initialize()

    def __torch_dispatch__(
        self,
        make: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        return make(*args, **{**(options or {}), "device": torch.device("meta")})


# --- attaching --------------------------------------------------------------------------------------------------------


def attach(ddp: DistributedDataParallel, group: Group, layout: Layout | None) -> None:
    """Attach a wrapper to a generation's group with exactly this layout. Its gradients become None.

    Args:
        ddp: a survivor's wrapper, or a new one.
        group: the formed group; a wrapper on a subgroup of its own keeps that subgroup.
        layout: a final layout is applied as it is; None, or a layout that is not final, gives the layout of a new
            wrapper before its first iteration.

    Raises:
        LayoutError: this model cannot have that layout; the message names the difference.
        UsageError: the wrapper uses a feature that cannot be moved to another group.
    """
    _require_supported(ddp, has_sparse=any(torch_private.parameters_of(ddp)[1]))
    pg = _group_for(ddp, group)
    # The reducer owns gradient buffers and may hold the last reference to the old group.
    old: list[object] = [ddp.reducer, ddp.logger, ddp.process_group]
    with _only_reduced_require_gradients(ddp):
        parameters, sparse = torch_private.parameters_of(ddp)
        torch_private.unhook_reducer(ddp)
        if layout is not None and layout.rebuilt:
            _build_final(ddp, layout, parameters, sparse)
        else:
            _build_fresh(ddp, parameters, sparse)
    ddp.process_group = pg
    ddp.require_forward_param_sync = True  # the same on every rank, whatever it was before
    _connect_reducer(ddp)
    for parameter in ddp.module.parameters():
        parameter.grad = None
    discard([old])
    got = _read(ddp)
    _captured[ddp] = (ddp.reducer, got)
    if layout is not None and got != layout:
        raise LayoutError(
            f"the gradient buckets of {type(ddp.module).__name__} cannot be laid out as they were at the restore "
            f"point: {_difference(layout, got)}. Fix: run the same script with the same bucket_cap_mb on every rank, "
            "or start over "
            f"with `{spelled('run', '--fresh')}`"
        )


@contextlib.contextmanager
def _only_reduced_require_gradients(ddp: DistributedDataParallel) -> Iterator[None]:
    """Make exactly the reducer's parameters require gradients inside the block, as when the wrapper was built.

    A script may freeze a model for a while (a GAN's discriminator) or unfreeze it later (a backbone), while torch's
    reducer keeps its parameters. A reducer built from the current flags would not reduce the parameters that are frozen
    now.
    """
    reduced = {id(parameter) for bucket in _buckets(ddp) for parameter in bucket.parameters()}
    flags = [(parameter, parameter.requires_grad) for parameter in ddp.module.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in reduced)
        yield
    finally:
        for parameter, requires_grad in flags:
            parameter.requires_grad_(requires_grad)


def _build_fresh(ddp: DistributedDataParallel, parameters: Sequence[torch.Tensor], sparse: Sequence[bool]) -> None:
    ddp.process_group = _GroupOfOne()
    torch_private.new_reducer(ddp, parameters, sparse)


def _build_final(
    ddp: DistributedDataParallel, layout: Layout, parameters: Sequence[torch.Tensor], sparse: Sequence[bool]
) -> None:
    """Build a reducer with the layout as its final one, as if gradients had arrived in that order.

    The reducer gets its parameters in that order, each marked as ready, as DDP's ``join`` does for ranks without data.
    Its broadcast of the result goes to a group of one.
    """
    by_name = dict(ddp.module.named_parameters())
    position = {id(parameter): index for index, parameter in enumerate(parameters)}
    wanted = [name for bucket in layout.buckets for name in bucket]
    _require_same_parameters(ddp, wanted, {name for name, one in by_name.items() if id(one) in position})
    ddp.process_group = _GroupOfOne()
    for number, names in enumerate(_arrivals(layout, lambda name: (by_name[name].dtype, by_name[name].device))):
        if number:
            torch_private.unhook_reducer(ddp)
        order = [position[id(by_name[name])] for name in names]
        torch_private.new_reducer(ddp, [parameters[index] for index in order], [sparse[index] for index in order])
        if not torch_private.lay_out_as_given(ddp):
            raise LayoutError(
                f"the restore point's gradient buckets of {type(ddp.module).__name__} are final, but this wrapper "
                "never rebuilds its buckets (find_unused_parameters=True). Fix: build it with the same arguments on "
                "every rank"
            )
        if _read(ddp) == layout:
            return


def _arrivals(layout: Layout, kind_of: Callable[[str], Hashable]) -> Iterator[list[str]]:
    """Yield the orders in which gradients may have arrived to produce this layout, the likeliest first.

    The reducer fills one bucket per kind of gradient (dtype and device). Buckets that are not full at the end follow in
    an order that depends only on which kind arrived first, and libstdc++'s hash table returns the newest kind first. So
    one order of arrival is yielded for each permutation of the kinds.
    """
    names = [name for bucket in layout.buckets for name in bucket]
    firsts: dict[Hashable, str] = {}
    for name in names:
        firsts.setdefault(kind_of(name), name)
    lasts = {kind_of(bucket[0]): index for index, bucket in enumerate(layout.buckets)}
    kinds = sorted(firsts, key=lambda kind: -lasts[kind])
    for arriving in itertools.permutations(kinds):
        order: dict[str, None] = {}
        for name in names:
            for kind in arriving[: arriving.index(kind_of(name)) + 1]:
                order.setdefault(firsts[kind])
            order.setdefault(name)
        yield list(order)


def _connect_reducer(ddp: DistributedDataParallel) -> None:
    """Make the reducer use a group with little overhead whose waits can be abandoned at any time."""
    group = ddp.process_group
    # In a static graph's first iteration the reducer reduces and waits in one call, so it needs the general group.
    if isinstance(group, BreakableGroup) and not ddp.static_graph:
        group = _reducer_groups[ddp] = ReducerGroup(group)
    torch_private.give_reducer_group(ddp, group)


_reducer_groups: weakref.WeakKeyDictionary[Module, ReducerGroup] = weakref.WeakKeyDictionary()
"""Keeps the Python half of each group alive; torch keeps only the C++ half."""


class _GroupOfOne(dist.ProcessGroup):
    """A process group of one rank for a reducer. It works on any device without a connection."""

    def __init__(self) -> None:
        initialize: Any = super().__init__  # as in breakable_group.BreakableGroup
        initialize(0, 1)

    def broadcast(self, *_: object) -> dist.Work:
        return _Done()

    def getBackendName(self) -> str:
        return "none"


class _Done(dist.Work):
    def wait(self, timeout: object = None) -> bool:
        return True


def _group_for(ddp: DistributedDataParallel, group: Group) -> dist.ProcessGroup:
    current = ddp.process_group
    default = dist.group.WORLD
    if current is not default and torch_private.is_registered(current):
        return current
    if getattr(current, "group_desc", "") not in ("default_pg", ""):
        raise UsageError(
            f"DistributedDataParallel({type(ddp.module).__name__}) was built on a group of its own that ended with its "
            "generation. Fix: build such a group and its wrapper inside the function that elastic.run runs"
        )
    return group.pg


def _require_supported(ddp: DistributedDataParallel, *, has_sparse: bool) -> None:
    parameters = list(ddp.module.parameters())
    has_no_buckets = torch_private.uses_python_reducer(ddp)
    reasons = {
        "delay_all_reduce_named_params: it reduces past the reducer": torch_private.reduces_past_reducer(ddp),
        "a communication hook (register_comm_hook): its state is not part of a restore point": bool(
            getattr(ddp, "_comm_hooks", ())
        ),
        "a buffer hook (_register_buffer_comm_hook): its state is not part of a restore point": hasattr(
            ddp, "buffer_hook"
        ),
        "device_mesh: its groups end with their generation": getattr(ddp, "device_mesh", None) is not None,
        "mixed_precision: its hooks live on the old reducer; use torch.autocast": ddp.mixed_precision is not None,
        "an optimizer inside backward (_apply_optimizer_in_backward): a lost peer would leave half a step": any(
            hasattr(parameter, "_in_backward_optimizers") for parameter in parameters
        ),
        "sparse gradients (nn.Embedding(sparse=True)): their buckets cannot be read": has_sparse,
        "torch's python_reducer (torch._dynamo.config.optimize_ddp): it has no buckets": has_no_buckets,
        "require_manual_backward_finalization: a lost peer would leave half a step": torch_private.ends_by_hand(ddp),
    }
    for reason, present in reasons.items():
        if present:
            raise UsageError(
                f"DistributedDataParallel({type(ddp.module).__name__}) uses {reason}. Fix: remove it, or run with "
                "ENABLE_RECOVERY=0"
            )


def _require_same_parameters(ddp: DistributedDataParallel, wanted: Sequence[str], present: set[str]) -> None:
    missing, extra = [name for name in wanted if name not in present], present.difference(wanted)
    if missing or extra:
        raise LayoutError(
            f"the parameters of {type(ddp.module).__name__} are not those of the restore point: missing here "
            f"{sorted(missing) or 'none'}, new here {sorted(extra) or 'none'} (a parameter that was frozen when "
            "DistributedDataParallel was built counts as missing). Fix: run the script that made the restore point, or "
            f"start over with `{spelled('run', '--fresh')}`"
        )


def _difference(wanted: Layout, got: Layout) -> str:
    if len(wanted.buckets) != len(got.buckets):
        return f"{len(wanted.buckets)} buckets there, {len(got.buckets)} here"
    for index, (there, here) in enumerate(zip(wanted.buckets, got.buckets, strict=True)):
        if there != here:
            return f"bucket {index} holds {list(there)} there, {list(here)} here"
    return f"final there: {wanted.rebuilt}, here: {got.rebuilt}"


# --- finding ----------------------------------------------------------------------------------------------------------

_OUTSIDE: Final = "outside"
_INSIDE: Final = "inside"


@dataclass(frozen=True, slots=True)
class _Rider:
    """A weak reference to a wrapper, with its number among those built in the same phase."""

    ddp: weakref.ref[DistributedDataParallel]
    key: str


class _Riders:
    """The wrappers that a script builds. Those built outside a generation persist; others end with their generation.

    Within a phase, the script builds wrappers in the same order on every rank, so the number identifies the wrapper.
    """

    def __init__(self) -> None:
        self._hook: RemovableHandle | None = None
        self._lasting: list[_Rider] = []
        self._passing: list[_Rider] = []
        self._group: Group | None = None
        self._layouts: dict[str, Layout] = {}
        self._settled: dict[str, Any] | None = None  # all layouts as plain values, once they are final
        self._has_buffers = True  # whether there may be buffers to synchronize; valid once layouts are final
        self._waiting: dict[str, RemovableHandle] = {}

    def install(self) -> None:
        if self._hook is None:
            self._hook = register_module_module_registration_hook(self._on_registration)

    def _on_registration(self, module: Module, name: str, submodule: Module | None) -> None:
        # DDP's constructor assigns self.module once: after its group, before its first collective.
        if isinstance(module, DistributedDataParallel) and name == "module" and "module" not in module._modules:
            self._add(module)
            if submodule is not None and any(one.device.type != "cpu" for one in submodule.parameters()):
                module.register_forward_pre_hook(_refuse_capture)

    def _add(self, ddp: DistributedDataParallel) -> None:
        self._settled = None
        if self._group is None or self._group.broken:
            self._lasting.append(_Rider(weakref.ref(ddp), f"{_OUTSIDE}/{len(self._lasting)}"))
            return
        key = f"{_INSIDE}/{len(self._passing)}"
        self._passing.append(_Rider(weakref.ref(ddp), key))
        self._waiting[key] = ddp.register_forward_pre_hook(lambda module, _: self._adopt(module, key))

    def _adopt(self, module: Module, key: str) -> None:
        self._waiting.pop(key).remove()
        self._settled = None
        assert self._group is not None
        assert isinstance(module, DistributedDataParallel)
        attach(module, self._group, self._layouts.get(key))

    def attach_all(self, group: Group, layouts: Mapping[str, Layout]) -> None:
        for ddp, _ in _alive(self._passing):
            ddp.register_forward_pre_hook(_refuse)
        self._passing.clear()
        self._waiting.clear()
        self._group, self._settled = group, None
        self._layouts = dict(layouts)
        for ddp, key in _alive(self._lasting):
            attach(ddp, group, self._layouts.get(key))

    def sync_buffers_all(self) -> None:
        if self._settled is not None and not self._has_buffers:
            return
        for ddp, _ in self._present():
            if ddp.will_sync_module_buffers():
                torch_private.make_buffers_rank_0s(ddp)
                ddp.require_forward_param_sync = False  # until a forward pass changes the buffers again

    def generation_ended(self) -> None:
        self._group = None

    def settle_all(self) -> dict[str, Any] | None:
        if self._settled is not None:
            return self._settled
        if any(torch_private.is_learning(ddp) for ddp, _ in self._present()):
            return None
        captured = self.capture_all()
        plain = {key: layout.to_plain() for key, layout in sorted(captured.items())}
        if all(layout.rebuilt for layout in captured.values()) and not self._waiting:
            self._settled = plain
            self._has_buffers = any(ddp.broadcast_buffers and ddp.modules_buffers for ddp, _ in self._present())
        return plain

    def wrappers(self) -> list[DistributedDataParallel]:
        return [ddp for ddp, _ in self._present()]

    def _present(self) -> Iterator[tuple[DistributedDataParallel, str]]:
        return _alive([*self._lasting, *self._passing])

    def capture_all(self) -> dict[str, Layout]:
        captured = dict(self._layouts)
        for ddp, key in self._present():
            if key not in self._waiting:
                captured[key] = capture(ddp)
        return captured


def _alive(riders: Sequence[_Rider]) -> Iterator[tuple[DistributedDataParallel, str]]:
    for rider in riders:
        ddp = rider.ddp()
        if ddp is not None:
            yield ddp, rider.key


def _refuse_capture(module: Module, _: object) -> None:
    """Raise if a forward pass is captured into a CUDA graph together with the collectives of its backward pass."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    parameter = next(module.parameters())
    if devices.is_capturing(parameter.device):
        raise UsageError(
            f"{type(module).__name__} was captured into a CUDA graph with its collectives: they belong to a group that "
            "ends with the first lost peer. Fix: capture the module before DistributedDataParallel wraps it "
            "(torch.cuda.make_graphed_callables)"
        )


def _refuse(module: Module, _: object) -> None:
    raise UsageError(
        f"{type(module).__name__} was built inside an earlier call of the function that elastic.run runs, and its "
        "group is gone. Fix: build it before elastic.run, or again in each call"
    )


_riders = _Riders()  # one per process, because torch has a single hook of this kind


def install() -> None:
    """Track every DistributedDataParallel that is built from now on. Further calls do nothing."""
    _riders.install()


def attach_all(group: Group, layouts: Mapping[str, Any] | None) -> None:
    """Attach every wrapper to a new generation's group.

    Wrappers that are built later in the generation are attached at their first forward pass.

    Args:
        group: the formed and installed group.
        layouts: :func:`capture_all`'s result from when the restore point was made; None before the first step.

    Raises:
        LayoutError, UsageError: as for :func:`attach`.
    """
    plain = {} if layouts is None else layouts
    _riders.attach_all(group, {key: Layout.from_plain(value) for key, value in plain.items()})


def sync_buffers_all() -> None:
    """Set every wrapper's buffers (batch statistics) to rank 0's, as its next forward pass would.

    This makes the saved state the same on every rank. A collective: call it on every rank at the same step.
    """
    _riders.sync_buffers_all()


def wrappers() -> list[DistributedDataParallel]:
    """Return the wrappers that are alive, those built outside a generation first."""
    return _riders.wrappers()


def gradients_are_finite() -> bool:
    """Return whether a sample of the wrappers' reduced gradients on the CPU is finite.

    If the loss is not finite on some rank, almost no reduced gradient is finite on any rank. The sample is one value
    from each of up to ``_SAMPLED`` parameters per wrapper, so the check takes microseconds. Gradients on an accelerator
    are left out, since each step waits for the device only once.
    """
    return are_finite(parameter.grad for ddp in wrappers() for parameter in _sampled_of(ddp))


def are_finite(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Return whether the first value of each gradient on the CPU is finite."""
    sample = [
        one.view(-1)[0] for one in gradients if one is not None and one.is_cpu and one.is_contiguous() and one.numel()
    ]
    return all(math.isfinite(one.item()) for one in sample)


def _sampled_of(ddp: DistributedDataParallel) -> Sequence[torch.Tensor]:
    found = _sampled.get(ddp)
    if found is None:
        parameters = [one for one in ddp.module.parameters() if one.requires_grad and one.numel()]
        last = max(0, len(parameters) - 1)
        places = sorted({round(last * part / (_SAMPLED - 1)) for part in range(_SAMPLED)})
        found = _sampled[ddp] = [parameters[place] for place in places if parameters]
    return found


_SAMPLED = 4
_sampled: weakref.WeakKeyDictionary[Module, Sequence[torch.Tensor]] = weakref.WeakKeyDictionary()


def require_all_among(weights: Sequence[torch.Tensor]) -> None:
    """Raise if a wrapper trains a parameter that is not in the state, because a recovery would not restore it.

    Raises:
        UsageError: the message names the wrapped module.
    """
    known = {id(one) for one in weights}
    for ddp in wrappers():
        if any(parameter.requires_grad and id(parameter) not in known for parameter in ddp.parameters()):
            name = type(ddp.module).__name__
            raise UsageError(
                f"DistributedDataParallel({name}) trains parameters that are not in the state, so a "
                "replacement worker would begin with different values. Fix: pass this model to "
                "TorchState(model, optimizer, …), or as model_2=… if the state has another model already"
            )


def settle_all() -> dict[str, Any] | None:
    """Return the result of :func:`capture_all` at a commit. Costs nothing once all layouts are final.

    Return None between the first and the second iteration of a wrapper with ``static_graph=True``, which has no layout
    yet.
    """
    return _riders.settle_all()


def generation_ended() -> None:
    """End the generation. Wrappers that are built from now on persist."""
    _riders.generation_ended()


def capture_all() -> dict[str, Any]:
    """Return the layouts of all wrappers as plain values, by key. All ranks must call it together."""
    return {key: layout.to_plain() for key, layout in sorted(_riders.capture_all().items())}
