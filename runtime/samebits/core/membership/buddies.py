"""Compute each rank's local rank, watched peer and buddy from the hosts of all members.

Each rank watches the next rank on its host, in a ring. Its buddy, on another host, stores copies of its newest points.
To find the buddies, the ranks are ordered by host and shifted by the size of the largest host. Then no rank's buddy is
on its own host, each rank stores exactly one other rank's copies, and all members compute the same result. If one host
has more than half of the ranks, no such shift exists: the buddies of its ranks are spread over the other hosts, and
those of all other ranks over this host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BuddyPlacement:
    """The local rank, watched peer and buddies of one member."""

    local_rank: int  # among the ranks of its host
    local_world_size: int
    watches: int | None  # the next rank on its host; None if it is alone there
    buddy: int | None
    is_apart: bool  # the buddy is on another host
    keeps: tuple[int, ...]  # the ranks for which it is the buddy


def buddy_placements(hosts: Sequence[str]) -> list[BuddyPlacement]:
    """Return each member's placement, by rank.

    Args:
        hosts: the members' hosts, by rank.
    """
    sizes, seen = Counter(hosts), Counter[str]()
    keepers, kept = buddies(hosts), [list[int]() for _ in hosts]
    watched = _next_on_host(hosts)
    for rank, keeper in enumerate(keepers):
        if keeper is not None:
            kept[keeper].append(rank)
    found = []
    for rank, (host, keeper) in enumerate(zip(hosts, keepers, strict=True)):
        is_apart = keeper is not None and hosts[keeper] != host
        found.append(BuddyPlacement(seen[host], sizes[host], watched[rank], keeper, is_apart, tuple(kept[rank])))
        seen[host] += 1
    return found


def _next_on_host(hosts: Sequence[str]) -> list[int | None]:
    """Return the next rank on each rank's host, in a ring, or None if the rank is alone there."""
    after: list[int | None] = [None] * len(hosts)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        if host in last:
            after[last[host]] = rank
        first.setdefault(host, rank)
        last[host] = rank
    for host, rank in last.items():
        if first[host] != rank:
            after[rank] = first[host]
    return after


def buddies(hosts: Sequence[str]) -> tuple[int | None, ...]:
    """Return the rank that stores each rank's copies, or None in a world of one rank.

    The buddy is on another host if the job has several hosts.

    Args:
        hosts: the members' hosts, by rank.
    """
    size = len(hosts)
    if size == 1:
        return (None,)
    ranks_on: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_on.setdefault(host, []).append(rank)
    by_host = sorted(ranks_on.values(), key=lambda ranks: (-len(ranks), ranks))
    most = len(by_host[0])
    in_order = [rank for ranks in by_host for rank in ranks]
    keeper_of: dict[int, int] = {}
    if most == size or most <= size - most:
        shift = 1 if most == size else most
        keeper_of = {rank: in_order[(index + shift) % size] for index, rank in enumerate(in_order)}
    else:
        largest, others = in_order[:most], in_order[most:]
        keeper_of = {rank: others[index % len(others)] for index, rank in enumerate(largest)}
        keeper_of |= dict(zip(others, largest, strict=False))
    return tuple(keeper_of[rank] for rank in range(size))
