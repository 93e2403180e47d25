"""Which fault, on whom, and when: drawn from a seed, so that a drill can be had again.

Only the drawing and the names live here; how a fault is given is ``faults``'. The one idea: a target is drawn as a
number and becomes a process when the fault is due, since nobody knows before who the members will be then.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from samebits.errors import UsageError


class Notice(enum.Enum):
    """What the job's events must show after a fault before the next one may come."""

    LOSS = "a member is lost"
    TERM = "a scheduler starts"
    NOTHING = "nobody may be lost: it trains on"
    END = "the job ends with its cause"


class Fault(enum.StrEnum):
    """What is done to the job."""

    KILL = "kill"
    SEGFAULT = "segfault"
    STOP = "stop"
    PAUSE = "pause"
    SLOW_RANK = "slow-rank"
    HELD_GIL = "held-gil"
    OOM = "oom"
    HOST = "host"
    SCHEDULER = "scheduler"
    ALL = "all"
    EVERYTHING = "everything"
    PARTITION = "partition"
    DISK_FULL = "disk-full"
    CLOCK_JUMP = "clock-jump"
    BITFLIP = "bitflip"
    BITFLIP_MEMORY = "bitflip-memory"

    @property
    def text(self) -> str:
        """What it does, for people."""
        return _FAULTS[self][0]

    @property
    def notice(self) -> Notice:
        """By what the job shows that it has met it."""
        return _FAULTS[self][1]


_FAULTS = {
    Fault.KILL: ("kill -9 of a worker", Notice.LOSS),
    Fault.SEGFAULT: ("SIGSEGV to a worker", Notice.LOSS),
    Fault.STOP: ("SIGSTOP to a worker until it is lost", Notice.LOSS),
    Fault.PAUSE: ("SIGSTOP to a worker for a second", Notice.NOTHING),
    Fault.SLOW_RANK: ("a worker runs a quarter of the time for five seconds", Notice.NOTHING),
    Fault.HELD_GIL: ("a worker's interpreter is held by C code until it is lost", Notice.LOSS),
    Fault.OOM: ("a worker takes all the memory it may have", Notice.LOSS),
    Fault.HOST: ("kill -9 of half of the ranks, and their memory is gone", Notice.LOSS),
    Fault.SCHEDULER: ("kill -9 of the scheduler", Notice.TERM),
    Fault.ALL: ("kill -9 of every worker", Notice.LOSS),
    Fault.EVERYTHING: ("kill -9 of every worker and the scheduler", Notice.TERM),
    Fault.PARTITION: ("a worker and the scheduler do not hear each other until it is lost", Notice.LOSS),
    Fault.DISK_FULL: ("the checkpoints' disk takes no byte until a save has failed", Notice.NOTHING),
    Fault.CLOCK_JUMP: ("the wall clock is an hour off for three seconds", Notice.NOTHING),
    Fault.BITFLIP: ("a bit of a stored checkpoint, then kill -9 of everything and its memory is gone", Notice.TERM),
    Fault.BITFLIP_MEMORY: ("a bit of a parameter in one replica", Notice.END),
}


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


def host_of(members: Sequence[str], draw: float) -> list[str]:
    """The members that are taken for one host: the first or the second half of them."""
    half = (len(members) + 1) // 2
    return list(members[:half] if draw < 0.5 or len(members) == 1 else members[half:])
