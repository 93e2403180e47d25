"""Decide when a rank saves and when it is compared: at the same steps on every rank.

Fixed steps need no communication. With an interval in seconds, the ranks *meet* at steps that all of them know: rank
0's clock decides for all whether to save and where to meet next. The first meeting of a generation is always the first
commit after its restore point, whatever was agreed before. So all ranks agree on whether to meet: newcomers, and
survivors of which only some may have received the last answer. Otherwise some would enter a collective alone.

The interval follows Young (J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9),
1974). The cost of saves and repeated steps is lowest at the square root of twice the cost of a save times the mean
time between failures. (J. T. Daly, FGCS 22(3), 2006, refines it for saves that cost a good part of that time.)
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from samebits.core.messages import GenerationStarted
from samebits.service import log
from samebits.training.state.checkpoint_config import AUTO, CheckpointConfig

Agree: TypeAlias = Callable[[tuple[int, int]], tuple[int, int]]
"""A collective that returns rank 0's two numbers on every rank; the other ranks' arguments are ignored."""

RECENT_STEPS = 64
RECENT_SAVES = 5
SLOWER = 1.1
"""Steps after a save count as slowed by it while they take at least this many times the usual duration."""
WORTH_SAYING = 1.2


def due_by(config: CheckpointConfig, agree: Agree) -> Due:
    """Return the save schedule for this configuration."""
    steps = config.save_checkpoint_steps
    if isinstance(steps, int) and steps > 0:
        return FixedSteps(steps)
    return Timed(None if steps == AUTO else float(config.save_checkpoint_seconds), agree)


class Due(ABC):
    """A rank's save schedule, which is asked at every commit, on all ranks at the same steps."""

    @abstractmethod
    def begins(self, step: int, generation: GenerationStarted) -> None:
        """Begin a generation at this step, which is the same on all its ranks."""

    @abstractmethod
    def is_at(self, step: int) -> bool:
        """Return whether to save at this commit. All ranks get the same answer. May be a collective."""

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager that measures the cost of a save."""
        yield

    def contents(self) -> dict[str, Any]:
        """Return measurements to save with the state, so that a later process need not repeat them."""
        return {}

    def become(self, contents: Mapping[str, Any]) -> None:  # noqa: B027 - nothing to take is the usual case
        """Load measurements that were saved with a state. Those of a different kind of schedule are ignored."""


class FixedSteps(Due):
    """A schedule with a fixed number of steps, on which ranks agree without communication."""

    def __init__(self, steps: int) -> None:
        self._interval = steps
        self._last = 0

    def begins(self, step: int, generation: GenerationStarted) -> None:
        """Begin a generation at this step."""
        self._last = step

    def is_at(self, step: int) -> bool:
        """Return whether the last point is so old that a multiple of the interval has been reached since."""
        is_due = step // self._interval > self._last // self._interval
        if is_due:
            self._last = step
        return is_due


class Timed(Due):
    """A schedule with an interval of training time, which is set by the user or measured.

    Args:
        seconds: seconds between two points; None: chosen from measurements.
        agree: distributes rank 0's decision to the others.
        clock: monotonic seconds.
        say: logs the choice and its reason.
    """

    def __init__(
        self,
        seconds: float | None,
        agree: Agree,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = log.say,
    ) -> None:
        self._seconds = seconds
        self._agree = agree
        self._clock = clock
        self._say = say
        self._said_steps = 0.0
        self._rank, self._world_size, self._failures = 0, 1, 0
        self._meets_at = 0
        self._step, self._at_s = 0, clock()  # the last commit
        self._watched_s = 0.0
        self._since_save_s = 0.0
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)  # seconds, and the steps done in them
        self._costs: deque[float] = deque(maxlen=RECENT_SAVES)
        self._open_cost: float | None = None  # cost of the last save, while it may still slow steps

    def begins(self, step: int, generation: GenerationStarted) -> None:
        """Begin a generation; the ranks meet at its first commit.

        Time spent on recovery does not count as training.
        """
        self._rank, self._world_size = generation.rank, generation.world_size
        self._failures = generation.generation - 1  # voluntary departures and arrivals count as well
        self._step, self._at_s = step, self._clock()
        self._meets_at = step + 1
        self._settle_cost()

    def is_at(self, step: int) -> bool:
        """Return rank 0's decision if the ranks meet at this step, otherwise False."""
        self._took(step)
        if step < self._meets_at:
            return False
        saves, self._meets_at = self._agree(self._decide(step) if self._rank == 0 else (0, 0))
        if saves:
            self._since_save_s = 0.0
        return bool(saves)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a save. If the steps after it are slower, that adds to its cost."""
        began_s = self._clock()
        yield
        self._at_s = self._clock()
        self._watched_s += self._at_s - began_s
        self._settle_cost()
        self._open_cost = self._at_s - began_s

    def contents(self) -> dict[str, Any]:
        """Return the job's age, the time since the last point, and the measured costs of saves, in seconds."""
        costs = [*self._costs, *([] if self._open_cost is None else [self._open_cost])]
        return {"watched_s": self._watched_s, "since_save_s": self._since_save_s, "costs_s": costs}

    def become(self, contents: Mapping[str, Any]) -> None:
        """Load the measurements, in case this rank becomes rank 0."""
        if contents.keys() == self.contents().keys():
            self._watched_s = contents["watched_s"]
            self._since_save_s = contents["since_save_s"]
            self._costs = deque(contents["costs_s"], maxlen=RECENT_SAVES)
            self._open_cost = None

    # ---- what rank 0 decides

    def _decide(self, step: int) -> tuple[int, int]:
        step_s = self._step_s()
        choice = self._choice(step_s)
        left_s = choice.interval_s - self._since_save_s
        saves = left_s < step_s / 2  # this step is closer to the due time than the next one
        if saves:
            left_s = choice.interval_s
            self._tell(choice, step_s)
        return int(saves), step + steps_to_next_look(left_s, step_s)

    def _choice(self, step_s: float) -> Choice:
        if self._seconds is not None:
            return Choice(self._seconds, text_of_seconds(self._seconds, step_s))
        cost_s = self._cost_s()
        if cost_s is None:
            return Choice(MIN_INTERVAL_S, "")  # early, to measure the cost of a save
        return choose_save_interval(
            cost_s=cost_s,
            step_s=step_s,
            world_size=self._world_size,
            failures=self._failures,
            watched_s=self._watched_s,
        )

    def _tell(self, choice: Choice, step_s: float) -> None:
        steps = choice.interval_s / max(step_s, 1e-9)
        has_changed = not self._said_steps / WORTH_SAYING <= steps <= self._said_steps * WORTH_SAYING
        if choice.text and has_changed:
            self._said_steps = steps
            self._say(choice.text)

    # ---- what every rank measures

    def _took(self, step: int) -> None:
        """Account for the time of the steps since the last commit."""
        now_s = self._clock()
        took_s, steps = now_s - self._at_s, step - self._step
        self._step, self._at_s = step, now_s
        self._watched_s += took_s
        self._since_save_s += took_s
        if steps > 0:
            self._add_slowdown(took_s, steps)
            self._recent.append((took_s, steps))

    def _add_slowdown(self, took_s: float, steps: int) -> None:
        if self._open_cost is None:
            return
        usual_s = statistics.median(one / of for one, of in self._recent) if self._recent else took_s
        if took_s > SLOWER * usual_s * steps:
            self._open_cost += took_s - usual_s * steps
        else:
            self._settle_cost()

    def _settle_cost(self) -> None:
        if self._open_cost is not None:
            self._costs.append(self._open_cost)
            self._open_cost = None

    def _cost_s(self) -> float | None:
        return statistics.median(self._costs) if self._costs else self._open_cost

    def _step_s(self) -> float:
        return sum(one for one, _ in self._recent) / max(1, sum(of for _, of in self._recent))


