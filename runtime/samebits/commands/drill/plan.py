"""Choose a drill's faults, their steps and their targets from a seed, so that a drill can be repeated.

A step is chosen as a fraction of the undisturbed job's steps, and a target as a number, because neither the job's
length nor its members at that step are known in advance.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from samebits.errors import UsageError


class AwaitedEvent(enum.Enum):
    """What a job's events must show after a fault before the next fault is due."""

    LOSS = "a member is lost"
    TERM = "a scheduler starts"
    NOTHING = "no worker may be lost: training continues"
    END = "the job ends with its cause, or returns to an earlier step"


class DrillFault(enum.StrEnum):
    """The faults of a drill."""

    KILL = "kill"
    SEGFAULT = "segfault"
    ABORT = "abort"
    TERMINATE = "terminate"
    INTERRUPT = "interrupt"
    EXCEPTION = "exception"
    ASYNC_EXCEPTION = "async-exception"
    HANG = "hang"
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
    DISK_ERROR = "disk-error"
    CLOCK_JUMP = "clock-jump"
    BITFLIP = "bitflip"
    TRUNCATED = "truncated"
    MISSING = "missing"
    BITFLIP_MEMORY = "bitflip-memory"
    BITFLIP_GRADIENT = "bitflip-gradient"
    STALE_MEMORY = "stale-memory"
    DRIFT = "drift"
    UNREDUCED = "unreduced"
    DESYNC = "desync"

    @property
    def text(self) -> str:
        """The fault's description for people."""
        return _FAULTS[self][0]

    @property
    def notice(self) -> AwaitedEvent:
        """The events that show that the job has been affected by the fault."""
        return _FAULTS[self][1]

    @property
    def needs_steps(self) -> bool:
        """Whether the fault affects the job only in later steps.

        No rank may then wait for the next fault before these steps.
        """
        return self in _MET_LATER


