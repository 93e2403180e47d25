"""How one value of a state is remembered, brought back and taken apart: a handler for each kind, and their registry.

Here lives what is particular to modules, optimizers, samplers, objects with a ``state_dict`` and plain values. Never
here: when something is remembered, where it goes, files. The one idea: what only an optimizer step changes (weights,
moments) need not be copied at a commit, because until the next step it *is* the commit; ``remember`` keeps just the
rest, what a forward pass or the user's loop changes.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samebits.errors import CheckpointError, UsageError
from samebits.training import value_trees
from samebits.training.sharding.pieces import is_distributed, local, paths_of
from samebits.training.state import snapshot
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.module_state import ModuleState

__all__ = ["StateHandler", "handler_of", "register_handler"]

_OPTIMIZER_KEYS = {"state", "param_groups"}
_NAMES = "parameter_names"  # beside them, of each group's parameters, where groups were added
_INNER = ("_orig_mod", "_forward_module")  # under which torch.compile and Lightning Fabric keep what they wrap
_NUMBERS = frozenset({type(None), bool, int, float})
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


class StateHandler:
    """One value of a state. Subclass it and :func:`register_handler` it for a type of your own.

    The base class is right for whatever has ``state_dict()`` and ``load_state_dict()``, is small and is equal on every
    rank: a learning-rate schedule, a gradient scaler. With ``rng="per_step"`` a newcomer gets another rank's copy, so a
    stateful data loader, say, is right only where its position is the same number on every rank. With ``rng="saved"``
    it gets that only where :attr:`is_alike` says so of all values.

    Args:
        value: the object; handlers keep it, they never replace it.
    """

    loads_in_place: ClassVar[bool] = False
    """Whether ``load`` may be given the very tensors of ``contents()``, filled with other values."""
    records: ClassVar[tuple[str, ...]] = ()
    """Keys of ``contents()`` that no later step reads, such as a log: a step taken twice may differ in them."""

    path = "state"
    """Where the value is in its state, for messages; set by the state."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._remembered: Any = None

    @property
    def is_alike(self) -> bool:
        """Whether the value is known to be the same on every rank: of a class of somebody's own it is not."""
        return isinstance(self.value, torch.optim.lr_scheduler.LRScheduler)

    def contents(self) -> Any:
        """Everything, as a tree of plain values with tensors in it, which are not copied."""
        return self.value.state_dict()

    def load(self, contents: Any) -> None:
        """Become what ``contents()`` gave, here or on another rank."""
        self.value.load_state_dict(contents)

    def load_back(self, contents: Any) -> None:
        """Become an earlier ``contents()`` of this very value, and keep nothing of it: it may be needed again."""
        self.load(copied_tree(contents))

    def unlisted(self) -> dict[str, Any]:
        """Return what belongs to the value though :meth:`contents` leaves it out, as a tree with tensors."""
        return {}

    def load_unlisted(self, unlisted: Mapping[str, Any]) -> None:
        """Become what :meth:`unlisted` gave, here or on another rank; called before :meth:`load`."""

    def remember(self) -> None:
        """Keep what may change before the next optimizer step; called at every commit, so it must be cheap.

        What is kept must be a copy: a loop may go on filling the list that was committed.

        Raises:
            UsageError: the value holds something that cannot be saved.
        """
        self._remembered = copied(self.value.state_dict())
        require_savable(self._remembered, self.path)

    def undo(self) -> None:
        """Take the object itself back to what it was when last remembered; whatever follows gives it its values."""

    def recall(self) -> None:
        """Go back to what was last remembered; called after :meth:`undo`, if no optimizer step has begun since."""
        self.value.load_state_dict(copy.deepcopy(self._remembered))

    def has_changed(self) -> bool:
        """Return whether the value may differ from what was last remembered; the tensors of ``stepped()`` left out.

        A subclass that remembers in its own way, and does not tell, may.
        """
        if type(self).remember is not StateHandler.remember:
            return True
        return not same(self.value.state_dict(), self._remembered)

    def loose(self) -> dict[str, Any]:
        """What may differ between ranks, by name; "": all of it. Not that of an optimizer, a step's or a sampler's."""
        return {"": self.contents()}

    def stepped(self) -> Sequence[torch.Tensor]:
        """The tensors that ``remember`` leaves out, because only an optimizer step is to change them."""
        return ()


