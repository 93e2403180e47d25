"""Reduce a failing seed to the few faults it needs, by delta debugging over the run's planned faults.

A run is a function of its seed, of the omitted faults, and of the mix, so "does it still fail the same way?" has one
answer. First the mix is made as kind as possible (no loss, no delay, no torn write, …), then faults are omitted, by
halves, quarters, …, down to single ones (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input",
2002), until each remaining one is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation.quorum import QuorumFaults
from tests.simulation.trace import Violation
from tests.simulation.world import World

KINDER: tuple[Mapping[str, Any], ...] = (
    {"clock_spread": 0.0, "scheduler_rate": 1.0},
    {"p_echo": 0.0},
    {"p_slow": 0.0},
    {"p_duplicate": 0.0},
    {"p_drop": 0.0},
    {"has_stragglers": False},
    {"is_ordered": True},
    {"p_torn": 0.0},
    {"quorum": QuorumFaults()},
    {"quorum": None},
    {"fsync_s": 0.0},
    {"has_own_parts": False},
    {"sharding": None},
    {"has_memory": False},
    {"spare_num": 0},
    {"compact_bytes": 1 << 22},
)
MOST_RUNS = 600


@dataclass(frozen=True, slots=True)
class Minimised:
    """The rest of a failing run. ``leave_out`` are the numbers of the planned faults that are not needed."""

    seed: int
    violation: Violation
    changes: Mapping[str, Any]
    leave_out: frozenset[int]
    runs: int

    def world(self, **how: Any) -> World:
        """Return the run, ready to be repeated."""
        return World(self.seed, changes=self.changes, leave_out=self.leave_out, **how)

    def report(self, tail: int) -> str:
        """Return the schedule, the mix and the trace's end."""
        world = self.world(traced=True)
        try:
            world.run()
        except Violation as violation:
            ending = str(violation)
        else:
            ending = "did not fail again: the code has changed meanwhile"
        needed = [planned for planned in world.schedule if planned.number not in self.leave_out]
        schedule = "\n".join(map(str, needed)) or "   (no planned fault is needed)"
        return (
            f"minimised in {self.runs} runs to {len(needed)} of {len(world.schedule)} planned faults, with "
            f"{dict(self.changes)}:\n{schedule}\n{world.mix}\n" + "\n".join(world.trace.lines(tail)) + f"\n{ending}\n"
            f"again: python -m tests.simulation --seeds 1 --start {self.seed}"
        )


class _Search:
    """Runs variants of one failing run; any of them that fails by the same invariant counts."""

    def __init__(self, seed: int, violation: Violation, how: Mapping[str, Any]) -> None:
        self.seed, self.violation, self.how, self.runs = seed, violation, how, 0

    def fails(self, changes: Mapping[str, Any], leave_out: frozenset[int]) -> bool:
        if self.runs >= MOST_RUNS:
            return False
        self.runs += 1
        try:
            World(self.seed, changes=changes, leave_out=leave_out, **self.how).run()
        except Violation as violation:
            if violation.name == self.violation.name:
                self.violation = violation
                return True
        return False

    def kinder_mix(self, changes: dict[str, Any]) -> dict[str, Any]:
        for change in KINDER:
            if self.fails({**changes, **change}, frozenset()):
                changes = {**changes, **change}
        return changes

    def fewer(self, changes: Mapping[str, Any], numbers: Sequence[int]) -> frozenset[int]:
        """Return which of these planned faults can all be omitted."""
        everything, needed = frozenset(numbers), list(numbers)
        if self.fails(changes, everything):
            return everything
        parts = 2
        while len(needed) > 1:
            size = -(-len(needed) // parts)
            for first in range(0, len(needed), size):
                rest = needed[:first] + needed[first + size :]
                if self.fails(changes, everything - set(rest)):
                    needed, parts = rest, max(2, parts - 1)
                    break
            else:
                if parts >= len(needed):
                    break
                parts = min(2 * parts, len(needed))
        return everything - set(needed)


def minimised(seed: int, violation: Violation, changes: Mapping[str, Any] | None = None, **how: Any) -> Minimised:
    """Return the smallest failing variant found of this seed's run; ``how`` is what the world is made with, of a
    mutant.
    """
    search = _Search(seed, violation, how)
    kinder = search.kinder_mix(dict(changes or {}))
    numbers = [planned.number for planned in World(seed, changes=kinder, **how).schedule]
    leave_out = search.fewer(kinder, numbers)
    return Minimised(seed, search.violation, kinder, leave_out, search.runs)
