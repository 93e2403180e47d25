"""A mutant, the search for a seed that kills it, and the known seed.

``killing_seeds.txt`` stores one seed for each mutant, so that a test runs one schedule instead of a search. Seeds
change whenever the core or the simulator changes: a stored seed that misses is a warning, and a new one is searched
for. ``python -m tests.simulation --mutants`` rewrites the table.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from samebits.core.agent.agent_core import AgentCore
from samebits.core.scheduler import SchedulerCore
from tests.simulation.checkers import Checker
from tests.simulation.trace import Violation
from tests.simulation.world import World

STORE = Path(__file__).with_name("killing_seeds.txt")
HEAD = "# A seed that kills each mutant; `python -m tests.simulation --mutants` writes this table.\n"
ENOUGH_KILLS = 3  # of which the cheapest is stored


def stored_seeds() -> dict[str, int]:
    """Return the stored seed of each mutant, by its name."""
    rows = (line.split(maxsplit=1) for line in STORE.read_text().splitlines() if not line.startswith("#"))
    return {name: int(seed) for seed, name in rows}


def store_seeds(seeds: Mapping[str, int]) -> None:
    """Write the table."""
    STORE.write_text(HEAD + "".join(f"{seed:3} {name}\n" for name, seed in seeds.items()))


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken build: its name, the checkers that may be the first to notice, and within how many seeds."""

    name: str
    caught_by: frozenset[str]
    within_seeds: int
    core_type: type[SchedulerCore] = SchedulerCore
    agent_type: type[AgentCore] = AgentCore
    patches: Mapping[str, Any] = field(default_factory=dict)  # dotted name → its replacement
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the drawn mix, if its fault shows rarely

    def kill(self) -> tuple[int, Violation] | None:
        """Return a seed in which one of its checkers notices: the stored one, or the first of ``within_seeds``."""
        stored = stored_seeds().get(self.name)
        if stored is not None:
            caught = self.hunt(stored, 1)
            if caught is not None and caught[1].name in self.caught_by:
                return caught
            warnings.warn(
                f"{self.name}: its stored seed {stored} kills it no more, which makes the tests slower. "
                "Fix: python -m tests.simulation --mutants",
                stacklevel=2,
            )
        return self.hunt(0, self.within_seeds)

    def hunt(
        self, start: int, seeds: int, checkers: Sequence[type[Checker]] | None = None
    ) -> tuple[int, Violation] | None:
        """Return the first of these seeds in which a checker (one of these; all if none are named) notices."""
        with self._applied():
            for seed in range(start, start + seeds):
                if (violation := self._violation(self._world(seed, checkers))) is not None:
                    return seed, violation
        return None

    def cheapest_seed(self) -> int | None:
        """Return the killing seed with the fewest events, counting the mutant's run and the unchanged build's."""
        costs: dict[int, int] = {}
        for seed in range(self.within_seeds):
            with self._applied():
                world = self._world(seed, None)
                violation = self._violation(world)
            if violation is not None and violation.name in self.caught_by:
                whole = World(seed, changes=self.changes)
                whole.run()
                costs[seed] = world.events + whole.events
            if len(costs) == ENOUGH_KILLS:
                break
        return min(costs, key=costs.__getitem__, default=None)

    @contextmanager
    def _applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for target, broken in self.patches.items():
                stack.enter_context(mock.patch(target, broken))
            yield

    def _world(self, seed: int, checkers: Sequence[type[Checker]] | None) -> World:
        return World(
            seed, core_type=self.core_type, agent_type=self.agent_type, changes=self.changes, checkers=checkers
        )

    @staticmethod
    def _violation(world: World) -> Violation | None:
        try:
            world.run()
        except Violation as violation:
            return violation
        return None
