"""Find nodes that are slow or compute wrong results, alone and in pairs, before training. Pure functions.

Each node judges itself by its own report and those of some peers, so no node is indispensable, and the cost for a node
does not grow with the world. A node is slow if it needs a multiple of the others' time for the same work twice, the
second time while the others are idle. Each node also computes a sum with two or three partners. If a pair is slow or
wrong, it is unknown which of its members is at fault. A member that succeeds with another partner is cleared, which
leaves the other. With two nodes there is no other pair. ``training.process.node_comparison`` measures and exchanges the
reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from statistics import median_low
from typing import NamedTuple

import msgspec

FACTORS = {"computes": 2.0, "memory": 2.0, "disk": 5.0}
"""How many times the others' median makes a node slow. Disks vary most, even from one minute to the next."""
SUM_FACTOR = 3.0
"""The same factor for a pair, relative to the median of the other pairs that are on one host, or that are not."""
SAMPLE = 8
"""Evenly distributed nodes with which a node compares its times, in addition to its partners and theirs."""
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
    """One node's results, and its verdict on itself."""

    name: str = ""
    machine: bytes = b""
    figures: NodeTimings = NodeTimings(0.0, 0.0, 0.0)
    sums: dict[int, Sum] = {}  # by the other node's slot
    why: str | None = None  # the reason why it must not train, "" if it may, None while it has no verdict


def rounds(world_size: int) -> list[list[Pair]]:
    """Return the pairs that compute sums, in rounds in which each node has at most one partner.

    A node's first partner is half the world away, and thus mostly on another host. The others are its neighbors, so a
    node whose host is cut off from the others is still cleared.
    """
    half = (world_size + 1) // 2
    far = [(slot, slot + half) for slot in range(world_size - half)]
    near = [[(slot, slot + 1) for slot in range(first, world_size - 1, 2)] for first in (0, 1)]
    return [far, *near] if world_size > 2 else [far]


def peers(slot: int, world_size: int) -> list[int]:
    """Return the slots whose reports this node reads: its partners, their partners, and a sample of the others."""
    pairs, near = [pair for one in rounds(world_size) for pair in one], {slot}
    for _ in range(2):
        near |= {one for pair in pairs if not near.isdisjoint(pair) for one in pair}
    sample = {(slot + max(1, number * world_size // SAMPLE)) % world_size for number in range(SAMPLE)}
    return sorted((near | sample) - {slot})


def slow(slot: int, reports: Mapping[int, NodeReport], *, shares_all: bool) -> str:
    """Return at what this node is slower than the others by a multiple, or "".

    Nodes of a host measure at the same time, so of the hardware that they share, the best result counts for each.

    Args:
        slot: the node's.
        reports: by slot.
        shares_all: nodes of a host also share processors and memory; False: only the disk.
    """
    texts = []
    for place, (part, factor) in enumerate(FACTORS.items()):
        shares = shares_all or part == "disk"
        hosts = {one: report.machine if shares else one for one, report in reports.items()}
        best: dict[bytes | int, float] = {}
        for one, host in hosts.items():
            if 0 < (took_s := reports[one].figures[place]) < _LONGEST_S:
                best[host] = min(took_s, best.get(host, took_s))
        others = [best[host] for one, host in hosts.items() if one != slot and host in best]
        took_s, median_s = best.get(hosts[slot], 0.0), median_low(others or [0.0])
        if others and took_s > factor * median_s:
            texts.append(f"{part}: {1000 * took_s:.3g} ms, the others {1000 * median_s:.3g} ms")
    return "; ".join(texts)


def _sums(reports: Mapping[int, NodeReport]) -> dict[Pair, Sum]:
    """Return each tested pair's result, that of its slower or wrong member. A pair without both reports is untested."""
    found = {}
    for slot, report in reports.items():
        for other in report.sums:
            if slot < other and other in reports and slot in reports[other].sums:
                both = report.sums[other], reports[other].sums[slot]
                problems = {one.problem for one in both}
                if UNMET not in problems:
                    problem = next((one for one in _PROBLEMS if one in problems), "")
                    took_s = max(one.took_s for one in both)
                    found[slot, other] = Sum(took_s if 0 <= took_s < _LONGEST_S else 0.0, problem)
    return found


def verdict(slot: int, reports: Mapping[int, NodeReport], slow_at: str) -> tuple[str, list[str]]:
    """Return why this node must not train ("" if it may), and messages.

    Args:
        slot: this node's.
        reports: by slot, its own and its peers'.
        slow_at: at what it is slow alone; "" if it is not.
    """
    sums = _sums(reports)
    on_host = {pair: reports[pair[0]].machine == reports[pair[1]].machine for pair in sums}  # such a pair is faster
    others = [(on_host[pair], one.took_s) for pair, one in sums.items() if slot not in pair and not one.problem]
    usual_s = {kind: median_low([took_s for one, took_s in others if one is kind] or [inf]) for kind in (True, False)}
    failed = {pair for pair, one in sums.items() if one.problem or one.took_s > SUM_FACTOR * usual_s[on_host[pair]]}
    cleared = {one for pair in sums.keys() - failed for one in pair}
    named = {one for pair in failed if len(left := {*pair} - cleared) == 1 for one in left}
    found, said = [f"it is slow ({slow_at})"] if slow_at else [], []
    for pair in sorted(pair for pair in failed if slot in pair):
        other, is_first = pair[slot == pair[0]], slot == pair[0]  # one message is enough for a pair
        (took_s, problem), others_s = sums[pair], usual_s[on_host[pair]]
        times = f"they need {1000 * took_s:.3g} ms for a sum; the other nodes need {1000 * others_s:.3g} ms"
        what = _PROBLEMS.get(problem, times)
        names = {one: reports[one].name[:_MOST_NAME_CHARS] for one in pair}
        both = f"{names[pair[0]]} and {names[pair[1]]}: {what}"
        if cleared.issuperset(pair):
            said += [f"{both}, but each works well with other nodes. Check the network between the two"] * is_first
        elif other in cleared:
            found.append(f"together with {names[other]} {what}, and {names[other]} works well with other nodes")
        elif named.isdisjoint(pair):
            sentence = f"{both}, and no other pair shows which of the two is at fault"
            if problem:  # then neither may train
                found.append(sentence)
            else:
                said += [sentence] * is_first
    return (found[0] if found else ""), said
