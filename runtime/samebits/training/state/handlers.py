"""Define how each kind of value in a state is remembered, restored and saved, and register these handlers.

Weights and optimizer moments change only in an optimizer step. Until the next step they still equal the commit and need
no copy. ``remember`` therefore copies only the other values, which a forward pass or the user's loop can change.
"""

from __future__ import annotations

import copy
import itertools
import operator
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samebits.errors import CheckpointError, UsageError
from samebits.training import torch_private, value_trees
from samebits.training.sharding.pieces import is_distributed, local, paths_of
from samebits.training.state import snapshot
from samebits.training.state.attributes import PlainAttributes
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.module_state import ModuleState

__all__ = ["StateHandler", "handler_of", "register_handler"]

_OPTIMIZER_KEYS = {"state", "param_groups"}
_NAMES = "parameter_names"  # additional key: each group's parameters, if groups were added
_INNER = ("_orig_mod", "_forward_module")  # attributes in which torch.compile and Fabric keep the wrapped module
_NUMBERS = frozenset({type(None), bool, int, float})
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, deque})


class StateHandler:
    """Saves and restores one value of a state.

    For a type without ``state_dict()`` and ``load_state_dict()``, override ``contents()`` and ``load()`` in a subclass
    and call :func:`register_handler`. The value must be the same on every rank: with ``rng="per_step"``, a new member
    gets another rank's copy. With ``rng="saved"``, this happens only if ``is_alike`` is True for all values in the
    state.

    Args:
        value: the object; a handler never replaces it.

    Example::

        class Counter:
            count = 0

        class CounterHandler(samebits.elastic.StateHandler):
            def contents(self):
                return {"count": self.value.count}

            def load(self, contents):
                self.value.count = contents["count"]

        samebits.elastic.register_handler(Counter, CounterHandler)
        state = samebits.elastic.ObjectState(rng="per_step", seed=1, counter=Counter())

        @samebits.elastic.run
        def train(state):
            while state.completed_steps < 3:
                state.counter.count += 10
                state.commit()

        train(state)
    """

    loads_in_place: ClassVar[bool] = False
    """Whether ``load`` accepts the tensors of ``contents()`` themselves after they were filled with other values."""
    records: ClassVar[tuple[str, ...]] = ()
    """Keys of ``contents()`` that no later step reads, such as a log; a step taken twice may differ in them."""

    path = "state"
    """The value's path in its state, for messages; set by the state."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._remembered: Any = None
        self._marks: _Marks = []  # marks of the tensors that were remembered

    @property
    def is_alike(self) -> bool:
        """Whether the value is known to be the same on every rank; False for a class of your own."""
        return isinstance(self.value, torch.optim.lr_scheduler.LRScheduler)

    def contents(self) -> Any:
        """Return everything that must be saved, as nested plain values and tensors. No copy is needed."""
        return self.value.state_dict()

    def load(self, contents: Any) -> None:
        """Apply the contents that ``contents()`` returned on this or another rank."""
        self.value.load_state_dict(contents)

    def load_back(self, contents: Any) -> None:
        """Restore an earlier ``contents()`` of this value. Keep no references to it, because it may be needed again."""
        self.load(copied_tree(contents))

    def unlisted(self) -> dict[str, Any]:
        """Return data of the value that is not in :meth:`contents`, as nested plain values and tensors."""
        return {}

    def load_unlisted(self, unlisted: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`unlisted` from this or another rank. Called before :meth:`load`."""

    def remember(self) -> None:
        """Copy what may change before the next optimizer step. Called at every commit, so it must be fast.

        Store copies, not references: the loop may, for example, append to a list after the commit.

        Raises:
            UsageError: the value holds something that cannot be saved.
        """
        told = self.contents()
        self._remembered, self._marks = copied(told), _marks_of(told)
        require_savable(self._remembered, self.path)

    def undo(self) -> None:
        """Restore the object's structure as of the last :meth:`remember`; a later call restores its values."""

    def recall(self) -> None:
        """Restore the remembered values. Called after :meth:`undo`, if no optimizer step has begun since the commit."""
        self.load(copy.deepcopy(self._remembered))

    def has_changed(self) -> bool:
        """Return whether the value may differ from what was last remembered, not counting :meth:`stepped` tensors.

        A subclass that overrides ``remember`` but not this method counts as possibly changed.
        """
        if type(self).remember is not StateHandler.remember:
            return True
        return not same(self.contents(), self._remembered)

    def changed(self) -> Sequence[str]:
        """Return the names of values that are known to have changed since ``remember``, such as ``state.best``.

        The tensors of :meth:`stepped` are left out. Called once per step, so tensors are read only if their version
        counter or the tensor object has changed. A subclass that overrides ``remember`` but not this method returns
        nothing.
        """
        if type(self).remember is not StateHandler.remember:
            return ()
        told = self.value.state_dict()
        if _is_untouched(told, self._remembered, self._marks, leave_out=self.records):
            return ()
        if not same(told, self.value.state_dict()):
            return ()  # its contents differ on every call, as a time does
        return (self.path,)

    def changed_attributes(self) -> Sequence[str]:
        """Return the names of the object's plain attributes that have changed since ``remember``."""
        return ()

    def tensors_changed(self) -> bool:
        """Return whether a tensor outside :meth:`stepped` that only an optimizer step may change has changed."""
        return False

    def loose(self) -> dict[str, Any]:
        """Return the values that may differ between ranks, by name; "" names the whole value."""
        return {"": self.contents()}

    def stepped(self) -> Sequence[torch.Tensor]:
        """Return the tensors that only an optimizer step changes, and that ``remember`` does not copy."""
        return ()


