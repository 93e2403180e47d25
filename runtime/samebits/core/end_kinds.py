"""How a job or one worker can end, each with its error, exit code and wording."""

from __future__ import annotations

import enum

from samebits import errors


class EndKind(enum.IntEnum):
    """How a job, or a worker's part in it, ends.

    Kinds up to ``POINTS_LOST`` end the whole job; they are journaled and sent by number. The others end one process.

    Attributes:
        error: the exception that a process of the job raises; None if the job is finished.
        words: the predicate for a sentence, as in "the job was stopped".
        exit_code: the process's exit code.
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
    UNEQUAL = 8, errors.UnequalError, "failed"
    POINTS_LOST = 9, errors.PointsLostError, "could not continue"  # recoverable once the points are brought back

    FENCED = 32, errors.FencedError, "was replaced"
    DUPLICATE = 33, errors.DuplicateNodeError, "has a duplicate"
    REFUSED = 34, errors.RefusedError, "was refused"
    NUMERICS = 35, errors.NumericsError, "computes differently"
    UNREACHABLE = 36, errors.SchedulerUnreachableError, "found no scheduler"
    STUCK = 37, errors.StuckError, "was stuck"

    def __new__(cls, number: int, error: type[errors.SameBitsError] | None, words: str) -> EndKind:
        """Create the member with this number."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.error, member.words = error, words
        member.exit_code = 0 if error is None else error.exit_code
        return member

    @property
    def label(self) -> str:
        """Return the name used in JSON, such as ``script_failed``."""
        return self.name.lower()

    def is_permanent(self, status: int) -> bool:
        """Return whether the job exits with the code of a process's error.

        ``status`` is that process's exit code, and the error is one of this package's.
        """
        return status in errors.OWN_CODES and status != self.exit_code

    def words_with(self, status: int) -> str:
        """Return the predicate of a sentence, given the exit status that a process gave the job (0: none)."""
        return "failed" if self.is_permanent(status) else self.words

    @classmethod
    def of_exit_code(cls, code: int) -> EndKind | None:
        """Return how an unfinished job with this exit code ended, or None."""
        ends = (one for one in cls if cls.FINISHED < one <= cls.POINTS_LOST)
        return next((one for one in ends if one.exit_code == code), None)
