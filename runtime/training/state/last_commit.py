"""The last commit, in this process's memory: what it costs to keep, and whether it can still be had.

Here lives one commit of a set of handlers. Never here: what a value is made of (``handlers``), disks, other ranks. The
one idea: until an optimizer begins its next step, weights and moments *are* the last commit, so a commit after every
step copies only what a forward pass or the user's loop changes. Where several steps lie between two commits the tensors
are copied as well, into the older of two buffers, so that one whole commit is there at any moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from runtime.core.point import Point
from runtime.training import torch_private
from runtime.training.state.handlers import StateHandler, copied_tree

__all__ = ["LastCommit"]


class LastCommit:
    """Remembers commits; tells whether the last one can be brought back, and brings it back.

    Args:
        handlers: of everything that belongs to the state, by name.
    """

    def __init__(self, handlers: Mapping[str, StateHandler]) -> None:
        self.point: Point | None = None
        self._handlers = handlers
        self._copies = False
        self._slots: list[dict[str, Any]] = [{}, {}]
        self._newest: dict[str, Any] | None = None  # the slot that holds the commit of ``point``
        self._is_stepping = False  # an optimizer began a step since then
        self._versions = 0
        self._stepped: list[torch.Tensor] = []

    def stepping(self) -> None:
        """An optimizer begins a step: from now on the live tensors are no commit."""
        self._is_stepping = True

    def copy_from_now_on(self) -> None:
        """The live tensors will not do, because a failure may find them changed: copy them, the present commit's too.

        The present one can be copied only while they still are what was committed.
        """
        if not self._copies and self.point is not None and self._is_live():
            self._copy()
        self._copies = True

    def remember(self, point: Point) -> None:
        """The state as it stands is the commit ``point``."""
        try:
            for handler in self._handlers.values():
                handler.remember()
            if self._copies:
                self._copy()
        except BaseException:
            self.forget()  # a part of this commit and a part of the last are neither
            raise
        self._stepped = [tensor for handler in self._handlers.values() for tensor in handler.stepped()]
        self._versions = self._sum_of_versions()
        self._is_stepping = False
        self.point = point

    def _copy(self) -> None:
        spare = self._slots[0] if self._newest is not self._slots[0] else self._slots[1]
        for name, handler in self._handlers.items():
            spare[name] = copied_tree(handler.contents(), spare.get(name))
        self._newest = spare

    def forget(self) -> None:
        """What stands is no commit."""
        self.point = self._newest = None

    @property
    def copy(self) -> Mapping[str, Any] | None:
        """The contents of the last commit by name, where they were copied; not to be changed."""
        return self._newest

    @property
    def is_held(self) -> bool:
        """Whether ``recall`` can bring it back whole."""
        return self.point is not None and (self._newest is not None or self._is_live())

    def recall(self) -> Point | None:
        """Make the state the last commit again, and return which that is; None where memory does not hold it whole."""
        if not self.is_held:
            return None
        if self._newest is not None:  # also where nothing shows a change: one through .data cannot be seen
            for name, handler in self._handlers.items():
                handler.load_back(self._newest[name])
        for handler in self._handlers.values():
            handler.recall()
        self._versions, self._is_stepping = self._sum_of_versions(), False
        return self.point

    def _is_live(self) -> bool:
        """Whether nothing has changed the tensors that are not copied."""
        return not self._is_stepping and self._versions == self._sum_of_versions()

    def _sum_of_versions(self) -> int:
        """Grows with every change in place, also one that is made by hand (though not through ``.data``)."""
        return sum(torch_private.version_of(tensor) for tensor in self._stepped)
