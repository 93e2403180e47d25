"""Parse discovered hosts, suspend failed ones, and plan where workers run.

Hosts keep the order in which they were first seen. Hosts that have the training state therefore remain in use, and a
new host never replaces an old one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from samebits.errors import UsageError

MOST_HOSTS = 100_000
MOST_SLOTS = 4096
_LINE = re.compile(
    r"(?P<name>\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::(?P<slots>\d{1,9}))?"
)
_LONGEST_NAME = 253


@dataclass(frozen=True, slots=True)
class Host:
    """A host and its number of worker slots."""

    name: str
    slots: int


def parse(text: str, default_slots: int = 1) -> tuple[Host, ...]:
    """Parse the hosts printed by a discovery script, one ``host`` or ``host:slots`` per line.

    IPv6 addresses are in brackets. Empty lines and text after ``#`` are ignored. If a host is named twice, its last
    line counts.

    Raises:
        UsageError: a line is invalid; the message has the line's number, and the entire text is rejected.
    """
    found: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        slots = int(match["slots"]) if match and match["slots"] else default_slots
        if match is None or len(match["name"]) > _LONGEST_NAME or not 0 <= slots <= MOST_SLOTS:
            raise UsageError(
                f"line {number} of the discovered hosts is {line[:80]!a}: expected host or host:slots, with 0 to "
                f"{MOST_SLOTS} slots. Fix: have the script print one host per line, and everything else to its stderr"
            )
        name = match["name"].strip("[]")
        found[name] = Host(name, slots)
        if len(found) > MOST_HOSTS:
            raise UsageError(
                f"more than {MOST_HOSTS} hosts were discovered. Fix: have the script print only this job's hosts"
            )
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Resting:
    """How long a host is suspended after its first failure, and the maximum.

    The time doubles with each failure.

    Raises:
        UsageError: the times are invalid or in the wrong order.
    """

    first_s: float = 10.0
    most_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.most_s:
            raise UsageError(
                f"a failed host would be suspended for {self.first_s:g} to {self.most_s:g} s; expected two times "
                "above 0, with the shorter one first. Fix: swap them"
            )

    def after(self, failures: int) -> float:
        """Return the suspension in seconds after this number of failures."""
        doublings = min(failures - 1, 64)  # the maximum is reached long before that
        return min(self.most_s, self.first_s * 2.0**doublings)


@dataclass(slots=True)
class _Known:
    host: Host
    is_there: bool = True
    failures: int = 0
    rests_until: float = 0.0


@dataclass(frozen=True, slots=True)
class HostListPlan:
    """A change of workers: each host on which to start one, and the nodes that leave at their next commit."""

    start: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()


@dataclass(slots=True)
class Hosts:
    """The hosts seen so far. Times are in seconds, and all on the same clock."""

    resting: Resting = field(default_factory=Resting)
    _known: dict[str, _Known] = field(default_factory=dict)

    def seen(self, hosts: Iterable[Host]) -> None:
        """Record the script's output, which lists exactly these hosts."""
        for known in self._known.values():
            known.is_there = False
        for host in hosts:
            known = self._known.setdefault(host.name, _Known(host))
            known.host, known.is_there = host, True
        gone = [name for name, known in self._known.items() if not known.is_there and not known.failures]
        for name in gone[: max(0, len(self._known) - MOST_HOSTS)]:  # limits the memory if each answer has new names
            del self._known[name]

    def failed(self, name: str, now_s: float) -> float:
        """Record a failure caused by the host, and return until when nothing is started there."""
        known = self._known.setdefault(name, _Known(Host(name, 0), is_there=False))
        if now_s >= known.rests_until:  # failures of several workers at once count as one
            known.failures += 1
            known.rests_until = now_s + self.resting.after(known.failures)
        return known.rests_until

    def worked(self, name: str, now_s: float) -> None:
        """Forget a host's failures after a worker there has trained for the longest suspension time."""
        known = self._known.get(name)
        if known is not None and now_s >= known.rests_until + self.resting.most_s:
            known.failures = 0

    def usable(self, now_s: float) -> tuple[Host, ...]:
        """Return the current hosts that are not suspended, in the order in which they were first seen."""
        return tuple(one.host for one in self._known.values() if one.is_there and now_s >= one.rests_until)

    def next_change_s(self, now_s: float) -> float | None:
        """Return when the next suspension ends, or None."""
        return min(
            (one.rests_until for one in self._known.values() if one.is_there and one.rests_until > now_s), default=None
        )

    def plan(self, size: int, running: Mapping[str, str], now_s: float) -> HostListPlan:
        """Plan the change from the running workers to ``size`` workers on usable hosts.

        A worker leaves if its host is gone or has fewer slots than workers; the newest leaves first. Workers on a
        suspended host stay, since its failed workers have already ended. If there are more than ``size`` workers, the
        newest leave.

        Args:
            size: the wanted number of workers.
            running: the host of each node, in order of seniority.
            now_s: the current time.
        """
        there = {one.host.name: one.host.slots for one in self._known.values() if one.is_there}
        taken: Counter[str] = Counter()
        stay: list[str] = []
        drain: list[str] = []
        for node, host in running.items():
            if len(stay) < size and taken[host] < there.get(host, 0):
                taken[host] += 1
                stay.append(node)
            else:
                drain.append(node)
        start: list[str] = []
        for usable in self.usable(now_s):
            free = min(usable.slots - taken[usable.name], size - len(stay) - len(start))
            start += [usable.name] * max(0, free)
        return HostListPlan(tuple(start), tuple(drain))
