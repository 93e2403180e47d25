"""Remember and restore everything in a module except the values of its parameters.

This covers the modes of its submodules (``train()``, ``eval()``), ``requires_grad`` flags, hooks, buffers, plain
attributes, and the submodules themselves. No optimizer step changes these, and no ``state_dict()`` contains all of
them, but a lost peer can interrupt an evaluation that has changed any of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from samebits.service import log
from samebits.training import torch_private, value_trees
from samebits.training.sharding.pieces import is_distributed
from samebits.training.state.attributes import PlainAttributes

MODE = "train() or eval()"
"""Description of a difference in a module's mode."""

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Hooks that a forward or backward pass calls, as the names of torch's dictionaries in a module."""

_Held: TypeAlias = dict[Any, Any]
"""One of a module's dictionaries: its parameters, buffers, submodules or hooks."""


@dataclass(frozen=True, slots=True)
class _MadeOf:
    """The structure of a module at one moment.

    Attributes:
        modules: the module and all modules below it.
        parameters: the parameters, each once.
        names: names of all parameters and buffers.
        parameters_of, buffers_of, hooks_of: the dictionaries of each module; hooks in the order of ``_HOOKS``.
        held: the dictionaries that hold parts, each as (module index, dictionary, copy).
        classes: the modules' classes.
        parts: number of parts in ``held``.
        sizes: sizes of ``parameters_of`` and ``buffers_of``.
    """

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    names: dict[str, None]
    parameters_of: list[_Held]
    buffers_of: list[_Held]
    hooks_of: list[list[_Held]]
    held: list[tuple[int, _Held, _Held]]
    classes: list[type]
    parts: list[Any]
    sizes: list[int]

    @classmethod
    def at_present(cls, module: nn.Module, *, is_sharded: bool) -> _MadeOf:
        """Record a module's structure.

        Parameters of a sharded module are left out, because FSDP2 swaps them in place.
        """
        modules = list(module.modules())
        held: Any = [
            (index, part, dict(part))
            for index, one in enumerate(modules)
            for part in ((one._modules,) if is_sharded else (one._modules, one._parameters))
            if isinstance(part, dict)  # torch.jit uses other types
        ]
        parameters_of, buffers_of = [one._parameters for one in modules], [one._buffers for one in modules]
        return cls(
            modules=modules,
            parameters=list(module.parameters()),
            names=_names(module),
            parameters_of=parameters_of,
            buffers_of=buffers_of,
            hooks_of=[[getattr(one, name) for name in _HOOKS] for one in modules],
            held=held,
            classes=[type(one) for one in modules],
            parts=[one for _, _, kept in held for one in kept.values()],
            sizes=[*map(len, parameters_of), *map(len, buffers_of)],
        )

    def is_same(self) -> bool:
        """Return whether the module still has the same parts. Called at every commit, so names are not compared."""
        parts = [one for _, held, _ in self.held for one in held.values()]
        return (
            self.sizes == [*map(len, self.parameters_of), *map(len, self.buffers_of)]
            and len(parts) == len(self.parts)
            and all(map(operator.is_, parts, self.parts))
        )

    def put_back(self) -> set[int]:
        """Restore the parts of every module, and return the indices of modules whose class has changed for good."""
        for index, held, kept in self.held:
            if not _is_same(held, kept):
                _put_back(held, kept)
                for name in kept:
                    vars(self.modules[index]).pop(name, None)  # prune and parametrize shadow it with an attribute
                self.modules[index].__class__ = self.classes[index]
        # These modules were lazy.
        return {index for index, one in enumerate(self.modules) if type(one) is not self.classes[index]}


@dataclass(frozen=True, slots=True)
class _Commit:
    """The remembered values of one commit, in the order of the modules."""

    modes: list[bool]
    flags: list[bool]
    hooks: dict[int, _Held]
    buffers: dict[int, _Held]


