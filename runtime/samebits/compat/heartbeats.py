"""Find silent nodes with ``samebits.HeartbeatDetector``, in programs that watch their own processes.

Every heartbeat renews a lease, which ends after silence, as in the scheduler (``core.membership.leases``). A pause of
the watching process does not count as silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from samebits.errors import UsageError

__all__ = ["HeartbeatDetector"]


class HeartbeatDetector:
    """Find nodes that have stopped sending heartbeats.

    Args:
        capacity: maximum number of nodes.
        timeout: seconds of silence after which a node counts as failed.
        clock: returns the time in seconds, which never decreases.

    Raises:
        UsageError: ``capacity`` is below 1, or ``timeout`` is not above 0.

    Example::

        detector = samebits.HeartbeatDetector(capacity=8, timeout=5.0)
        detector.send_heartbeat("node-a")
        assert detector.detect_failure() == []
    """

    def __init__(self, capacity: int, timeout: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        if capacity < 1 or not 0 < timeout < float("inf"):
            raise UsageError(
                f"HeartbeatDetector(capacity={capacity!r}, timeout={timeout!r}): expected a capacity of 1 or more and "
                "seconds above 0"
            )
        self._capacity, self._timeout_s, self._clock = capacity, timeout, clock
        self._until: dict[str | int, float] = {}
        self._looked_at = clock()

    def send_heartbeat(self, node_id: str | int) -> None:
        """Record a heartbeat from a node. A failed node counts as alive again.

        Raises:
            UsageError: the node is new, and ``capacity`` nodes are already monitored.
        """
        now = self._clock()
        if node_id not in self._until and len(self._until) >= self._capacity:
            raise UsageError(
                f"HeartbeatDetector: {node_id!r} exceeds the capacity of {self._capacity} nodes. Fix: give a larger "
                "capacity, or forget() nodes that will not return"
            )
        self._until[node_id] = now + self._timeout_s

    def detect_failure(self, max_nodes: int | None = None) -> list[str | int]:
        """Return the nodes that have been silent for ``timeout`` seconds, oldest first.

        The nodes are in the order of their first heartbeats. Call this at least once per ``timeout``: if two calls are
        further apart, the time between them counts as a pause of this process, and not as a node's silence.

        Args:
            max_nodes: the maximum number of nodes to return; None for all.
        """
        now = self._clock()
        pause_s, self._looked_at = now - self._looked_at, now
        if pause_s > self._timeout_s:
            self._until = {node: min(until + pause_s, now + self._timeout_s) for node, until in self._until.items()}
        return [node for node, until in self._until.items() if until <= now][:max_nodes]

    def forget(self, node_id: str | int) -> None:
        """Stop monitoring this node."""
        self._until.pop(node_id, None)
