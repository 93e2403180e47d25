"""Find nodes that are slow or compute wrong results, alone and in pairs, before training. Pure functions.

A node is slow if it needs a multiple of the others' time for the same work twice, the second time while the others are
idle. If a pair is slow or wrong, it is unknown which of its members is at fault. A member that succeeds in another pair
is cleared, which leaves the other. With two nodes there is no other pair. ``training.process.node_comparison`` measures
and exchanges the results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

import msgspec

from samebits.printable import IN_LOGS, shortened

FACTORS = {"computes": 2.0, "memory": 2.0, "disk": 5.0}
"""How many times the others' median makes a node slow. Disks vary most, even from one minute to the next."""
SUM_FACTOR = 3.0
"""The same factor for a pair, relative to the other pairs' median; connections between nodes differ more."""
MOST_ROUNDS = 4
MOST_PLANS = MOST_ROUNDS + 3
"""Most plans of one check: slow nodes measure again, pairs add up, and a verdict follows."""
MOST_SAID = 32
"""Most nodes with a sentence of their own in a verdict, and most that are only listed: key values are bounded."""
MOST_CHARS = 300
_MOST_NAME_CHARS = 40
_LONGEST_S = 1e6
WRONG, SILENT = "wrong", "silent"
UNMET = "unmet"
"""The nodes did not learn each other's address in time, so their connection is untested."""
_PROBLEMS = {WRONG: "their sum is wrong", SILENT: "they get no answer from each other"}
Pair = tuple[int, int]


class NodeTimings(NamedTuple):
    """How many seconds a node needs for the standard work; 0: not measured."""

    compute_s: float
    memory_s: float
    disk_s: float


class Sum(NamedTuple):
    """One node's result for the sum that a pair computes together."""

    took_s: float
    problem: str = ""  # WRONG, SILENT or UNMET; the last is not held against the pair


class NodeReport(msgspec.Struct, frozen=True):
    """One node's results from one round."""

    name: str = ""
    machine: bytes = b""
    figures: NodeTimings = NodeTimings(0.0, 0.0, 0.0)
    sum: Sum = Sum(0.0)


class NodeVerdict(NamedTuple):
    """Why nodes must not train, and messages."""

    bad: dict[int, str]
    said: list[str]


class NodeCheckPlan(msgspec.Struct, frozen=True):
    """What the nodes measure next. The last plan names the nodes that must not train."""

    pairs: tuple[Pair, ...] = ()
    again: tuple[int, ...] = ()  # slots that measure once more, while the others are idle
    is_last: bool = False
    bad: dict[int, bytes] = {}  # slot → machine id
    why: dict[int, str] = {}
    said: tuple[str, ...] = ()

    @property
    def asked(self) -> list[int]:
        """Return the slots of the nodes that must report on this plan."""
        return sorted({*self.again, *(slot for pair in self.pairs for slot in pair)})

    def is_sound(self, world_size: int) -> bool:
        """Return whether the plan contains only existing slots, each in at most one pair."""
        is_paired_once = len({slot for pair in self.pairs for slot in pair}) == 2 * len(self.pairs)
        return is_paired_once and all(0 <= slot < world_size for slot in (*self.asked, *self.bad))


def by_host(
    figures: Mapping[int, NodeTimings], hosts: Mapping[int, bytes], *, shares_all: bool
) -> dict[int, NodeTimings]:
    """Replace each node's timings by the best ones of its host, because nodes of a host measure at the same time.

    Args:
        shares_all: nodes of a host also share processors and memory; False: only the disk.
    """
    found = dict(figures)
    for place, part in enumerate(NodeTimings._fields):
        if shares_all or part == "disk_s":
            best: dict[bytes, float] = {}
            for slot, one in figures.items():
                if one[place] > 0:
                    best[hosts[slot]] = min(one[place], best.get(hosts[slot], one[place]))
            found = {slot: one._replace(**{part: best.get(hosts[slot], 0.0)}) for slot, one in found.items()}
    return found


