"""Keep copies of compared states in this process's memory, to which it can roll back.

A state that is not yet known to be equal on all ranks must not replace the last one that is. But until the next
optimizer step, weights and moments in the host's memory *are* the new state, and by then the result of the comparison
has usually arrived. So they are copied just before that step, over the last copy that was found equal, and there is
one copy. There are two if the result is late or the tensors may change before the next step, and three if it arrives
after the next comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samebits.core.point import Point
from samebits.store.checkpoint.memory_buffer import available_bytes
from samebits.training import value_trees
from samebits.training.state.compared import Named, digest_of, is_hashable, parts_of
from samebits.training.state.handlers import copied_tree

MOST = 3
SHARE_OF_AVAILABLE = 0.25
"""Share of the host's available memory that new copies on all its ranks may take together."""

Place = tuple[int, tuple[int, ...], torch.dtype]
"""Data pointer, shape and dtype of a tensor."""
Places = dict[Place, torch.Tensor]
"""Copies of tensors, by the place of the original."""


@dataclass(slots=True)
class RollbackCopy:
    """One copy of a state.

    Attributes:
        contents: the result of ``State.contents`` with the point's additions, on the CPU.
        layouts: the gradient buckets' layouts.
        named: the compared parts: tensors are those of ``contents``, everything else is hashed already.
        shared: the digest that was reported for it; b"" until then.
    """

    point: Point
    contents: Mapping[str, Any]
    layouts: Mapping[str, Any]
    named: Sequence[Named]
    shared: bytes = b""

    def is_sound(self) -> bool:
        """Return whether the copy still has the digest that was reported for it."""
        return bool(self.shared) and digest_of(parts_of(self.named)) == self.shared


@dataclass(slots=True)
class _Begun:
    """A copy that still refers to live tensors.

    Attributes:
        copy: the copy; its parts in live tensors are hashed.
        compared: the compared parts of the live state.
        live: the places of the live tensors.
        places: the tensors that are copied.
    """

    copy: RollbackCopy
    compared: Sequence[Named]
    live: frozenset[Place]
    places: Places


class RollbackCopies:
    """The newest copies of a state, oldest first."""

    def __init__(self) -> None:
        self._kept: list[RollbackCopy] = []
        self._begun: _Begun | None = None
        self._spare: Mapping[str, Any] | None = None  # memory of a dropped copy, for reuse

    @property
    def begun(self) -> Point | None:
        """The point of the copy that is not finished, if there is one."""
        return None if self._begun is None else self._begun.copy.point

    def keep(
        self,
        point: Point,
        contents: Mapping[str, Any],
        layouts: Mapping[str, Any],
        compared: Sequence[Named],
        at_rest: Sequence[torch.Tensor] = (),
    ) -> RollbackCopy:
        """Copy the current state.

        At the limit, the newest copy that is not known to be equal is dropped.

        Args:
            point, contents, layouts, compared: the state.
            at_rest: tensors that will not change before :meth:`finish` or :meth:`cancel` is called. They are hashed now
                and copied then.
        """
        self._begun = None
        live = frozenset(_place_of(one) for one in at_rest if one.data_ptr() and one.is_cpu)
        places: Places = {}
        if live:
            copy = _copied(contents, None, places, lambda tensor: _place_of(tensor) not in live)
        else:
            copy = _copied(contents, self._room(), places)
        kept = RollbackCopy(point, copy, copied_tree(dict(layouts)), [_of_copy(one, places) for one in compared])
        if live:
            self._begun = _Begun(kept, compared, live, places)
        else:
            self._kept.append(kept)
        return kept

    def finish(self, equal: Point | None) -> None:
        """Copy the live tensors of the copy that was begun.

        Args:
            equal: the newest point at which all ranks were equal.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return
        copy, places = begun.copy, begun.places
        if copy.point == equal:
            for one in self._kept:
                self._drop(one)
            self._kept.clear()
        else:
            self.found_equal(equal)
        copy.contents = _copied(copy.contents, self._room(), places, lambda tensor: _place_of(tensor) in begun.live)
        copy.named = [_of_copy(one, places) for one in begun.compared]
        self._kept.append(copy)

    def cancel(self) -> None:
        """Drop the copy that was begun, since its live tensors are about to change or have changed."""
        self._begun = None

    def free_spare(self) -> None:
        """Free the memory of dropped copies."""
        self._spare = None

    def _room(self) -> Mapping[str, Any] | None:
        """Return memory to reuse for one more copy, if there is any; at the limit, drop a copy."""
        if len(self._kept) == MOST:
            self._drop(self._kept.pop())
        spare, self._spare = self._spare, None
        return spare

    def has_room(self, contents: Mapping[str, Any], ranks_here: int) -> bool:
        """Return whether one more copy for each rank of this host leaves enough memory for training."""
        if self._spare is not None or len(self._kept) == MOST:
            return True
        return has_room_for(bytes_in(contents) * ranks_here)

    def found_equal(self, point: Point | None) -> None:
        """Drop copies older than ``point``, at which all ranks were equal."""
        at = next((at for at, one in enumerate(self._kept) if one.point == point), 0)
        for one in self._kept[:at]:
            self._drop(one)
        del self._kept[:at]

    def go_back(self, to: Point) -> RollbackCopy | None:
        """Drop damaged copies and those after ``to``, and return the newest one that remains, or None."""
        for one in [one for one in self._kept if one.point > to or not one.is_sound()]:
            self._kept.remove(one)
            self._drop(one)
        return self._kept[-1] if self._kept else None

    def begin(self, restore: Point) -> None:
        """Drop copies after ``restore``, the point at which a new generation begins."""
        for one in [one for one in self._kept if one.point > restore]:
            self._kept.remove(one)
            self._drop(one)

    def _drop(self, one: RollbackCopy) -> None:
        self._spare = one.contents


def has_room_for(size_bytes: int) -> bool:
    """Return whether copies of this size leave enough of this host's memory for training."""
    left = available_bytes()
    return left is None or size_bytes <= left * SHARE_OF_AVAILABLE


