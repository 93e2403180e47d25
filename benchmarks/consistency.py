"""The cost of comparing ranks during training: steps per second with CONSISTENCY=majority:N against 0.

``python -m benchmarks.consistency [--quick] [--sharded] [--workload NAME ...]``. Three jobs of four ranks under
``elastic.run``, one with comparisons and two without, alternate in every order (``benchmarks.turns``). A window is one
interval and so contains one comparison: the copy, and the hash during the next step. With ``--sharded``, FSDP2 takes
DDP's place, and each rank hashes its shards at a commit and again before the next step. The models have 3 and 25
million parameters unless another is named. The smaller ones compare every 50 steps. The transformer, whose steps take a
second on two cores, compares every 5; the figure for 50 is computed, and marked as computed. On a machine with other
load the ratio of CPU time is more reliable.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.report import Progress, Report, rounded
from benchmarks.steady_state import WORLD_SIZE, job_of_ours
from benchmarks.turns import Turns, take_turns

OFF, ON, AGAIN = CONTESTANTS = ("not compared", "compared", "not compared again")
ORDERS = tuple(itertools.permutations(CONTESTANTS))
EVERY = 50
"""The default steps of CONSISTENCY."""
TARGET = 0.98


@dataclass(frozen=True, slots=True)
class Load:
    """The interval between comparisons of a model, in steps, and the number of rounds."""

    every: int
    rounds: int

    def at_default(self, ratio: float) -> float:
        """Return the ratio at an interval of ``EVERY`` steps."""
        return 1 / (1 + (1 / ratio - 1) * self.every / EVERY)


LOADS = {"mlp": Load(EVERY, 24), "wide": Load(EVERY, 12), "transformer": Load(5, 12)}
USUAL, QUICK = ("wide", "transformer"), ("mlp",)
ROUNDS_QUICK = 6


def measure(workload: str, rounds: int, progress: Progress, *, sharded: bool = False) -> Turns:
    """Measure each contestant's windows; sharded jobs make no copies in shared memory."""
    turns, every = Turns(OFF), LOADS[workload].every
    kind, settings = ("sharded", {"SHARD_COPY_EVERY": "off"}) if sharded else ("elastic", {})
    starts = {
        name: job_of_ours(WORLD_SIZE, kind, CONSISTENCY=f"majority:{every if name == ON else 0}", **settings)
        for name in CONTESTANTS
    }
    take_turns(turns, starts, workload, every, itertools.islice(itertools.cycle(ORDERS), rounds), progress.say)
    return turns


def report(measured: Mapping[str, Turns]) -> Report:
    """Report the figures; the floor is the job without comparisons, against itself."""
    found = Report("consistency")
    for name, turns in measured.items():
        load = LOADS[name]
        found.floor.update(turns.figures(OFF, name))
        found.ours.update(turns.figures(ON, name))
        steps, cpu = turns.ratios(ON).median, turns.cpu_ratio(ON)
        found.ratios[f"compared_vs_not_{name}_every_{load.every}"] = rounded(steps)
        found.ratios[f"compared_vs_not_cpu_{name}_every_{load.every}"] = rounded(cpu)
        found.ratios[f"not_vs_not_{name}"] = rounded(turns.ratios(AGAIN).median)
        found.ratios[f"not_vs_not_cpu_{name}"] = rounded(turns.cpu_ratio(AGAIN))
        if load.every != EVERY:
            found.ratios[f"worked_out_compared_vs_not_{name}_every_{EVERY}"] = rounded(load.at_default(steps))
            found.ratios[f"worked_out_compared_vs_not_cpu_{name}_every_{EVERY}"] = rounded(load.at_default(cpu))
    return found


def people(measured: Mapping[str, Turns]) -> str:
    """Format one table per load."""
    parts = [turns.people(f"{name}, every {LOADS[name].every} steps") for name, turns in measured.items()]
    return "\n\n".join([*parts, f"target: {TARGET} at every {EVERY} steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="run six rounds, with the smallest model (0.4 million parameters)"
    )
    parser.add_argument("--sharded", action="store_true", help="train with FSDP2 instead of DDP")
    parser.add_argument(
        "--workload", nargs="+", choices=list(LOADS), help=f"models to train (default: {' '.join(USUAL)})"
    )
    options = parser.parse_args()
    names = options.workload or (QUICK if options.quick else USUAL)
    progress, measured = Progress(f"steps/s of {', '.join(names)}, {WORLD_SIZE} ranks"), dict[str, Turns]()
    for name in names:
        rounds = ROUNDS_QUICK if options.quick else LOADS[name].rounds
        measured[name] = measure(name, rounds, progress, sharded=options.sharded)
    report(measured).print(people(measured))


if __name__ == "__main__":
    main()
