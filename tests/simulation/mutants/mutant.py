"""What a mutant is, and how it is hunted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from samebits.core.agent import AgentCore
from samebits.core.scheduler import SchedulerCore
from tests.simulation.checkers import Checker
from tests.simulation.trace import Violation
from tests.simulation.world import World


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken build: what it is called, which checkers may be the first to notice, and within how many seeds."""

    name: str
    caught_by: frozenset[str]
    within_seeds: int
    core_type: type[SchedulerCore] = SchedulerCore
    agent_type: type[AgentCore] = AgentCore
    patches: Mapping[str, Any] = field(default_factory=dict)  # dotted name → what stands there instead
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the drawn mix, where its fault shows seldom

    def hunt(
        self, start: int, seeds: int, checkers: Sequence[type[Checker]] | None = None
    ) -> tuple[int, Violation] | None:
        """The first of these seeds in which a checker (one of these; all if none are named) notices."""
        with ExitStack() as stack:
            for target, broken in self.patches.items():
                stack.enter_context(mock.patch(target, broken))
            for seed in range(start, start + seeds):
                try:
                    World(
                        seed,
                        core_type=self.core_type,
                        agent_type=self.agent_type,
                        changes=self.changes,
                        checkers=checkers,
                    ).run()
                except Violation as violation:
                    return seed, violation
        return None
