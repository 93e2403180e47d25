"""Define and validate ``CheckpointConfig`` and ``StepLog``: how often a job saves, where, and how much it keeps.

An invalid value is reported when the object is created. MindSpore's options without a counterpart here accept only the
value that describes what happens anyway.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from typing import Any, Literal

from samebits.config import WrongValueError, folder_or_url
from samebits.errors import UsageError
from samebits.store.checkpoint import is_prefix
from samebits.urls import without_credentials

AUTO: Literal["auto"] = "auto"
DEFAULT_STEPS = 100
MIN_KEPT = 2
WHEN_BUSY = ("wait", "skip")
RAISE, WARN = "raise", "warn"

_MINDSPORES: dict[str, tuple[tuple[Any, ...], str]] = {
    "keep_checkpoint_per_n_minutes": (
        (None, 0),
        "points are kept by number: set keep_checkpoint_max, and save_checkpoint_seconds to space them",
    ),
    "integrated_save": (
        (True,),
        "every rank's point is complete: leave it out, and read a part of one with `samebits ckpt export`",
    ),
    "saved_network": ((None,), "the state is what is saved: pass the network to samebits.elastic.TorchState"),
    "append_info": (
        (None, []),
        "the state is what is saved: pass such values to it, as in samebits.elastic.TorchState(…, epoch=0)",
    ),
    "enc_key": ((None,), "points are not encrypted: put CHECKPOINT_PATH on an encrypted file system"),
    "enc_mode": (("AES-GCM",), "points are not encrypted: put CHECKPOINT_PATH on an encrypted file system"),
    "exception_save": (
        (False,),
        "training cannot resume in the middle of a failed step: leave it out; survivors keep the last commit",
    ),
    "crc_check": ((True,), "every chunk of a point is always hashed and compared: leave it out"),
    "remove_redundancy": (
        (False,),
        "every rank saves the whole state, so one is enough: leave it out",
    ),
    "format": (("safetensors",), "points are safetensors files: leave it out; `samebits ckpt export` writes others"),
}
"""MindSpore's other options: the values that describe what happens here anyway, and advice for any other value."""


