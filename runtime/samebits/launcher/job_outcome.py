"""Describe how processes and the job ended, with one sentence for each group of processes that ended alike.

All ranks run into an error of the script at almost the same time, so a report is delayed briefly to group them. A
killed process is restarted; a process that its own script ended is not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from samebits.account.job_view import JobView
from samebits.core.causes.restarts import Sort, is_usage_error
from samebits.core.end_kinds import EndKind
from samebits.errors import OWN_CODES
from samebits.launcher.processes import Death
from samebits.launcher.supervising import GivenUp
from samebits.tracebacks import Failure

GATHER_S = 0.3  # longest time between two kills that are reported together
GATHER_OWN_S = 1.5  # the same for processes that end by their own program, which takes longer
GATHER_AT_MOST_S = 3.0
NAMED = 12
MOST_WAYS = 4

MISSING_LINES = (
    "`import samebits` and `samebits.init()` at its beginning and `@samebits.elastic.run` above its training function"
)
_NO_RANK = re.compile(r"\b(?:RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)\b")
_STATUS = re.compile(r"ended with status (\d+): ")
OWN_ADVICE = "do what that message says"
CORRECT_ARGUMENTS = "correct the script's arguments"


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How one worker or spare ended.

    ``cause`` is the error in its log, if any. ``has_joined`` tells whether it has called ``samebits.init()``.
    ``follows`` describes the launcher's reaction, such as "a new process is started in its place", and is empty if
    there is none.
    """

    node: str
    pid: int
    death: Death
    cause: Failure | str = ""
    is_spare: bool = False
    has_joined: bool = True
    follows: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether an error of the script ended the process."""
        return isinstance(self.cause, Failure)

    @property
    def is_own(self) -> bool:
        """Whether the process's own program ended it, and restarting it unchanged would not help."""
        if self.is_failure:
            return True
        return self.death.status is not None and (self.death.status != 0 or not self.has_joined)

    @property
    def has_own_advice(self) -> bool:
        """Whether the process ended with a SameBits error, whose message names its fix."""
        return self.death.status in OWN_CODES and bool(self.cause)

    @property
    def is_stranger(self) -> bool:
        """Whether the process ran to its end without ever joining the job."""
        return self.death.status == 0 and not self.has_joined

    @property
    def is_of_the_script(self) -> bool:
        """Whether the user must change the script, even if the job has ended for another reason."""
        return self.is_failure or self.is_stranger or "trained alone" in str(self.cause)

    @property
    def title(self) -> str:
        """The process's name for messages."""
        return f"{'spare' if self.is_spare else 'worker'} {self.node}"

    def __str__(self) -> str:
        return f"{self.title} (pid {self.pid}) {self.words}"

    @property
    def words(self) -> str:
        """How the process ended, for messages."""
        if isinstance(self.cause, Failure):
            return str(self.cause)
        if self.is_stranger:
            return "ended with status 0 and never called samebits.init()"
        if self.death.status == 0:
            return "ended with status 0 before training was finished"
        said = self.cause.removeprefix(f"{self.title} ")
        return f"{self.death}: {said}" if said else str(self.death)


def has_no_slot(end: WorkerExit, view: JobView | None) -> bool:
    """Return whether the process has no slot any more, so that its exit does not affect the job.

    This is the case if it was a spare, if another process has taken its slot, or if the world shrank without it.
    """
    known = view.node(end.node) if view is not None else None
    return end.is_spare or (known is not None and known.slot is None)


def sentence(alike: Sequence[WorkerExit]) -> str:
    """Return a sentence about processes that ended alike: one process with its pid, or several by their names."""
    first = alike[0]
    if len(alike) == 1:
        return str(first)
    names = ", ".join(sorted((end.node for end in alike), key=_by_number)[:NAMED])
    more = f" and {len(alike) - NAMED} more" if len(alike) > NAMED else ""
    words = first.words.replace("was killed", "were killed").replace("is gone", "are gone")
    return f"{'spare' if first.is_spare else 'worker'}s {names}{more} {words}"


def what_others_do(count: int, view: JobView | None, *, waiting: str, shrinking: str) -> str:
    """Return how the job continues without ``count`` workers: with spares, with fewer workers, or after a wait."""
    if view is None or view.training_finished:
        return ""
    several = count > 1
    if view.spares_alive >= count:
        return f"; {f'{count} spares take their places' if several else 'a spare takes its place'}"
    them = "them" if several else "it"
    if view.generation and view.min_world_size <= view.world_size - count and not view.has_one_size:
        return f"; the others continue without {them} {shrinking}"
    return f"; the others wait for {them} {waiting}"


def advice(alike: Sequence[WorkerExit], recover: str) -> str:
    """Return what the user can do, or "" if the process printed that itself or ended as intended."""
    end = alike[0]
    if end.is_stranger:
        return f". Fix: add {MISSING_LINES}"
    if end.is_failure:
        return f". Fix: {correction(end.words)}, then {recover}"
    if end.has_own_advice or end.death.status == 0:
        return ""
    return f". Fix: {recover} brings {'them' if len(alike) > 1 else 'it'} back"


def _by_number(node: str) -> tuple[int, str]:
    return (int(node) if node.isdecimal() else 0), node


def missing(cause: str) -> str:
    """Return what to add to a script that ended without ever training in the job."""
    if "samebits.init" in cause:
        return f"add {MISSING_LINES}"
    return "write `@samebits.elastic.run` above the training function and call that with its state"


