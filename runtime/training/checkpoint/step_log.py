"""``StepLog``: how steps are logged, and what a step that is done again differently means.

Here live the values and what they may be. Never here: what is logged (``replay``), or files. The one idea: a replay
that differs ends the job unless the user has said that it shall not.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import UsageError

__all__ = ["StepLog"]

RAISE, WARN = "raise", "warn"


@dataclass(frozen=True, slots=True)
class StepLog:
    """How a rank logs its steps: ``CheckpointConfig(step_log=StepLog(…))``; ``step_log=True`` is all defaults.

    Args:
        digest_every: compute the digest of the weights in every so many steps, from 1 on. It reads all parameters once,
            and copies those of an accelerator to the host.
        on_divergence: what happens where a step that is done again is another one than was logged: ``"raise"`` a
            :class:`~runtime.errors.DivergenceError` before it is taken, or ``"warn"`` once and go on.
    """

    digest_every: int = 1
    on_divergence: str = RAISE

    def __post_init__(self) -> None:
        if self.digest_every < 1:
            raise UsageError(f"StepLog(digest_every={self.digest_every}): expected 1 or more steps")
        if self.on_divergence not in (RAISE, WARN):
            raise UsageError(f"StepLog(on_divergence={self.on_divergence!r}): expected {RAISE!r} or {WARN!r}")

    @classmethod
    def of(cls, asked: bool | StepLog) -> StepLog | None:
        """What was asked for; None where nothing was.

        Raises:
            UsageError: it is neither.
        """
        if isinstance(asked, StepLog):
            return asked
        if not isinstance(asked, bool):
            raise UsageError(f"step_log={asked!r}: expected True, False or a runtime.StepLog(…)")
        return cls() if asked else None
