"""What it costs to compare the ranks while they train: steps per second with CONSISTENCY_EVERY=N against 0.

``python -m benchmarks.consistency [--quick] [--workload mlp|transformer|both]``. Three jobs of four ranks under
``elastic.run``, one that compares and two that do not, take turns in every order (``benchmarks.turns``); a window is
one interval, so that each holds one comparison: the copy, and the hash beside the next step. The MLP compares every 50
steps. Of the transformer, whose steps take a second on two cores, every 5 are compared; what that would be at 50 is
worked out and marked so. On a machine with other work the ratio of CPU time is the steadier witness. Both end within
ten minutes on two busy cores.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.processes import Job, Stage
from benchmarks.report import Progress, Report, rounded, spread, table
from benchmarks.steady_state import MLP, TRANSFORMER, WORLD_SIZE, Start, Workload
from benchmarks.turns import Turns, take_turns

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


LOADS = {"mlp": Load(MLP, USUAL, 24, 6), "transformer": Load(TRANSFORMER, 5, 6, 3)}


@dataclass(slots=True)
class Measured:
    """All windows of a load, by contestant, in the order of rounds."""

    load: Load
    turns: Turns = field(default_factory=lambda: Turns(OFF))

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
    measured = Measured(load)
    starts = {name: _starts(load.every if name == ON else 0) for name in CONTESTANTS}
    orders = itertools.islice(itertools.cycle(ORDERS), rounds)
    take_turns(measured.turns, starts, load.workload, load.every, orders, progress.say)
    return measured


def report(measured: Mapping[str, Measured]) -> Report:
    """Floor: who does not compare, against itself."""
    floor: dict[str, float | None] = {}
    ours: dict[str, float | None] = {}
    ratios: dict[str, float | None] = {}
    for name, one in measured.items():
        every, usual = f"_{name}_every_{one.load.every}", f"_{name}_every_{USUAL}"
        turns = one.turns
        floor.update({f"{name}_{key}": value for key, value in turns.figures(OFF).items()})
        ours.update({f"{name}_{key}": value for key, value in turns.figures(ON).items()})
        steps, cpu = turns.ratios(ON).median, turns.cpu_ratio(ON)
        ratios[f"compared_vs_not{every}"] = rounded(steps)
        ratios[f"compared_vs_not_cpu{every}"] = rounded(cpu)
        ratios[f"not_vs_not_{name}"] = rounded(turns.ratios(AGAIN).median)
        ratios[f"not_vs_not_cpu_{name}"] = rounded(turns.cpu_ratio(AGAIN))
        if one.load.every != USUAL:
            ratios[f"worked_out_compared_vs_not{usual}"] = rounded(one.at_usual(steps))
            ratios[f"worked_out_compared_vs_not_cpu{usual}"] = rounded(one.at_usual(cpu))
    return Report("consistency", floor, {}, ours, ratios)


def people(measured: Mapping[str, Measured]) -> str:
    """A table for each load."""
    parts = []
    for name, one in measured.items():
        turns = one.turns
        rows = [
            (
                contestant,
                spread(turns.rates(contestant)),
                f"{turns.cpu_ms(contestant):.3g}",
                f"{turns.ratios(contestant).median:.3f}",
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
