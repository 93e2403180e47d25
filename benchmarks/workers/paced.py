"""How far the ranks of a job may train, said from outside, so that any number of them stop after the same step.

Here live the number and both ends of it. Never here: who sets it, or why. The one idea: eight bytes of a mapped file
cost a rank that trains nothing to look at, and outlive whatever process is killed.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["ENDLESSLY", "INTERVAL", "PACE", "Pace"]

ENDLESSLY = 2**62
PACE = "BENCHMARK_PACE"
"""Environment variable: the file that says how far to train; without it, until the end."""
INTERVAL = "BENCHMARK_CHECKPOINT_STEPS"
"""Environment variable: steps between two checkpoints."""
RNG = "BENCHMARK_RNG"
"""Environment variable: ``saved``, the default of a state's ``rng``; then the steps have dropout to be sensitive to."""
_NUMBER = struct.Struct("=q")
_LOOK_EVERY_S = 0.002


class Pace:
    """The number of the last step that may be done; :data:`ENDLESSLY` from the beginning.

    Args:
        path: of the file, which is made if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(_NUMBER.pack(ENDLESSLY))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _NUMBER.size)

    @property
    def last_step(self) -> int:
        """Nobody trains beyond it."""
        return int(_NUMBER.unpack(self._memory)[0])

    @last_step.setter
    def last_step(self, step: int) -> None:
        self._memory[:] = _NUMBER.pack(step)

    def wait_beyond(self, step: int, pausing: Callable[[], object], meanwhile: Callable[[], object]) -> None:
        """Until more than ``step`` steps may be done; if that is not so yet, say so once, then keep calling."""
        if step < self.last_step:
            return
        pausing()
        while step >= self.last_step:
            meanwhile()
            time.sleep(_LOOK_EVERY_S)
