"""What all that watches a job costs it: steps per second with the default settings ÷ with all of it switched off.

``python -m benchmarks.defaults [--quick] [--workload mlp|transformer] [--ranks N] [--watcher NAME]``. Four jobs of the
same script take turns, as in ``benchmarks.turns``: SameBits with everything off, SameBits as it comes, SameBits with
everything off once more, and plain DDP, which is the floor. The script reports its loss and commits after every step.
What is on by default: where no step is made (WATCHDOG), who is slow (STRAGGLER, which times each step), losses that
training cannot have (LOSS_ANOMALY), whether the ranks are equal (CONSISTENCY_EVERY), and the hosts' health (HEALTH_…).
``--watcher`` has one of them on, to find what it costs.

A window holds one comparison of the ranks, and all windows together some looks at the host, which come every ten
seconds. Two ranks, by default: with more ranks than cores the scheduler of the system is in every figure. On a machine
with other work the ratio of CPU time is the steadier witness.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence

from benchmarks.processes import Job, Stage
from benchmarks.report import Progress, Report, rounded, spread, table
from benchmarks.steady_state import MLP, TRANSFORMER, WORKLOADS, Start, start_plain
from benchmarks.turns import Turns, take_turns
from runtime.settings_table import VARIABLES

OFF, ON, AGAIN, PLAIN = CONTESTANTS = ("all off", "defaults", "all off again", "plain DDP")
ORDERS = tuple(CONTESTANTS[at:] + CONTESTANTS[:at] for at in range(4))
ORDERS += tuple(order[::-1] for order in ORDERS)  # everybody stands twice in every place
TARGET = 0.99
WATCHERS: dict[str, dict[str, str]] = {
    "standstill": {"WATCHDOG": "0"},
    "stragglers": {"STRAGGLER": "off"},
    "anomalies": {"LOSS_ANOMALY": "off"},
    "consistency": {"CONSISTENCY_EVERY": "0"},
    "health": {one.name: "off" for one in VARIABLES if one.name.startswith("HEALTH_") and one.default == "tell"},
}
"""What is on by default, and what turns it off."""
WINDOW_STEPS = 50
BLOCKS = 3
"""Sets of processes, so that the luck of one (memory layout, sockets) is drawn several times."""
REPEATED = {MLP.name: 4, TRANSFORMER.name: 1}
"""How often all orders are gone through with one set of processes."""


def all_off(but: str = "") -> dict[str, str]:
    """The settings that turn every watcher off, but for one."""
    return {name: value for watcher, off in WATCHERS.items() if watcher != but for name, value in off.items()}


def starts(ranks: int, watcher: str = "") -> dict[str, Start]:
    """How each contestant begins; where one watcher is named, it alone is on."""

    def ours(settings: dict[str, str]) -> Start:
        def start(stage: Stage, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
            job = Job(stage, "steady_state", ranks, **settings)
            job.start_scheduler()
            return [job.start_worker(slot, "reporting", *arguments, gated=True) for slot in range(ranks)]

        return start

    return {
        OFF: ours(all_off()),
        ON: ours(all_off(watcher) if watcher else {}),
        AGAIN: ours(all_off()),
        PLAIN: lambda stage, arguments: start_plain(stage, arguments, ranks),
    }


def report(turns: Turns) -> Report:
    """Floor: plain DDP."""
    on, again = turns.ratios(ON), turns.ratios(AGAIN)
    return Report(
        "defaults",
        turns.figures(PLAIN),
        {},
        {"defaults": turns.figures(ON), "all_off": turns.figures(OFF)},
        {
            "defaults_vs_all_off": rounded(on.median),
            "defaults_vs_all_off_lower_quartile": rounded(on.lower_quartile),
            "defaults_vs_all_off_upper_quartile": rounded(on.upper_quartile),
            "all_off_vs_all_off": rounded(again.median),
            "all_off_vs_all_off_lower_quartile": rounded(again.lower_quartile),
            "all_off_vs_all_off_upper_quartile": rounded(again.upper_quartile),
            "defaults_vs_all_off_cpu": turns.cpu_ratio(ON),
            "all_off_vs_all_off_cpu": turns.cpu_ratio(AGAIN),
            "defaults_vs_plain_ddp": rounded(turns.ratios(ON, PLAIN).median),
            "all_off_vs_plain_ddp": rounded(turns.ratios(OFF, PLAIN).median),
        },
    )


def people(turns: Turns, what: str) -> str:
    """The table."""
    rows = []
    for name in CONTESTANTS:
        ratio = turns.ratios(name)
        quartiles = f"{ratio.lower_quartile:.3f}–{ratio.upper_quartile:.3f}"
        cpu = (f"{turns.cpu_ms(name):.3g}", f"{turns.cpu_ratio(name):.3f}")
        rows.append((name, spread(turns.rates(name)), f"{ratio.median:.3f}", quartiles, *cpu))
    head = (what, "steps/s", f"÷ {OFF}", "quartiles", "CPU ms a step", f"{OFF} ÷ it")
    return f"{table(head, rows)}\n{ON} ÷ {OFF}: {turns.ratios(ON).median:.3f} (wanted: {TARGET} or more)"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.defaults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one set of processes")
    parser.add_argument("--workload", choices=list(WORKLOADS), default=MLP.name)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"sets of processes (default: {BLOCKS})")
    parser.add_argument("--watcher", choices=list(WATCHERS), default="", help="the only one that is on")
    options = parser.parse_args()
    workload, on = WORKLOADS[options.workload], options.watcher or "all watchers"
    what = f"{workload.name}, {options.ranks} ranks, {on} on"
    progress, turns = Progress(f"{what}: steps/s in windows of {WINDOW_STEPS} steps"), Turns(OFF)
    orders = ORDERS * REPEATED[workload.name]
    for _ in range(1 if options.quick else options.blocks):
        take_turns(turns, starts(options.ranks, options.watcher), workload, WINDOW_STEPS, orders, progress.say)
    report(turns).print(people(turns, what))


if __name__ == "__main__":
    main()
