"""Jobs that take turns: only one runs at a time, for a window, so that other load affects all alike.

Each ratio is of two windows of one round, seconds apart. Over all rounds each job has each place equally often.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.report import Spread, median, spread, table
from benchmarks.steady_state import Contestant, Start, Window


@dataclass(slots=True)
class Turns:
    """All windows by contestant, in the order of rounds.

    Args:
        base: the contestant with which the others are compared.
    """

    base: str
    windows: dict[str, list[Window]] = field(default_factory=dict)

    def rates(self, name: str) -> list[float]:
        """Return the steps per second of each window."""
        return [window.steps_per_s for window in self.windows[name]]

    def ratios(self, name: str) -> Spread:
        """Return the contestant's rate ÷ the base's for each round."""
        pairs = zip(self.rates(name), self.rates(self.base), strict=True)
        return spread([one / base for one, base in pairs])

    def cpu_ms(self, name: str) -> float:
        """Return the CPU time of a step over all ranks, in the median window."""
        return median([window.cpu_ms_per_step for window in self.windows[name]])

    def cpu_ratio(self, name: str) -> float:
        """Return the base's CPU time ÷ the contestant's: below 1 if the contestant needs more than the base."""
        pairs = zip(self.windows[name], self.windows[self.base], strict=True)
        return statistics.median(base.cpu_ms_per_step / one.cpu_ms_per_step for one, base in pairs)

    def figures(self, name: str, workload: str) -> dict[str, float]:
        """Return the figures for a report."""
        return {
            f"{workload}_steps_per_s": median(self.rates(name)),
            f"{workload}_cpu_per_step_ms": self.cpu_ms(name),
        }

    def people(self, what: str) -> str:
        """Format the table of all contestants."""
        rows = []
        for name in self.windows:
            ratio = self.ratios(name)
            quartiles = f"{ratio.lower_quartile:.3f}–{ratio.upper_quartile:.3f}"
            cpu = (f"{self.cpu_ms(name):.3g}", f"{self.cpu_ratio(name):.3f}")
            rows.append((name, spread(self.rates(name)), f"{ratio.median:.3f}", quartiles, *cpu))
        head = ("steps/s", f"÷ {self.base}", "quartiles", "CPU ms a step", f"{self.base} ÷ it")
        return table((f"{what}, {len(self.windows[self.base])} rounds", *head), rows)


def take_turns(
    turns: Turns,
    starts: Mapping[str, Start],
    workload: str,
    steps: int,
    orders: Iterable[Sequence[str]],
    say: Callable[[str], None],
) -> None:
    """Start the jobs, give each a window of ``steps`` steps in every round, and end them.

    Args:
        turns: where the windows are added.
        starts: how each contestant is started.
        workload: the model that they train.
        steps: the steps in a window; two such windows precede the first that counts.
        orders: the sequence of contestants in each round.
        say: called at each round.
    """
    contestants: dict[str, Contestant] = {}
    try:
        for name, start in starts.items():
            contestants[name] = Contestant(name, workload, start)
        for contestant in contestants.values():
            contestant.wait_until_ready()
            contestant.run("train", steps)  # memory is warm, and one-time work is done
            contestant.run("train", steps)
        for order in orders:
            for name in order:
                turns.windows.setdefault(name, []).append(contestants[name].run("train", steps))
            last = ", ".join(f"{name} {turns.rates(name)[-1]:.3g} steps/s" for name in starts)
            say(f"{workload}: {last}")
    finally:
        for contestant in contestants.values():
            contestant.close()