PRIOR_MTBF_OF_A_PROCESS_S = 50_000 * 3600.0
"""Prior for the failure rate of one process, weighted as one observed failure.

419 unexpected interruptions in 54 days on 16,384 GPUs, one every 3.1 h ("The Llama 3 Herd of Models", 2024, section
3.3.4), correspond to one in 50,700 h for each GPU.
"""
MIN_INTERVAL_S = 5.0
"""With shorter intervals, a recovery itself (imports, a new group) takes longer than the steps it saves."""
MAX_INTERVAL_S = 3600.0
"""With longer intervals, an error in the assumed failure rate costs more than the hourly save."""
FURTHEST_LOOK_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Choice:
    """An interval in seconds of training, and a sentence with the reason."""

    interval_s: float
    text: str


def mean_time_between_failures_s(world_size: int, failures: int, watched_s: float) -> float:
    """Return the expected time between failures in seconds.

    It is estimated with a gamma prior that counts as one failure, updated with the observations.

    Args:
        world_size: processes, any of which may fail.
        failures: observed so far.
        watched_s: length of the observation in seconds.
    """
    return (PRIOR_MTBF_OF_A_PROCESS_S / world_size + watched_s) / (1 + failures)


def choose_save_interval(*, cost_s: float, step_s: float, world_size: int, failures: int, watched_s: float) -> Choice:
    """Choose the interval between saves from these measurements.

    Args:
        cost_s: what a save costs training: the time it blocks, and the slowdown of the steps after it.
        step_s: duration of a step, used only in the sentence.
        world_size, failures, watched_s: as in :func:`mean_time_between_failures_s`.
    """
    mtbf_s = mean_time_between_failures_s(world_size, failures, watched_s)
    best_s = math.sqrt(2 * max(0.0, cost_s) * mtbf_s)
    interval_s = min(max(best_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
    bound = ""
    if interval_s != best_s:
        bound = f"; {'more' if best_s < interval_s else 'less'} often than every {spoken(interval_s)} does not pay"
    return Choice(
        interval_s,
        f"saves every {_steps(interval_s, step_s)} ({spoken(interval_s)}): a save costs {cost_s:.2g} s, a failure is "
        f"expected every {spoken(mtbf_s)} ({failures} seen in {spoken(watched_s)}){bound}",
    )


def text_of_seconds(interval_s: float, step_s: float) -> str:
    """Return a sentence about an interval that the user has set in seconds."""
    return (
        f"saves every {_steps(interval_s, step_s)} ({spoken(interval_s)}, save_checkpoint_seconds): a step takes "
        f"{step_s:.2g} s"
    )


def steps_to_next_look(left_s: float, step_s: float) -> int:
    """Return the number of steps until the clock is read again.

    This is half of the remaining time, so that slower steps are noticed early enough.

    Args:
        left_s: seconds until a point is due.
        step_s: measured duration of a step.
    """
    if step_s <= 0 or left_s <= step_s:
        return 1
    return max(1, int(min(left_s / step_s / 2, FURTHEST_LOOK_STEPS)))


def spoken(seconds: float) -> str:
    """Format a duration in the most readable unit."""
    if seconds < 1e-3:
        return "0 s"
    for limit_s, unit_s, unit in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit_s:
            return f"{seconds / unit_s:.{0 if seconds / unit_s >= 10 else 1}f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def _steps(interval_s: float, step_s: float) -> str:
    steps = max(1, round(interval_s / max(step_s, 1e-9)))
    return f"{steps} steps" if steps > 1 else "step"


SHARE = 0.01
"""Share of training time that comparisons may take with ``auto``."""
OFTENEST, SELDOMEST = 10, 1000


def comparisons_by(every: int | str, agree: Agree) -> Comparisons:
    """Return the schedule of comparisons for this CONSISTENCY setting."""
    return Measured(agree) if every == AUTO else Comparisons(int(every))


class Comparisons:
    """A schedule of comparisons at multiples of ``every`` steps; 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._next = 1

    @property
    def are_on(self) -> bool:
        """Whether ranks are compared between saves."""
        return self._every != 0

    def begins(self, step: int, *, leads: bool) -> None:
        """Begin a generation at this step; ``leads`` is true on rank 0."""
        self._next = step + 1

    def is_at(self, step: int) -> bool:
        """Return whether to compare at this commit. All ranks get the same answer. May be a collective."""
        if not self._every or step < self._next:
            return False
        self._next = self._after(step)
        return True

    def _after(self, step: int) -> int:
        return (step // self._every + 1) * self._every

    def took(self, seconds: float) -> None:
        """Record how many seconds one comparison took, in the training thread or the hashing thread."""


class Measured(Comparisons):
    """A schedule in which comparisons take at most ``SHARE`` of training time, as measured by rank 0.

    Args:
        agree: distributes rank 0's decision to the others.
        clock: monotonic seconds.
    """

    def __init__(self, agree: Agree, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(OFTENEST)
        self._agree = agree
        self._clock = clock
        self._leads = False
        self._cost_s = 0.0  # of the comparisons since the last decision
        self._since = (0, clock())  # step and time of the last decision

    def begins(self, step: int, *, leads: bool) -> None:
        """Begin a generation, as :meth:`Comparisons.begins` does."""
        super().begins(step, leads=leads)
        self._leads, self._since = leads, (step, self._clock())

    def took(self, seconds: float) -> None:
        """Record a cost, as :meth:`Comparisons.took` does."""
        self._cost_s += seconds

    def _after(self, step: int) -> int:
        at, (before, since) = self._clock(), self._since
        steps = OFTENEST
        if self._leads and step > before:
            step_s = max((at - since) / (step - before), 1e-9)
            steps = min(max(math.ceil(self._cost_s / (SHARE * step_s)), OFTENEST), SELDOMEST)
        self._since, self._cost_s = (step, at), 0.0
        _, following = self._agree((0, step + steps) if self._leads else (0, 0))
        return following