def slow(figures: Mapping[int, NodeTimings], again: Mapping[int, NodeTimings] | None = None) -> dict[int, str]:
    """Return slow nodes and their problem. With ``again``, only those that were slow both times."""
    found: dict[int, list[str]] = {}
    for place, (part, factor) in enumerate(FACTORS.items()):
        known = sorted((one[place], slot) for slot, one in figures.items() if one[place] > 0)
        median_s = known[(len(known) - 2) // 2][0] if len(known) > 1 else 0.0  # of the others, for any node above it
        for took_s, slot in known[1:]:
            second_s = took_s if again is None else again[slot][place] if slot in again else 0.0
            if (least_s := min(took_s, second_s)) > factor * median_s:
                text = f"{part}: {1000 * least_s:.3g} ms, the others {1000 * median_s:.3g} ms"
                found.setdefault(slot, []).append(text)
    return {slot: "; ".join(texts) for slot, texts in found.items()}


def across_hosts(hosts: Mapping[int, bytes]) -> list[int]:
    """Order the slots so that neighbors are on different hosts where possible."""
    counts: Counter[bytes] = Counter()
    places: dict[int, int] = {}
    for slot in sorted(hosts):
        places[slot] = counts[hosts[slot]]
        counts[hosts[slot]] += 1
    return sorted(places, key=lambda slot: (places[slot], slot))


def _outcomes(sums: Mapping[Pair, Sum]) -> tuple[list[Pair], set[int], float]:
    """Return the failed pairs, the nodes that another pair has cleared, and the usual time of a sum in seconds."""
    usual_s = median_low([one.took_s for one in sums.values() if not one.problem] or [0.0])
    failed = {pair for pair, one in sums.items() if one.problem or one.took_s > SUM_FACTOR * usual_s}
    return sorted(failed), {slot for pair in sums if pair not in failed for slot in pair}, usual_s


def next_pairs(waiting: Sequence[int], sums: Mapping[Pair, Sum]) -> tuple[Pair, ...]:
    """Return the pairs of nodes to test next, or () if no pair can give more information.

    At first, neighbors are paired; later, each suspect and each single node gets a different partner.
    """
    if not sums:
        return tuple(_pair(*two) for two in zip(waiting[::2], waiting[1::2], strict=False))
    failed, cleared, _ = _outcomes(sums)
    named = {slot for pair in failed if not cleared.isdisjoint(pair) for slot in pair}
    unclear = [slot for slot in waiting if slot not in cleared | named]
    free = dict.fromkeys([*(slot for slot in waiting if slot in cleared), *reversed(unclear)])
    found: list[Pair] = []
    for slot in unclear:
        if slot in free:
            del free[slot]
            if (other := next((one for one in free if _pair(slot, one) not in sums), None)) is not None:
                del free[other]
                found.append(_pair(slot, other))
    return tuple(found)


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)


def verdict(names: Mapping[int, str], slow_ones: Mapping[int, str], sums: Mapping[Pair, Sum]) -> NodeVerdict:
    """Return the result when no more pairs need to be tested.

    Args:
        names: by slot, names for messages.
        slow_ones: nodes that are slow alone, and at what.
        sums: by pair, the result of its slower or wrong member.
    """
    bad = {slot: f"it is slow ({text})" for slot, text in slow_ones.items()}
    said: list[str] = []
    either: dict[int, str] = {}
    failed, cleared, usual_s = _outcomes(sums)
    for pair in failed:
        took_s, problem = sums[pair]
        times = f"they need {1000 * took_s:.3g} ms for a sum; the other nodes need {1000 * usual_s:.3g} ms"
        what = _PROBLEMS.get(problem, times)
        both, left = f"{names[pair[0]]} and {names[pair[1]]}: {what}", [slot for slot in pair if slot not in cleared]
        if not left:
            said.append(f"{both}, but each works well with other nodes. Check the network between the two")
        elif len(left) == 1:
            other = names[pair[left[0] == pair[0]]]
            bad.setdefault(left[0], f"together with {other} {what}, and {other} works well with other nodes")
        elif bad.keys().isdisjoint(pair):
            sentence = f"{both}, and no other pair shows which of the two is at fault"
            if problem:  # then neither may train
                either |= dict.fromkeys(pair, sentence)
            else:
                said.append(sentence)
    return NodeVerdict(bad | either, said)


