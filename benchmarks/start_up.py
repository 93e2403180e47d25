"""Time from the command until every rank has finished its first step, under ``samebits run`` and torchrun.

``python -m benchmarks.start_up [--quick] [--rounds N]``. Four ranks train the MLP of ``workers.mlp``. In each round, a
job starts under torchrun, under ``samebits run`` with its default settings (which start a spare, too), and under
``samebits run --spares 0``. The floor is a process that does nothing but import what a rank imports.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.launchers import RUN, RUN_WITHOUT_SPARE, TORCHRUN, UNPORTED, start_samebits_run, torchrun
from benchmarks.processes import Stage
from benchmarks.recovery_trials import TRAINING_WITHIN_S, WORLD_SIZE, start_alone_s
from benchmarks.report import Progress, Report, median, rounded, spread, table

TARGET = 1.2
ROUNDS, ROUNDS_QUICK = 5, 1
FLOOR = "the imports of one rank"
STARTS: Mapping[str, Callable[[Stage], object]] = {
    TORCHRUN: lambda stage: torchrun(UNPORTED, "c10d")(stage, sys.executable),
    RUN: start_samebits_run,
    RUN_WITHOUT_SPARE: lambda stage: start_samebits_run(stage, "--spares", "0"),
}
NAMES = tuple(STARTS)


def first_step_s(start: Callable[[Stage], object], ranks: int = WORLD_SIZE) -> float:
    """Return the seconds from a job's command until the last rank has finished its first step."""
    with Stage() as stage:
        began_s, channel = time.monotonic(), stage.channel
        start(stage)

        def have_stepped() -> bool:
            return len({one.pid for one in channel.select("stepped")}) >= ranks

        channel.wait_for(have_stepped, TRAINING_WITHIN_S, "the first step")
        firsts: dict[int, float] = {}
        for one in channel.select("stepped"):
            firsts[one.pid] = min(one.at_s, firsts.get(one.pid, one.at_s))
        return max(firsts.values()) - began_s


def report(imports_s: Sequence[float], measured: Mapping[str, Sequence[float]]) -> Report:
    """Report the medians, and ours as multiples of torchrun's."""
    first_s = {name: median(some) for name, some in measured.items()}
    return Report(
        benchmark="start_up",
        floor={"imports_s": rounded(median(imports_s))},
        peers={"torchrun": {"first_step_s": rounded(first_s[TORCHRUN])}},
        ours={
            "first_step_s": rounded(first_s[RUN]),
            "without_spare_first_step_s": rounded(first_s[RUN_WITHOUT_SPARE]),
        },
        ratios={
            "first_step_vs_torchrun": rounded(first_s[RUN] / first_s[TORCHRUN]),
            "without_spare_first_step_vs_torchrun": rounded(first_s[RUN_WITHOUT_SPARE] / first_s[TORCHRUN]),
        },
    )


def people(imports_s: Sequence[float], measured: Mapping[str, Sequence[float]]) -> str:
    """Format the table."""
    torchrun_s = median(measured[TORCHRUN])
    rows: list[list[object]] = [[FLOOR, spread(imports_s), f"{median(imports_s) / torchrun_s:.2f}"]]
    rows += [[name, spread(some), f"{median(some) / torchrun_s:.2f}"] for name, some in measured.items()]
    head = (f"{WORLD_SIZE} ranks, {len(imports_s)} rounds", "s to the first step of all", "÷ torchrun")
    return f"{table(head, rows)}\nwanted: {TARGET} × torchrun's or less"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start_up", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help=f"measure only {ROUNDS_QUICK} round")
    parser.add_argument("--rounds", type=int, help=f"how often each job is started (default: {ROUNDS})")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (ROUNDS_QUICK if arguments.quick else ROUNDS)
    progress = Progress(f"{WORLD_SIZE} ranks start {rounds} times under each of {', '.join(NAMES)}")
    imports_s: list[float] = []
    measured: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(rounds):
        imports_s.append(start_alone_s())
        for name in NAMES[number % len(NAMES) :] + NAMES[: number % len(NAMES)]:
            measured[name].append(first_step_s(STARTS[name]))
            progress.say(f"round {number + 1} of {rounds}, {name}: {measured[name][-1]:.2f} s")
    report(imports_s, measured).print(people(imports_s, measured))


if __name__ == "__main__":
    main()
