"""Which of the nodes that are to train together is slow, or adds up wrong: by their figures and by pairs of them. Pure.

Here live who is paired with whom, and what follows from what the pairs found. Never here: computing anything, or how
the figures travel (``training.process.node_check``). Two ideas. Who needs a multiple of what the others need for the
same work is slow, and is named when a second measurement, while the others rest, says the same. Of a pair that is slow
or wrong nobody can say which member it is; but whoever does well in another pair is cleared, so the other is named.
With two nodes there is no other pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

FACTOR = 2.0
"""Of the others' median, for computing and memory."""
SUM_FACTOR = 3.0
"""Of the other pairs' median: what lies between two nodes differs more."""
DISK_FACTOR = 5.0
"""Disks of one kind differ most, and so does one disk from one minute to the next."""
MOST_ROUNDS = 4
"""Of pairs."""
WRONG = "wrong"
SILENT = "silent"
UNMET = "unmet"
"""They did not come to know each other's address in time, which says nothing of what lies between them."""
Pair = tuple[int, int]


class Figures(NamedTuple):
    """Seconds that a node needs for the same work as every other; 0: it was not measured."""

    compute_s: float
    memory_s: float
    disk_s: float


class Sum(NamedTuple):
    """What a member of a pair found when the two added something up."""

    took_s: float
    problem: str = ""  # WRONG, SILENT; UNMET, which is none of a pair


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whom the check names.

    Attributes:
        bad: by slot, why that node is not to train.
        said: what is only told.
        either: of pairs that are wrong or silent, where nothing tells which member it is, what is said: neither is to
            train.
    """

    bad: Mapping[int, str]
    said: tuple[str, ...] = ()
    either: Mapping[Pair, str] = field(default_factory=dict)


_PARTS = (("computes", FACTOR), ("memory", FACTOR), ("disk", DISK_FACTOR))


def by_host(figures: Mapping[int, Figures], hosts: Mapping[int, bytes], *, shares_all: bool) -> dict[int, Figures]:
    """What nodes of one host share is as fast as the fastest of them saw it: they measure at the same time.

    Args:
        shares_all: processors and memory as well; else only the disk.
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
    """Who needs a multiple of the others' median, and for what; with ``again`` only who does so there as well."""
    found: dict[int, str] = {}
    for place, (part, factor) in enumerate(_PARTS):
        known = sorted((one[place], slot) for slot, one in figures.items() if one[place] > 0)
        median_s = known[(len(known) - 2) // 2][0] if len(known) > 1 else 0.0  # of the others, for whoever is above it
        for took_s, slot in known[1:]:
            second_s = took_s if again is None else again[slot][place] if slot in again else 0.0
            if min(took_s, second_s) > factor * median_s:
                text = f"{part}: {1000 * min(took_s, second_s):.3g} ms, the others {1000 * median_s:.3g} ms"
                found[slot] = f"{found[slot]}; {text}" if slot in found else text
    return found


def across_hosts(hosts: Mapping[int, bytes]) -> list[int]:
    """The slots in an order in which neighbours are on two hosts, as far as there are two."""
    counts: Counter[bytes] = Counter()
    places: dict[int, int] = {}
    for slot in sorted(hosts):
        places[slot] = counts[hosts[slot]]
        counts[hosts[slot]] += 1
    return sorted(hosts, key=lambda slot: (places[slot], slot))


def next_pairs(waiting: Sequence[int], sums: Mapping[Pair, Sum]) -> tuple[Pair, ...]:
    """Whom to pair next, none twice at once; nobody where nothing is left that pairs could tell.

    Args:
        waiting: whom to pair; first the neighbours.
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
    """What follows, once nothing more is to be tried.

    Args:
        names: how each node is called, by slot.
        slow_ones: who is slow by itself, and at what.
        sums: what each pair found; its slower or wrong member's word counts.
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
