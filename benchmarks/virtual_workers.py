"""Measure the cost of virtual workers at full size: steps per second with one on each rank, against DDP.

``python -m benchmarks.virtual_workers [--quick] [--workload NAME ...]``. Three jobs of four ranks under ``elastic.run``
with a commit after every step, one with virtual workers and two without, alternate in every order
(``benchmarks.turns``). The goal is a step that takes at most 1.15 times as long. On a machine with other load the ratio
of CPU time is more reliable.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping

from benchmarks.report import Progress, Report, rounded
from benchmarks.steady_state import WORLD_SIZE, job_of_ours
from benchmarks.turns import Turns, take_turns

DDP, VIRTUAL, AGAIN = CONTESTANTS = ("DDP", "virtual workers", "DDP again")
KINDS = {DDP: "elastic", VIRTUAL: "virtual", AGAIN: "elastic"}
ORDERS = tuple(itertools.permutations(CONTESTANTS))
STEPS = {"mlp": 50, "wide": 20, "transformer": 4}
"""Steps in a window, by workload."""
USUAL, QUICK = ("mlp", "wide", "transformer"), ("mlp",)
ROUNDS, ROUNDS_QUICK = 12, 6
TARGET = 1.15


def measure(workload: str, rounds: int, progress: Progress) -> Turns:
    """Measure each contestant's windows."""
    turns = Turns(DDP)
    starts = {name: job_of_ours(WORLD_SIZE, kind) for name, kind in KINDS.items()}
    orders = itertools.islice(itertools.cycle(ORDERS), rounds)
    take_turns(turns, starts, workload, STEPS[workload], orders, progress.say)
    return turns


def report(measured: Mapping[str, Turns]) -> Report:
    """Report the figures; the floor is DDP, against itself."""
    found = Report("virtual_workers")
    for name, turns in measured.items():
        found.floor.update(turns.figures(DDP, name))
        found.ours.update(turns.figures(VIRTUAL, name))
        found.ratios[f"step_vs_ddp_{name}"] = rounded(1 / turns.ratios(VIRTUAL).median)
        found.ratios[f"cpu_vs_ddp_{name}"] = rounded(1 / turns.cpu_ratio(VIRTUAL))
        found.ratios[f"ddp_vs_ddp_{name}"] = rounded(1 / turns.ratios(AGAIN).median)
    return found


def people(measured: Mapping[str, Turns]) -> str:
    """Format one table per workload."""
    parts = [
        f"{turns.people(name)}\na step with virtual workers: {1 / turns.ratios(VIRTUAL).median:.3f} times as long"
        for name, turns in measured.items()
    ]
    return "\n\n".join([*parts, f"target: {TARGET} or less"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="run six rounds, with the smallest model (0.4 million parameters)"
    )
    parser.add_argument(
        "--workload", nargs="+", choices=list(STEPS), help=f"models to train (default: {' '.join(USUAL)})"
    )
    options = parser.parse_args()
    names = options.workload or (QUICK if options.quick else USUAL)
    progress, measured = Progress(f"steps/s of {', '.join(names)}, {WORLD_SIZE} ranks"), dict[str, Turns]()
    for name in names:
        measured[name] = measure(name, ROUNDS_QUICK if options.quick else ROUNDS, progress)
    report(measured).print(people(measured))


if __name__ == "__main__":
    main()
