"""Find nodes that are slow or compute wrong results, alone and in pairs, before training. Pure functions.

A node that needs a multiple of the others' time for the same work is slow if a second measurement, while the others are
idle, confirms it. In a slow or wrong pair the faulty member is unknown, but a member that succeeds in another pair is
cleared, which leaves the other. With two nodes there is no other pair. A :class:`Judge` derives from the nodes' reports
what they do next; ``training.process.node_check`` measures and exchanges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

import msgspec

from samebits.printable import IN_LOGS, shortened

FACTOR = 2.0
"""A node that takes this many times the others' median is slow (computing and memory)."""
SUM_FACTOR = 3.0
"""The same for a pair and the other pairs' median; connections between nodes differ more."""
DISK_FACTOR = 5.0
"""The same for disks, which vary most, even from one minute to the next."""
MOST_ROUNDS = 4
"""Most rounds of pairs."""
MOST_PLANS = MOST_ROUNDS + 3
"""Most plans of one check: slow nodes measure again, pairs add up, and a verdict follows."""
MOST_SAID = 32
"""Most nodes with a sentence of their own in a verdict, and most that are only listed: key values are bounded."""
MOST_CHARS = 300
_MOST_NAME_CHARS = 40
_LONGEST_S = 1e6
WRONG = "wrong"
SILENT = "silent"
UNMET = "unmet"
"""The nodes did not learn each other's address in time, so their connection is untested."""
Pair = tuple[int, int]


class Figures(NamedTuple):
    """Seconds that a node needs for the standard work; 0: not measured."""

    compute_s: float
    memory_s: float
    disk_s: float


class Sum(NamedTuple):
    """One node's result of the sum that a pair computes together."""

    took_s: float
    problem: str = ""  # WRONG, SILENT or UNMET; the last is not held against the pair


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the check.

    Attributes:
        bad: by slot, why that node must not train.
        said: informational messages.
        either: messages about pairs that are wrong or silent while the faulty member is unknown. Neither may train.
    """

    bad: Mapping[int, str]
    said: tuple[str, ...] = ()
    either: Mapping[Pair, str] = field(default_factory=dict)


_PARTS = (("computes", FACTOR), ("memory", FACTOR), ("disk", DISK_FACTOR))


def by_host(figures: Mapping[int, Figures], hosts: Mapping[int, bytes], *, shares_all: bool) -> dict[int, Figures]:
    """Replace each node's figures by the best ones of its host, whose nodes measure at the same time.

    Args:
        shares_all: nodes of a host also share processors and memory; False: only the disk.
    """
    best: dict[tuple[bytes, int], float] = {}
    for slot, one in figures.items():
        for place, took_s in enumerate(one):
            if took_s > 0:
                key = hosts[slot], place
                best[key] = min(took_s, best.get(key, took_s))
    return {
        slot: Figures(*(best.get((hosts[slot], at), 0.0) if shares_all or at == 2 else one[at] for at in range(3)))
        for slot, one in figures.items()
    }


def slow(figures: Mapping[int, Figures], again: Mapping[int, Figures] | None = None) -> dict[int, str]:
    """Return slow nodes and their problem; with ``again``, only those that were slow both times."""
    found: dict[int, str] = {}
    for place, (part, factor) in enumerate(_PARTS):
        known = sorted((one[place], slot) for slot, one in figures.items() if one[place] > 0)
        median_s = known[(len(known) - 2) // 2][0] if len(known) > 1 else 0.0  # of the others, for any node above it
        for took_s, slot in known[1:]:
            second_s = took_s if again is None else again[slot][place] if slot in again else 0.0
            if min(took_s, second_s) > factor * median_s:
                text = f"{part}: {1000 * min(took_s, second_s):.3g} ms, the others {1000 * median_s:.3g} ms"
                found[slot] = f"{found[slot]}; {text}" if slot in found else text
    return found


def across_hosts(hosts: Mapping[int, bytes]) -> list[int]:
    """Return the slots ordered such that neighbours are on different hosts where possible."""
    counts: Counter[bytes] = Counter()
    places: dict[int, int] = {}
    for slot in sorted(hosts):
        places[slot] = counts[hosts[slot]]
        counts[hosts[slot]] += 1
    return sorted(hosts, key=lambda slot: (places[slot], slot))


def next_pairs(waiting: Sequence[int], sums: Mapping[Pair, Sum]) -> tuple[Pair, ...]:
    """Return the next pairs, each node at most once; () if more pairs would tell nothing.

    Args:
        waiting: the slots to pair; at first, neighbours are paired.
    """
    if not sums:
        return tuple(_pair(waiting[at], waiting[at + 1]) for at in range(0, len(waiting) - 1, 2))
    failed = _failed(sums)
    cleared = _cleared(sums, failed)
    met = {slot for pair in sums for slot in pair}
    suspected = {slot for pair in failed if cleared.isdisjoint(pair) for slot in pair}
    suspects = [slot for slot in waiting if slot in suspected]
    alone = [slot for slot in waiting if slot not in met]
    free = dict.fromkeys([*(slot for slot in waiting if slot in cleared), *alone, *suspects])
    found: list[Pair] = []
    for slot in [*suspects, *alone]:
        if slot not in free:
            continue
        del free[slot]
        other = next((one for one in free if _pair(slot, one) not in sums), None)
        if other is not None:
            del free[other]
            found.append(_pair(slot, other))
    return tuple(found)


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)


def verdict(names: Mapping[int, str], slow_ones: Mapping[int, str], sums: Mapping[Pair, Sum]) -> Verdict:
    """Return the verdict once no more pairs are to be tried.

    Args:
        names: by slot, names for messages.
        slow_ones: nodes that are slow alone, and at what.
        sums: by pair, the result of its slower or wrong member.
    """
    bad, either = {slot: f"it is slow ({text})" for slot, text in slow_ones.items()}, {}
    said: list[str] = []
    failed, usual_ms = _failed(sums), 1000 * _usual(sums)
    cleared = _cleared(sums, failed)
    for pair in sorted(failed):
        left = [slot for slot in pair if slot not in cleared]
        problem = sums[pair].problem
        what = {WRONG: "their sum is wrong", SILENT: "they get no answer of each other"}.get(
            problem, f"they need {1000 * sums[pair].took_s:.3g} ms for a sum, the others {usual_ms:.3g} ms"
        )
        first, second = (names[slot] for slot in pair)
        if not left:
            said.append(f"{first} and {second}: {what}, and each does well with others: look at what lies between them")
        elif len(left) == 1:
            (one,) = left
            other = names[pair[0] if one == pair[1] else pair[1]]
            bad.setdefault(one, f"together with {other} {what}, and {other} does well with others")
        elif not any(slot in bad for slot in pair):
            sentence = f"{first} and {second}: {what}, and no other pair tells which of the two it is"
            if problem:
                either[pair] = sentence
            else:
                said.append(sentence)
    return Verdict(bad, tuple(said), either)


def _usual(sums: Mapping[Pair, Sum]) -> float:
    return median_low([one.took_s for one in sums.values() if not one.problem] or [0.0])


def _failed(sums: Mapping[Pair, Sum]) -> set[Pair]:
    usual_s = _usual(sums)
    return {pair for pair, one in sums.items() if one.problem or one.took_s > SUM_FACTOR * usual_s}


def _cleared(sums: Mapping[Pair, Sum], failed: Collection[Pair]) -> set[int]:
    return {slot for pair in sums if pair not in failed for slot in pair}


class Plan(msgspec.Struct, frozen=True):
    """The nodes' next task; the last plan names the nodes that must not train."""

    pairs: tuple[tuple[int, int], ...] = ()
    again: tuple[int, ...] = ()  # slots that measure once more, while the others are idle
    is_last: bool = False
    bad: dict[int, bytes] = {}  # slot → machine id
    why: dict[int, str] = {}
    said: tuple[str, ...] = ()

    def is_sound(self, world_size: int) -> bool:
        """Return whether the plan names only existing slots, and each in at most one pair."""
        paired = [slot for pair in self.pairs for slot in pair]
        named = (*paired, *self.again, *self.bad)
        return len(paired) == len(set(paired)) and all(0 <= slot < world_size for slot in named)

    @property
    def asked(self) -> list[int]:
        """Return the slots that report on this plan."""
        return sorted({*self.again, *(slot for pair in self.pairs for slot in pair)})


