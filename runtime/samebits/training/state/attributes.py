"""Save and restore the plain attributes of modules and optimizers that change during training, such as ``dropout.p``.

A loop may anneal such a number, and a forward pass or an optimizer may count calls in one. No ``state_dict()`` contains
these numbers. An attribute that never changes is left out, because it may differ between ranks, as a rank number does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

__all__ = ["PlainAttributes", "is_plain"]

_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_OTHER: Any = object()
"""Stands for a value that is not plain, and for an attribute that does not exist."""
_OF_TORCH: Final = frozenset(vars(nn.Module()))


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
        self.follow(objects)

    def follow(self, objects: Mapping[str, object]) -> None:
        """Replace the followed objects. An object's initial values are those that it has when it is first followed."""
        self._owners = {path: vars(one) for path, one in objects.items()}
        self._first = {id(own): self._first.get(id(own)) or _plain(own) for own in self._owners.values()}
        self._look()

    def remember(self) -> None:
        """Keep the current values; called at every commit."""
        if self._sizes != list(map(len, self._owners.values())):
            self._look()
        try:
            self._kept = self._present()
        except KeyError:  # as many attributes were added as removed
            self._look()
            self._kept = self._present()

    def _present(self) -> list[Any]:
        return [  # a call for each value would cost the most
            value if type(value := own[name]) in _PLAIN else _plain_or_other(value) for own, name in self._places
        ]

    def changed(self) -> list[str]:
        """Return the names of attributes whose values differ from the kept ones."""
        return [
            name
            for (own, name), kept in zip(self._places, self._kept, strict=False)
            if (now := own.get(name, _OTHER)) is not kept and kept is not _OTHER and _differ(kept, _plain_or_other(now))
        ]

    def undo(self) -> None:
        """Restore the kept values, and remove plain attributes that did not exist."""
        for own, size in zip(self._owners.values(), self._sizes, strict=True):
            if len(own) != size:
                known = {name for one, name in self._places if one is own}
                for name in _plain(own).keys() - known:
                    del own[name]
        for (own, name), kept in zip(self._places, self._kept, strict=False):
            if kept is not _OTHER and _differ(kept, _plain_or_other(own.get(name, _OTHER))):
                own[name] = kept

    def since_start(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that have changed since the start: object path → attribute name → value."""
        found = {}
        for path, own in self._owners.items():
            first = self._first[id(own)]
            values = {name: one for name, one in _plain(own).items() if _differ(one, first.get(name, _OTHER), new=True)}
            if values:
                found[path] = values
        return found

    def load(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the attributes that :meth:`since_start` returned in this or another process."""
        for path, own in self._owners.items():
            first, given = self._first[id(own)], changed.get(path, {})
            for name in _plain(own).keys() - first.keys() - given.keys():
                del own[name]
            own.update({name: value for name, value in first.items() if name in own})
            own.update(given)

    def _look(self) -> None:
        self._places = [(own, name) for own in self._owners.values() for name in own if name not in _OF_TORCH]
        self._sizes = list(map(len, self._owners.values()))


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
