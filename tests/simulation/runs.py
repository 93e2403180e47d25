"""Many seeds, one after the other or on several processes, and the report that a failing one leaves behind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, date, datetime

from tests.simulation.trace import TAIL, Violation
from tests.simulation.world import World

EPOCH = date(1970, 1, 1)
SEEDS_A_DAY = 10_000


def first_seed_of_today() -> int:
    """Where the seeds that the test suite runs begin: another place every day, the same one for everybody."""
    return (datetime.now(tz=UTC).date() - EPOCH).days * SEEDS_A_DAY


@dataclass(slots=True)
class Tally:
    """What some seeds amounted to."""

    seeds: int = 0
    events: int = 0
    simulated_s: float = 0.0
    generations: int = 0
    terms: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take another tally in."""
        self.seeds += other.seeds
        self.events += other.events
        self.simulated_s += other.simulated_s
        self.generations += other.generations
        self.terms += other.terms
        self.faults += other.faults
        self.failures += other.failures


def run_seed(seed: int, *, tail: int = TAIL) -> Tally:
    """One run; a violation becomes the report of a failure."""
    world = World(seed)
    try:
        outcome = world.run()
    except Violation as violation:
        lines = "\n".join(world.trace.lines(tail))
        again = f"python -m tests.simulation --seeds 1 --start {seed}"
        report = f"seed {seed}: {violation}\n{world.mix}\n{lines}\nagain: {again}"
        return Tally(seeds=1, events=world.events, simulated_s=world.now, faults=world.happened, failures=[report])
    return Tally(1, outcome.events, outcome.simulated_s, outcome.generations, outcome.terms, Counter(outcome.faults))


def run_seeds(start: int, seeds: int, *, tail: int = TAIL) -> Tally:
    """These seeds, here."""
    tally = Tally()
    for seed in range(start, start + seeds):
        tally.add(run_seed(seed, tail=tail))
    return tally


def run_in_parts(start: int, seeds: int, *, jobs: int, part: int = 50, tail: int = TAIL) -> Iterator[Tally]:
    """The tally so far, after every part; parts run on ``jobs`` processes."""
    parts = [(first, min(part, start + seeds - first)) for first in range(start, start + seeds, part)]
    total = Tally()
    if jobs <= 1:
        for first, many in parts:
            total.add(run_seeds(first, many, tail=tail))
            yield total
        return
    with ProcessPoolExecutor(jobs) as pool:
        for future in [pool.submit(run_seeds, first, many, tail=tail) for first, many in parts]:
            total.add(future.result())
            yield total


def timed(tallies: Iterator[Tally]) -> Iterator[tuple[Tally, float]]:
    """Each tally with the seconds it took to get there."""
    began = time.perf_counter()
    for tally in tallies:
        yield tally, time.perf_counter() - began