def correction(error: str) -> str:
    """Return how to correct a script that failed with this error."""
    if ("KeyError" in error or "environment variable" in error) and _NO_RANK.search(error):
        return (
            "call samebits.init() before that line, which sets RANK, LOCAL_RANK and WORLD_SIZE; a spare has none, so "
            "in a job with spares ask samebits.get_rank() in the training function instead"
        )
    if "No module named 'runtime'" in error or "write `import samebits`" in error:
        return "write `import samebits` in place of `import runtime`, and `samebits.` in place of `runtime.`"
    status = _STATUS.search(error)
    if status is not None and int(status[1]) in OWN_CODES:
        return OWN_ADVICE
    if status is not None and is_usage_error(int(status[1]), error[status.end() :]):
        return CORRECT_ARGUMENTS
    return "correct the script"


class Deaths:
    """Deaths that are not reported yet."""

    def __init__(self) -> None:
        self._unsaid: list[WorkerExit] = []
        self._is_held = False
        self._first_at = self._due_at = 0.0

    def add(self, end: WorkerExit, now: float) -> None:
        """Add a process's end to the next report."""
        self.hold(now, GATHER_S if end.death.signal is not None else GATHER_OWN_S)
        self._unsaid.append(end)

    def hold(self, now: float, for_s: float = GATHER_S) -> None:
        """Delay the report so that it includes processes that end within the next ``for_s`` seconds."""
        if not self._is_held:
            self._first_at = self._due_at = now
        self._due_at, self._is_held = min(max(self._due_at, now + for_s), self._first_at + GATHER_AT_MOST_S), True

    def due_at(self) -> float | None:
        """Return when the report is due, or None if there is nothing to report."""
        return self._due_at if self._is_held else None

    def take(self) -> list[list[WorkerExit]]:
        """Remove and return all ends in order of arrival, grouped by the processes that ended alike."""
        unsaid, self._unsaid, self._is_held = self._unsaid, [], False
        return alike(unsaid)


def alike(ends: Sequence[WorkerExit]) -> list[list[WorkerExit]]:
    """Group the processes that one sentence can describe, in order of each group's first end."""
    groups: dict[tuple[bool, str, str], list[WorkerExit]] = {}
    for end in ends:
        groups.setdefault((end.is_spare, end.words, end.follows), []).append(end)
    return list(groups.values())


def sentences(ends: Sequence[WorkerExit]) -> str:
    """Return one sentence for each way in which processes ended, at most ``MOST_WAYS``."""
    found = alike([replace(end, follows="") for end in ends])
    more = sum(map(len, found[MOST_WAYS:]))
    return "; ".join([*map(sentence, found[:MOST_WAYS]), *([f"{more} more ended in other ways"] if more else [])])


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How the job ended; ``kind`` is None if it finished."""

    kind: EndKind | None
    cause: str
    exit_code: int

    @property
    def words(self) -> str:
        """The outcome as the predicate of a sentence about the job."""
        assert self.kind is not None, "it is unfinished"
        return self.kind.words_with(self.exit_code)

    @property
    def is_permanent(self) -> bool:
        """Whether a process ended the job with a SameBits exit code, which then is also the job's."""
        return self.kind is not None and self.kind.is_permanent(self.exit_code)

    @classmethod
    def unfinished(cls, kind: EndKind, cause: str, status: int = 0) -> JobOutcome:
        """Return the outcome of an unfinished job.

        If ``status``, the script's exit status, is given, it is also the job's exit code.
        """
        return cls(kind, cause, status or kind.exit_code)


FINISHED = JobOutcome(None, "", 0)


def verdict_of(given_up: GivenUp) -> JobOutcome:
    """Return the outcome of a job that ends because one of its processes is not restarted."""
    dead, cause = given_up.dead, f"{given_up.dead.said}; {given_up.why}"
    match dead.loss.sort:
        case Sort.HOPELESS if dead.status is not None:
            return JobOutcome(EndKind.INTERRUPTED, dead.said, dead.status)
        case Sort.OWN | Sort.ARGUMENTS:
            return JobOutcome.unfinished(EndKind.SCRIPT_FAILED, cause)
        case _:
            return JobOutcome.unfinished(EndKind.INTERRUPTED, cause)


def verdict_of_all(ends: Sequence[WorkerExit], view: JobView | None, *, is_trained: bool = False) -> JobOutcome | None:
    """Return the outcome if all workers ran on this machine and each was ended by its own program, otherwise None.

    Args:
        ends: the ends of this machine's workers and spares, none of which is still running.
        view: the last known state of the job.
        is_trained: whether training is finished; the exit code is then the script's own.
    """
    workers = [end for end in ends if not end.is_spare and not (is_trained and has_no_slot(end, view))]
    if view is None or view.alive or len(workers) < max(view.wanted_size, 1) or not all(end.is_own for end in ends):
        return None
    if all(end.is_stranger for end in workers):
        return JobOutcome.unfinished(EndKind.UNTRAINED, sentence(workers))
    failed = next((end for end in workers if end.is_failure), None) or next(e for e in workers if not e.is_stranger)
    text = sentences(sorted(workers, key=lambda end: end.words != failed.words))
    status = failed.death.status
    if is_trained:
        return JobOutcome.unfinished(EndKind.SCRIPT_FAILED, text, status or 0)
    if status is not None and failed.has_own_advice:
        return None if view.workers else JobOutcome(EndKind.INTERRUPTED, text, status)
    return JobOutcome.unfinished(EndKind.SCRIPT_FAILED, text)
