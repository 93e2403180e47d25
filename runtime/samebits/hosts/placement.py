"""Decide, as hosts change, on which hosts workers are started and which workers leave.

The current placement is read from disk and passed to each call, so a process that takes over makes the same decisions.
Only the state of failed hosts is kept in memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from samebits.core.messages import OperatorDecision
from samebits.core.replacement_names import root_of
from samebits.hosts.host_list import Host, Hosts, Resting
from samebits.printable import counted

MOST_DEATHS, DEATHS_S = 3, 60.0
"""This many deaths of joined workers by external causes, within this time, count as a failure of their host."""


@dataclass(slots=True)
class PlacementOrders:
    """What to do now: workers to start, as (number, host), and nodes that must leave."""

    start: list[tuple[str, str]] = field(default_factory=list)
    drain: list[str] = field(default_factory=list)
    reasons: list[OperatorDecision] = field(default_factory=list)


class Placement:
    """Decides where workers run. Times are in seconds, and all on the same clock.

    Nodes are given as in NODE_ID.

    Args:
        most: MAX_WORKER_NUM, which is also the number of node numbers.
        resting: how long a host is suspended after a failure.
    """

    def __init__(self, most: int, resting: Resting) -> None:
        self._most = most
        self._hosts = Hosts(resting)
        self._there: dict[str, int] | None = None
        self._deaths: dict[str, deque[float]] = {}
        self._rests: set[str] = set()

    def seen(self, hosts: Iterable[Host], drained: Collection[str] = ()) -> list[OperatorDecision]:
        """Record the script's output, which lists exactly these hosts. Hosts in ``drained`` are ignored."""
        found = [host for host in hosts if host.name not in drained]
        self._hosts.seen(found)
        before, now = self._there, {host.name: host.slots for host in found}
        self._there = now
        if before is None or before == now:
            return []
        texts = [f"host {name} is there, with {_slots(now[name])}" for name in now if name not in before]
        texts += [
            f"host {name} has {_slots(now[name])} instead of {before[name]}"
            for name in now
            if name in before and before[name] != now[name]
        ]
        for name in before:
            if name not in now:
                texts.append(f"host {name} {'is being drained' if name in drained else 'is gone'}")
        return [OperatorDecision("; ".join(texts))]

    def died(self, node: str, host: str, now_s: float, *, has_joined: bool) -> OperatorDecision | None:
        """Handle the death of a worker that its own program did not cause.

        Return None if the worker is restarted in place. ``has_joined`` is true if the worker had a seat, so that
        workers are known to start there.
        """
        deaths = self._deaths.setdefault(host, deque(maxlen=MOST_DEATHS))
        deaths.append(now_s)
        if has_joined and (len(deaths) < MOST_DEATHS or now_s - deaths[0] > DEATHS_S):
            return None
        why = f"{MOST_DEATHS} workers died there within {DEATHS_S:g} s" if has_joined else "it ended before it joined"
        return self.failed(node, host, now_s, why)

    def failed(self, node: str, host: str, now_s: float, why: str) -> OperatorDecision:
        """Suspend a host on which a worker could not start or keep running. Another host gets the worker."""
        rests_s = self._hosts.failed(host, now_s) - now_s
        self._deaths.pop(host, None)
        self._rests.add(host)
        return OperatorDecision(f"host {host} is not used for {rests_s:.3g} s: worker {node}: {why}")

    def next(
        self,
        running: Mapping[str, str],
        leaving: Mapping[str, str],
        now_s: float,
        *,
        wish: int | None = None,
        used: Collection[str] = (),
        lost: Collection[str] = (),
    ) -> PlacementOrders:
        """Return the actions that move the workers to usable hosts.

        Args:
            running: the host of each node, in order of seniority.
            leaving: the same for nodes that were asked to leave and have not left yet.
            now_s: the current time.
            wish: the requested number of workers; None for as many as fit.
            used: node numbers that other nodes have.
            lost: node numbers whose last process was lost, which may have to wait for a cool-down.
        """
        orders = PlacementOrders()
        if self._there is None:
            return orders
        for host in dict.fromkeys(running.values()):
            self._hosts.worked(host, now_s)
        usable = {host.name for host in self._hosts.usable(now_s)}
        for host in sorted(self._rests & usable):
            orders.reasons.append(OperatorDecision(f"host {host} is used again"))
        self._rests -= usable
        size = self._most if wish is None else min(wish, self._most)
        plan = self._hosts.plan(size, running, now_s)
        orders.drain = list(plan.drain)
        orders.reasons += self._why_drained(plan.drain, running, size)
        taken = {root_of(node) for node in (*running, *leaving)} | set(used)
        free = [number for number in map(str, range(self._most)) if number not in taken]
        free.sort(key=lambda number: number in lost)
        room = self._most - len(running) - len(leaving)
        orders.start = list(zip(free, plan.start[: max(0, room)], strict=False))
        if orders.start:
            counts = Counter(host for _, host in orders.start)
            where = ", ".join(f"{count} on {host}" for host, count in counts.items())
            total = len(running) - len(plan.drain) + len(orders.start)
            bound = f"{size} are wanted" if wish is not None else f"there is room for {sum(self._there.values())}"
            orders.reasons.append(
                OperatorDecision(f"starting {where}: {total} workers, and {bound}, at most {self._most}")
            )
        return orders

    def wake_at(self, now_s: float) -> float | None:
        """Return when ``next`` is due even if nothing happens, or None."""
        return self._hosts.next_change_s(now_s)

    def _why_drained(self, nodes: Sequence[str], running: Mapping[str, str], size: int) -> list[OperatorDecision]:
        assert self._there is not None
        by_reason: dict[str, list[str]] = {}
        left = Counter(running.values())
        for node in reversed(nodes):
            host = running[node]
            if host not in self._there:
                why = f"host {host} is gone"
            elif left[host] > self._there[host]:
                why = f"host {host} has {_slots(self._there[host])}"
            else:
                why = f"{counted(size, 'worker')} {'is' if size == 1 else 'are'} wanted"
            left[host] -= 1
            by_reason.setdefault(why, []).insert(0, node)
        reasons = []
        for why, names in by_reason.items():
            leaves = "leaves" if len(names) == 1 else "leave"
            reasons.append(
                OperatorDecision(f"worker {', '.join(names)} {leaves} at the next commit: {why}", tuple(names))
            )
        return reasons


def _slots(count: int) -> str:
    return counted(count, "slot")
