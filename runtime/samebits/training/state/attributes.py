"""Save and restore the plain attributes of modules and optimizers that change during training, such as ``dropout.p``.

A loop may anneal such a number, and a forward pass or an optimizer may count calls in one. No ``state_dict()`` contains
these numbers. An attribute that never changes is left out, because it may differ between ranks, as a rank number does.

So is a number that describes a tensor in another attribute, such as the length of a rotary embedding's cached table.
The tensor belongs to no commit, and a new process that got only the number would use a table that it does not have.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_OTHER: Any = object()
"""Stands for a value that is not plain, and for an attribute that does not exist."""
_OF_TORCH: Final = frozenset(vars(nn.Module()))


class _WithTensors:
    """The attributes of an object that also has tensors in plain attributes.

    A number is *tied* to a tensor if both have always changed in the same steps, and neither in some step. A loss or a
    feature map that every forward pass replaces is therefore tied to nothing.

    Args:
        own: the object's dictionary.
        numbers: its plain attributes at the last commit.
    """

    def __init__(self, own: dict[str, Any], numbers: dict[str, Any]) -> None:
        self._own, self._numbers = own, numbers
        self._tensors: dict[str, weakref.ref[torch.Tensor]] = {}
        self._at_start: frozenset[str] = frozenset()  # tensors that existed then, and cannot be restored
        self._rested: set[str] = set()  # tensors that outlived a step
        self._has_begun = False  # whether the initial state was remembered, which is no step
        self._apart: set[tuple[str, str]] = set()  # tensor and number of which only one changed in some step
        self.tied: frozenset[str] = frozenset()

    def start(self) -> None:
        """Take the present tensors as those that every process creates."""
        self._at_start = frozenset(self._present())
        self.begin()

    def begin(self) -> None:
        """Take the present tensors and numbers as those of the last commit."""
        self._tensors = {name: weakref.ref(one) for name, one in self._present().items()}
        self._numbers = _plain(self._own)

    def remember(self) -> None:
        """Compare the attributes with those of the last commit."""
        numbers, before = _plain(self._own), self._numbers
        names = numbers.keys() | before.keys()
        changed = {one for one in names if _differ(numbers.get(one, _OTHER), before.get(one, _OTHER), new=True)}
        tensors = self._present()
        for name, tensor in tensors.items():
            is_replaced = name not in self._tensors or self._tensors[name]() is not tensor
            if not is_replaced and self._has_begun:
                self._rested.add(name)
            self._apart |= {(name, one) for one in (numbers.keys() - changed if is_replaced else changed)}
        self._has_begun = True
        rested = self._rested & tensors.keys()
        self.tied = frozenset(one for one in numbers if any((name, one) not in self._apart for name in rested))
        self.begin()

    def stay(self) -> frozenset[str]:
        """Return the numbers that must not return to the start; none if their tensors do so, too."""
        return self.tied if self._at_start else frozenset()

    def _present(self) -> dict[str, torch.Tensor]:
        return {name: one for name, one in self._own.items() if isinstance(one, torch.Tensor)}


class PlainAttributes:
    """The plain attributes of some objects: numbers, strings, None, and tuples of these.

    Args:
        objects: the objects by path, in the state that every process creates.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._owners: dict[str, dict[str, Any]] = {}
        self._first: dict[int, dict[str, Any]] = {}  # the values at the start, by the id of the object's dictionary
        self._places: list[tuple[dict[str, Any], str]] = []
        self._sizes: list[int] = []
        self._kept: list[Any] = []
        self._with_tensors: dict[int, _WithTensors] = {}  # by the id of the object's dictionary
        self._others = 0
        self.follow(objects)

    def follow(self, objects: Mapping[str, object]) -> None:
        """Replace the followed objects. An object's initial values are those that it has when it is first followed."""
        self._owners = {path: vars(one) for path, one in objects.items()}
        self._first = {id(own): self._first.get(id(own)) or _plain(own) for own in self._owners.values()}
        self._with_tensors = {key: one for key, one in self._with_tensors.items() if key in self._first}
        self._look()
        for one in self._find_tensors():
            one.start()

    def remember(self) -> None:
        """Keep the current values; called at every commit."""
        has_grown = self._sizes != list(map(len, self._owners.values()))
        try:
            present = [] if has_grown else self._present()
        except KeyError:  # as many attributes were added as removed
            has_grown = True
        if has_grown or present.count(_OTHER) != self._others:
            self._find_tensors()
        if has_grown:
            self._look()
            present = self._present()
        for one in self._with_tensors.values():
            one.remember()
        self._kept, self._others = present, present.count(_OTHER)

    def _present(self) -> list[Any]:
        return [  # a call for each value would cost the most
            value if type(value := own[name]) in _PLAIN else _plain_or_other(value) for own, name in self._places
        ]

    def changed(self) -> list[str]:
        """Return the names of attributes whose values differ from the kept ones."""
        return [
            name
            for (own, name), kept in zip(self._places, self._kept, strict=False)
            if (now := own.get(name, _OTHER)) is not kept
            and kept is not _OTHER
            and _differ(kept, _plain_or_other(now))
            and name not in self._tied(own)
        ]

    def undo(self) -> None:
        """Restore the kept values, and remove plain attributes that did not exist."""
        for own, size in zip(self._owners.values(), self._sizes, strict=True):
            if len(own) != size:
                known = {name for one, name in self._places if one is own}
                for name in _plain(own).keys() - known:
                    del own[name]
        for (own, name), kept in zip(self._places, self._kept, strict=False):
            now = own.get(name, _OTHER)
            is_filled = kept is None and isinstance(now, torch.Tensor)
            if is_filled or (
                kept is not _OTHER and _differ(kept, _plain_or_other(now)) and name not in self._tied(own)
            ):
                own[name] = kept

    def since_start(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that have changed since the start: object path → attribute name → value."""
        found = {}
        for path, own in self._owners.items():
            first, tied = self._first[id(own)], self._tied(own)
            values = {
                name: one
                for name, one in _plain(own).items()
                if name not in tied and _differ(one, first.get(name, _OTHER), new=True)
            }
            if values:
                found[path] = values
        return found

    def load(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the attributes that :meth:`since_start` returned in this or another process."""
        for path, own in self._owners.items():
            first, given = self._first[id(own)], changed.get(path, {})
            with_tensors = self._with_tensors.get(id(own))
            stay = frozenset() if with_tensors is None else with_tensors.stay() - given.keys()
            for name in _plain(own).keys() - first.keys() - given.keys() - stay:
                del own[name]
            own.update({name: value for name, value in first.items() if name in own and name not in stay})
            own.update(given)
            if with_tensors is not None:
                with_tensors.begin()

    def _look(self) -> None:
        self._places = [(own, name) for own in self._owners.values() for name in own if name not in _OF_TORCH]
        self._sizes = list(map(len, self._owners.values()))

    def _find_tensors(self) -> list[_WithTensors]:
        """Find the objects that have got their first tensor in a plain attribute."""
        found = []
        for own in self._owners.values():
            if id(own) not in self._with_tensors and any(isinstance(one, torch.Tensor) for one in own.values()):
                found.append(_WithTensors(own, self._numbers_of(own)))
                self._with_tensors[id(own)] = found[-1]
        return found

    def _numbers_of(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return an object's plain attributes at the last commit, or at the start."""
        if not self._kept:
            return self._first[id(own)]
        at_commit = zip(self._places, self._kept, strict=False)
        return {name: kept for (one, name), kept in at_commit if one is own and kept is not _OTHER}

    def _tied(self, own: dict[str, Any]) -> frozenset[str]:
        found = self._with_tensors.get(id(own))
        return frozenset() if found is None else found.tied


def _plain(own: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if name not in _OF_TORCH and is_plain(value)}


def is_plain(value: object) -> bool:
    """Return whether an attribute with this value belongs to a commit: a number, string, None, or a tuple of these."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is tuple:
        return all(type(one) in _PLAIN for one in value)  # type: ignore[attr-defined]
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _plain_or_other(value: Any) -> Any:
    return value if is_plain(value) else _OTHER


def _differ(one: Any, other: Any, *, new: bool = False) -> bool:
    """Return whether two values differ.

    With ``new``, a value that was not plain or did not exist before also differs.
    """
    if one is other:
        return False
    if one is _OTHER or other is _OTHER:
        return new
    return type(one) is not type(other) or repr(one) != repr(other)
