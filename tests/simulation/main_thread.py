"""A worker's main thread as its control thread sees it: what holds it up, for how long, and what is reported of it.

This has the truth about held threads, and the model of what ``training.run.main_thread_probe`` reads from outside a
thread; the core judges it. A hold is a fault (it lasts until it is released, or forever) or a pause as on every busy
machine: three seconds at most, and never a cause for an alarm.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samebits.core.reports import Phase, Progress

if TYPE_CHECKING:
    from tests.simulation.worker import Worker

STILL_S = 2.0
FIRST_STEPS = 2
PAUSE_S = 3.0


class Kind(enum.Enum):
    """What holds a main thread; the phase it shows, and whether it uses no CPU."""

    SLEEPS = (Phase.USER, True)
    COMPUTES = (Phase.USER, False)
    LOADS = (Phase.DATA, True)
    COMPILES = (Phase.COMPILING, False)
    COMMITS = (Phase.COMMIT, True)
    APART = (Phase.COMMUNICATION, True)  # in a collective that the others never enter

    @property
    def is_in_collective(self) -> bool:
        """Return whether it notices that its group breaks."""
        return self is Kind.APART


ENDED_KINDS = (Kind.SLEEPS, Kind.COMPUTES, Kind.LOADS, Kind.COMPILES)
"""Those in which only the end of the process helps."""


@dataclass(frozen=True, slots=True)
class Hold:
    """How it is held, and since when, in true time."""

    kind: Kind
    since: float
    is_pause: bool = False


class MainThread:
    """The main thread of one worker.

    Attributes:
        hold: what holds it up; None if nothing does.
        must_break: its group was broken meanwhile, and it has not noticed.
        has_failed: a collective of it failed meanwhile.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.hold: Hold | None = None
        self.must_break = self.has_failed = False
        self.steps = 0
        self._moved_at = 0.0  # true time
        self._longest_s = 0.0
        self._last: Hold | None = None  # that is over
        self._let_go_at = 0.0

    def begin(self) -> None:
        """A generation trains."""
        self.steps, self._longest_s, self._moved_at = 0, 0.0, self._worker.world.now
        self.must_break = self.has_failed = False

    def steps_on(self) -> None:
        """One step is made."""
        now = self._worker.world.now
        if self.steps >= FIRST_STEPS:
            self._longest_s = max(self._longest_s, now - self._moved_at)
        self.steps += 1
        self._moved_at = now

    def grab(self, kind: Kind, *, is_pause: bool = False) -> None:
        """Hold the main thread, whose last collective has just ended."""
        self._moved_at = self._worker.world.now
        self.hold = Hold(kind, self._moved_at, is_pause)

    def let_go(self) -> None:
        """Let the main thread continue, into the collective in which the others wait or out of its group."""
        if self.hold is not None:
            self._moved_at = self._let_go_at = self._worker.world.now
            self._last, self.hold = self.hold, None

    def is_or_was_just(self, hold: Hold, within_s: float) -> bool:
        """Return whether this holds it up, or did until so long ago."""
        return self.hold is hold or (self._last is hold and self._worker.world.now - self._let_go_at < within_s)

    def was_astray_since(self, when: float) -> bool:
        """Return whether it is in a collective of its own, or was later than then."""
        last = self._last if self._let_go_at > when else None
        return any(one is not None and one.kind is Kind.APART for one in (self.hold, last))

    @property
    def notices_breaks(self) -> bool:
        """Return whether it is in a collective, or free to enter one."""
        return self.hold is None or self.hold.kind.is_in_collective

    def progress(self) -> Progress | None:
        """Return its position; None if it progresses, or has not stood for long."""
        worker, hold = self._worker, self.hold
        timeout_s = worker.world.policy.step_timeout_s
        still_s, longest_s = (worker.world.now - self._moved_at) * worker.rate, self._longest_s * worker.rate
        usual_s = max(STILL_S, longest_s)
        if still_s < (usual_s if timeout_s is None else min(usual_s, timeout_s / 2)):
            return None
        if hold is None:
            return Progress(Phase.COMMUNICATION, self.steps + 1, self.steps, still_s, longest_s, True, "all_reduce")
        phase, rests = hold.kind.value
        launched = self.steps + 2 * hold.kind.is_in_collective
        return Progress(phase, launched, self.steps, still_s, longest_s, rests, f"train.py:1 ({hold.kind.name})")
