"""``CheckpointConfig``: how often a job saves and how much it keeps, in MindSpore's names.

Here live the values and what they may be. Never here: when the next save is due, or what is written. The one idea: a
wrong value is one sentence when the object is made, not a surprise at the hundredth step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.errors import UsageError
from runtime.training.checkpoint.step_log import StepLog

__all__ = ["CheckpointConfig"]

MIN_KEPT = 2


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """How often this rank saves and how much it keeps (the names are MindSpore's).

    Args:
        save_checkpoint_steps: optimizer steps between two points, from 1 on.
        keep_checkpoint_max: whole points kept, at least 2: while one is being written another must be there.
        directory: the job's checkpoint folder; CHECKPOINT_PATH where it is None.
        step_log: log every step before it is taken and compare steps that are done again; a :class:`StepLog` says how.
    """

    save_checkpoint_steps: int = 100
    keep_checkpoint_max: int = 5
    directory: str | Path | None = None
    step_log: bool | StepLog = False

    def __post_init__(self) -> None:
        StepLog.of(self.step_log)
        if self.save_checkpoint_steps < 1:
            raise UsageError(f"save_checkpoint_steps={self.save_checkpoint_steps}: expected 1 or more optimizer steps")
        if self.keep_checkpoint_max < MIN_KEPT:
            raise UsageError(
                f"keep_checkpoint_max={self.keep_checkpoint_max}: expected {MIN_KEPT} or more, because a crash while "
                "one point is written must leave another"
            )