class Report(msgspec.Struct, frozen=True):
    """One node's results from one round."""

    name: str = ""
    machine: bytes = b""
    figures: Figures = Figures(0.0, 0.0, 0.0)
    took_s: float = 0.0
    problem: str = ""


class Judge:
    """Derives plans from the nodes' reports.

    Args:
        alone: by slot, the figures of the nodes that reported in time.
        slots: of all nodes.
        shares_all: nodes of one machine share processors and memory too, not only the disk.
    """

    def __init__(self, alone: Mapping[int, Report], slots: Iterable[int], *, shares_all: bool) -> None:
        self._alone, self._slots, self._shares_all = alone, slots, shares_all
        self._again: dict[int, Figures] | None = None
        self._sums: dict[Pair, Sum] = {}
        self._rounds = 0
        self._gone: set[int] = set()  # sent nothing in time: dead or stopped, which is handled elsewhere

    def plan(self) -> Plan:
        """Return the next plan."""
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
            said.append(f"the nodes of these slots did not report in time and were not compared: {_named(silent)}")
        if unmet:
            said.append(f"the nodes of these slots found no partner for a sum in time: {_named(unmet)}")
        return Plan(
            is_last=True,
            bad={slot: self._alone[slot].machine for slot in bad},
            why={slot: shortened(text, MOST_CHARS, IN_LOGS) for slot, text in sorted(bad.items())[:MOST_SAID]},
            said=tuple(shortened(sentence, MOST_CHARS, IN_LOGS) for sentence in said),
        )

    def _figures(self, said: Mapping[int, Report]) -> dict[int, Figures]:
        found = {slot: Figures(*map(_seconds, one.figures)) for slot, one in said.items()}
        machines = {slot: self._alone[slot].machine for slot in said}
        return by_host(found, machines, shares_all=self._shares_all)

    def take(self, plan: Plan, said: Mapping[int, Report]) -> None:
        """Add the reports on a plan that arrived in time."""
        self._gone |= set(plan.asked) - said.keys()
        if plan.again:
            self._again = self._figures(
                {slot: said[slot] for slot in plan.again if slot in said and slot in self._alone}
            )
        self._rounds += bool(plan.pairs)
        for pair in plan.pairs:
            if not said.keys() >= set(pair):
                continue  # the other node is paired again
            both = [said[slot] for slot in pair]
            problems = {one.problem for one in both}
            if UNMET in problems:
                continue  # both nodes are
            problem = next((one for one in (WRONG, SILENT) if one in problems), "")
            self._sums[pair] = Sum(max(_seconds(one.took_s) for one in both), problem)


def _named(slots: Sequence[int]) -> str:
    more = f" and {len(slots) - MOST_SAID} more" if len(slots) > MOST_SAID else ""
    return ", ".join(map(str, slots[:MOST_SAID])) + more


def _seconds(value: float) -> float:
    return value if 0 <= value < _LONGEST_S else 0.0