@dataclass(frozen=True, slots=True)
class StepLog:
    """Options of the step log, for ``CheckpointConfig(step_log=StepLog(…))``.

    Args:
        digest_every: steps between two digests of the weights, at least 1. A digest reads all parameters, and copies
            parameters on an accelerator to the host.
        on_divergence: reaction to a repeated step that differs from the log: ``"raise"``
            :class:`~samebits.errors.DivergenceError` before the step is taken, or ``"warn"`` once and continue.

    Raises:
        UsageError: a value is out of range.
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
        """Convert the ``step_log`` argument to options, or None if the step log is off.

        Raises:
            UsageError: ``asked`` is neither a bool nor a StepLog.
        """
        if isinstance(asked, StepLog):
            return asked
        if not isinstance(asked, bool):
            raise UsageError(f"step_log={asked!r}: expected True, False or a samebits.StepLog(…)")
        return cls() if asked else None


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Settings for how often a rank saves a checkpoint, and how many checkpoints it keeps.

    Give ``save_checkpoint_steps`` or ``save_checkpoint_seconds``, not both. The arguments after ``step_log`` are
    MindSpore's: each accepts only the value that matches the actual behavior.

    Args:
        save_checkpoint_steps: optimizer steps between two checkpoints, at least 1; ``"auto"``: chosen from the cost of
            a save and the job's failure rate. 100 if no seconds are given.
        save_checkpoint_seconds: seconds of training between two checkpoints; 0: steps are counted.
        keep_checkpoint_max: number of complete checkpoints to keep, at least 2.
        directory: the job's checkpoint folder, a path or a URL; None: CHECKPOINT_PATH.
        async_save: continue training as soon as the state is copied to memory, and let another process write it; False:
            wait for the disk.
        when_busy: what a due save does while the previous save is not on disk yet: ``"wait"`` for the previous one, or
            ``"skip"`` this one. In a remote folder, the due save is always skipped, because no step waits for a
            network.
        buddy_copies: keep a copy of each rank's two newest checkpoints in the memory of another rank's host.
            ``"auto"``: if the ranks are on more than one host; True: also between ranks on one host; False: never.
            Copies need ``async_save``, and as much shared memory again.
        prefix: a folder in ``directory`` for the ranks' folders; empty: none.
        step_log: log every step before the optimizer steps, and compare repeated steps with the log; a :class:`StepLog`
            sets options.

    Raises:
        UsageError: a value is out of range, or a MindSpore option has no meaning here.

    Example::

        checkpoint = samebits.CheckpointConfig(save_checkpoint_seconds=600, keep_checkpoint_max=3)
        state = samebits.elastic.TorchState(model, optimizer, checkpoint=checkpoint)
    """

    save_checkpoint_steps: int | Literal["auto"] | None = None
    save_checkpoint_seconds: float = 0
    keep_checkpoint_max: int = 5
    _: KW_ONLY
    directory: str | Path | None = None
    async_save: bool = True
    when_busy: str = "wait"
    buddy_copies: bool | Literal["auto"] = AUTO
    prefix: str = ""
    step_log: bool | StepLog = False
    keep_checkpoint_per_n_minutes: InitVar[int | None] = None
    integrated_save: InitVar[bool] = True
    saved_network: InitVar[Any] = None
    append_info: InitVar[Any] = None
    enc_key: InitVar[Any] = None
    enc_mode: InitVar[str] = "AES-GCM"
    exception_save: InitVar[bool] = False
    crc_check: InitVar[bool] = True
    remove_redundancy: InitVar[bool] = False
    format: InitVar[str] = "safetensors"

    def __post_init__(self, *mindspores: Any) -> None:
        _require_what_happens_anyway(mindspores)
        StepLog.of(self.step_log)
        self._require_one_rhythm()
        if type(self.keep_checkpoint_max) is not int or self.keep_checkpoint_max < MIN_KEPT:
            raise UsageError(
                f"keep_checkpoint_max={self.keep_checkpoint_max}: expected {MIN_KEPT} or more, because a crash while "
                "one point is written must leave another"
            )
        if isinstance(self.directory, str):
            try:
                folder_or_url(self.directory)
            except WrongValueError as wrong:
                shown = without_credentials(self.directory)
                raise UsageError(f"directory={shown!r}: {wrong.why or 'expected a folder or a URL'}") from None
        if self.when_busy not in WHEN_BUSY:
            raise UsageError(f"when_busy={self.when_busy!r}: expected {' or '.join(map(repr, WHEN_BUSY))}")
        if type(self.buddy_copies) is not bool and self.buddy_copies != AUTO:
            raise UsageError(f'buddy_copies={self.buddy_copies!r}: expected True, False or "auto"')
        if self.prefix and not is_prefix(self.prefix):
            raise UsageError(
                f"prefix={self.prefix!r}: expected a folder name of letters, digits, - and _ that does not begin "
                "with a digit; its parent folder is set with directory"
            )

    def _require_one_rhythm(self) -> None:
        steps, seconds = self.save_checkpoint_steps, self.save_checkpoint_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
            raise UsageError(f"save_checkpoint_seconds={seconds!r}: expected seconds above 0, or 0 to count steps")
        if steps is None:
            steps = 0 if seconds else DEFAULT_STEPS
            object.__setattr__(self, "save_checkpoint_steps", steps)
        if seconds and steps:
            raise UsageError(
                f"save_checkpoint_steps={steps!r} and save_checkpoint_seconds={seconds}: only one of them can "
                "decide when to save. Fix: leave the other out"
            )
        if steps == AUTO or (seconds and steps == 0):
            return
        if type(steps) is not int or steps < 1:
            raise UsageError(
                f'save_checkpoint_steps={steps!r}: expected 1 or more optimizer steps, or "auto"; or give '
                "save_checkpoint_seconds"
            )

    def folder_below(self, checkpoint_path: Path | str) -> Path | str:
        """Return the absolute path of the folder that contains the ranks' folders, given the job's CHECKPOINT_PATH."""
        given = self.directory or checkpoint_path
        location = folder_or_url(given) if isinstance(given, str) else given
        if isinstance(location, str):
            return f"{location}/{self.prefix}".rstrip("/")
        return Path(location, self.prefix).resolve()


def _require_what_happens_anyway(given: tuple[Any, ...]) -> None:
    for (name, (meant, instead)), value in zip(_MINDSPORES.items(), given, strict=True):
        if not any(type(value) is type(one) and value == one for one in meant):
            raise UsageError(f"{name}={value!r}: {instead}")
