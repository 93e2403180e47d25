"""Whether two jobs hold the same bits: their checkpoints, tensor by tensor, at every step that both kept.

Reading and comparing live here; nothing is judged by a tolerance, and what a difference comes from is ``advice``'s to
say. The one idea: bytes are equal or they are not, and the first step and what differs there say more than a yes or no.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.errors import CheckpointError
from samebits.store import checkpoint
from samebits.store.checkpoint import EntryState

MOST_NAMED = 1000


@dataclass(frozen=True, slots=True)
class Differing:
    """Something of a rank that is not the same in both jobs: a tensor, or (``is_tensor`` False) another value."""

    slot: int
    name: str
    is_tensor: bool = True


@dataclass(frozen=True, slots=True)
class Compared:
    """``steps`` are those that both jobs kept on every rank; ``difference`` is empty where all bits are equal.

    ``differing`` is what differs at ``first_step``, the first step at which anything does; ``equal_until`` is the
    newest step before it that both kept, 0 where there is none.
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
        """Whether something was compared, and all of it is equal."""
        return bool(self.steps) and not self.difference


def compare(undisturbed: Path, disturbed: Path, damaged: Collection[Path] = ()) -> Compared:
    """Compare two jobs' checkpoint folders, the older steps first, up to the first step that differs.

    Args:
        damaged: points in which the drill itself has changed a bit; they are left out.
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
    tensors, equal_until = 0, 0
    for step in steps:
        differing: list[Differing] = []
        for slot in sorted(slot for found, slot in ours if found == step and (step, slot) in theirs):
            try:
                one, other = (checkpoint.read(checkpoint.point_in(side[step, slot])) for side in (ours, theirs))
            except CheckpointError as error:
                return Compared(tuple(steps), slots, tensors, f"step {step}, rank {slot}: {error}", step, equal_until)
            found = list(_differing(slot, one, other))
            tensors += len(one.tensors) - sum(each.is_tensor for each in found)
            differing += found
        if any(one.is_tensor for one in differing):
            named = next(one for one in differing if one.is_tensor)
            text = f"tensor {named.name} of rank {named.slot} differs at step {step}"
            more = tuple(differing[:MOST_NAMED])
            return Compared(tuple(steps), slots, tensors, text, step, equal_until, more)
        equal_until = step
    return Compared(tuple(steps), slots, tensors)


def _differing(slot: int, one: checkpoint.Checkpoint, other: checkpoint.Checkpoint) -> Iterator[Differing]:
    for name in sorted(one.tensors.keys() | other.tensors.keys()):
        mine, yours = one.tensors.get(name), other.tensors.get(name)
        if mine is None or yours is None or bytes(mine.data) != bytes(yours.data):
            yield Differing(slot, name)
    values, others = dict(_leaves(one.tree)), dict(_leaves(other.tree))
    for name in sorted(values.keys() | others.keys()):
        if values.get(name) != others.get(name):
            yield Differing(slot, name, is_tensor=False)


def _leaves(tree: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Every value of a state's tree that is no container, with its path, as text."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{above}.{key}" if above else str(key))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{above}[{number}]")
    else:
        yield above, repr(tree)


def _points(root: Path, damaged: Collection[Path]) -> dict[tuple[int, int], Path]:
    """By step and slot, the newest line's whole points."""
    found: dict[tuple[int, int], Path] = {}
    for entry in checkpoint.survey(root):  # each slot's newest first
        if entry.state is EntryState.WHOLE and entry.point is not None and entry.path not in damaged:
            found.setdefault((entry.point.step, entry.slot), entry.path)
    return found