class ModuleHandler(StateHandler):
    """A module: an optimizer step changes its parameters; a forward pass or a loop its buffers, modes, flags, hooks.

    Extra state is what a submodule's own ``get_extra_state()`` tells at each commit, FP8 scaling factors for one.
    """

    is_alike = True

    loads_in_place = True

    def contents(self) -> Any:
        """As :meth:`StateHandler.contents`, in a plain dict."""
        return dict(self.value.state_dict())

    def __init__(self, value: nn.Module) -> None:
        super().__init__(bare(value))
        self._beside = ModuleState(self.value)
        self._with_extra_state = [module for module in self.value.modules() if _has_extra_state(module)]
        self._extra_states: list[Any] = []

    def load(self, contents: Any) -> None:
        """Load what ``contents()`` gave, buffers with their dtype and strides, also those not made here yet.

        Raises:
            UsageError: a parameter has another dtype or other strides here than there.
        """
        self._beside.expect(contents)
        for name, parameter in self.value.named_parameters(remove_duplicate=False):
            _require_same_kind(name, parameter, contents.get(name))
        loadable = OrderedDict(contents)
        loadable._metadata = getattr(self.value.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
        self.value.load_state_dict(loadable)
        for prefix, module in self.value.named_modules():
            for name, buffer in module._buffers.items():
                given = contents.get(f"{prefix}.{name}" if prefix else name)
                if isinstance(given, torch.Tensor) and buffer is not None and not _is_same_kind(buffer, given):
                    module._buffers[name] = value_trees.clone(given).to(buffer.device)

    def load_back(self, contents: Any) -> None:
        """A module copies what it is given into its parameters, so a copy of them would be one too many."""
        parameters = dict(self.value.named_parameters(remove_duplicate=False))
        self.load({name: one if name in parameters else copied_tree(one) for name, one in contents.items()})
        if any(_share_memory(one, contents.get(name)) for name, one in parameters.items()):  # a class that does not
            self.load(copied_tree(contents))

    def unlisted(self) -> dict[str, Any]:
        """As :meth:`StateHandler.unlisted`: modes, flags, and buffers that are not persistent."""
        return self._beside.unlisted()

    def load_unlisted(self, unlisted: Mapping[str, Any]) -> None:
        """As :meth:`StateHandler.load_unlisted`."""
        self._beside.load_unlisted(unlisted)

    def remember(self) -> None:
        if self._with_extra_state:
            told = [module.get_extra_state() for module in self._with_extra_state]
            self._extra_states = copied_tree(told, self._extra_states)
        self._beside.remember()

    def undo(self) -> None:
        self._beside.undo()

    def has_changed(self) -> bool:
        told = [module.get_extra_state() for module in self._with_extra_state]
        return self._beside.has_changed() or not same(told, self._extra_states)

    def recall(self) -> None:
        for module, extra_state in zip(self._with_extra_state, copied_tree(self._extra_states), strict=True):
            module.set_extra_state(extra_state)
        self._beside.recall()

    def loose(self) -> dict[str, Any]:
        return dict(self.value.named_buffers())

    def stepped(self) -> Sequence[torch.Tensor]:
        return self._beside.parameters


class OptimizerHandler(StateHandler):
    """An optimizer: its tensors change in a step, its hyperparameters whenever a schedule says so."""

    is_alike = True

    loads_in_place = True

    def __init__(self, value: torch.optim.Optimizer) -> None:
        super().__init__(bare_optimizer(value))
        self.name_of: Callable[[torch.Tensor], str | None] = lambda parameter: None
        self.named: Callable[[], dict[str, torch.Tensor]] = dict
        """The name of a parameter in the state's modules, and all of them by name; set by the state."""
        self._first_groups = self._groups()
        self.settings = frozenset(key for group in self.value.param_groups for key in group) - {"params"}
        """The hyperparameters that every group has."""
        self._remembered_sizes = [len(group) for group in self._first_groups]

    def contents(self) -> Any:
        """As :meth:`StateHandler.contents`, with the parameters' names once groups were added.

        Raises:
            UsageError: a parameter that was added cannot be restored.
        """
        contents = self.value.state_dict()
        return contents if self._has_first_groups() else {**contents, _NAMES: self._names()}

    def _groups(self) -> list[list[torch.Tensor]]:
        return [list(group["params"]) for group in self.value.param_groups]

    def _has_first_groups(self) -> bool:
        groups = self.value.param_groups
        return len(groups) == len(self._first_groups) and all(
            len(group["params"]) == len(first) and all(map(operator.is_, group["params"], first))
            for group, first in zip(groups, self._first_groups, strict=True)
        )

    def _names(self) -> list[list[str]]:
        names = []
        for number, group in enumerate(self._groups()):
            names.append([name for one in group if (name := self.name_of(one)) is not None])
            if len(names[-1]) < len(group) or any(map(is_distributed, group)):
                raise UsageError(
                    f"{self.path}: group {number} was added after the state was made, and holds a parameter that is "
                    "sharded or belongs to no module of the state, so a recovery would lose it. Fix: make the "
                    "optimizer with all its groups, and change their rates or requires_grad instead"
                )
        return names

    def _regroup(self, names: list[list[str]] | None, given: list[dict[str, Any]], named: dict[str, Any]) -> None:
        """Give the optimizer the groups that it had when these contents were taken.

        Args:
            names: of the parameters of each group; None: those with which the state was made.
            given: the groups' settings.
            named: the state's parameters by name.

        Raises:
            UsageError: this program's modules lack one of the parameters.
        """
        if names is None:
            wanted = self._first_groups
        elif missing := [name for group in names for name in group if name not in named]:
            raise UsageError(f"{self.path}: the restore point's groups hold {missing[0]}, which no module here has")
        else:
            wanted = [[named[name] for name in group] for group in names]
        groups = self.value.param_groups
        if [list(map(id, one["params"])) for one in groups] == [list(map(id, one)) for one in wanted]:
            return
        kept = {id(one) for group in wanted for one in group}
        for parameter in [one for group in self._groups() for one in group if id(one) not in kept]:
            self.value.state.pop(parameter, None)
        groups[:] = [
            {**(groups[number] if number < len(groups) else given[number]), "params": list(parameters)}
            for number, parameters in enumerate(wanted)
        ]

    def load(self, contents: Any) -> None:
        """Load what ``contents()`` gave, with its dtypes, strides and types at any depth.

        torch's own ``load_state_dict`` casts tensors to their parameter's dtype and rebuilds strings from nothing.

        Raises:
            UsageError: an optimizer that keeps its state its own way does not restore it.
        """
        contents, names = dict(contents), contents.get(_NAMES)
        contents.pop(_NAMES, None)
        if not self._has_torchs_state(contents):
            self.value.load_state_dict(contents)
            if not same(self.value.state_dict(), contents):
                raise UsageError(
                    f"{type(self.value).__name__}.load_state_dict() does not restore what its state_dict() returned, "
                    "so training would go on with other values. Fix: correct them, or keep the state in self.state"
                )
            return
        self._regroup(names, contents["param_groups"], self.named() if names is not None else {})
        castable = {number: _castable(values) for number, values in contents["state"].items()}
        defaults = dict(self.value.defaults)
        self.value.load_state_dict({**contents, "state": castable})
        self.value.defaults.clear()  # torch adds some, and groups added later would have more than another rank's
        self.value.defaults.update(defaults)
        numbers = [number for group in contents["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            if number in contents["state"]:
                loaded = self.value.state.get(parameter)
                self.value.state[parameter] = _exactly(contents["state"][number], loaded)

    def _parameters(self) -> list[torch.Tensor]:
        return [one for group in self.value.param_groups for one in group["params"]]

    def _has_torchs_state(self, contents: Any) -> bool:
        """Whether the class uses torch's own ``state_dict``, and these contents are of its form."""
        return type(self.value).state_dict is torch.optim.Optimizer.state_dict and contents.keys() == _OPTIMIZER_KEYS

    def load_back(self, contents: Any) -> None:
        """Into the moments that are there, where they are still those that were taken: fresh pages cost more."""
        pairs = self._moments_and(contents)
        if pairs is None:
            super().load_back(contents)
            return
        with torch.no_grad():
            for moment, given in pairs:
                moment.copy_(given)

    def _moments_and(self, contents: Any) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Every tensor of the optimizer's state with the one to be copied into it; None unless that is all there is.

        Hyperparameters are left out: ``recall`` brings them back.
        """
        if not self._has_torchs_state(contents) or not self._has_first_groups():
            return None
        numbers = [number for group in contents["param_groups"] for number in group["params"]]
        parameters = self._parameters()
        if len(numbers) != len(parameters) or contents["state"].keys() - numbers:
            return None
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, parameter in zip(numbers, parameters, strict=True):
            given, live = contents["state"].get(number, {}), self.value.state.get(parameter, {})
            if given.keys() != live.keys() or not all(_fits(live[name], one) for name, one in given.items()):
                return None
            pairs += [(live[name], one) for name, one in given.items()]
        return pairs

    def loose(self) -> dict[str, Any]:
        return {}

    def remember(self) -> None:
        self._remembered = [
            {
                name: value if type(value) in _ATOMS else copied(value)  # a call each would be most of the cost
                for name, value in group.items()
                if name != "params"
            }
            for group in self.value.param_groups
        ]
        sizes = [len(group["params"]) for group in self.value.param_groups]
        if sizes != self._remembered_sizes:
            self._names()  # or say at once that they cannot be restored
            self._remembered_sizes = sizes
        for number, group in enumerate(self._remembered):
            for name, value in group.items():
                if type(value) not in _ATOMS:
                    require_savable(value, f"{self.path}.param_groups.{number}.{name}")

    def has_changed(self) -> bool:
        """Return whether a hyperparameter or a group has changed; only a step changes moments."""
        groups = self.value.param_groups
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        return not same(
            [[len(group["params"]) for group in groups], settings], [self._remembered_sizes, self._remembered]
        )

    def recall(self) -> None:
        groups, sizes = self.value.param_groups, self._remembered_sizes
        for group, size in zip(groups, [*sizes, *[0] * (len(groups) - len(sizes))], strict=True):
            for added in group["params"][size:]:
                self.value.state.pop(added, None)
            del group["params"][size:]
        del groups[len(sizes) :]
        for group, values in zip(groups, self._remembered, strict=True):
            group.update({name: copied(value) for name, value in values.items()})


class ScalerHandler(StateHandler):
    """A gradient scaler: inside a step it notes, beside its state, whose gradients are unscaled already.

    A step that a lost peer has cut off leaves that note behind, and the step that is done again would be taken with
    scaled gradients, by the survivors alone.
    """

    is_alike = True

    def load(self, contents: Any) -> None:
        super().load(contents)
        self._forget_the_open_step()

    def recall(self) -> None:
        super().recall()
        self._forget_the_open_step()

    def _forget_the_open_step(self) -> None:
        if self.value.is_enabled():  # else it keeps no notes at all
            self.value._per_optimizer_states.clear()


class SamplerHandler(StateHandler):
    """An :class:`ElasticSampler`, whose state is three numbers."""

    is_alike = True

    def loose(self) -> dict[str, Any]:
        return {}

    def remember(self) -> None:
        self._remembered = self.value.state_dict()

    def has_changed(self) -> bool:
        return not same(self.value.state_dict(), self._remembered)

    def recall(self) -> None:
        self.value.load_state_dict(self._remembered)


class PlainHandler(StateHandler):
    """An attribute of the state itself that is data: a number, a text, a list, a tensor, …

    Args:
        owner: the state.
        name: of the attribute.
    """

    is_alike = True

    def __init__(self, owner: object, name: str) -> None:
        super().__init__(None)
        self._owner = owner
        self._name = name

    def contents(self) -> Any:
        return getattr(self._owner, self._name)

    def load(self, contents: Any) -> None:
        setattr(self._owner, self._name, contents)

    def remember(self) -> None:
        self._remembered = copied(getattr(self._owner, self._name))
        require_savable(self._remembered, self.path)

    def has_changed(self) -> bool:
        return not same(getattr(self._owner, self._name), self._remembered)

    def recall(self) -> None:
        setattr(self._owner, self._name, copied(self._remembered))


class TrainedTensorHandler(StateHandler):
    """A value of the state that an optimizer trains, such as SAC's ``log_alpha``: it stays the same tensor."""

    is_alike = True

    loads_in_place = True

    def contents(self) -> Any:
        """As :meth:`StateHandler.contents`: without the gradient."""
        return self.value.detach()

    def load(self, contents: Any) -> None:
        """Copy the values into the tensor.

        Raises:
            UsageError: it has another dtype or other strides here than there.
        """
        _require_same_kind(self.path, self.value, contents)
        with torch.no_grad():
            self.value.copy_(contents)

    def load_back(self, contents: Any) -> None:
        """As :meth:`load`, which keeps nothing of it."""
        self.load(contents)

    def remember(self) -> None:
        """Only an optimizer step changes it."""

    def has_changed(self) -> bool:
        """Return False: its version tells."""
        return False

    def recall(self) -> None:
        """Only an optimizer step changes it."""

    def loose(self) -> dict[str, Any]:
        """It is compared as a parameter is."""
        return {}

    def stepped(self) -> Sequence[torch.Tensor]:
        """As :meth:`StateHandler.stepped`."""
        return (self.value,)


_registry: list[tuple[type, Callable[[Any], StateHandler]]] = [
    (nn.Module, ModuleHandler),
    (torch.optim.Optimizer, OptimizerHandler),
    (torch.amp.GradScaler, ScalerHandler),
    (ElasticSampler, SamplerHandler),
]


def register_handler(kind: type, handler: Callable[[Any], StateHandler]) -> None:
    """From now on states handle values of ``kind``, and of its subclasses, with ``handler(value)``.

    The last registered fits first. Call it before the state is made, on every rank.
    """
    _registry.append((kind, handler))


def handler_of(value: Any) -> StateHandler | None:
    """The handler for this value; None where it is plain data."""
    for kind, make in reversed(_registry):
        if isinstance(value, kind):
            handler: StateHandler = make(value)
            return handler
    return StateHandler(value) if is_stateful(value) else None


def require_savable(value: Any, path: str) -> None:
    """Check that a value can be saved, at a commit already, so that no later save or recovery meets it first.

    Raises:
        UsageError: it cannot, which no further try would change; the message names the place and the type.
    """
    if type(value) in _NUMBERS:  # most are
        return
    try:
        snapshot.take_apart(value, path)
    except CheckpointError as error:
        if next(paths_of(value, path), None) is None:  # a DTensor is taken out of a state before
            raise UsageError(str(error)) from None


def is_stateful(value: object) -> bool:
    """Whether the value keeps a state that can be taken out and put back."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def bare(module: nn.Module) -> nn.Module:
    """The script's own module inside DistributedDataParallel, torch.compile and Lightning Fabric's wrapper.

    Its names depend on no wrapper.
    """
    while True:
        inner = next((module._modules[name] for name in _INNER if module._modules.get(name) is not None), None)
        if inner is not None:
            module = inner
        elif isinstance(module, DistributedDataParallel):
            module = module.module
        else:
            return module


def bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose ``step`` changes the weights, inside Accelerate's and Lightning Fabric's wrappers.

    They are known by their shape: ``.optimizer`` is an optimizer, and has the same state and parameter groups. One that
    keeps a state of its own besides is no wrapper to us, and keeps its place.

    Raises:
        UsageError: this one lacks what torch's optimizers have, and so cannot be followed.
    """
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer) and inner is not optimizer and _is_only_wrapped(inner, optimizer):
        optimizer = inner
        inner = getattr(optimizer, "optimizer", None)
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        raise UsageError(
            f"a {type(optimizer).__name__} is no optimizer that a state can follow: it was not made by "
            "torch.optim.Optimizer's constructor. Fix: give the state the optimizer inside it"
        )
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        raise UsageError(
            f"a {type(optimizer).__name__} keeps a part of its state on each rank that no other rank holds, so a lost "
            "rank's part could not be restored. Fix: shard the model with fully_shard, or use the inner optimizer"
        )
    return optimizer


def _is_only_wrapped(inner: torch.optim.Optimizer, wrapper: torch.optim.Optimizer) -> bool:
    return wrapper.state is inner.state and wrapper.param_groups is inner.param_groups


def _has_extra_state(module: nn.Module) -> bool:
    """Whether its class keeps, beside parameters and buffers, what torch's ``load_state_dict`` can give back."""
    kind = type(module)
    return (
        kind.get_extra_state is not nn.Module.get_extra_state and kind.set_extra_state is not nn.Module.set_extra_state
    )


def _fits(live: object, given: object) -> bool:
    """Whether one tensor can be copied into the other, place by place."""
    return (
        isinstance(live, torch.Tensor)
        and isinstance(given, torch.Tensor)
        and live.layout is given.layout is torch.strided
        and (live.shape, live.dtype, live.device) == (given.shape, given.dtype, given.device)
        and live.stride() == given.stride()
        and not value_trees.overlaps(live)
    )


def _is_same_kind(live: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether values copied from one into the other are the same, strides included.

    Points of earlier releases know no strides, so plain ones fit everything.
    """
    if is_distributed(live) or is_distributed(given) or live.layout is not torch.strided:
        return True
    is_plain = given.stride() == value_trees.plain_strides(given.shape)
    return live.dtype is given.dtype and (is_plain or live.shape != given.shape or live.stride() == given.stride())


def _require_same_kind(name: str, parameter: torch.Tensor, given: object) -> None:
    if isinstance(given, torch.Tensor) and not _is_same_kind(parameter, given):
        raise UsageError(
            f"parameter {name} is of {given.dtype} with strides {tuple(given.stride())} in the restore point, and of "
            f"{parameter.dtype} with strides {tuple(parameter.stride())} in this process. Fix: call .to(dtype) and "
            ".to(memory_format=…) before the state is made, not in the training function"
        )


def _castable(value: Any) -> Any:
    """Return the value without what torch's ``load_state_dict`` would iterate over as if it were a list."""
    items = value_trees.children(value)
    if items is not None:
        return value_trees.rebuilt(value, [(key, _castable(item)) for key, item in items])
    return value if isinstance(value, torch.Tensor) or type(value) in _NUMBERS else None


def _exactly(given: Any, loaded: Any) -> Any:
    """Return what was given, where torch's ``load_state_dict`` has put it: on the device of what it has loaded."""
    if isinstance(given, torch.Tensor):
        if is_distributed(given):
            is_cast = not isinstance(loaded, torch.Tensor) or loaded.dtype is not given.dtype
            return given.detach().clone() if is_cast else loaded
        if isinstance(loaded, torch.Tensor) and given.device != loaded.device:
            return value_trees.laid_out(given, given.stride(), loaded.device)
        return given if loaded is given else value_trees.clone(given)  # torch has cast it
    items = value_trees.children(given)
    if items is None:
        return given
    counterparts = dict(value_trees.children(loaded) or ())
    return value_trees.rebuilt(given, [(key, _exactly(item, counterparts.get(key))) for key, item in items])


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same in type and bits, at any depth."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
            return False
        if is_distributed(one) or is_distributed(other) or one.layout is not torch.strided:
            return True
        return one.stride() == other.stride() and value_trees.have_same_bits(one, other)
    ones, others = value_trees.children(one), value_trees.children(other)
    if ones is None or others is None:
        return type(one) is type(other) and (one is other or bool(one == other))
    ones, others = list(ones), list(others)
    return (
        type(one) is type(other)
        and len(ones) == len(others)
        and all(key == key_2 and same(item, item_2) for (key, item), (key_2, item_2) in zip(ones, others, strict=True))
    )


def _share_memory(one: torch.Tensor, other: object) -> bool:
    if not isinstance(other, torch.Tensor):
        return False
    one, other = local(one), local(other)
    return one.numel() > 0 and one.data_ptr() == other.data_ptr()


def copied(value: Any) -> Any:
    """Return a copy that no later change reaches."""
    if type(value) in _ATOMS or (type(value) is tuple and all(type(item) in _ATOMS for item in value)):
        return value
    if isinstance(value, torch.Tensor):
        return value_trees.clone(value)
    return copy.deepcopy(value)


def copied_tree(tree: Any, old: Any = None) -> Any:
    """Copy a tree with tensors, in the memory of ``old``, an earlier copy, where it fits: new pages cost more."""
    if isinstance(tree, torch.Tensor):
        if _fits(old, tree) and not tree.requires_grad:
            with torch.no_grad():
                return old.copy_(tree)
        return value_trees.clone(tree)
    items = value_trees.children(tree)
    if items is None:
        return copied(tree)
    by_key = dict(value_trees.children(old) or ()) if type(old) is type(tree) else {}
    return value_trees.rebuilt(tree, [(key, copied_tree(item, by_key.get(key))) for key, item in items])
