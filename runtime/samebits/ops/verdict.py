"""How a job ended, for whoever follows it: the kind of end, its cause and the exit status.

Values, and the one judgement that needs no scheduler: that every worker of the job was ended by its own program. The
one idea: who is ended by a kill comes back, who is ended by its script does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samebits.core.restarts import Sort
from samebits.errors import (
    FormationTimeoutError,
    JobFailedError,
    JobInterruptedError,
    JobStoppedError,
    PointsLostError,
    ScriptFailedError,
    UnequalError,
    UntrainedError,
)
from samebits.ops.deaths import End, has_no_slot, sentence, sentences
from samebits.ops.job_view import EndKind, JobView
from samebits.ops.supervising import GivenUp

EXIT_CODES = {
    EndKind.STOPPED: JobStoppedError.exit_code,
    EndKind.INTERRUPTED: JobInterruptedError.exit_code,
    EndKind.FORMATION_TIMEOUT: FormationTimeoutError.exit_code,
    EndKind.FAILED: JobFailedError.exit_code,
    EndKind.SCRIPT_FAILED: ScriptFailedError.exit_code,
    EndKind.UNTRAINED: UntrainedError.exit_code,
    EndKind.UNEQUAL: UnequalError.exit_code,
    EndKind.POINTS_LOST: PointsLostError.exit_code,
}
KINDS = {code: kind for kind, code in EXIT_CODES.items()}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the job ended; ``kind`` is None where it finished."""

    kind: EndKind | None
    cause: str
    exit_code: int

    @classmethod
    def unfinished(cls, kind: EndKind, cause: str, status: int = 0) -> Verdict:
        """Return how an unfinished job ended; ``status`` is the script's own, which then is the job's exit code."""
        return cls(kind, cause, status or EXIT_CODES[kind])


FINISHED = Verdict(None, "", 0)


def verdict_of(given_up: GivenUp) -> Verdict:
    """How a job ends of which one place gets no process any more."""
    dead, cause = given_up.dead, f"{given_up.dead.said}; {given_up.why}"
    match dead.loss.sort:
        case Sort.HOPELESS if dead.status is not None:
            return Verdict(EndKind.INTERRUPTED, cause, dead.status)
        case Sort.OWN | Sort.ARGUMENTS:
            return Verdict.unfinished(EndKind.SCRIPT_FAILED, cause)
        case _:
            return Verdict.unfinished(EndKind.INTERRUPTED, cause)


def verdict_of_all(ends: Sequence[End], view: JobView | None, *, is_trained: bool = False) -> Verdict | None:
    """How the job ended where all of its workers were here and each was ended by its own program; else none.

    Args:
        ends: of this machine's workers and spares, of which none runs.
        is_trained: training is finished: then the exit code is the script's own.
    """
    workers = [end for end in ends if not end.is_spare and not (is_trained and has_no_slot(end, view))]
    if view is None or view.alive or len(workers) < max(view.wanted_size, 1) or not all(end.is_own for end in ends):
        return None
    if all(end.is_stranger for end in workers):
        return Verdict.unfinished(EndKind.UNTRAINED, sentence(workers))
    failed = next((end for end in workers if end.is_failure), None) or next(e for e in workers if not e.is_stranger)
    text = sentences(sorted(workers, key=lambda end: end.words != failed.words))
    status = failed.death.status
    if is_trained:
        return Verdict.unfinished(EndKind.SCRIPT_FAILED, text, status or 0)
    if status is not None and failed.has_own_advice:
        return None if view.workers else Verdict(EndKind.INTERRUPTED, text, status)
    return Verdict.unfinished(EndKind.SCRIPT_FAILED, text)
