"""The line that says how a job stands: its words, its figures, and what is left out where a terminal is narrow.

Formatting and the figures that need a history (steps a second, what is left, what recoveries cost) live here; the clock
is the caller's. The one idea: a part has a rank, and a line that does not fit loses its least important part first, so
that it never wraps.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samebits.ops.job_view import JobView

WINDOW_S = 120.0  # the pace is that of the last two minutes
_LEAST_S = 1.0  # of two looks that a pace is made of
_MOST_SAMPLES = 1000
_FEWEST_COLUMNS = 20


class Pace:
    """Steps a second over the last minutes of training, and how long recoveries have held it up.

    Only time in which the job trained counts; after a recovery the steps go on from where they went back to.
    """

    def __init__(self) -> None:
        self.recoveries = 0
        self._samples: collections.deque[tuple[float, int]] = collections.deque(maxlen=_MOST_SAMPLES)
        self._phase = ""
        self._phase_since = 0.0
        self._generation = 0
        self._lost_s = 0.0
        self._stands_since: float | None = None

    def look(self, view: JobView | None, now: float, shown: str | None = None) -> None:
        """The job as it is seen at ``now``; ``shown`` is what its phase is called, where it is called otherwise."""
        phase = view.phase if view is not None else "waiting"
        name = (phase if shown is None else shown).partition(";")[0]
        if name != self._phase:
            self._phase, self._phase_since = name, now
        if view is None or view.from_journal:
            return
        self._count_recoveries(view, now)
        if phase != "training" or view.alive < view.world_size:
            self._samples.clear()
            return
        if self._samples and view.step < self._samples[-1][1]:
            self._samples.clear()
        if not self._samples or view.step != self._samples[-1][1] or now - self._samples[-1][0] >= _LEAST_S:
            self._samples.append((now, view.step))
        while now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()

    def _count_recoveries(self, view: JobView, now: float) -> None:
        stands = view.generation > 0 and not view.training_finished and not view.job_finished
        is_held_up = stands and view.ended is None and (view.phase != "training" or view.alive < view.world_size)
        if self._generation and view.generation > self._generation:
            self.recoveries += view.generation - self._generation
        if is_held_up and self._generation and self._stands_since is None:
            self._stands_since = now
        elif not is_held_up and self._stands_since is not None:
            self._lost_s += now - self._stands_since
            self._stands_since = None
        if view.phase == "training" or self._generation:
            self._generation = max(self._generation, view.generation)

    def phase_s(self, now: float) -> float:
        """How long the present phase has lasted."""
        return now - self._phase_since

    def lost_s(self, now: float) -> float:
        """How long training stood still so far, as far as it was seen."""
        return self._lost_s + (0.0 if self._stands_since is None else now - self._stands_since)

    def steps_per_s(self) -> float | None:
        """None until it can be told."""
        if len(self._samples) < 2:
            return None
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        return (last - first) / (ended - began) if ended - began >= _LEAST_S and last > first else None


@dataclass(frozen=True, slots=True)
class Standing:
    """Everything a line may say.

    Attributes:
        script: its name.
        phase: empty while it trains.
        phase_s: for how long.
        step, total_steps, steps_per_s: of training.
        values: what the script reports, as it is shown.
        world: the workers in words.
        recoveries, lost_s: since this follower came.
        more: what else is to be said, such as when a seat is free.
    """

    script: str
    world: str
    phase: str = ""
    phase_s: float = 0.0
    step: int | None = None
    total_steps: int | None = None
    steps_per_s: float | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    recoveries: int = 0
    lost_s: float = 0.0
    more: str = ""

    @property
    def left_s(self) -> float | None:
        """How long training takes yet, at its present pace."""
        if self.phase or self.step is None or not self.total_steps or not self.steps_per_s:
            return None
        return max(0, self.total_steps - self.step) / self.steps_per_s

    def as_json(self) -> dict[str, Any]:
        """For programs: the same figures, none left out."""
        return {
            "script": self.script,
            "phase": self.phase or "training",
            "phase_s": round(self.phase_s, 3),
            "step": self.step,
            "total_steps": self.total_steps,
            "steps_per_s": None if self.steps_per_s is None else round(self.steps_per_s, 3),
            "left_s": None if self.left_s is None else round(self.left_s, 3),
            "values": dict(self.values),
            "workers": self.world,
            "recoveries": self.recoveries,
            "lost_s": round(self.lost_s, 3),
        }


def line_of(standing: Standing, columns: int | None = None) -> str:
    """``train.py · step 1,180/3,000 · 43 steps/s · loss 0.0312 · 41 s left · 4/4 workers, 1 spare``.

    Args:
        columns: of the terminal; the line has fewer, whatever must be left out. None: all of it.
    """
    parts = [(rank, text) for rank, text in _parts(standing) if text]
    line = " · ".join(text for _, text in parts)
    if columns is None:
        return line
    most = max(_FEWEST_COLUMNS, columns - 1)  # a full last column wraps on some terminals
    while len(line) > most and len(parts) > 1:
        parts.remove(max(parts))
        line = " · ".join(text for _, text in parts)
    return line if len(line) <= most else line[: most - 1] + "…"


def _parts(standing: Standing) -> list[tuple[int, str]]:
    """The parts in order, each with its rank: the greatest is left out first."""
    step = "" if standing.step is None else f"step {standing.step:,}"
    if step and standing.total_steps:
        step += f"/{standing.total_steps:,}"
    values = [f"{name} {value}" for name, value in standing.values.items()]
    recoveries = ""
    if standing.recoveries or standing.lost_s >= 0.05:
        count, lost = standing.recoveries, f"{seconds(standing.lost_s, fine=True)} lost"
        recoveries = f"{count} recover{'y' if count == 1 else 'ies'}, {lost}" if count else f"{lost} so far"
    return [
        (6, standing.script),
        (1, standing.phase),
        (3, seconds(standing.phase_s) if standing.phase and standing.phase_s >= 1 else ""),
        (0, step),
        (5, "" if standing.steps_per_s is None or standing.phase else f"{_figure(standing.steps_per_s)} steps/s"),
        *((4 if place == 0 else 10 + place, text) for place, text in enumerate(values)),
        (4, "" if standing.left_s is None else f"{seconds(standing.left_s)} left"),
        (2, standing.world),
        (7, recoveries),
        (2, standing.more),
    ]


def seconds(value: float, *, fine: bool = False) -> str:
    """``41 s``, ``12 min``, ``3.5 h``; with ``fine`` tenths of a second below a minute."""
    if value < 60:
        return f"{value:.1f} s" if fine else f"{math.ceil(value)} s"
    if value < 3600:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h" if value < 100 * 3600 else f"{value / 86400:.0f} days"


def _figure(value: float) -> str:
    """Three figures are enough of a pace."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def shown_value(value: float) -> str:
    """As people write a loss: ``0.0312``, ``2.3``, ``1e-05``, ``nan``."""
    return f"{value:.4g}" if math.isfinite(value) else str(value)
