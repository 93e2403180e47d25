"""The corruptions that ``benchmarks.corruption`` draws: what is overwritten, where, on which rank and in which step.

A draw is a function of its seed and number alone, so the campaign and the workers compute it independently.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "AUDIT_EVERY",
    "COMPARED_EVERY",
    "HASHED_AT",
    "RESET_AT",
    "WINDOW",
    "WORLD_SIZE",
    "Draw",
    "Kind",
    "Place",
    "corrupt",
    "draw",
    "window_of",
]

WORLD_SIZE = 3
COMPARED_EVERY = AUDIT_EVERY = 50
"""Steps between two comparisons (the default of CONSISTENCY) and between two audits (the shortest that is allowed)."""
WINDOW = 50
"""Steps per draw. Two steps after a comparison and an audit, the next window begins."""
RESET_AT = WINDOW + 2
"""The last step of window 0. Its commit returns to the state that every window begins with."""
HASHED_AT = WINDOW + 1
"""The step of window 0 whose state is hashed."""
_FIRST = RESET_AT - WINDOW + 2
"""The first step of window 0 in which a corruption may occur; the last is the audited one."""


class Kind(enum.Enum):
    """How values are overwritten."""

    BITS = "2 to 8 bits of one value"
    WARP = "32 neighbouring values"
    STUCK = "exponent bit stuck at 1 in a range"
    TILE = "16 x 16 block scaled or swapped"
    MANTISSA = "one of bfloat16's mantissa bits"
    LINE = "64 bytes repeated"
    PAGE = "4 KiB of zeros"


class Place(enum.Enum):
    """The values that are overwritten.

    ``GRADIENT`` and ``ACTIVATION`` occur in any step of a window, so that few of those steps are audited. Their
    audited counterparts occur in an audited step, on the audited rank.
    """

    WEIGHT = "weight"
    MOMENT = "moment"
    RECEIVED = "reduced gradient on one rank"
    SUM = "reduced gradient on all ranks"
    GRADIENT = "local gradient, any step"
    ACTIVATION = "activation, any step"
    AUDITED_GRADIENT = "local gradient, audited step"
    AUDITED_ACTIVATION = "activation, audited step"

    @property
    def is_at_rest(self) -> bool:
        """Return whether the value is overwritten between a commit and the next step."""
        return self in (Place.WEIGHT, Place.MOMENT)

    @property
    def is_of_audited_step(self) -> bool:
        """Return whether the step and the rank are those of an audit."""
        return self in (Place.AUDITED_GRADIENT, Place.AUDITED_ACTIVATION)

    @property
    def is_visible(self) -> bool:
        """Return whether a replica or an audit holds a correct value to compare with."""
        return self.is_at_rest or self.is_of_audited_step or self is Place.RECEIVED


@dataclass(frozen=True, slots=True)
class Draw:
    """One corruption.

    Attributes:
        number: the draw's number; the same seed and number give the same draw.
        window: the window of steps in which it occurs, from 1; window 0 is the undisturbed reference.
        victim: the rank whose value is overwritten (all ranks' for ``Place.SUM``).
        step: the step in which the value is overwritten, or after whose commit if the value is at rest.
        where: seed for the tensor, the position and the bits.
    """

    number: int
    window: int
    kind: Kind
    place: Place
    victim: int
    step: int
    where: int

    def rng(self) -> random.Random:
        """Return a new generator for the tensor, the position and the bits."""
        return random.Random(self.where)


def draw(seed: int, number: int, window: int) -> Draw:
    """Return draw ``number`` of this seed, placed into a window of its job."""
    rng = random.Random(f"corruption {seed} {number}")
    kind, place = rng.choice(list(Kind)), rng.choice(list(Place))
    last = WINDOW - place.is_at_rest  # a value at rest changes after the commit of its step
    victim, step = rng.randrange(WORLD_SIZE), WINDOW * window + rng.randint(_FIRST, last)
    where = rng.randrange(1 << 32)
    if place.is_of_audited_step:
        step = WINDOW * (window + 1)
        victim = step // AUDIT_EVERY % WORLD_SIZE
    return Draw(number, window, kind, place, victim, step, where)


def window_of(step: int) -> int:
    """Return the window that a step belongs to."""
    return (step - RESET_AT - 1) // WINDOW + 1


def corrupt(memory: npt.NDArray[np.uint8], item_bytes: int, columns: int, kind: Kind, rng: random.Random) -> bool:
    """Overwrite values of a matrix in place, and return whether any bit has changed.

    Args:
        memory: the bytes of the complete matrix, row by row.
        item_bytes: 4 for float32, 2 for bfloat16.
            columns: the number of the matrix's columns; it has at least 16 columns and 16 rows.
            kind: how values are overwritten.
        rng: chooses position and bits.
    """
    before = memory.copy()
    values = memory.view(np.uint32 if item_bytes == 4 else np.uint16)
    mantissa = 23 if item_bytes == 4 else 7
    if kind is Kind.BITS:
        bits = rng.sample(range(8 * item_bytes), rng.randint(2, 8))
        values[rng.randrange(len(values))] ^= sum(1 << bit for bit in bits)
    elif kind is Kind.MANTISSA:
        values[rng.randrange(len(values))] ^= 1 << (mantissa - 1 - rng.randrange(7))
    elif kind is Kind.WARP:
        at = 32 * rng.randrange(len(values) // 32)
        for one in range(at, at + 32):
            values[one] ^= 1 << rng.randrange(8 * item_bytes)
    elif kind is Kind.STUCK:
        length = rng.randint(64, 1024)
        at = rng.randrange(max(1, len(values) - length))
        values[at : at + length] |= 1 << (mantissa + rng.randrange(8))
    elif kind is Kind.LINE:
        at = 64 * rng.randrange(1, len(memory) // 64)
        memory[at : at + 64] = memory[at - 64 : at].copy()
    elif kind is Kind.PAGE:
        at = 4096 * rng.randrange(-(-len(memory) // 4096))
        memory[at : at + 4096] = 0
    else:
        _corrupt_tile(values.reshape(-1, columns), mantissa, rng)
    return bool((memory != before).any())


def _corrupt_tile(matrix: npt.NDArray[np.uint32 | np.uint16], mantissa: int, rng: random.Random) -> None:
    """Scale or swap a 16 x 16 block: ×2, ×-1, ×0, or exchanged with a second block."""
    rows, columns = (size // 16 for size in matrix.shape)
    places = [(16 * row, 16 * column) for row in range(rows) for column in range(columns)]
    (row, column), (other_row, other_column) = rng.sample(places, 2)
    block = matrix[row : row + 16, column : column + 16]
    way = rng.randrange(4)
    if way == 0:
        block += (block != 0).astype(block.dtype) << mantissa
    elif way == 1:
        block ^= 1 << (mantissa + 8)
    elif way == 2:
        block[:] = 0
    else:
        other = matrix[other_row : other_row + 16, other_column : other_column + 16]
        block[:], other[:] = other.copy(), block.copy()
