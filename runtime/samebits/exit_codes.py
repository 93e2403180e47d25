"""Exit codes of all processes, and whether starting the same command again can help.

docs/reference/exit-codes.md and ``samebits explain exit-codes`` print this table. A code keeps its meaning until a new
major version, because restart loops, Slurm and Kubernetes base decisions on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from samebits import errors
from samebits.doc_tables import chinese, markdown


class Repeatable(Enum):
    """Whether the same command can succeed when it is started again."""

    YES = "yes"
    NO = "no"
    DONE = "–"


YES, NO, DONE = Repeatable.YES, Repeatable.NO, Repeatable.DONE


@dataclass(frozen=True, slots=True)
class ExitCode:
    """One row: the code, its name, whether starting again helps, and its meaning."""

    code: int
    name: str
    again: Repeatable
    meaning: str


def _of(error: type[errors.SameBitsError], again: Repeatable) -> ExitCode:
    meaning = " ".join((error.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")
    return ExitCode(error.exit_code, error.__name__, again, meaning)


EXIT_CODES: tuple[ExitCode, ...] = (
    ExitCode(
        *(0, "finished", DONE),
        "The job, or this process's part of the job, is finished.",
    ),
    ExitCode(
        *(1, "script failed", NO),
        "For a worker: the script failed. The traceback is in the worker's log, and the line in the first cause.",
    ),
    ExitCode(
        *(errors.WRONG_WORDS, "wrong words", NO),
        "A command was called with unknown arguments; nothing was done.",
    ),
    _of(errors.SettingsError, NO),
    _of(errors.FencedError, NO),
    _of(errors.DuplicateNodeError, YES),
    _of(errors.SchedulerUnreachableError, YES),
    _of(errors.RefusedError, NO),
    _of(errors.NumericsError, NO),
    _of(errors.FormationTimeoutError, YES),
    _of(errors.StoreError, YES),
    _of(errors.ClaimRemovedError, YES),
    _of(errors.JournalDamagedError, YES),
    _of(errors.ForeignFolderError, NO),
    _of(errors.LockedError, YES),
    _of(errors.CheckpointError, YES),
    _of(errors.ListenError, YES),
    _of(errors.JobFailedError, NO),
    _of(errors.JobInterruptedError, YES),
    _of(errors.JobStoppedError, NO),
    _of(errors.StuckError, YES),
    _of(errors.UsageError, NO),
    _of(errors.AnomalyError, NO),
    _of(errors.KeyValueError, NO),
    _of(errors.ProtocolError, NO),
    _of(errors.LayoutError, NO),
    _of(errors.CommunicationError, YES),
    _of(errors.GenerationEndedError, YES),
    _of(errors.HostsUpdatedInterrupt, YES),
    _of(errors.SchedulerLeftError, YES),
    _of(errors.SecretError, NO),
    _of(errors.DivergenceError, NO),
    _of(errors.ScriptFailedError, NO),
    _of(errors.UntrainedError, NO),
    _of(errors.UnequalError, NO),
    _of(errors.KeyValueTimeoutError, YES),
    _of(errors.SupersededError, NO),
    _of(errors.LevelsSpentError, NO),
    _of(errors.PreflightError, YES),
    _of(errors.PointsLostError, NO),
    _of(errors.HiddenStateError, NO),
    _of(errors.AbortHungError, YES),
    _of(errors.DeviceLostError, YES),
    ExitCode(
        *(130, "interrupted", NO),
        "Ctrl-C ended only this command or process.",
    ),
    ExitCode(
        *(137, "SIGKILL", YES),
        "The process was killed by signal 9, by a person, or by the kernel for lack of memory.",
    ),
    ExitCode(
        *(143, "asked to leave", NO),
        "The worker was asked to leave (SIGTERM) and has finished its step.",
    ),
)


def exit_code_table() -> str:
    """Return the table of docs/reference/exit-codes.md, one row per entry."""
    rows = [(one.code, f"`{one.name}`", one.again.value, one.meaning) for one in EXIT_CODES]
    return markdown(("code", "name", "again?", "meaning"), rows)


def exit_code_table_zh() -> str:
    """Return the same table for docs/reference/exit-codes.zh-CN.md."""
    again, texts = chinese("again"), chinese("exit_codes")
    rows = [(one.code, f"`{one.name}`", again[one.again.value], texts[one.name]) for one in EXIT_CODES]
    return markdown(chinese("heads")["exit_codes"], rows)


def codes_to_give_up_at() -> tuple[int, ...]:
    """Return the codes at which a restart loop must end."""
    return tuple(sorted({one.code for one in EXIT_CODES if one.again is NO}))
