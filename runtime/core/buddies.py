"""Who keeps a copy of whose newest points: each rank's buddy, from the members' hosts alone.

Only the choice lives here, never the copying. The one idea: order the ranks by host and shift them by as many places as
the largest host has ranks. Nobody then meets its own host, everybody keeps exactly one other's copies, and all
members who know the hosts would choose alike. Where one host has more than half of the ranks no such shift exists: its
ranks are dealt out over the others', and theirs over its own.
"""

from __future__ import annotations

from collections.abc import Sequence


def buddies(hosts: Sequence[str]) -> tuple[int | None, ...]:
    """By rank, the rank that keeps its copies: on another host where there is one; None in a world of one.

    Args:
        hosts: of the members, by rank.
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
