"""Track the optimizer steps since the last commit, and gradients that no step has used yet.

A gradient is identified by its tensor object and version counter, so no hook runs in the backward pass. A gradient of
zeros counts as used.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from samebits.training import torch_private

Marks = Mapping[int, tuple[weakref.ref[torch.Tensor], int]]
"""Gradient and change count by parameter id; parameters without a gradient are left out."""


class OpenSteps:
    """Counts optimizer steps through the optimizers' hooks.

    Args:
        optimizers: the optimizers of one state.
        about_to_step: called before every step.
        stepped: called after every step.
        needs_copies: called if weights change while a collective may still fail: before a step that runs backward
            passes itself (a closure), or if another optimizer's backward pass comes between two steps.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        about_to_step: Callable[[], None],
        stepped: Callable[[], None],
        needs_copies: Callable[[], None],
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._about_to_step = about_to_step
        self._tell_stepped = stepped
        self._needs_copies = needs_copies
        self._counts = [0] * len(optimizers)
        self._callers: list[int | None] = [None] * len(optimizers)  # ids of the frames whose steps are under way
        self._inner = [0] * len(optimizers)  # calls of super().step() that are under way
        self.beginning = 0  # number of the step that is about to be taken, counted from the last commit
        self._at_commit: Marks = {}
        self._has_closed = False  # whether a commit has contained a step
        self._at_first_step: Marks = {}
        for index, optimizer in enumerate(self._optimizers):
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after(index))

    @property
    def count(self) -> int:
        """Number of steps since the last commit. With several optimizers, the largest of their counts."""
        counts = self._counts
        return counts[0] if len(counts) == 1 else max(counts, default=0)

    def close(self) -> None:
        """Start counting from a new commit with the current state."""
        self._has_closed = self._has_closed or any(self._counts)
        self._counts = [0] * len(self._optimizers)
        self._at_commit = self.marks()

    def gradients_wait(self) -> bool:
        """Return whether gradients were computed since the last commit that no optimizer step has used."""
        if 0 not in self._counts:
            return False
        idle = [one for one, count in zip(self._optimizers, self._counts, strict=True) if not count]
        return any(_has_changed(key, one, self._at_commit) and not _is_zero(one) for key, one in _gradients(idle))

    def has_left_gradients(self) -> bool | None:
        """Return whether an optimizer has stepped with a gradient tensor that already existed at the last commit.

        In that case the gradient was either zeroed in place, or this step's gradients were added to the previous
        step's.

        Returns:
            None until there was a commit with a step, and another step after it.
        """
        stepped = [one for one, count in zip(self._optimizers, self._counts, strict=True) if count]
        if not (stepped and self._has_closed):
            return None
        return any(
            (mark := self._at_commit.get(key)) is not None and _alive(mark) is one for key, one in _gradients(stepped)
        )

    def marks(self) -> Marks:
        """Return the marks of the current gradients."""
        held: list[tuple[int, torch.Tensor]] = []
        for optimizer in self._optimizers:  # runs at every commit, so no function is called for each parameter
            for group in optimizer.param_groups:
                held += [(id(one), gradient) for one in group["params"] if (gradient := one.grad) is not None]
        versions = torch_private.versions_of([gradient for _, gradient in held])
        return {key: (weakref.ref(gradient), version) for (key, gradient), version in zip(held, versions, strict=True)}

    def drop_gradients(self) -> None:
        """Remove all gradients."""
        for parameter in _parameters(self._optimizers):
            parameter.grad = None

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = next(number for number, one in enumerate(self._optimizers) if one is optimizer)
        caller = sys._getframe(1)
        if self._callers[index] is not None and _is_inside(caller, self._callers[index]):
            self._inner[index] += 1  # torch calls the hooks again if step() calls super().step()
            return
        self._callers[index], self._inner[index] = id(caller), 0
        if any(one is not None for one in (*args[1:2], kwargs.get("closure"))):
            self._needs_copies()
        if len(self._optimizers) > 1:
            if not any(self._counts):
                self._at_first_step = self.marks()
            elif any(_has_changed(key, one, self._at_first_step) for key, one in _gradients([optimizer])):
                self._needs_copies()
        self.beginning = 1 + self._counts[index]
        self._about_to_step()

    def _after(self, index: int) -> Callable[..., None]:
        def after(*_: object) -> None:
            if self._inner[index]:
                self._inner[index] -= 1
                return
            self._callers[index] = None
            self._counts[index] += 1
            self._tell_stepped()

        return after


def _is_inside(frame: FrameType | None, outer: int | None) -> bool:
    """Return whether ``frame`` was called, directly or indirectly, by the frame with the id ``outer``."""
    while frame is not None:
        frame = frame.f_back
        if id(frame) == outer:
            return True
    return False


def same_marks(one: Marks, other: Marks) -> bool:
    """Return whether no gradient was added, removed or changed between the two records."""
    return one.keys() == other.keys() and all(
        (gradient := _alive(mark)) is not None and gradient is _alive(other[key]) and mark[1] == other[key][1]
        for key, mark in one.items()
    )


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    return (one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"])


def _gradients(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[int, torch.Tensor]]:
    return ((id(one), one.grad) for one in _parameters(optimizers) if one.grad is not None)


def _has_changed(key: int, gradient: torch.Tensor, marks: Marks) -> bool:
    mark = marks.get(key)
    return mark is None or _alive(mark) is not gradient or mark[1] != torch_private.version_of(gradient)


def _alive(mark: tuple[weakref.ref[torch.Tensor], int]) -> torch.Tensor | None:
    gradient: Any = mark[0]()
    if gradient is not None:
        gradient._fix_weakref()  # as torch.utils.weak does: torch may have held the last reference
    alive: torch.Tensor | None = gradient
    return alive


def _is_zero(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return not values.any()
