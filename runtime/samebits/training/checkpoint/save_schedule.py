"""When a rank saves and when it is compared: at the same steps as every other rank.

Fixed steps need no communication. By the clock, the ranks *meet* at steps that all of them know, where rank 0's clock
decides for all whether this is a save and where they meet next. The first meeting of a generation is the first commit
after its restore point, whatever was agreed before. Survivors, some of which may have heard an answer that others have
not, and newcomers therefore always agree on whether to meet; otherwise some would enter a collective alone.

The interval follows Young (J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9),
1974). The cost of saving and of redone steps is least at the square root of twice the cost of a save times the mean
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
"""Two numbers of rank 0 on every rank: a collective, to which the other ranks give any two."""

RECENT_STEPS = 64
RECENT_SAVES = 5
SLOWER = 1.1
"""A step behind a save is slowed by it while it takes this much longer than the usual one."""
WORTH_SAYING = 1.2


def due_by(config: CheckpointConfig, agree: Agree) -> Due:
    """The rhythm that the config asks for."""
    steps = config.save_checkpoint_steps
    if isinstance(steps, int) and steps > 0:
        return FixedSteps(steps)
    return Timed(None if steps == AUTO else float(config.save_checkpoint_seconds), agree)


class Due(ABC):
    """When one rank saves; asked at every commit, on all ranks at the same steps."""

    @abstractmethod
    def begins(self, step: int, generation: GenerationStarted) -> None:
        """A generation begins at this step, the same on all its ranks."""

    @abstractmethod
    def is_at(self, step: int) -> bool:
        """Whether to save at this commit: the same answer on every rank. May be a collective."""

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save, to learn what it costs."""
        yield

    def contents(self) -> dict[str, Any]:
        """What goes with the state, so that who takes it need not learn it again."""
        return {}

    def become(self, contents: Mapping[str, Any]) -> None:  # noqa: B027 - nothing to take is the usual case
        """Take what came with a state; another rhythm's, or none, changes nothing."""


class FixedSteps(Due):
    """Every so many steps: by the step alone, so that the ranks agree without a word."""

    def __init__(self, steps: int) -> None:
        self._interval = steps
        self._last = 0

    def begins(self, step: int, generation: GenerationStarted) -> None:
        """A generation begins at this step."""
        self._last = step

    def is_at(self, step: int) -> bool:
        """Whether a multiple of the interval was reached since the last point."""
        is_due = step // self._interval > self._last // self._interval
        if is_due:
            self._last = step
        return is_due


