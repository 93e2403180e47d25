"""Many seeds, one after the other or on several processes, and the report of a failing one."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, date, datetime

from tests.simulation.minimise import minimised
from tests.simulation.trace import TAIL, Violation
from tests.simulation.world import World

EPOCH = date(1970, 1, 1)
SEEDS_A_DAY = 1_000_000
COLLECT_EVERY = 20


def first_seed_of_today() -> int:
    """Return the test suite's first seed: it changes daily and is the same for all machines."""
    return (datetime.now(tz=UTC).date() - EPOCH).days * SEEDS_A_DAY


@dataclass(slots=True)
class Tally:
    """The results of some seeds."""

    seeds: int = 0
    events: int = 0
    simulated_s: float = 0.0
    generations: int = 0
    terms: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add another tally."""
        self.seeds += other.seeds
        self.events += other.events
        self.simulated_s += other.simulated_s
        self.generations += other.generations
        self.terms += other.terms
        self.faults += other.faults
        self.failures += other.failures


def run_seed(seed: int, *, tail: int = TAIL) -> Tally:
    """Run a seed; a violation becomes the report of a failure."""
    world = World(seed)
    try:
        outcome = world.run()
    except Violation as violation:
        report = f"seed {seed}: {violation}\n{minimised(seed, violation).report(tail)}"
        return Tally(seeds=1, events=world.events, simulated_s=world.now, faults=world.happened, failures=[report])
    return Tally(1, outcome.events, outcome.simulated_s, outcome.generations, outcome.terms, outcome.faults)


def run_seeds(start: int, seeds: int, *, tail: int = TAIL) -> Tally:
    """Run these seeds in this process."""
    tally = Tally()
    with _RarelyCollected() as collect:
        for seed in range(start, start + seeds):
            tally.add(run_seed(seed, tail=tail))
            collect(seed - start)
    return tally


class _RarelyCollected:
    """A world's cycles become garbage only together at its end, so collecting within a run finds none.

    Objects from before the first run need not be examined again after each, either.
    """

    def __enter__(self) -> _RarelyCollected:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        gc.freeze()
        return self

    def __call__(self, number: int) -> None:
        if number % COLLECT_EVERY == COLLECT_EVERY - 1:
            gc.collect()

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()


def run_in_parts(start: int, seeds: int, *, jobs: int, part: int = 100, tail: int = TAIL) -> Iterator[Tally]:
    """Yield the tally of each part as it is done, in order; parts run on ``jobs`` processes."""
    parts = [(first, min(part, start + seeds - first)) for first in range(start, start + seeds, part)]
    if jobs <= 1:
        for first, many in parts:
            yield run_seeds(first, many, tail=tail)
        return
    with ProcessPoolExecutor(jobs) as pool:
        ahead = [pool.submit(run_seeds, first, many, tail=tail) for first, many in parts[: 2 * jobs]]
        for first, many in [*parts[2 * jobs :], *[(0, 0)] * len(ahead)]:
            yield ahead.pop(0).result()
            if many:
                ahead.append(pool.submit(run_seeds, first, many, tail=tail))