def bytes_in(tree: Any) -> int:
    """Return the total size of the tensors in the tree."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    return sum(bytes_in(item) for _, item in value_trees.children(tree) or ())


def _of_copy(named: Named, places: Places) -> Named:
    """Return the part with its tensor replaced by the copied tensor. Parts without a copy are hashed at once."""
    value = named.value
    if isinstance(value, torch.Tensor) and is_hashable(value) and (copy := places.get(_place_of(value))) is not None:
        return named._replace(value=copy)
    parts = parts_of([named])
    return named._replace(value=parts[0].value if parts else None)


def _place_of(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def _all(_tensor: torch.Tensor) -> bool:
    """Select every tensor."""
    return True


def _copied(tree: Any, old: Any, places: Places, is_wanted: Callable[[torch.Tensor], bool] = _all) -> Any:
    """Copy nested values to the CPU, reusing an earlier copy's memory if it fits. Each copy is added to ``places``.

    Tensors that are not wanted stay in the tree as they are.
    """
    if isinstance(tree, torch.Tensor):
        if not is_wanted(tree):
            return tree
        copy = _tensor_copied(tree, old)
        if tree.layout is torch.strided and tree.data_ptr():
            places[_place_of(tree)] = copy
        return copy
    items = value_trees.children(tree)
    if items is None:
        return copied_tree(tree)
    by_key = dict(value_trees.children(old) or ()) if type(old) is type(tree) else {}
    return value_trees.rebuilt(tree, [(key, _copied(item, by_key.get(key), places, is_wanted)) for key, item in items])


def _tensor_copied(tensor: torch.Tensor, old: object) -> torch.Tensor:
    kind = (tensor.shape, tensor.dtype, tensor.stride())
    is_written = isinstance(old, torch.Tensor) and not tensor.requires_grad and not value_trees.overlaps(old)
    if isinstance(old, torch.Tensor) and is_written and (old.shape, old.dtype, old.stride()) == kind:
        with torch.no_grad():
            return old.copy_(tensor)
    return value_trees.clone(tensor) if tensor.is_cpu else tensor.detach().to("cpu", copy=True)
