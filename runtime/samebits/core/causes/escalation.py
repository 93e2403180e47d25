"""Escalate restarts of a dead process: first in place, then its pod, then the whole job.

After a fixed number of failed attempts, the next level is tried. If a process has held its seat for a while, the level
was sufficient, so counting starts again at the lowest level.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from samebits.printable import counted

ATTEMPTS = 3
"""Attempts per level if RECOVER_STRATEGY gives no number."""
STEADY_S = 60.0
"""An attempt succeeded if its process has held its seat for this long."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 8.0
"""Seconds before the second attempt in place, doubled for each later one; the first is made at once."""


class RestartScope(Enum):
    """The unit that is restarted."""

    PROCESS = "process"
    POD = "pod"
    JOB = "job"


_LEVELS_OF_A_WORD = {
    "process": RestartScope.PROCESS,
    "retry": RestartScope.PROCESS,
    "recover": RestartScope.PROCESS,
    "recover-in-place": RestartScope.PROCESS,
    "pod": RestartScope.POD,
    "job": RestartScope.JOB,
    "exit": RestartScope.JOB,
    "dump": None,  # a worker saves its last commit in any case
    "elastic-training": None,  # MIN_WORKER_NUM decides what the others do meanwhile
}
STRATEGY_WORDS = tuple(_LEVELS_OF_A_WORD)


def levels_of(
    words: Mapping[str, int | None], *, process: bool | None = None, pod: bool | None = None
) -> dict[RestartScope, int]:
    """Return the levels of RECOVER_STRATEGY with their numbers of attempts, in the order in which they are tried.

    Args:
        words: from STRATEGY_WORDS, which include those of Ascend's ``recover-strategy``,
            with their attempts; None: three.
        process: PROCESS_RECOVER; None: not set.
        pod: POD_RESCHEDULING; None: not set.
    """
    attempts = {level: most for word, most in words.items() if (level := _LEVELS_OF_A_WORD[word]) is not None}
    wanted = set(attempts)
    for level, switch in ((RestartScope.PROCESS, process), (RestartScope.POD, pod)):
        if switch is not None:
            wanted = wanted | {level} if switch else wanted - {level}
    return {level: attempts.get(level) or ATTEMPTS for level in RestartScope if level in wanted}


@dataclass(frozen=True, slots=True)
class Tried:
    """The level that was tried last, and how often. Stored for as long as the pod exists."""

    level: RestartScope
    attempts: int

    def __str__(self) -> str:
        return f"{self.level.value} {self.attempts}"

    @classmethod
    def read(cls, text: str) -> Tried | None:
        """Parse the output of ``str()``, or return None if the text is anything else."""
        found = re.fullmatch(r"(process|pod|job) ([1-9][0-9]{0,5})", text.strip(), re.ASCII)
        return None if found is None else cls(RestartScope(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class EscalationStep:
    """The decision after a process has died. ``level`` is None if no level is left."""

    level: RestartScope | None
    attempt: int
    wait_s: float
    said: str


class Escalation:
    """The escalation of restarts for one worker's place in the job.

    Args:
        levels: the levels to try, lowest first, with the attempts of each.
        tried: state of an earlier start.
    """

    def __init__(self, levels: Mapping[RestartScope, int], tried: Tried | None = None) -> None:
        self._levels = tuple(levels)
        self._attempts = dict(levels)
        self.tried = tried if tried is not None and tried.level in self._levels else None

    def died(self, held_s: float) -> EscalationStep:
        """Decide on a restart after the process has died, having held its seat for ``held_s`` seconds."""
        in_vain = self.tried if held_s < STEADY_S else None
        level, attempt, spent = self._next(in_vain)
        if level is None:
            self.tried = in_vain
            return EscalationStep(
                None, 0, 0.0, f"no level is left: {self._spent(spent)}" if spent else "no level is to be tried"
            )
        self.tried = Tried(level, attempt)
        said = f"{level.value} level, attempt {attempt} of {self._attempts[level]}"
        wait_s = 0.0
        if level is RestartScope.PROCESS and attempt > 1:
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * float(2.0 ** min(attempt - 2, 10)))
        return EscalationStep(
            level, attempt, wait_s, f"{said}, as {self._spent(spent)}" if spent and attempt == 1 else said
        )

    def _next(self, in_vain: Tried | None) -> tuple[RestartScope | None, int, RestartScope | None]:
        """Return the next level, the number of the attempt, and the level that is exhausted, if any."""
        if in_vain is None:
            return (self._levels[0] if self._levels else None), 1, None
        if in_vain.attempts < self._attempts[in_vain.level]:
            return in_vain.level, in_vain.attempts + 1, None
        above = self._levels[self._levels.index(in_vain.level) + 1 :]
        return (above[0] if above else None), 1, in_vain.level

    def _spent(self, level: RestartScope) -> str:
        return f"{counted(self._attempts[level], 'attempt')} at the {level.value} level failed"
