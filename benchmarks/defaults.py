"""The cost of all monitoring: steps per second with the default settings ÷ with all of it off.

``python -m benchmarks.defaults [--quick] [--workload NAME ...] [--ranks N] [--watcher NAME]``. Three jobs of the same
script alternate in every order (``benchmarks.turns``): SameBits with everything off, which is the floor, SameBits with
its defaults, and SameBits with everything off once more. The script reports its loss and commits after every step. On
by default are hang detection (HANG), straggler detection (STRAGGLER, which times each step), loss anomalies
(LOSS_ANOMALY), changing values outside the state (HIDDEN_STATE, at the first commits), comparisons of the ranks
(CONSISTENCY), and host health (HEALTH). ``--watcher`` enables only one of them, to find its cost.

A window contains one comparison of the ranks, and all windows together several host checks, which come every ten
seconds. The models have 3 and 25 million parameters unless another is named. There are two ranks by default: with more
ranks than cores the system's own scheduler would affect every figure. On a machine with other load the ratio of CPU
time is more reliable.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping

from benchmarks.report import Progress, Report, rounded
from benchmarks.steady_state import Start, job_of_ours
from benchmarks.turns import Turns, take_turns

OFF, ON, AGAIN = CONTESTANTS = ("all off", "defaults", "all off again")
ORDERS = tuple(itertools.permutations(CONTESTANTS))
TARGET = 0.99
WATCHERS: dict[str, dict[str, str]] = {
    "standstill": {"HANG": "off"},
    "stragglers": {"STRAGGLER": "off"},
    "anomalies": {"LOSS_ANOMALY": "off"},
    "consistency": {"CONSISTENCY": "majority:0"},
    "hidden": {"HIDDEN_STATE": "off"},
    "health": {"HEALTH": "off"},
}
"""Settings that are on by default, and the value that turns each off."""
WINDOW_STEPS = 50
BLOCKS = {"mlp": 6, "wide": 2, "transformer": 1}
"""Sets of processes by workload, since each set's memory layout and sockets affect its speed."""
USUAL, QUICK = ("wide", "transformer"), ("mlp",)


def all_off(but: str = "") -> dict[str, str]:
    """Return the settings that turn off every watcher but one."""
    return {name: value for watcher, off in WATCHERS.items() if watcher != but for name, value in off.items()}


def starts(ranks: int, watcher: str = "") -> dict[str, Start]:
    """Return how each contestant starts; if a watcher is named, it alone is on."""
    settings = {OFF: all_off(), ON: all_off(watcher) if watcher else {}, AGAIN: all_off()}
    return {name: job_of_ours(ranks, "reporting", **chosen) for name, chosen in settings.items()}


def report(measured: Mapping[str, Turns]) -> Report:
    """Report the figures; the floor is everything off."""
    floor: dict[str, float] = {}
    ours: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for name, turns in measured.items():
        floor.update(turns.figures(OFF, name))
        ours.update(turns.figures(ON, name))
        for who, key in ((ON, f"defaults_vs_all_off_{name}"), (AGAIN, f"all_off_vs_all_off_{name}")):
            ratio = turns.ratios(who)
            ratios[key] = rounded(ratio.median)
            ratios[f"{key}_lower_quartile"] = rounded(ratio.lower_quartile)
            ratios[f"{key}_upper_quartile"] = rounded(ratio.upper_quartile)
            ratios[f"{key}_cpu"] = rounded(turns.cpu_ratio(who))
    return Report("defaults", floor, {}, ours, ratios)


def people(measured: Mapping[str, Turns], what: str) -> str:
    """Format one table per workload."""
    parts = []
    for name, turns in measured.items():
        ratio = f"{turns.ratios(ON).median:.3f}, of CPU time {turns.cpu_ratio(ON):.3f}"
        parts.append(f"{turns.people(f'{name}, {what}')}\n{ON} ÷ {OFF}: {ratio} (wanted: {TARGET} or more)")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.defaults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one set of processes; of the smallest model, 0.4 million")
    parser.add_argument("--workload", nargs="+", choices=list(BLOCKS), help=f"default: {' '.join(USUAL)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--watcher", choices=list(WATCHERS), default="", help="the only one that is on")
    options = parser.parse_args()
    what = f"{options.ranks} ranks, {options.watcher or 'all watchers'} on"
    progress, measured = Progress(f"{what}: steps/s in windows of {WINDOW_STEPS} steps"), dict[str, Turns]()
    for name in options.workload or (QUICK if options.quick else USUAL):
        measured[name] = Turns(OFF)
        for _ in range(1 if options.quick else BLOCKS[name]):
            contestants = starts(options.ranks, options.watcher)
            take_turns(measured[name], contestants, name, WINDOW_STEPS, ORDERS, progress.say)
    report(measured).print(people(measured, what))


if __name__ == "__main__":
    main()