class ModuleHandler(StateHandler):
    """Handler for a module, whose parameters change in an optimizer step.

    A forward pass or a loop may change its buffers, modes, flags and hooks.

    Extra state, such as FP8 scaling factors, is the result of a submodule's ``get_extra_state()`` at each commit.
    """

    is_alike = True

    loads_in_place = True

    def contents(self) -> Any:
        """Return the module's ``state_dict()`` as a plain dict."""
        return dict(self.value.state_dict())

    def __init__(self, value: nn.Module) -> None:
        super().__init__(bare(value))
        self._beside = ModuleState(self.value)
        self._with_extra_state = [module for module in self.value.modules() if _has_extra_state(module)]
        self._extra_states: list[Any] = []

    @property
    def has_extra_state(self) -> bool:
        """Whether a submodule has extra state."""
        return bool(self._with_extra_state)

    def load(self, contents: Any) -> None:
        """Load ``contents()``. Buffers get the saved dtype and strides, and missing buffers are created.

        Raises:
            UsageError: a parameter has a different dtype or different strides in this process.
        """
        self._beside.expect(contents)
        for name, parameter in self.value.named_parameters(remove_duplicate=False):
            _require_same_kind(name, parameter, contents.get(name))
        if not self._load_shards(contents):
            self.value.load_state_dict(self._loadable(contents))
        for prefix, module in self.value.named_modules():
            for name, buffer in module._buffers.items():
                given = contents.get(f"{prefix}.{name}" if prefix else name)
                if isinstance(given, torch.Tensor) and buffer is not None and not _is_same_kind(buffer, given):
                    module._buffers[name] = value_trees.clone(given).to(buffer.device)
        if any(map(_converts_what_it_loads, self.value.modules())):
            self._put_back(contents)

    def _put_back(self, contents: Mapping[str, Any]) -> None:
        """Set the values that loading has changed, as a module does that clips its weights when it loads them.

        Values that ``state_dict()`` converts are left alone, because loading converts them back.
        """
        saved = self.value.state_dict()
        live = (self.value.named_parameters, self.value.named_buffers)
        with torch.no_grad():
            for name, one in itertools.chain(*(named(remove_duplicate=False) for named in live)):
                given = contents.get(name)
                if not isinstance(given, torch.Tensor) or not _share_memory(one, saved.get(name)):
                    continue
                is_same = _is_same_shard(one, given) if is_distributed(one) else given.shape == one.shape
                if is_same and not torch.equal(local(one), local(given)):
                    local(one).copy_(local(given))

    def _loadable(self, contents: Mapping[str, Any]) -> OrderedDict[str, Any]:
        loadable = OrderedDict(contents)
        loadable._metadata = getattr(self.value.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
        return loadable

    def _load_shards(self, contents: Mapping[str, Any]) -> bool:
        """Load all values, and copy shards into shards directly. Return False if only torch can load these values.

        ``load_state_dict()`` copies by DTensor's dispatcher, which takes about 10 ms for each new shape.
        """
        shards = {
            name: (parameter, contents[name])
            for name, parameter in self.value.named_parameters(remove_duplicate=False)
            if is_distributed(parameter) and _is_same_shard(parameter, contents.get(name))
        }
        if not shards or any(map(_converts_what_it_loads, self.value.modules())):
            return False
        rest = self._loadable({name: one for name, one in contents.items() if name not in shards})
        found = self.value.load_state_dict(rest, strict=False)
        if found.unexpected_keys or set(found.missing_keys) != shards.keys():
            return False  # torch's error names these keys
        with torch.no_grad():
            for parameter, given in shards.values():
                local(parameter).copy_(local(given))
        return True

    def load_back(self, contents: Any) -> None:
        """Load without copying the parameters first, because a module copies values into its own tensors anyway."""
        parameters = dict(self.value.named_parameters(remove_duplicate=False))
        self.load({name: one if name in parameters else copied_tree(one) for name, one in contents.items()})
        if any(_share_memory(one, contents.get(name)) for name, one in parameters.items()):  # adopted, not copied
            self.load(copied_tree(contents))

    def unlisted(self) -> dict[str, Any]:
        """Return modes, flags, changed plain attributes, and buffers that are not persistent."""
        return self._beside.unlisted()

    def load_unlisted(self, unlisted: Mapping[str, Any]) -> None:
        """Restore modes, flags, plain attributes, and buffers that are not persistent."""
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

    def changed(self) -> Sequence[str]:
        found = [f"{one} of {self.path}" for one in self._beside.changed()]
        if self._with_extra_state:
            told = [module.get_extra_state() for module in self._with_extra_state]
            if not same(told, self._extra_states):
                found.append(f"extra state of {self.path}")
        return found

    def changed_attributes(self) -> Sequence[str]:
        return [f"{name} of {self.path}" for name in self._beside.changed_attributes()]

    def recall(self) -> None:
        for module, extra_state in zip(self._with_extra_state, copied_tree(self._extra_states), strict=True):
            module.set_extra_state(extra_state)
        self._beside.recall()

    def loose(self) -> dict[str, Any]:
        return dict(self.value.named_buffers())

    def stepped(self) -> Sequence[torch.Tensor]:
        return self._beside.parameters


class OptimizerHandler(StateHandler):
    """Handler for an optimizer: a step changes its tensors, a schedule its hyperparameters."""

    is_alike = True

    loads_in_place = True

    def __init__(self, value: torch.optim.Optimizer) -> None:
        super().__init__(bare_optimizer(value))
        self.name_of: Callable[[torch.Tensor], str | None] = lambda parameter: None
        self.named: Callable[[], dict[str, torch.Tensor]] = dict
        """Return all parameters by name; set by the state, as is ``name_of``, which returns a parameter's name."""
        self._first_groups = self._groups()
        self.settings = frozenset(key for group in self.value.param_groups for key in group) - {"params"}
        """The hyperparameters that every group has."""
        self._remembered_sizes = [len(group) for group in self._first_groups]
        self._moments = _moments_of(self.value)
        self._attributes = PlainAttributes({"": self.value})

    def unlisted(self) -> dict[str, Any]:
        """Return plain attributes that have changed since the state was created."""
        return {"attributes": self._attributes.since_start()}

    def load_unlisted(self, unlisted: Mapping[str, Any]) -> None:
        """Adopt plain attributes."""
        self._attributes.load(unlisted["attributes"])

    def changed_attributes(self) -> Sequence[str]:
        return [f"{name} of {self.path}" for name in self._attributes.changed()]

    def undo(self) -> None:
        self._attributes.undo()

    def contents(self) -> Any:
        """Return the ``state_dict()``, with the parameters' names if groups were added.

        Raises:
            UsageError: an added parameter cannot be restored.
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
        """Restore the optimizer's parameter groups as they were when the contents were saved.

        Args:
            names: each group's parameter names; None: the groups that the optimizer had when the state was created.
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
        """Load ``contents()`` with the saved dtypes, strides and types.

        torch's own ``load_state_dict`` casts tensors to their parameter's dtype and cannot restore strings.

        Raises:
            UsageError: an optimizer's own ``load_state_dict()`` does not restore what its ``state_dict()`` returned.
        """
        contents, names = dict(contents), contents.get(_NAMES)
        contents.pop(_NAMES, None)
        if not self._has_torchs_state(contents):
            self.value.load_state_dict(contents)
            if not same(self.value.state_dict(), contents):
                raise UsageError(
                    f"{type(self.value).__name__}.load_state_dict() does not restore what its state_dict() returned, "
                    "so training would continue with other values. Fix: correct them, or keep the state in self.state"
                )
            return
        self._regroup(names, contents["param_groups"], self.named() if names is not None else {})
        castable = {number: _castable(values) for number, values in contents["state"].items()}
        defaults = dict(self.value.defaults)
        self.value.load_state_dict({**contents, "state": castable})
        self.value.defaults.clear()  # torch adds keys, which would make groups added later differ from another rank's
        self.value.defaults.update(defaults)
        numbers = [number for group in contents["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            if number in contents["state"]:
                loaded = self.value.state.get(parameter)
                self.value.state[parameter] = _exactly(contents["state"][number], loaded)

    def _parameters(self) -> list[torch.Tensor]:
        return [one for group in self.value.param_groups for one in group["params"]]

    def _has_torchs_state(self, contents: Any) -> bool:
        """Return whether the class uses torch's own ``state_dict()`` and the contents have its format."""
        return type(self.value).state_dict is torch.optim.Optimizer.state_dict and contents.keys() == _OPTIMIZER_KEYS

    def load_back(self, contents: Any) -> None:
        """Copy into the existing moments if they match, because allocating new memory is slower."""
        pairs = self._moments_and(contents)
        if pairs is None:
            super().load_back(contents)
            return
        with torch.no_grad():
            for moment, given in pairs:
                moment.copy_(given)

    def _moments_and(self, contents: Any) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Pair each saved tensor of the optimizer's state with the tensor that it is copied to.

        Return None if any pair does not match. Hyperparameters are left out, because ``recall`` restores them.
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
        self._attributes.remember()
        self._moments = _moments_of(self.value)
        self._remembered = [
            {
                name: value if type(value) in _ATOMS else copied(value)  # calling copied() for all would cost the most
                for name, value in group.items()
                if name != "params"
            }
            for group in self.value.param_groups
        ]
        self._marks = _marks_of(self._settings())
        sizes = [len(group["params"]) for group in self.value.param_groups]
        if sizes != self._remembered_sizes:
            self._names()  # raises here if the added parameters cannot be restored
            self._remembered_sizes = sizes
        for number, group in enumerate(self._remembered):
            for name, value in group.items():
                if type(value) not in _ATOMS:
                    require_savable(value, f"{self.path}.param_groups.{number}.{name}")

    def _settings(self) -> list[dict[str, Any]]:
        groups = self.value.param_groups
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.value.param_groups]

    def has_changed(self) -> bool:
        """Return whether a hyperparameter, a group or a moment has changed."""
        now = [self._sizes(), self._settings()]
        return self.tensors_changed() or not same(now, [self._remembered_sizes, self._remembered])

    def changed(self) -> Sequence[str]:
        found = []
        if self._sizes() != self._remembered_sizes:
            found.append(f"the parameter groups of {self.path}")
        elif not _is_untouched(self._settings(), self._remembered, self._marks):
            found.append(f"a setting in the param_groups of {self.path}")
        if self.tensors_changed():
            found.append(f"a moment of {self.path}")
        return found

    def tensors_changed(self) -> bool:
        """Return whether a moment was replaced or changed in place since the last ``remember``."""
        return self._moments != _moments_of(self.value)

    def recall(self) -> None:
        groups, sizes = self.value.param_groups, self._remembered_sizes
        for group, size in zip(groups, [*sizes, *[0] * (len(groups) - len(sizes))], strict=True):
            for added in group["params"][size:]:
                self.value.state.pop(added, None)
            del group["params"][size:]
        del groups[len(sizes) :]
        for group, values in zip(groups, self._remembered, strict=True):
            group.update({name: copied(value) for name, value in values.items()})
        self._moments = _moments_of(self.value)


class ScalerHandler(StateHandler):
    """Handler for a gradient scaler.

    During a step, a scaler records which optimizers' gradients are already unscaled. If a lost peer interrupts the
    step, this record must be cleared; otherwise, only the survivors would repeat the step with scaled gradients.
    """

    is_alike = True

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._own: list[Any] = []

    def remember(self) -> None:
        super().remember()
        self._own = self._numbers()
        self._marks = _marks_of(list(vars(self.value).values()))

    def has_changed(self) -> bool:
        return not same(self.value.state_dict(), self._remembered)

    def changed(self) -> Sequence[str]:
        """Compare the scaler's Python fields first, because ``state_dict()`` waits for the device."""
        is_untouched = _are_marked(list(vars(self.value).values()), self._marks) and self._own == self._numbers()
        return () if is_untouched or not self.has_changed() else (self.path,)

    def _numbers(self) -> list[Any]:
        return [one for one in vars(self.value).values() if type(one) in _ATOMS]

    def load(self, contents: Any) -> None:
        super().load(contents)
        self._forget_the_open_step()

    def recall(self) -> None:
        super().recall()
        self._forget_the_open_step()

    def _forget_the_open_step(self) -> None:
        if self.value.is_enabled():  # a disabled scaler keeps no record
            self.value._per_optimizer_states.clear()


class SamplerHandler(StateHandler):
    """Handler for an :class:`ElasticSampler`, whose state is three numbers."""

    is_alike = True

    def loose(self) -> dict[str, Any]:
        return {}

    def remember(self) -> None:
        self._remembered = self.value.state_dict()

    def has_changed(self) -> bool:
        return not same(self.value.state_dict(), self._remembered)

    def changed(self) -> Sequence[str]:
        return (self.path,) if self.has_changed() else ()

    def recall(self) -> None:
        self.value.load_state_dict(self._remembered)


class PlainHandler(StateHandler):
    """Handler for an attribute of the state that is plain data: a number, a string, a list, a tensor, …

    Args:
        owner: the state.
        name: the attribute's name.
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
        value = getattr(self._owner, self._name)
        self._remembered, self._marks = copied(value), _marks_of(value)
        require_savable(self._remembered, self.path)

    def has_changed(self) -> bool:
        return not same(getattr(self._owner, self._name), self._remembered)

    def changed(self) -> Sequence[str]:
        value = getattr(self._owner, self._name)
        return () if _is_untouched(value, self._remembered, self._marks) else (self.path,)

    def recall(self) -> None:
        setattr(self._owner, self._name, copied(self._remembered))


class TrainedTensorHandler(StateHandler):
    """Handler for a tensor that an optimizer trains directly, such as SAC's ``log_alpha``; it is never replaced."""

    is_alike = True

    loads_in_place = True

    def contents(self) -> Any:
        """Return the tensor without its gradient."""
        return self.value.detach()

    def load(self, contents: Any) -> None:
        """Copy the values into the tensor.

        Raises:
            UsageError: dtype or strides differ from those of the tensor in this process.
        """
        _require_same_kind(self.path, self.value, contents)
        with torch.no_grad():
            self.value.copy_(contents)

    def load_back(self, contents: Any) -> None:
        """Copy the values without keeping a reference to ``contents``."""
        self.load(contents)

    def remember(self) -> None:
        """Do nothing: only an optimizer step changes the tensor."""

    def has_changed(self) -> bool:
        """Return False, because the tensor's version counter already shows changes."""
        return False

    def recall(self) -> None:
        """Do nothing: only an optimizer step changes the tensor."""

    def loose(self) -> dict[str, Any]:
        """Return nothing, because the tensor is compared like a parameter."""
        return {}

    def stepped(self) -> Sequence[torch.Tensor]:
        """Return the tensor."""
        return (self.value,)


_registry: list[tuple[type, Callable[[Any], StateHandler]]] = [
    (nn.Module, ModuleHandler),
    (torch.optim.Optimizer, OptimizerHandler),
    (torch.amp.GradScaler, ScalerHandler),
    (ElasticSampler, SamplerHandler),
]


def register_handler(kind: type, handler: Callable[[Any], StateHandler]) -> None:
    """Let states save and restore values of an additional type.

    Call this on every rank, before the state is created. The handler registered last takes precedence.

    Args:
        kind: the type; subclasses are included.
        handler: a :class:`StateHandler` subclass, or a function that takes the value and returns one.
    """
    _registry.append((kind, handler))


def handler_of(value: Any) -> StateHandler | None:
    """Return the handler for a value; None for plain data."""
    for kind, make in reversed(_registry):
        if isinstance(value, kind):
            handler: StateHandler = make(value)
            return handler
    return StateHandler(value) if is_stateful(value) else None


def require_savable(value: Any, path: str) -> None:
    """Check at a commit that a value can be saved, so that no later save or recovery fails.

    Raises:
        UsageError: the value cannot be saved; the message names its path and type.
    """
    if type(value) in _NUMBERS:  # the most frequent case
        return
    try:
        snapshot.take_apart(value, path)
    except CheckpointError as error:
        if next(paths_of(value, path), None) is None:  # a DTensor is taken out before saving
            raise UsageError(str(error)) from None


def is_stateful(value: object) -> bool:
    """Return whether the value has ``state_dict()`` and ``load_state_dict()``."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def bare(module: nn.Module) -> nn.Module:
    """Unwrap a module from DistributedDataParallel, torch.compile and Lightning Fabric.

    Parameter names then do not depend on wrappers.
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
    """Unwrap an optimizer from Accelerate's or Lightning Fabric's wrapper.

    A wrapper is recognised by its ``.optimizer``, which must be an optimizer with the same state and parameter groups.
    An optimizer that also keeps its own state is not treated as a wrapper.

    Raises:
        UsageError: the object lacks attributes of torch's optimizers, so its steps cannot be followed.
    """
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer) and inner is not optimizer and _is_only_wrapped(inner, optimizer):
        optimizer = inner
        inner = getattr(optimizer, "optimizer", None)
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        raise UsageError(
            f"a state cannot follow a {type(optimizer).__name__}: it was not made by "
            "torch.optim.Optimizer's constructor. Fix: pass the inner optimizer to the state"
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


def _is_same_shard(parameter: Any, given: Any) -> bool:
    """Return whether a DTensor is the same part of a tensor as a parameter."""
    return (
        is_distributed(given)
        and (given.shape, given.placements) == (parameter.shape, parameter.placements)
        and given.device_mesh == parameter.device_mesh
        and local(given).shape == local(parameter).shape
    )


def _converts_what_it_loads(module: nn.Module) -> bool:
    """Return whether a module may change its values while it loads them."""
    functions: list[Any] = [type(module).load_state_dict, type(module)._load_from_state_dict]
    for hook in (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()):
        functions.append(getattr(hook, "hook", hook))  # torch wraps some hooks
    return not all(str(getattr(one, "__module__", "")).startswith("torch.") for one in functions)


def _has_extra_state(module: nn.Module) -> bool:
    """Return whether the class has extra state that torch's ``load_state_dict`` can restore."""
    kind = type(module)
    return (
        kind.get_extra_state is not nn.Module.get_extra_state and kind.set_extra_state is not nn.Module.set_extra_state
    )


def _fits(live: object, given: object) -> bool:
    """Return whether one tensor can be copied into the other element by element, in memory order."""
    return (
        isinstance(live, torch.Tensor)
        and isinstance(given, torch.Tensor)
        and live.layout is given.layout is torch.strided
        and (live.shape, live.dtype, live.device) == (given.shape, given.dtype, given.device)
        and live.stride() == given.stride()
        and not value_trees.overlaps(live)
    )


def _is_same_kind(live: torch.Tensor, given: torch.Tensor) -> bool:
    """Return whether a copy keeps values, dtype, shape and strides.

    Checkpoints of earlier releases contain no strides, so they match any tensor.
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
    """Return the value without items that torch's ``load_state_dict`` would mistake for a list of tensors."""
    items = value_trees.children(value)
    if items is not None:
        return value_trees.rebuilt(value, [(key, _castable(item)) for key, item in items])
    return value if isinstance(value, torch.Tensor) or type(value) in _NUMBERS else None


def _exactly(given: Any, loaded: Any) -> Any:
    """Return ``given`` unchanged, except that it is moved to the device of ``loaded``."""
    if isinstance(given, torch.Tensor):
        if is_distributed(given):
            is_cast = not isinstance(loaded, torch.Tensor) or loaded.dtype is not given.dtype
            return given.detach().clone() if is_cast else loaded
        if isinstance(loaded, torch.Tensor) and given.device != loaded.device:
            return value_trees.laid_out(given, given.stride(), loaded.device)
        return given if loaded is given else value_trees.clone(given)  # torch has cast the tensor
    items = value_trees.children(given)
    if items is None:
        return given
    counterparts = dict(value_trees.children(loaded) or ())
    return value_trees.rebuilt(given, [(key, _exactly(item, counterparts.get(key))) for key, item in items])


_Marks = list[tuple[weakref.ref[torch.Tensor], int]]
"""A tree's tensors in order, each with torch's count of changes to the tensor."""


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if type(tree) in _ATOMS:
        return
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    for _, item in value_trees.children(tree) or ():
        yield from _tensors_in(item)


def _marks_of(tree: Any) -> _Marks:
    if type(tree) in _ATOMS:
        return []
    return [(weakref.ref(one), torch_private.version_of(one)) for one in _tensors_in(tree)]


def _are_marked(tree: Any, marks: _Marks) -> bool:
    """Return whether the nested structure has the same tensors as when ``marks`` were taken, unchanged in place."""
    tensors = list(_tensors_in(tree))
    return len(tensors) == len(marks) and all(
        mark() is one and torch_private.version_of(one) == version
        for one, (mark, version) in zip(tensors, marks, strict=True)
    )


def _is_untouched(live: Any, kept: Any, marks: _Marks, *, leave_out: Sequence[str] = ()) -> bool:
    """Return whether a nested structure equals its earlier copy. Tensors without marks are compared bit by bit."""
    if leave_out and type(live) is dict and type(kept) is dict:
        live, kept = ({key: one for key, one in tree.items() if key not in leave_out} for tree in (live, kept))
        marks = []
    return same(live, kept, tensors=not _are_marked(live, marks))


def _moments_of(optimizer: torch.optim.Optimizer) -> tuple[list[int], list[int]]:
    """Return the ids of all values in an optimizer's state, and the version counters of its tensors."""
    held = list(optimizer.state.values())
    values = list(itertools.chain.from_iterable([one.values() if type(one) is dict else (one,) for one in held]))
    if not _CONTAINERS.isdisjoint(set(map(type, values))):
        values += [one for value in values if type(value) in _CONTAINERS for one in _tensors_in(value)]
    return list(map(id, values)), torch_private.versions_among(values)


def same(one: Any, other: Any, *, tensors: bool = True) -> bool:
    """Return whether two values are equal in type and bits, at any depth.

    Args:
        one, other: the values.
        tensors: whether to compare tensors; if False, any two tensors count as equal.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if not tensors:
            return True
        if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
            return False
        if is_distributed(one) or is_distributed(other) or one.layout is not torch.strided or one.is_meta:
            return True
        return one.stride() == other.stride() and value_trees.have_same_bits(one, other)
    ones, others = value_trees.children(one), value_trees.children(other)
    if ones is None or others is None:
        return type(one) is type(other) and (one is other or _are_same_leaves(one, other))
    ones, others = list(ones), list(others)
    return (
        type(one) is type(other)
        and len(ones) == len(others)
        and all(
            key == key_2 and same(item, item_2, tensors=tensors)
            for (key, item), (key_2, item_2) in zip(ones, others, strict=True)
        )
    )


def _are_same_leaves(one: Any, other: Any) -> bool:
    """Compare two values of one type. NaN equals itself, 0.0 differs from -0.0, and arrays are compared as bytes."""
    if type(one) in (float, complex):
        return repr(one) == repr(other)
    if hasattr(one, "tobytes") and hasattr(one, "dtype"):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return bool(one == other)


def _share_memory(one: torch.Tensor, other: object) -> bool:
    if not isinstance(other, torch.Tensor):
        return False
    one, other = local(one), local(other)
    return one.numel() > 0 and one.data_ptr() == other.data_ptr()


def copied(value: Any) -> Any:
    """Return a deep copy that later changes to the original do not affect."""
    if type(value) in _ATOMS or (type(value) is tuple and all(type(item) in _ATOMS for item in value)):
        return value
    if isinstance(value, torch.Tensor):
        return value_trees.clone(value)
    return copy.deepcopy(value)


def copied_tree(tree: Any, old: Any = None) -> Any:
    """Copy nested tensors, reusing the memory of the earlier copy ``old``, because allocating new memory is slower."""
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
