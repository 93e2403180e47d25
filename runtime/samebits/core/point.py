"""A restore point's identity: the value every room orders, compares and names points by.

Only the pair lives here; where a point is stored and whether it may be resumed is decided elsewhere. The one idea: a
step alone does not identify a state, because after a rollback the same step is reached again by another generation.
A named tuple and not a dataclass: points are sorted, hashed and compared by the hundred, which tuples do in C.
"""

from __future__ import annotations

from typing import NamedTuple

from samebits.core.values import Int, Value


class Point(NamedTuple):
    """The state after ``step`` optimizer steps, as ``generation`` computed it; ordered by (step, generation).

    Generations count from 1: generation 0 means "before the first one" and never exists on disk.
    """

    step: Int
    generation: Int

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


class Cut(Value, frozen=True):
    """Points of ``generation`` up to ``step`` belong to the line the job is on; later ones were abandoned.

    A step of -1 stands for a journal that was lost and made anew: nobody knows which generations up to this one there
    were besides those that other cuts name, so nothing of them is kept, and no later one has one of their numbers.
    """

    generation: Int
    step: Int

    @property
    def is_a_loss(self) -> bool:
        """Whether the journal was lost here."""
        return self.step < 0
