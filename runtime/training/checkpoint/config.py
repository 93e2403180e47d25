"""``CheckpointConfig``: how often a job saves and how much it keeps, in MindSpore's names.

Here live the values and what they may be. Never here: when the next save is due, or what is written. The one idea: a
wrong value is one sentence when the object is made, not a surprise at the hundredth step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.config import WrongValueError, folder_or_url
from runtime.errors import UsageError

__all__ = ["CheckpointConfig"]

MIN_KEPT = 2
WHEN_BUSY = ("wait", "skip")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """How often this rank saves and how much it keeps (the names are MindSpore's).

    Args:
        save_checkpoint_steps: optimizer steps between two points, from 1 on.
        keep_checkpoint_max: whole points kept, at least 2: while one is being written another must be there.
        async_save: training goes on as soon as the state is copied to memory of its own, and another process writes it
            to disk; False: it waits for the disk.
        when_busy: what a save that is due does while the one before it is not on disk yet: ``"wait"`` for that, or
            ``"skip"`` this one. In a remote folder it is left out in any case: no step waits for a network.
        directory: the job's checkpoint folder, a path or a URL; CHECKPOINT_PATH where it is None.
    """

    save_checkpoint_steps: int = 100
    keep_checkpoint_max: int = 5
    directory: str | Path | None = None
    async_save: bool = True
    when_busy: str = "wait"

    def __post_init__(self) -> None:
        if self.save_checkpoint_steps < 1:
            raise UsageError(f"save_checkpoint_steps={self.save_checkpoint_steps}: expected 1 or more optimizer steps")
        if self.keep_checkpoint_max < MIN_KEPT:
            raise UsageError(
                f"keep_checkpoint_max={self.keep_checkpoint_max}: expected {MIN_KEPT} or more, because a crash while "
                "one point is written must leave another"
            )
        if isinstance(self.directory, str):
            try:
                folder_or_url(self.directory)
            except WrongValueError as wrong:
                raise UsageError(f"directory={self.directory!r}: {wrong.why or 'expected a folder or a URL'}") from None
        if self.when_busy not in WHEN_BUSY:
            raise UsageError(f"when_busy={self.when_busy!r}: expected {' or '.join(map(repr, WHEN_BUSY))}")

    @property
    def location(self) -> Path | str | None:
        """``directory``, with a text for a URL only."""
        return folder_or_url(self.directory) if isinstance(self.directory, str) else self.directory
