"""When a rank saves: at fixed steps, or by the clock, and then at the same steps as every other rank.

Here live the two rhythms, and what the second one measures: steps, what a save takes from training, the job's age.
Never here: the arithmetic (``interval``), the save itself, bytes between ranks. The one idea of the second rhythm: the
ranks *meet* at steps that all of them know, where rank 0's clock decides for all whether this is a save and where they
meet next. The first meeting of a generation is the first commit behind its restore point, whatever was agreed before:
so survivors, of whom some may have heard an answer that others have not, and newcomers can never be of two minds about
whether to meet, which would leave some of them in a collective alone.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from samebits.core.messages import GenerationStarted
from samebits.service import log
from samebits.training.checkpoint import interval
from samebits.training.state.checkpoint_config import AUTO, CheckpointConfig

__all__ = ["Agree", "Due", "due_by"]

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
        return int(saves), step + interval.steps_to_next_look(left_s, step_s)

    def _choice(self, step_s: float) -> interval.Choice:
        if self._seconds is not None:
            return interval.Choice(self._seconds, interval.text_of_seconds(self._seconds, step_s))
        cost_s = self._cost_s()
        if cost_s is None:
            return interval.Choice(interval.MIN_INTERVAL_S, "")  # soon, to learn what a save costs
        return interval.choose(
            cost_s=cost_s,
            step_s=step_s,
            world_size=self._world_size,
            failures=self._failures,
            watched_s=self._watched_s,
        )

    def _tell(self, choice: interval.Choice, step_s: float) -> None:
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
