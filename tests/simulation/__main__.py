"""``python -m tests.simulation``: run many seeds, and print everything needed to understand a violation."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.hours import run_hours_in_parts
from tests.simulation.mutants import MUTANTS, store_seeds
from tests.simulation.runs import Tally, first_seed_of_today, run_in_parts
from tests.simulation.trace import TAIL

BAR = 30


def main() -> int:
    """Return 0 if every promise held."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2_000, help="how many runs")
    parser.add_argument("--start", type=int, default=None, help="the first seed (default: today's)")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--tail", type=int, default=TAIL, help="events to print before a violation; 0: all there are")
    parser.add_argument("--keep-going", action="store_true", help="run all seeds, whatever fails")
    parser.add_argument("--hours", type=int, default=0, help="of a healthy job on a busy machine instead: false alarms")
    parser.add_argument("--mutants", action="store_true", help="store a seed that kills each mutant instead")
    arguments = parser.parse_args()
    if arguments.mutants:
        return _mutants(arguments.jobs)
    if arguments.hours:
        return _hours(arguments.hours, arguments.start or 0, arguments.jobs)
    start = first_seed_of_today() if arguments.start is None else arguments.start
    total, began = Tally(), time.perf_counter()
    print(f"seeds {start}..{start + arguments.seeds - 1}", flush=True)
    for tally in run_in_parts(start, arguments.seeds, jobs=arguments.jobs, tail=arguments.tail):
        total.add(tally)
        _show(total, arguments.seeds, time.perf_counter() - began)
        for report in tally.failures:
            print(f"\n\n{report}\n", flush=True)
        if total.failures and not arguments.keep_going:
            break
    print(f"\n{total.generations} generations in {total.terms} terms; what happened:")
    for kind, times in sorted(total.faults.items()):
        print(f"  {times:9}  {kind}")
    print(f"{total.seeds} seeds, {total.simulated_s / 3600:.1f} hours simulated, {len(total.failures)} violations")
    return 1 if total.failures else 0


def _mutants(jobs: int) -> int:
    """Return 0 if every mutant is killed within its number of seeds."""
    seeds: dict[str, int] = {}
    with ProcessPoolExecutor(jobs) as pool:
        for mutant, seed in zip(MUTANTS, pool.map(_cheapest_seed, range(len(MUTANTS))), strict=True):
            print(f"{'none' if seed is None else seed:>4}  {mutant.name}", flush=True)
            if seed is not None:
                seeds[mutant.name] = seed
    store_seeds(seeds)
    return 0 if len(seeds) == len(MUTANTS) else 1


def _cheapest_seed(number: int) -> int | None:
    return MUTANTS[number].cheapest_seed()


def _hours(hours: int, start: int, jobs: int) -> int:
    """Return 0 if no detector cost a healthy job a step."""
    done = run_hours_in_parts(hours, start, jobs, lambda so_far: print(so_far, flush=True))
    print("\n".join(done.costs[:20]) or "none cost a step")
    return 1 if done.costs else 0


def _show(total: Tally, seeds: int, took_s: float) -> None:
    """Overwrite one line on a terminal; otherwise print a line now and then."""
    done = total.seeds / seeds
    bar = "#" * int(BAR * done)
    text = (
        f"[{bar:<{BAR}}] {total.seeds}/{seeds} seeds, {total.seeds / took_s:.0f}/s, "
        f"{total.simulated_s / 3600:.1f} h simulated, {len(total.failures)} violations"
    )
    if sys.stdout.isatty():
        print(f"\r{text}", end="", flush=True)
    elif total.seeds == seeds or total.seeds % 1000 == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