_FAULTS = {
    DrillFault.KILL: ("kill -9 of a worker", AwaitedEvent.LOSS),
    DrillFault.SEGFAULT: ("SIGSEGV to a worker", AwaitedEvent.LOSS),
    DrillFault.ABORT: ("SIGABRT to a worker", AwaitedEvent.LOSS),
    DrillFault.TERMINATE: ("SIGTERM to a worker", AwaitedEvent.LOSS),
    DrillFault.INTERRUPT: ("SIGINT to a worker, which ignores it", AwaitedEvent.NOTHING),
    DrillFault.EXCEPTION: ("a worker's script raises an exception", AwaitedEvent.LOSS),
    DrillFault.ASYNC_EXCEPTION: ("another thread raises an exception in a worker's script", AwaitedEvent.LOSS),
    DrillFault.HANG: ("a worker's main thread sleeps until it is lost", AwaitedEvent.LOSS),
    DrillFault.STOP: ("SIGSTOP to a worker until it is lost", AwaitedEvent.LOSS),
    DrillFault.PAUSE: ("SIGSTOP to a worker for a second", AwaitedEvent.NOTHING),
    DrillFault.SLOW_RANK: ("a worker runs a quarter of the time for five seconds", AwaitedEvent.NOTHING),
    DrillFault.HELD_GIL: ("a worker's interpreter is held by C code until it is lost", AwaitedEvent.LOSS),
    DrillFault.OOM: ("a worker takes all the memory it may have", AwaitedEvent.LOSS),
    DrillFault.HOST: ("kill -9 of half of the ranks, and their memory is gone", AwaitedEvent.LOSS),
    DrillFault.SCHEDULER: ("kill -9 of the scheduler", AwaitedEvent.TERM),
    DrillFault.ALL: ("kill -9 of every worker", AwaitedEvent.LOSS),
    DrillFault.EVERYTHING: ("kill -9 of every worker and the scheduler", AwaitedEvent.TERM),
    DrillFault.PARTITION: (
        "the connection between a worker and the scheduler is cut until the worker is lost",
        AwaitedEvent.LOSS,
    ),
    DrillFault.DISK_FULL: ("the checkpoints' disk takes no byte until a save has failed", AwaitedEvent.NOTHING),
    DrillFault.DISK_ERROR: ("the checkpoints' disk fails until a save has failed", AwaitedEvent.NOTHING),
    DrillFault.CLOCK_JUMP: ("the wall clock is an hour off for three seconds", AwaitedEvent.NOTHING),
    DrillFault.BITFLIP: (
        "a bit of a stored checkpoint, then kill -9 of everything and its memory is gone",
        AwaitedEvent.TERM,
    ),
    DrillFault.TRUNCATED: (
        "a stored checkpoint loses its second half after kill -9 of everything and its memory is gone",
        AwaitedEvent.TERM,
    ),
    DrillFault.MISSING: (
        "a stored checkpoint is removed after kill -9 of everything and its memory is gone",
        AwaitedEvent.TERM,
    ),
    DrillFault.BITFLIP_MEMORY: ("a bit of a parameter in one replica", AwaitedEvent.END),
    DrillFault.BITFLIP_GRADIENT: ("a bit of a reduced gradient in one replica", AwaitedEvent.END),
    DrillFault.STALE_MEMORY: ("a parameter in one replica returns to an older value", AwaitedEvent.END),
    DrillFault.DRIFT: ("one replica's learning rate changes", AwaitedEvent.END),
    DrillFault.UNREDUCED: ("one replica does not reduce its gradients in one step", AwaitedEvent.END),
    DrillFault.DESYNC: ("one rank enters a collective that no other rank enters", AwaitedEvent.LOSS),
}
_MET_LATER = {DrillFault.DISK_FULL, DrillFault.DISK_ERROR, DrillFault.DESYNC} | {
    fault for fault, (_, notice) in _FAULTS.items() if notice is AwaitedEvent.END
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault that is due after the fraction ``share`` of the job's steps.

    ``draw`` selects the member; both are in [0, 1). The fault occurs within the next step, after the fraction
    ``moment`` of an average step's time.
    """

    fault: DrillFault
    share: float
    draw: float
    moment: float = 0.0

    def pick(self, members: Sequence[str]) -> str:
        """Return the member that the fault strikes."""
        return members[int(self.draw * len(members))]


def faults_of(text: str) -> list[DrillFault]:
    """Parse a list of faults such as ``kill,stop``.

    Raises:
        UsageError: a name is not a fault.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in set(map(str, DrillFault))]
    if unknown or not names:
        raise UsageError(f"--faults {text}: expected some of {','.join(DrillFault)}. Fix: --faults kill,scheduler")
    return [DrillFault(name) for name in names]


def drawn(faults: Sequence[DrillFault], count: int, seed: int) -> list[Planned]:
    """Choose ``count`` faults, each kind equally often, spread over the job in an order that depends on the seed."""
    rng = random.Random(seed)
    kinds = [faults[number % len(faults)] for number in range(count)]
    rng.shuffle(kinds)
    return [
        Planned(kind, (number + rng.uniform(0.25, 0.75)) / count, rng.random(), rng.random())
        for number, kind in enumerate(kinds)
    ]


def steps_of(plan: Sequence[Planned], last_step: int) -> list[int]:
    """Return each fault's step in a job that ends at ``last_step``: increasing, and all before the last step.

    Raises:
        UsageError: the job is too short for this many faults.
    """
    if last_step <= len(plan):
        raise UsageError(
            f"the script ends at step {last_step}, too early for --kills {len(plan)}: every fault needs a step of its "
            f"own before the last. Fix: train for 60 steps or more, or drill with --kills {max(0, last_step - 1)}"
        )
    steps: list[int] = []
    for number, one in enumerate(plan):
        latest = last_step - (len(plan) - number)
        step = 1 + int(one.share * (last_step - 1))
        steps.append(max(steps[-1] + 1 if steps else 1, min(step, latest)))
    return steps


def host_of(members: Sequence[str], draw: float) -> list[str]:
    """Return the members that represent one host: the first or the second half."""
    half = (len(members) + 1) // 2
    return list(members[:half] if draw < 0.5 or len(members) == 1 else members[half:])
