"""The identity of a restore point, (step, generation), by which points are ordered and compared.

A step alone does not identify a state: after a rollback another generation reaches the same step again. A point is a
named tuple and not a dataclass because hundreds are sorted, hashed and compared, which tuples do in C.
"""

from __future__ import annotations

from typing import NamedTuple

from samebits.core.values import Int, Value


class Point(NamedTuple):
    """The state after ``step`` optimizer steps of ``generation``. Ordered by (step, generation).

    Generations count from 1: generation 0 means "before the first one" and never exists on disk.
    """

    step: Int
    generation: Int

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


class Cut(Value, frozen=True):
    """Points of ``generation`` up to ``step`` belong to the job's line; later ones were abandoned.

    A step of -1 marks a lost journal. Of the generations up to this one, only points that another cut covers are known
    to be valid. All others are dropped, and no later generation reuses one of their numbers.
    """

    generation: Int
    step: Int

    @property
    def is_a_loss(self) -> bool:
        """Return whether this cut marks a lost journal."""
        return self.step < 0
