"""``runtime.HeartbeatDetector``: who has not been heard for too long, for whoever watches processes of his own.

The one idea is the scheduler's (``core.leases``): a lease is renewed by whatever is heard and ends by silence, and a
pause of the watcher itself is nobody's silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from runtime.errors import UsageError

__all__ = ["HeartbeatDetector"]


class HeartbeatDetector:
    """Leases of named nodes.

    Args:
        capacity: how many nodes are watched at most.
        timeout: seconds of silence after which a node counts as failed.
        clock: seconds that never go back.
    """

    def __init__(self, capacity: int, timeout: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        if capacity < 1 or not 0 < timeout < float("inf"):
            raise UsageError(
                f"HeartbeatDetector(capacity={capacity!r}, timeout={timeout!r}): expected a capacity of 1 or more and "
                "seconds above 0"
            )
        self._capacity, self._timeout_s, self._clock = capacity, timeout, clock
        self._until: dict[str, float] = {}
        self._looked_at = clock()

    def send_heartbeat(self, node: str) -> None:
        """The node lives now; one that had failed is back.

        Raises:
            UsageError: it would be one node more than ``capacity``.
        """
        now = self._clock()
        if node not in self._until and len(self._until) >= self._capacity:
            raise UsageError(
                f"HeartbeatDetector: {node!r} is one node too many, its capacity is {self._capacity}. "
                "Fix: give a greater capacity, or forget() nodes that are gone for good"
            )
        self._until[node] = now + self._timeout_s

    def detect_failure(self) -> list[str]:
        """The nodes that have been silent for longer than ``timeout``, in the order they were first heard.

        Call it oftener than every ``timeout``: where two calls lie further apart, that counts as this process's own
        pause, and everybody has as much more time.
        """
        now = self._clock()
        pause_s, self._looked_at = now - self._looked_at, now
        if pause_s > self._timeout_s:
            self._until = {node: min(until + pause_s, now + self._timeout_s) for node, until in self._until.items()}
        return [node for node, until in self._until.items() if until <= now]

    def forget(self, node: str) -> None:
        """Watch this node no longer."""
        self._until.pop(node, None)
