"""What it costs to compare the ranks while they train: steps per second with CONSISTENCY_EVERY=N against 0.

``python -m benchmarks.consistency [--quick] [--workload mlp|transformer|both]``. Three jobs of four ranks under
``elastic.run``, one that compares and two that do not, take turns in every order, as in ``steady_state``; a window is
one interval, so that each holds one comparison: the copy, and the hash beside the next step. The MLP compares every 50
steps. Of the transformer, whose steps take a second on two cores, every 10 are compared; what that would be at 50 is
worked out and marked so. On a machine with other work the ratio of CPU time is the steadier witness.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.processes import Job, Stage
from benchmarks.report import Progress, Report, median, rounded, spread, table
from benchmarks.steady_state import MLP, TRANSFORMER, WORLD_SIZE, Contestant, Start, Window, Workload

OFF, ON, AGAIN = CONTESTANTS = ("not compared", "compared", "not compared again")
ORDERS = tuple(itertools.permutations(CONTESTANTS))
USUAL = 50
TARGET = 0.98


@dataclass(frozen=True, slots=True)
class Load:
    """What is trained, compared every so many steps, in so many rounds."""

    workload: Workload
    every: int
    rounds: int
    rounds_quick: int


LOADS = {"mlp": Load(MLP, USUAL, 24, 6), "transformer": Load(TRANSFORMER, 10, 6, 3)}


@dataclass(slots=True)
class Measured:
    """All windows of a load, by contestant, in the order of rounds."""

    load: Load
    windows: dict[str, list[Window]] = field(default_factory=lambda: {name: [] for name in CONTESTANTS})

    def ratios(self, contestant: str) -> list[float]:
        """Its rate ÷ that of the first who does not compare, of each round."""
        pairs = zip(self.windows[contestant], self.windows[OFF], strict=True)
        return [one.steps_per_s / off.steps_per_s for one, off in pairs]

    def cpu_ms(self, contestant: str) -> float:
        """Of a step, all ranks together, the median window's."""
        return median([window.cpu_ms_per_step for window in self.windows[contestant]])

    def at_usual(self, ratio: float) -> float:
        """What a ratio would be at an interval of ``USUAL`` steps."""
        return 1 / (1 + (1 / ratio - 1) * self.load.every / USUAL)


def _starts(every: int) -> Start:
    def start(stage: Stage, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        job = Job(stage, "steady_state", WORLD_SIZE, CONSISTENCY_EVERY=str(every))
        job.start_scheduler()
        return [job.start_worker(slot, "elastic", *arguments, gated=True) for slot in range(WORLD_SIZE)]

    return start


def measure(load: Load, rounds: int, progress: Progress) -> Measured:
    """Each contestant's windows."""
    measured, contestants = Measured(load), dict[str, Contestant]()
    try:
        for name in CONTESTANTS:
            contestants[name] = Contestant(name, load.workload, _starts(load.every if name == ON else 0))
        for contestant in contestants.values():
            contestant.wait_until_ready()
            contestant.run("train", load.every)  # memory is warm, and both copies have been made
            contestant.run("train", load.every)
        for _, order in zip(range(rounds), itertools.cycle(ORDERS), strict=False):
            for name in order:
                measured.windows[name].append(contestants[name].run("train", load.every))
            progress.say(f"{load.workload.name}: " + ", ".join(_rate(measured, name) for name in CONTESTANTS))
    finally:
        for contestant in contestants.values():
            contestant.close()
    return measured


def _rate(measured: Measured, name: str) -> str:
    return f"{name} {measured.windows[name][-1].steps_per_s:.3g} steps/s"


def report(measured: Mapping[str, Measured]) -> Report:
    """Floor: who does not compare, against itself."""
    floor: dict[str, float | None] = {}
    ours: dict[str, float | None] = {}
    ratios: dict[str, float | None] = {}
    for name, one in measured.items():
        every, usual = f"_{name}_every_{one.load.every}", f"_{name}_every_{USUAL}"
        floor[f"{name}_steps_per_s"] = median([window.steps_per_s for window in one.windows[OFF]])
        floor[f"{name}_cpu_per_step_ms"] = one.cpu_ms(OFF)
        ours[f"{name}_steps_per_s"] = median([window.steps_per_s for window in one.windows[ON]])
        ours[f"{name}_cpu_per_step_ms"] = one.cpu_ms(ON)
        steps, cpu = statistics.median(one.ratios(ON)), one.cpu_ms(OFF) / one.cpu_ms(ON)
        ratios[f"compared_vs_not{every}"] = rounded(steps)
        ratios[f"compared_vs_not_cpu{every}"] = rounded(cpu)
        ratios[f"not_vs_not_{name}"] = rounded(statistics.median(one.ratios(AGAIN)))
        ratios[f"not_vs_not_cpu_{name}"] = rounded(one.cpu_ms(OFF) / one.cpu_ms(AGAIN))
        if one.load.every != USUAL:
            ratios[f"worked_out_compared_vs_not{usual}"] = rounded(one.at_usual(steps))
            ratios[f"worked_out_compared_vs_not_cpu{usual}"] = rounded(one.at_usual(cpu))
    return Report("consistency", floor, {}, ours, ratios)


def people(measured: Mapping[str, Measured]) -> str:
    """A table for each load."""
    parts = []
    for name, one in measured.items():
        rows = [
            (
                contestant,
                str(spread([window.steps_per_s for window in one.windows[contestant]])),
                f"{one.cpu_ms(contestant):.3g}",
                f"{statistics.median(one.ratios(contestant)):.3f}",
            )
            for contestant in CONTESTANTS
        ]
        head = (f"{name}, every {one.load.every} steps", "steps/s", "CPU ms a step", f"÷ {OFF}")
        parts.append(table(head, rows))
    return "\n\n".join([*parts, f"target: {TARGET} at every {USUAL} steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workload", choices=(*LOADS, "both"), default="both")
    options = parser.parse_args()
    names = list(LOADS) if options.workload == "both" else [options.workload]
    progress = Progress(f"steps/s of {', '.join(names)}")
    measured = {
        name: measure(LOADS[name], LOADS[name].rounds_quick if options.quick else LOADS[name].rounds, progress)
        for name in names
    }
    report(measured).print(people(measured))


if __name__ == "__main__":
    main()
