"""How a job ends, or a worker's part in it: every kind, with the error that tells it, its exit code and its words."""

from __future__ import annotations

import enum

from samebits import errors


class EndKind(enum.IntEnum):
    """How it ends.

    Those up to ``POINTS_LOST`` are ends of a job for everybody, which are journaled and sent by their number. The
    others end one process.

    Attributes:
        error: what a process of the job raises; None if the job is finished.
        words: how a sentence tells it, as in "the job was stopped".
        exit_code: what a process leaves with.
    """

    error: type[errors.SameBitsError] | None
    words: str
    exit_code: int

    FINISHED = 1, None, "is finished"
    STOPPED = 2, errors.JobStoppedError, "was stopped"  # the user asked; recoverable
    INTERRUPTED = 3, errors.JobInterruptedError, "was interrupted"  # no worker is left; recoverable
    FORMATION_TIMEOUT = 4, errors.FormationTimeoutError, "was interrupted"  # recoverable
    FAILED = 5, errors.JobFailedError, "failed"  # ENABLE_RECOVERY=0 and a process died
    SCRIPT_FAILED = 6, errors.ScriptFailedError, "was ended by its script"  # recoverable
    UNTRAINED = 7, errors.UntrainedError, "was not trained"
    UNEQUAL = 8, errors.UnequalError, "was ended, because its ranks differ"
    POINTS_LOST = 9, errors.PointsLostError, "could not go on"  # recoverable once the points are brought back

    FENCED = 32, errors.FencedError, "was replaced"
    DUPLICATE = 33, errors.DuplicateNodeError, "has a namesake"
    REFUSED = 34, errors.RefusedError, "was refused"
    NUMERICS = 35, errors.NumericsError, "computes otherwise"
    UNREACHABLE = 36, errors.SchedulerUnreachableError, "found no scheduler"
    STUCK = 37, errors.StuckError, "was stuck"

    def __new__(cls, number: int, error: type[errors.SameBitsError] | None, words: str) -> EndKind:
        """Return the member of this number."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.error, member.words = error, words
        member.exit_code = 0 if error is None else error.exit_code
        return member

    @property
    def label(self) -> str:
        """The name in JSON, such as ``script_failed``."""
        return self.name.lower()

    @classmethod
    def of_exit_code(cls, code: int) -> EndKind | None:
        """Return the kind of an unfinished job's end that leaves with this code; None for any other code."""
        ends = (one for one in cls if cls.FINISHED < one <= cls.POINTS_LOST)
        return next((one for one in ends if one.exit_code == code), None)