class Timed(Due):
    """Every so many seconds of training, or as often as pays.

    Args:
        seconds: between two points; None: chosen from what is measured.
        agree: how rank 0's decision reaches the others.
        clock: monotonic seconds.
        say: where the choice and its reason are said.
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
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)  # seconds, and how many steps they were
        self._costs: deque[float] = deque(maxlen=RECENT_SAVES)
        self._open_cost: float | None = None  # of the last save, while it may still be slowing steps

    def begins(self, step: int, generation: GenerationStarted) -> None:
        """A generation begins; what it took to get here is no training. They meet at the first commit behind."""
        self._rank, self._world_size = generation.rank, generation.world_size
        self._failures = generation.generation - 1  # a member that came or left by itself counts as well
        self._step, self._at_s = step, self._clock()
        self._meets_at = step + 1
        self._settle_cost()

    def is_at(self, step: int) -> bool:
        """Whether rank 0 says so, where this is a step to meet at."""
        self._took(step)
        if step < self._meets_at:
            return False
        saves, self._meets_at = self._agree(self._decide(step) if self._rank == 0 else (0, 0))
        if saves:
            self._since_save_s = 0.0
        return bool(saves)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Time the save; the steps right behind it tell the rest of its cost."""
        began_s = self._clock()
        yield
        self._at_s = self._clock()
        self._watched_s += self._at_s - began_s
        self._settle_cost()
        self._open_cost = self._at_s - began_s

    def contents(self) -> dict[str, Any]:
        """The job's age, how long ago the last point was, and what one costs."""
        costs = [*self._costs, *([] if self._open_cost is None else [self._open_cost])]
        return {"watched_s": self._watched_s, "since_save_s": self._since_save_s, "costs_s": costs}

    def become(self, contents: Mapping[str, Any]) -> None:
        """Take what rank 0 would need, should this rank be the next one."""
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
        saves = left_s < step_s / 2  # now is nearer to it than the next step
        if saves:
            left_s = choice.interval_s
            self._tell(choice, step_s)
        return int(saves), step + steps_to_next_look(left_s, step_s)

    def _choice(self, step_s: float) -> Choice:
        if self._seconds is not None:
            return Choice(self._seconds, text_of_seconds(self._seconds, step_s))
        cost_s = self._cost_s()
        if cost_s is None:
            return Choice(MIN_INTERVAL_S, "")  # soon, to learn what a save costs
        return choose(
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
        """The step, or the steps, since the last commit."""
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
"""One failure in 50,000 hours of one process is assumed before this job has shown any, and weighs as much as one.

419 unexpected interruptions in 54 days on 16,384 GPUs, one every 3.1 h ("The Llama 3 Herd of Models", 2024, section
3.3.4), are one in 50,700 h for each of them.
"""
MIN_INTERVAL_S = 5.0
"""Below it a recovery itself (imports, a new group) takes longer than what saving more often would spare."""
MAX_INTERVAL_S = 3600.0
"""Above it more would hang on the assumed failure rate than an hour of saving less could be worth."""
FURTHEST_LOOK_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Choice:
    """An interval in seconds of training, and the sentence that says why."""

    interval_s: float
    text: str


def mean_time_between_failures_s(world_size: int, failures: int, watched_s: float) -> float:
    """The expectation once ``failures`` were seen in ``watched_s`` seconds: a gamma prior worth one failure.

    Args:
        world_size: processes, any of which may fail.
        failures: seen so far.
        watched_s: for how long.
    """
    return (PRIOR_MTBF_OF_A_PROCESS_S / world_size + watched_s) / (1 + failures)


def choose(*, cost_s: float, step_s: float, world_size: int, failures: int, watched_s: float) -> Choice:
    """When to save, where the user leaves it to us.

    Args:
        cost_s: what a save took from training: the time it blocked and what it slowed the steps behind it.
        step_s: of one step, for the sentence alone.
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
    """The sentence where the user has given the seconds."""
    return (
        f"saves every {_steps(interval_s, step_s)} ({spoken(interval_s)}, save_checkpoint_seconds): a step takes "
        f"{step_s:.2g} s"
    )


def steps_to_next_look(left_s: float, step_s: float) -> int:
    """After how many steps to look at the clock again: at half of the way, so that slower steps are noticed in time.

    Args:
        left_s: until a point is due.
        step_s: of one step, as far as is known.
    """
    if step_s <= 0 or left_s <= step_s:
        return 1
    return max(1, int(min(left_s / step_s / 2, FURTHEST_LOOK_STEPS)))


def spoken(seconds: float) -> str:
    """A duration for people, in the unit that fits."""
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
"""Of training, a comparison may cost so much with ``auto``."""
OFTENEST, SELDOMEST = 10, 1000


def comparisons_by(every: int | str, agree: Agree) -> Comparisons:
    """The rhythm that CONSISTENCY_EVERY asks for."""
    return Measured(agree) if every == AUTO else Comparisons(int(every))


class Comparisons:
    """Every so many steps: at its multiples; 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._next = 1

    def begins(self, step: int, *, leads: bool) -> None:
        """A generation begins at this step; ``leads``: as rank 0."""
        self._next = step + 1

    def is_at(self, step: int) -> bool:
        """Whether to compare at this commit: the same answer on every rank. May be a collective."""
        if not self._every or step < self._next:
            return False
        self._next = self._after(step)
        return True

    def _after(self, step: int) -> int:
        return (step // self._every + 1) * self._every

    def took(self, seconds: float) -> None:
        """So long one has kept the training's thread, and the one that hashes."""


class Measured(Comparisons):
    """So often that it costs ``SHARE`` of training at most, as rank 0 measures it.

    Args:
        agree: how rank 0's decision reaches the others.
        clock: monotonic seconds.
    """

    def __init__(self, agree: Agree, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(OFTENEST)
        self._agree = agree
        self._clock = clock
        self._leads = False
        self._cost_s = 0.0  # of the last one
        self._since = (0, clock())  # the step of the last one, and when

    def begins(self, step: int, *, leads: bool) -> None:
        """As :meth:`Comparisons.begins`."""
        super().begins(step, leads=leads)
        self._leads, self._since = leads, (step, self._clock())

    def took(self, seconds: float) -> None:
        """As :meth:`Comparisons.took`."""
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
