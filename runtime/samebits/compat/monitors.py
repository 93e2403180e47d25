"""Watch hosts, nodes and losses without a job: ``HealthChecker``, ``HeartbeatDetector`` and ``LossMonitor``.

The sensors are those of ``service.health``; limits and hysteresis come from ``core.watch.health_limits``. A heartbeat
renews a lease, which ends after silence, as in the scheduler (``core.membership.leases``), and a pause of the watching
process does not count as silence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from samebits.core.reports import Sign
from samebits.core.watch.health_limits import HealthWatch, Limit, said
from samebits.errors import UsageError
from samebits.service import log
from samebits.service.health.host_sensor import nearest, readings


class HealthChecker:
    """Compare this host's CPU, memory and disk use with limits.

    Args:
        capacity: number of node ids, starting at 0, for which the status is kept.
        cpu_limit, memory_limit, disk_limit: maximum shares in use, above 0 and at most 1.
        paths: folders whose disks are checked.

    Raises:
        UsageError: a limit or the capacity is out of range.

    Example::

        checker = samebits.HealthChecker(cpu_limit=0.95, paths=["."])
        for problem in checker.check():
            print(problem)
    """

    def __init__(
        self,
        capacity: int = 1,
        *,
        cpu_limit: float = 0.9,
        memory_limit: float = 0.9,
        disk_limit: float = 0.9,
        paths: Sequence[str | Path] = (".", "/dev/shm"),
    ) -> None:
        limits = {Sign.CPU: cpu_limit, Sign.MEMORY: memory_limit, Sign.DISK: disk_limit, Sign.DESCRIPTORS: 0.9}
        if not all(0 < one <= 1 for one in limits.values()):
            raise UsageError(f"HealthChecker: limits are shares, above 0 and at most 1; found {list(limits.values())}")
        if capacity < 1:
            raise UsageError(f"HealthChecker(capacity={capacity!r}): expected a number of nodes, 1 or more")
        self._limits, self._health_status = limits, [0] * capacity
        self._watch = HealthWatch({sign: Limit(share) for sign, share in limits.items()})
        self._places = [nearest(Path(path)) for path in paths]

    def check(self) -> list[str]:
        """Return a sentence for each limit that was exceeded in this call and in the previous one."""
        self._watch.look(readings(self._places))
        return [said(one) for one in self._watch.ailments]

    @property
    def is_healthy(self) -> bool:
        """Whether the last :meth:`check` found nothing."""
        return not self._watch.ailments

    def perform_health_check(self, node_id: int) -> int:
        """Check this host once, and store the result as the status of ``node_id``.

        Return 1 if the host is healthy, 0 if it exceeds a limit. Only this host can be checked, so each node passes its
        own id. The call takes 0.1 s, during which the CPU load is measured.

        Raises:
            UsageError: ``node_id`` is negative.
        """
        if node_id < 0:
            raise UsageError(f"HealthChecker.perform_health_check(node_id={node_id!r}): expected 0 or more")
        over = [one for one in readings(self._places, 0.1) if one.share > self._limits[one.sign]]
        if node_id < len(self._health_status):
            self._health_status[node_id] = int(not over)
        return int(not over)

    def get_health_status(self, node_id: int) -> int:
        """Return a node's stored status.

        The status is 1 if the node was healthy, and 0 if it exceeded a limit, was never checked, or is beyond
        ``capacity``.
        """
        return self._health_status[node_id] if 0 <= node_id < len(self._health_status) else 0


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


class LossMonitor:
    """Print the loss every few steps, and warn if it is not finite.

    Use it in your own loop or as a callback of :meth:`Model.train`.

    Args:
        per_print_times: number of steps between printed losses; 0 to only warn.

    Attributes:
        last: the last loss; None before the first step.

    Raises:
        UsageError: ``per_print_times`` is negative.

    Example::

        monitor = samebits.LossMonitor(per_print_times=10)
        assert monitor.step_end(10, loss=0.25)
    """

    def __init__(self, per_print_times: int = 1) -> None:
        if per_print_times < 0:
            raise UsageError(f"LossMonitor(per_print_times={per_print_times!r}): expected a number of steps, 0 or more")
        self._every = per_print_times
        self.last: float | None = None

    def step_end(self, step: int, loss: Any, epoch: int | None = None) -> bool:
        """Record a step's loss, a number or one-element tensor; return whether it is finite."""
        self.last = float(loss)
        where = f"step {step}" if epoch is None else f"epoch {epoch} step {step}"
        if not math.isfinite(self.last):
            log.warn(f"{where}: the loss is {self.last}")
            return False
        if self._every and step % self._every == 0:
            log.say(f"{where} loss {self.last:.6g}")
        return True
