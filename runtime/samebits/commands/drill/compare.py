"""Compare the checkpoints of two jobs bit by bit: tensor by tensor, at every step that both have kept.

There is no tolerance. ``advice`` explains the causes of a difference.

A rank's random number generators are treated separately. If the script does not seed a generator, it begins with
different numbers in every run, even without a fault, so it is compared only from a step at which both jobs had the same
state.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.errors import CheckpointError
from samebits.store import checkpoint
from samebits.store.checkpoint import EntryState

_GENERATOR = re.compile(r"(?:state\.)?(own\.rng\.\w+)")


@dataclass(frozen=True, slots=True)
class Differing:
    """A difference between the two jobs on one rank: a tensor, a generator, or (``is_tensor`` False) another value."""

    slot: int
    name: str
    is_tensor: bool = True


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison.

    ``steps`` are the steps that both jobs have kept on every rank; ``difference`` is empty if all bits are equal.
    ``differing`` lists the differences at ``first_step``, the first step with any; ``equal_until`` is the newest step
    before it that both kept, or 0.
    """

    steps: tuple[int, ...]
    slots: int
    tensors: int
    difference: str = ""
    first_step: int = 0
    equal_until: int = 0
    differing: tuple[Differing, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Return whether anything was compared, and everything that was compared is equal."""
        return bool(self.steps) and not self.difference


def compare(undisturbed: Path, disturbed: Path, damaged: Collection[Path] = ()) -> Compared:
    """Compare two jobs' checkpoint folders from the oldest step to the first step that differs.

    Args:
        damaged: points in which the drill itself has changed a bit; they are skipped.
    """
    ours, theirs = _points(undisturbed, ()), _points(disturbed, damaged)
    slots = len({slot for _, slot in ours})
    if {slot for _, slot in ours} != {slot for _, slot in theirs}:
        return Compared((), slots, 0, "the two jobs have checkpoints of different ranks")
    steps = sorted({step for step, _ in ours} & {step for step, _ in theirs})
    if not steps:
        return Compared((), slots, 0, "the two jobs have no checkpoint of the same step")
    newest = max(step for step, _ in ours), max(step for step, _ in theirs)
    if newest[0] != newest[1]:
        return Compared(tuple(steps), slots, 0, f"one job ended at step {newest[0]}, the other at step {newest[1]}")
    tensors, equal_until, alike = 0, 0, set[Differing]()
    for step in steps:
        differing: list[Differing] = []
        for slot in sorted(slot for found, slot in ours if found == step and (step, slot) in theirs):
            try:
                one, other = (checkpoint.read(checkpoint.point_in(side[step, slot])) for side in (ours, theirs))
            except CheckpointError as error:
                return Compared(tuple(steps), slots, tensors, f"step {step}, rank {slot}: {error}", step, equal_until)
            odd, even = _generators(slot, one, other)
            differing += [*_differing(slot, one, other), *(each for each in odd if each in alike)]
            alike |= even
            tensors += len(one.tensors) - sum(each.slot == slot and each.is_tensor for each in differing)
        if any(one.is_tensor for one in differing):
            named = next(one for one in differing if one.is_tensor)
            what = "generator" if _GENERATOR.fullmatch(named.name) else "tensor"
            text = f"{what} {named.name} of rank {named.slot} differs at step {step}"
            return Compared(tuple(steps), slots, tensors, text, step, equal_until, tuple(differing))
        equal_until = step
    return Compared(tuple(steps), slots, tensors)


def _differing(slot: int, one: checkpoint.LoadedPoint, other: checkpoint.LoadedPoint) -> Iterator[Differing]:
    """Yield all differences except those of generators."""
    for name in sorted(one.tensors.keys() | other.tensors.keys()):
        mine, yours = one.tensors.get(name), other.tensors.get(name)
        is_equal = mine is not None and yours is not None and bytes(mine.data) == bytes(yours.data)
        if not is_equal and not _GENERATOR.match(name):
            yield Differing(slot, name)
    values, others = dict(_leaves(one.tree)), dict(_leaves(other.tree))
    for name in sorted(values.keys() | others.keys()):
        if values.get(name) != others.get(name) and not _GENERATOR.match(name):
            yield Differing(slot, name, is_tensor=False)


def _generators(
    slot: int, one: checkpoint.LoadedPoint, other: checkpoint.LoadedPoint
) -> tuple[set[Differing], set[Differing]]:
    """Return the rank's generators whose states differ, and those whose states are equal."""
    mine, yours = _states(one), _states(other)
    odd = {name for name in mine.keys() | yours.keys() if mine.get(name) != yours.get(name)}
    return {Differing(slot, name) for name in odd}, {Differing(slot, name) for name in mine.keys() - odd}


def _states(point: checkpoint.LoadedPoint) -> dict[str, dict[str, str]]:
    """Return the state of each generator by the generator's name."""
    found: dict[str, dict[str, str]] = {}
    tensors = ((name, bytes(part.data).hex()) for name, part in point.tensors.items() if _GENERATOR.match(name))
    for name, content in (*tensors, *_leaves(point.tree)):
        if (match := _GENERATOR.match(name)) is not None:
            found.setdefault(match[1], {})[name] = content
    return found


def _leaves(tree: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield every value in a nested state that is not a container, as text, with its path."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{above}.{key}" if above else str(key))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{above}[{number}]")
    else:
        yield above, repr(tree)


def _points(root: Path, damaged: Collection[Path]) -> dict[tuple[int, int], Path]:
    """Return the complete points of the newest line, by step and slot."""
    found: dict[tuple[int, int], Path] = {}
    for entry in checkpoint.survey(root):  # newest first for each slot
        if entry.state is EntryState.WHOLE and entry.point is not None and entry.path not in damaged:
            found.setdefault((entry.point.step, entry.slot), entry.path)
    return found
