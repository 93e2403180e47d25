"""What the readers of all figures make of them: whom to pair next, and at the end the verdict, as all are told it.

Here live the values that nodes exchange in the pre-flight, and a reader's memory of them. Never here: how they travel
(``training.process.node_check``), nor what follows from them (``core.node_check``). The one idea: whatever another node
wrote is bounded here, and a verdict about any number of nodes fits into one key's value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from samebits.core.node_check import (
    MOST_ROUNDS,
    SILENT,
    UNMET,
    WRONG,
    Figures,
    Pair,
    Sum,
    across_hosts,
    by_host,
    next_pairs,
    slow,
    verdict,
)

__all__ = ["MOST_CHARS", "MOST_PLANS", "MOST_SAID", "Judge", "Plan", "Report", "Reports"]

MOST_PLANS = MOST_ROUNDS + 3
"""Who is slow measures again, pairs add up, and what follows."""
MOST_SAID = 32
"""Nodes about which a verdict has a sentence of their own, and as many that are only told: a key's value is bounded."""
MOST_CHARS = 300
_MOST_NAME_CHARS = 40
_LONGEST_S = 1e6


class Plan(msgspec.Struct, frozen=True):
    """What all do next; at the end, who is not to train."""

    pairs: tuple[tuple[int, int], ...] = ()
    again: tuple[int, ...] = ()  # who measures once more, while the others rest
    is_last: bool = False
    bad: dict[int, bytes] = {}  # by slot, the machine
    why: dict[int, str] = {}
    said: tuple[str, ...] = ()

    def is_sound(self, world_size: int) -> bool:
        """Whether it is about slots that there are, none of them in two pairs."""
        paired = [slot for pair in self.pairs for slot in pair]
        named = (*paired, *self.again, *self.bad)
        return len(paired) == len(set(paired)) and all(0 <= slot < world_size for slot in named)


class Report(msgspec.Struct, frozen=True):
    """What one node found in one round."""

    name: str = ""
    machine: bytes = b""
    figures: tuple[float, float, float] = (0.0, 0.0, 0.0)
    took_s: float = 0.0
    problem: str = ""


Reports = Callable[[str, Iterable[int]], dict[int, Report]]


class Judge:
    """What a reader makes of all figures and sums.

    Args:
        reports: what these nodes said in one part of the check, as far as they did in time.
        slots: of all nodes.
        shares_all: nodes of one machine share processors and memory as well; else only the disk.
    """

    def __init__(self, reports: Reports, slots: Iterable[int], *, shares_all: bool) -> None:
        self._reports, self._slots, self._shares_all = reports, slots, shares_all
        self._alone: dict[int, Report] = {}
        self._again: dict[int, Figures] | None = None
        self._sums: dict[Pair, Sum] = {}
        self._rounds = 0
        self._gone: set[int] = set()  # they said nothing in time: dead or stopped, which is others' business

    def plan(self) -> Plan:
        """What comes next."""
        if not self._alone:
            self._alone = self._reports("alone", self._slots)
        figures = self._figures(self._alone)
        if self._again is None and (slow_ones := slow(figures)):
            return Plan(again=tuple(slow_ones))
        order = across_hosts({slot: self._alone[slot].machine for slot in figures.keys() - self._gone})
        pairs = next_pairs(order, self._sums) if self._rounds < MOST_ROUNDS else ()
        return Plan(pairs) if pairs else self._last(figures)

    def _last(self, figures: Mapping[int, Figures]) -> Plan:
        names = {slot: one.name[:_MOST_NAME_CHARS] for slot, one in self._alone.items()}
        found = verdict(names, slow(figures, self._again or {}), self._sums)
        bad = dict(found.bad)
        for pair, sentence in found.either.items():
            bad.update(dict.fromkeys(pair, sentence))
        silent = sorted(self._gone.union(self._slots) - (self._alone.keys() - self._gone))
        summed = {slot for pair in self._sums for slot in pair}
        unmet = sorted(figures.keys() - self._gone - summed)
        said = list(found.said[: MOST_SAID - 2])
        if silent:
            said.append(f"the nodes of these slots said nothing in time and were not compared: {_named(silent)}")
        if unmet:
            said.append(f"the nodes of these slots met nobody in time to add up with: {_named(unmet)}")
        return Plan(
            is_last=True,
            bad={slot: self._alone[slot].machine for slot in bad},
            why={slot: text[:MOST_CHARS] for slot, text in sorted(bad.items())[:MOST_SAID]},
            said=tuple(sentence[:MOST_CHARS] for sentence in said),
        )

    def _figures(self, said: Mapping[int, Report]) -> dict[int, Figures]:
        found = {slot: Figures(*map(_seconds, one.figures)) for slot, one in said.items()}
        machines = {slot: self._alone[slot].machine for slot in said}
        return by_host(found, machines, shares_all=self._shares_all)

    def take(self, plan: Plan, number: int) -> None:
        """What came of it."""
        asked = {*plan.again, *(slot for one in plan.pairs for slot in one)}
        said = self._reports(f"round{number}", sorted(asked))
        self._gone |= asked - said.keys()
        if plan.again:
            self._again = self._figures(
                {slot: said[slot] for slot in plan.again if slot in said and slot in self._alone}
            )
        self._rounds += bool(plan.pairs)
        for pair in plan.pairs:
            if not said.keys() >= set(pair):
                continue  # the other one is paired again
            both = [said[slot] for slot in pair]
            problems = {one.problem for one in both}
            if UNMET in problems:
                continue  # both are
            problem = next((one for one in (WRONG, SILENT) if one in problems), "")
            self._sums[pair] = Sum(max(_seconds(one.took_s) for one in both), problem)


def _named(slots: Sequence[int]) -> str:
    more = f" and {len(slots) - MOST_SAID} more" if len(slots) > MOST_SAID else ""
    return ", ".join(map(str, slots[:MOST_SAID])) + more


def _seconds(value: float) -> float:
    return value if 0 <= value < _LONGEST_S else 0.0
