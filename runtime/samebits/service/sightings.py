"""What a follower, or a worker beside them, sees of its host's workers, told to a scheduler that may be elsewhere.

Only whom it looks at, how often, and what is worth telling live here. The one idea: a worker that is stopped, waits in
the kernel or holds Python's lock cannot say so, and a scheduler sees only processes of its own host; so whoever is on
the worker's host tells what is seen while that lasts, before the worker's lease is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from samebits.core.hangs import Doing, Sight
from samebits.service import sights, status
from samebits.store.process_identity import ProcessIdentity

MOST_LOOKS = 64
"""Processes that are looked at in one turn."""
LOOKS_A_LEASE = 4


class Sightings:
    """Of one who looks.

    Args:
        lease_s: NODE_TIMEOUT.
        see: how a process is looked at.
    """

    def __init__(self, lease_s: float, see: Callable[[ProcessIdentity], Sight | None] = sights.look) -> None:
        self._lease_s, self._see = lease_s, see
        self._due_at = float("-inf")

    def look(self, here: Mapping[str, ProcessIdentity], now: float) -> list[status.ForHistory]:
        """What is to be told of these processes, by node; called as often as one likes."""
        if now < self._due_at:
            return []
        self._due_at = now + self._lease_s / LOOKS_A_LEASE
        found: list[status.ForHistory] = []
        for node, identity in list(here.items())[:MOST_LOOKS]:
            sight = self._see(identity)
            if sight is not None and self._is_odd(sight):
                found.append(status.process_seen(node, identity, sight))
        return found

    def _is_odd(self, sight: Sight) -> bool:
        return sight.doing is not Doing.RUNS or (sight.quiet_s is not None and sight.quiet_s >= self._lease_s / 2)
