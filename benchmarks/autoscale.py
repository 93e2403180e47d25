"""Compare the cost and benefit of autoscaling with every fixed size, under loads of every shape.

``python -m benchmarks.autoscale [--quick]``. No job runs: the policy itself (``hosts.autoscale``) is asked every ten
seconds of simulated time, and a queue is processed by as many workers as it requests. A change of size stops all work
for some seconds, as a regroup does. *Time* is when all work is done, *wait* the mean wait of a piece of work,
*core-hours* the cost of the workers, *turns* the number of changes of direction. The floor is the core-hours of the
work itself, with no core idle.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.loads import LOOK_S, Load, all_loads
from benchmarks.report import Report, rounded, table
from samebits.hosts.autoscale import Autoscaler, Limits, LoadReading

LEAST, MOST = 1, 8
REGROUP_S = 5.0
POLICIES = {
    "by CPU": Limits(LEAST, MOST, cpu=0.8),
    "by queue": Limits(LEAST, MOST, queue=60.0),  # seconds of work per worker
}
FIXED = {f"{size} fixed": size for size in range(LEAST, MOST + 1)}
PATIENCE_LOOKS = 20_000


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one load under one policy. Times in seconds, core time in core-seconds."""

    time_s: float
    wait_s: float
    core_s: float
    sizes: tuple[int, ...]

    @property
    def turns(self) -> int:
        """Count how often growth is followed by shrinking or vice versa."""
        steps = [now - before for before, now in itertools.pairwise(self.sizes) if now != before]
        return sum((now > 0) != (before > 0) for before, now in itertools.pairwise(steps))


def play(load: Load, limits: Limits | None, size: int = LEAST) -> Run:
    """Process the load under a policy or, without ``limits``, with ``size`` workers throughout."""
    scaler = Autoscaler(limits) if limits is not None else None
    queue = waited = core_s = arrived = 0.0
    lost_s, sizes, at = 0.0, list[int](), 0
    while at < len(load.busy) or queue > 1e-9:
        comes = load.busy[at] * LOOK_S if at < len(load.busy) else 0.0
        works_s = max(0.0, LOOK_S - lost_s)
        lost_s = max(0.0, lost_s - LOOK_S)
        done = min(queue + comes, size * works_s)
        queue += comes - done
        arrived += comes
        waited += queue * LOOK_S
        core_s += size * LOOK_S
        sizes.append(size)
        at += 1
        if at > PATIENCE_LOOKS:
            break
        if scaler is not None:
            reading = LoadReading(at * LOOK_S, size, cpu=done / (size * LOOK_S), queue=queue, speed=done / LOOK_S)
            wanted = scaler.decide(reading).size
            lost_s += REGROUP_S if wanted != size else 0.0
            size = wanted
    return Run(at * LOOK_S, waited / max(arrived, 1e-9), core_s, tuple(sizes))


def run_all(loads: Sequence[Load]) -> dict[str, dict[str, Run]]:
    """Run each load under each policy and each fixed size."""
    return {
        load.name: {name: play(load, limits) for name, limits in POLICIES.items()}
        | {name: play(load, None, size) for name, size in FIXED.items()}
        for load in loads
    }


def rows(loads: Sequence[Load], found: dict[str, dict[str, Run]]) -> list[Sequence[object]]:
    """Format one row per load and sizing."""
    return [
        (
            load.name if number == 0 else "",
            name,
            rounded(run.time_s / 3600),
            rounded(run.wait_s),
            rounded(run.core_s / 3600),
            f"{run.turns} of {load.changes}" if number < len(POLICIES) else "",
        )
        for load in loads
        for number, (name, run) in enumerate(found[load.name].items())
    ]


def report(loads: Sequence[Load], found: dict[str, dict[str, Run]]) -> Report:
    """Return the report of the same figures as :func:`rows`."""
    work_s = {load.name: sum(load.busy) * LOOK_S for load in loads}

    def figures(load: str, way: str) -> dict[str, float]:
        run = found[load][way]
        return {"time_s": run.time_s, "wait_s": rounded(run.wait_s), "core_s": run.core_s}

    return Report(
        benchmark="autoscale",
        floor={"work": {f"{load}_s": rounded(seconds) for load, seconds in work_s.items()}},
        peers={way: {load: figures(load, way) for load in found} for way in FIXED},
        ours={way: {load: figures(load, way) for load in found} for way in POLICIES},
        ratios={
            way: {f"{load}: core time to work": rounded(found[load][way].core_s / work_s[load]) for load in found}
            for way in POLICIES
        },
    )


def main() -> int:
    """Return 0 if no policy changed direction more often than its load."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="no effect: this benchmark always takes only seconds")
    parser.parse_args()
    limits = POLICIES["by CPU"]
    loads = all_loads(limits.settle_s, limits.shrink_after_s)
    found = run_all(loads)
    report(loads, found).print(table(("load", "size", "hours", "wait, s", "core-hours", "turns"), rows(loads, found)))
    return 0 if all(found[load.name][way].turns <= load.changes for load in loads for way in POLICIES) else 1


if __name__ == "__main__":
    raise SystemExit(main())