class ModuleState:
    """The state of one module, except its weights.

    Args:
        module: the module without any wrapper.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._is_sharded = any(is_distributed(one) for one in module.parameters())
        self._made_of = _MadeOf.at_present(module, is_sharded=self._is_sharded)
        self._attributes = PlainAttributes(dict(module.named_modules()))
        self._commit: _Commit | None = None
        self._places: list[tuple[_Held, str]] = []  # where the copied buffers belong
        self._copies: list[torch.Tensor] = []
        self._versions: list[int] = []  # the buffers' versions at the last commit
        self._may_fill = True  # whether the copies can be written again
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...]]] = []  # of the copied buffers

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters at the last commit, each once. The same list object is returned until they change."""
        return self._made_of.parameters

    # ---- in this process

    def remember(self) -> None:
        """Keep the current state; called at every commit."""
        if not self._made_of.is_same():
            self._look_again()
        self._attributes.remember()
        made_of = self._made_of
        self._commit = _Commit(
            modes=[one.training for one in made_of.modules],
            flags=[one.requires_grad for held in made_of.parameters_of for one in held.values() if one is not None],
            hooks={id(held): dict(held) for some in made_of.hooks_of for held in some if held},
            buffers={id(held): dict(held) for held in made_of.buffers_of if held},
        )
        self._places = [
            (held, name) for held in made_of.buffers_of if held for name, one in held.items() if one is not None
        ]
        buffers = [held[name] for held, name in self._places]
        kinds = [(one.shape, one.dtype, one.device, one.stride()) for one in buffers]
        if kinds != self._kinds or not self._may_fill:
            self._copies, self._kinds = [value_trees.clone(buffer) for buffer in buffers], kinds
            self._may_fill = are_alike(self._copies, buffers)
        elif buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, buffers)
        self._versions = torch_private.versions_of(buffers)

    def has_changed(self) -> bool:
        """Return whether a mode, flag, part or buffer differs from the last commit.

        Hooks are ignored, because no checkpoint contains them.
        """
        return self._commit is None or bool(self._changed_flags()) or not self._has_same_buffers()

    def changed(self) -> list[str]:
        """Return the names of the values that differ from the last commit, for a message; hooks are ignored.

        Buffers are read only if one was replaced or changed in place.
        """
        return [] if self._commit is None else [*self._changed_flags(), *self._changed_buffers(self._commit)]

    def _changed_flags(self) -> list[str]:
        commit, made_of = self._commit, self._made_of
        if commit is None or not made_of.is_same():
            return ["a part"]
        flags = [one.requires_grad for held in made_of.parameters_of for one in held.values() if one is not None]
        found = [] if commit.modes == [one.training for one in made_of.modules] else [MODE]
        return found if commit.flags == flags else [*found, "requires_grad"]

    def _changed_buffers(self, commit: _Commit) -> list[str]:
        live = [one for held in self._made_of.buffers_of for one in held.values()]
        kept = [one for held in commit.buffers.values() for one in held.values()]
        is_untouched = (
            len(live) == len(kept)
            and all(map(operator.is_, live, kept))
            and self._versions == torch_private.versions_of([one for one in live if one is not None])
        )
        return [] if is_untouched or self._has_same_buffers() else ["a buffer"]

    def _has_same_buffers(self) -> bool:
        """Compare all buffers with their copies."""
        assert self._commit is not None, "only a commit's buffers were copied"
        live = [held.get(name) for held, name in self._places]
        return self._commit.buffers.keys() == {id(held) for held in self._made_of.buffers_of if held} and all(
            one is not None and are_alike([one], [kept]) and value_trees.have_same_bits(one, kept)
            for one, kept in zip(live, self._copies, strict=True)
        )

    def changed_attributes(self) -> list[str]:
        """Return the names of plain attributes that differ from the last commit."""
        return [] if self._commit is None else self._attributes.changed()

    def undo(self) -> None:
        """Restore modes, flags, hooks, plain attributes and parts of the last commit, but not the buffers' values."""
        commit, made_of = self._commit, self._made_of
        if commit is None:
            return
        self._attributes.undo()
        were_lazy = made_of.put_back()
        for index, some in enumerate(made_of.hooks_of):
            if index not in were_lazy:  # a lazy module removes its hook permanently
                for held in some:
                    _put_back(held, commit.hooks.get(id(held), {}))
        for held in made_of.buffers_of:
            _put_back(held, commit.buffers.get(id(held), {}))
        _set_modes(made_of.modules, commit.modes)
        parameters = [one for held in made_of.parameters_of for one in held.values() if one is not None]
        for parameter, requires_grad in zip(parameters, commit.flags, strict=not self._is_sharded):
            _set_flag(parameter, requires_grad)

    def recall(self) -> None:
        """Restore the values of all buffers; called after :meth:`undo`."""
        live = [held[name] for held, name in self._places]
        if live and are_alike(self._copies, live):
            with torch.no_grad():
                torch._foreach_copy_(live, self._copies)
            return
        for (held, name), copied in zip(self._places, self._copies, strict=True):
            held[name] = value_trees.clone(copied)

    def _look_again(self) -> None:
        """Record the new structure, and warn that a replacement process would build the module without this change."""
        before = self._made_of.names
        self._made_of = _MadeOf.at_present(self._module, is_sharded=self._is_sharded)
        self._attributes.follow(dict(self._module.named_modules()))
        names = self._made_of.names
        gone, new = [one for one in before if one not in names], [one for one in names if one not in before]
        if self._commit is not None and (gone or new):
            log.warn(
                f"the tensors of {type(self._module).__name__} have changed since the previous commit: removed "
                f"{_listed(gone)}, added {_listed(new)}. A process that replaces a lost rank builds the module as "
                "the script's first lines do, and cannot take this state: the next loss may end the job. Fix: "
                "prune, parametrize or add layers before samebits.elastic.TorchState(…)"
            )

    # ---- for points and other ranks

    def unlisted(self) -> dict[str, Any]:
        """Return the values that ``state_dict()`` leaves out, as nested plain values and tensors, without copying."""
        return {
            "eval": [path for path, one in self._module.named_modules() if not one.training],
            "frozen": [name for name, one in _parameters(self._module) if not one.requires_grad],
            "buffers": dict(self._non_persistent()),
            "attributes": self._attributes.since_start(),
        }

    def load_unlisted(self, unlisted: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`unlisted` from this or another rank."""
        named = list(self._module.named_modules())
        in_eval, frozen = set(unlisted["eval"]), set(unlisted["frozen"])
        for path, module in named:
            module.training = path not in in_eval
        for name, parameter in _parameters(self._module):
            _set_flag(parameter, name not in frozen)
        self._attributes.load(unlisted.get("attributes", {}))  # absent in points of earlier releases
        modules = dict(named)
        for name, given in unlisted["buffers"].items():
            path, _, last = name.rpartition(".")
            if path in modules:
                _fill(modules[path], last, given)

    def expect(self, contents: Mapping[str, Any]) -> None:
        """Allocate buffers that are in ``contents`` but still None here, because only a forward pass creates them."""
        for path, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                given = contents.get(f"{path}.{name}" if path else name)
                if buffer is None and isinstance(given, torch.Tensor):
                    module._buffers[name] = torch.empty_like(given, device=self._device())

    def _non_persistent(self) -> Iterable[tuple[str, torch.Tensor]]:
        for path, module in self._module.named_modules():
            for name in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers.get(name)
                if buffer is not None:
                    yield f"{path}.{name}" if path else name, buffer

    def _device(self) -> torch.device | None:
        return self.parameters[0].device if self.parameters else None


def are_alike(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Return whether each tensor can be copied into the tensor at the same position of the other list."""
    return len(some) == len(others) and all(
        (one.shape, one.dtype, one.device, one.stride()) == (other.shape, other.dtype, other.device, other.stride())
        and not value_trees.overlaps(one)
        for one, other in zip(some, others, strict=True)
    )


def _fill(module: nn.Module, name: str, given: torch.Tensor) -> None:
    """Set a buffer that no ``state_dict()`` contains, and create it if necessary."""
    live = module._buffers.get(name)
    if live is not None and are_alike([live], [given.to(live.device)]):
        with torch.no_grad():
            live.copy_(given)
        return
    device = next((one.device for one in (live, *module.parameters(), *module.buffers()) if one is not None), None)
    if name not in module._buffers:
        vars(module).pop(name, None)
        module._non_persistent_buffers_set.add(name)
    module._buffers[name] = value_trees.clone(given).to(device)


def _set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    for module, mode in zip(modules, modes, strict=True):
        if module.training != mode and type(module).train is not nn.Module.train:
            module.train(mode)  # a class that overrides train() may have merged weights (LoRA) and must unmerge them
    for module, mode in zip(modules, modes, strict=True):
        module.training = mode


def _set_flag(parameter: torch.Tensor, requires_grad: bool) -> None:
    if parameter.requires_grad != requires_grad and parameter.is_leaf:
        parameter.requires_grad_(requires_grad)


def _parameters(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return module.named_parameters(remove_duplicate=False)


def _names(module: nn.Module) -> dict[str, None]:
    """Return the names of all parameters and buffers, in order."""
    buffers = module.named_buffers(remove_duplicate=False)
    return dict.fromkeys(name for named in (_parameters(module), buffers) for name, _ in named)


def _is_same(held: _Held, kept: _Held) -> bool:
    return held.keys() == kept.keys() and all(held[key] is one for key, one in kept.items())


def _put_back(held: _Held, kept: _Held) -> None:
    if isinstance(held, dict) and not _is_same(held, kept):
        held.clear()
        held.update(kept)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
