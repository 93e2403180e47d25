"""Whether two jobs hold the same bits: their checkpoints, tensor by tensor, at every step that both kept.

Reading and comparing live here; nothing is judged by a tolerance. The one idea: bytes are equal or they are not, and
the first step and tensor that differ say more than a yes or no.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.errors import CheckpointError
from runtime.store import checkpoint
from runtime.store.checkpoint import EntryState


@dataclass(frozen=True, slots=True)
class Compared:
    """``step`` is the newest that both jobs kept on every rank; ``difference`` is empty where all bits are equal."""

    steps: tuple[int, ...]
    slots: int
    tensors: int
    difference: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether something was compared, and all of it is equal."""
        return bool(self.steps) and not self.difference


def compare(undisturbed: Path, disturbed: Path) -> Compared:
    """Compare two jobs' checkpoint folders, the older steps first, up to the first difference."""
    ours, theirs = _points(undisturbed), _points(disturbed)
    slots = len({slot for _, slot in ours})
    if {slot for _, slot in ours} != {slot for _, slot in theirs}:
        return Compared((), slots, 0, "the two jobs have checkpoints of different ranks")
    steps = sorted({step for step, _ in ours} & {step for step, _ in theirs})
    if not steps:
        return Compared((), slots, 0, "the two jobs have no checkpoint of the same step")
    newest = max(step for step, _ in ours), max(step for step, _ in theirs)
    if newest[0] != newest[1]:
        return Compared(tuple(steps), slots, 0, f"one job ended at step {newest[0]}, the other at step {newest[1]}")
    tensors = 0
    for step in steps:
        for slot in sorted(slot for found, slot in ours if found == step and (step, slot) in theirs):
            try:
                one, other = (checkpoint.read(checkpoint.point_in(side[step, slot])) for side in (ours, theirs))
            except CheckpointError as error:
                return Compared(tuple(steps), slots, tensors, f"step {step}, rank {slot}: {error}")
            for name in sorted(one.tensors.keys() | other.tensors.keys()):
                mine, yours = one.tensors.get(name), other.tensors.get(name)
                if mine is None or yours is None or bytes(mine.data) != bytes(yours.data):
                    return Compared(
                        tuple(steps), slots, tensors, f"tensor {name} of rank {slot} differs at step {step}"
                    )
                tensors += 1
    return Compared(tuple(steps), slots, tensors)


def _points(root: Path) -> dict[tuple[int, int], Path]:
    """By step and slot, the newest line's whole points."""
    found: dict[tuple[int, int], Path] = {}
    for entry in checkpoint.survey(root):  # each slot's newest first
        if entry.state is EntryState.WHOLE and entry.point is not None:
            found.setdefault((entry.point.step, entry.slot), entry.path)
    return found
