"""Which fault, on whom, and when: drawn from a seed, so that a drill can be had again.

Only the drawing lives here, a function of its arguments. The one idea: a target is drawn as a number and becomes a
process when the fault is due, since nobody knows before who the members will be then.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import UsageError


class Fault(enum.StrEnum):
    """What is done to the job, by signals alone."""

    KILL = "kill"  # SIGKILL to a worker
    SEGFAULT = "segfault"  # SIGSEGV to a worker
    STOP = "stop"  # SIGSTOP to a worker until it is lost
    PAUSE = "pause"  # SIGSTOP to a worker for less than its lease: nobody may be lost
    SCHEDULER = "scheduler"  # SIGKILL to the scheduler
    ALL = "all"  # SIGKILL to every worker at once
    EVERYTHING = "everything"  # and to the scheduler as well

    @property
    def text(self) -> str:
        """What it does, for people."""
        return {
            Fault.KILL: "kill -9 of a worker",
            Fault.SEGFAULT: "SIGSEGV to a worker",
            Fault.STOP: "SIGSTOP to a worker until it is lost",
            Fault.PAUSE: "SIGSTOP to a worker for a second",
            Fault.SCHEDULER: "kill -9 of the scheduler",
            Fault.ALL: "kill -9 of every worker",
            Fault.EVERYTHING: "kill -9 of every worker and the scheduler",
        }[self]


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault: ``after_s`` seconds of training after the one before, on the member that ``draw`` in [0, 1) picks."""

    fault: Fault
    after_s: float
    draw: float

    def pick(self, members: Sequence[str]) -> str:
        """Whose turn it is among these."""
        return members[int(self.draw * len(members))]


def faults_of(text: str) -> list[Fault]:
    """The faults of ``kill,stop``.

    Raises:
        UsageError: one of them is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in set(map(str, Fault))]
    if unknown or not names:
        raise UsageError(f"--faults {text}: expected some of {','.join(Fault)}. Fix: --faults kill,scheduler")
    return [Fault(name) for name in names]


def drawn(faults: Sequence[Fault], count: int, every_s: float, seed: int) -> list[Planned]:
    """``count`` faults, each kind as often as the others, in an order and at times that the seed decides."""
    rng = random.Random(seed)
    kinds = [faults[number % len(faults)] for number in range(count)]
    rng.shuffle(kinds)
    return [Planned(kind, round(every_s * rng.uniform(0.5, 1.5), 3), rng.random()) for kind in kinds]
