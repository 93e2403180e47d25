"""``python -m tests.simulation``: run seeds, print progress, and for a violation its seed and the tail of its trace."""

from __future__ import annotations

import argparse
import os
import sys

from tests.simulation.runs import Tally, first_seed_of_today, run_in_parts, timed
from tests.simulation.trace import TAIL


def main() -> int:
    """0 where every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2_000, help="how many runs")
    parser.add_argument("--start", type=int, default=None, help="the first seed (default: today's)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--tail", type=int, default=TAIL, help="events to print before a violation; 0: all there are")
    parser.add_argument("--keep-going", action="store_true", help="run all seeds, whatever fails")
    arguments = parser.parse_args()
    start = first_seed_of_today() if arguments.start is None else arguments.start
    print(f"seeds {start}..{start + arguments.seeds - 1}", flush=True)
    tally, printed = Tally(), 0
    for tally, took_s in timed(run_in_parts(start, arguments.seeds, jobs=arguments.jobs, tail=arguments.tail)):
        print(
            f"{tally.seeds} seeds, {tally.seeds / took_s:.0f}/s, {tally.events} events, "
            f"{tally.simulated_s / 3600:.1f} h simulated, {len(tally.failures)} violations",
            flush=True,
        )
        for report in tally.failures[printed:]:
            print(f"\n{report}\n", flush=True)
        printed = len(tally.failures)
        if printed and not arguments.keep_going:
            break
    print(f"{tally.generations} generations in {tally.terms} terms; what happened:")
    for kind, times in sorted(tally.faults.items()):
        print(f"  {times:8}  {kind}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
