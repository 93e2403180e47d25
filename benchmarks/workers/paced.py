"""Limit from outside how far a job's ranks may train, so that all of them stop after the same step.

Reading eight bytes of a mapped file costs a training rank nothing, and the file survives any killed process.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["ENDLESSLY", "INTERVAL", "LAST_STEP", "PACE", "Pace"]

ENDLESSLY = 2**62
PACE = "BENCHMARK_PACE"
"""Environment variable: the file that limits how far to train; without it, training has no limit."""
INTERVAL = "BENCHMARK_CHECKPOINT_STEPS"
"""Environment variable: steps between two checkpoints."""
LAST_STEP = "BENCHMARK_LAST_STEP"
"""Environment variable: the step at which a peer's worker ends; without it, never."""
RNG = "BENCHMARK_RNG"
"""Environment variable: ``saved``, the default of a state's ``rng``; then the steps have dropout to depend on it."""
MESH = "BENCHMARK_MESH"
"""Environment variable: sizes of the device mesh over which the model is sharded, as in ``2,2``; without it, DDP."""
_NUMBER = struct.Struct("=q")
_LOOK_EVERY_S = 0.002


class Pace:
    """The number of the last allowed step; :data:`ENDLESSLY` at the start.

    Args:
        path: the file, which is created if missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(_NUMBER.pack(ENDLESSLY))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _NUMBER.size)

    @property
    def last_step(self) -> int:
        """Return the last step that any rank may train."""
        return int(_NUMBER.unpack(self._memory)[0])

    @last_step.setter
    def last_step(self, step: int) -> None:
        self._memory[:] = _NUMBER.pack(step)

    def wait_beyond(self, step: int, pausing: Callable[[], object], meanwhile: Callable[[], object]) -> None:
        """Wait until more than ``step`` steps are allowed; call ``pausing`` once and ``meanwhile`` repeatedly."""
        if step < self.last_step:
            return
        pausing()
        while step >= self.last_step:
            meanwhile()
            time.sleep(_LOOK_EVERY_S)