class Judge:
    """Creates plans from the nodes' reports.

    Args:
        alone: by slot, the figures of the nodes that reported in time.
        slots: the slots of all nodes.
        shares_all: nodes of one machine share processors and memory too, not only the disk.
    """

    def __init__(self, alone: Mapping[int, NodeReport], slots: Iterable[int], *, shares_all: bool) -> None:
        self._alone, self._slots, self._shares_all = alone, set(slots), shares_all
        self._machines = {slot: one.machine for slot, one in alone.items()}
        self._again: dict[int, NodeTimings] | None = None
        self._sums: dict[Pair, Sum] = {}
        self._rounds = 0
        self._here = set(alone)  # the others are dead or stopped, which is handled elsewhere

    def plan(self) -> NodeCheckPlan:
        """Return the next plan."""
        figures = self._figures(self._alone)
        if self._again is None and (slow_ones := slow(figures)):
            return NodeCheckPlan(again=tuple(slow_ones))
        order = across_hosts({slot: self._machines[slot] for slot in self._here})
        if self._rounds < MOST_ROUNDS and (pairs := next_pairs(order, self._sums)):
            return NodeCheckPlan(pairs)
        names = {slot: one.name[:_MOST_NAME_CHARS] for slot, one in self._alone.items()}
        found = verdict(names, slow(figures, self._again or {}), self._sums)
        left_out = {
            "did not report in time and were not compared": self._slots - self._here,
            "found no partner for a sum in time": self._here.difference(*self._sums),
        }
        said = found.said[: MOST_SAID - len(left_out)]
        said += [f"the nodes of these slots {text}: {_named(slots)}" for text, slots in left_out.items() if slots]
        return NodeCheckPlan(
            is_last=True,
            bad={slot: self._machines[slot] for slot in found.bad},
            why={slot: shortened(text, MOST_CHARS, IN_LOGS) for slot, text in sorted(found.bad.items())[:MOST_SAID]},
            said=tuple(shortened(sentence, MOST_CHARS, IN_LOGS) for sentence in said),
        )

    def _figures(self, said: Mapping[int, NodeReport]) -> dict[int, NodeTimings]:
        found = {slot: NodeTimings(*map(_seconds, one.figures)) for slot, one in said.items()}
        return by_host(found, self._machines, shares_all=self._shares_all)

    def take(self, plan: NodeCheckPlan, said: Mapping[int, NodeReport]) -> None:
        """Add the reports on a plan that have arrived in time."""
        self._here -= set(plan.asked) - said.keys()
        if plan.again:
            self._again = self._figures({slot: said[slot] for slot in self._here.intersection(plan.again)})
        self._rounds += bool(plan.pairs)
        for pair in plan.pairs:
            both = [said[slot].sum for slot in pair if slot in said]
            problems = {one.problem for one in both}
            if len(both) == 2 and UNMET not in problems:  # otherwise its nodes are paired again
                problem = next((one for one in _PROBLEMS if one in problems), "")
                self._sums[pair] = Sum(max(_seconds(one.took_s) for one in both), problem)


def _named(slots: Iterable[int]) -> str:
    first, more = sorted(slots)[:MOST_SAID], sorted(slots)[MOST_SAID:]
    return ", ".join(map(str, first)) + (f" and {len(more)} more" if more else "")


def _seconds(value: float) -> float:
    return value if 0 <= value < _LONGEST_S else 0.0
