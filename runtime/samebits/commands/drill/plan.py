"""Choose a drill's faults, their steps and their targets from a seed, so that a drill can be repeated.

A step is chosen as a fraction of the undisturbed job's steps, and a target as a number, because neither the job's
length nor its members at that step are known in advance. The results of a job name the planned faults.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.account.events import JobEvent
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


# ---- the results of one job of a drill


@dataclass(slots=True)
class Injected:
    """A fault that was injected after a step, and what was done.

    ``recovered_s`` is the time in seconds until every member trained again, or, after a fault that interrupted no
    member (``trained_on``), until a scheduler answered again; None if this never happened.
    """

    fault: DrillFault
    node: str
    step: int
    at: float
    recovered_s: float | None = None
    did: str = ""
    trained_on: bool = False

    def plain(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "fault": str(self.fault)}

    def __str__(self) -> str:
        if self.recovered_s is None:
            after = "the job did not train again"
        elif self.trained_on or not self.recovered_s:
            after = "the ranks trained on"
            after += f"; a scheduler answered again after {self.recovered_s:.1f} s" if self.recovered_s else ""
        else:
            after = f"all ranks trained again after {self.recovered_s:.1f} s"
        return f"{self.fault}, after step {self.step}: {self.did}; {after}"


@dataclass(frozen=True, slots=True)
class NotInjected:
    """A planned fault that was not injected, and the reason."""

    fault: DrillFault
    why: str

    def __str__(self) -> str:
        return f"{self.fault}: not given: {self.why}"


@dataclass(slots=True)
class DrillOutcome:
    """How one job of the drill went. ``problem`` is empty if it finished.

    ``damaged`` are checkpoints in which the drill has changed a bit. ``said`` has the workers' warnings. ``seen_s`` is
    the time from the first to the last event by the drill's own clock (None: there was no event). ``retaken`` is the
    message about a step whose result differed when the step was repeated.
    """

    events: list[JobEvent] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    not_injected: list[NotInjected] = field(default_factory=list)
    damaged: set[Path] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    seen_s: float | None = None
    problem: str = ""
    retaken: str = ""

    @property
    def last_step(self) -> int:
        """The step at which the job ended, or 0 if it committed none."""
        return max((event.step for event in self.events), default=0)

    def add(self, one: Injected | NotInjected) -> None:
        """Record the outcome of a planned fault."""
        if isinstance(one, Injected):
            self.injected.append(one)
        else:
            self.not_injected.append(one)
