"""``samebits.HealthChecker``: what is wrong with this host, without a job.

The sensors are those of ``service.health``. The limits and their hysteresis are those of ``core.watch.health``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from samebits.core.reports import Sign
from samebits.core.watch.health import HealthWatch, Limit, said
from samebits.errors import UsageError
from samebits.service.health.host_health import nearest, readings

__all__ = ["HealthChecker"]


class HealthChecker:
    """Compare this host with limits, and keep the last status of each node.

    Args:
        capacity: node ids below this have a kept status.
        cpu_limit, memory_limit, disk_limit: shares, above 0 and at most 1.
        paths: folders whose disks are looked at.
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
        """Look once, and return a sentence for each limit that was exceeded in two looks in a row."""
        self._watch.look(readings(self._places))
        return [said(one) for one in self._watch.ailments]

    @property
    def is_healthy(self) -> bool:
        """Whether :meth:`check` found nothing."""
        return not self._watch.ailments

    def perform_health_check(self, node_id: int) -> int:
        """Look once at this host, and keep the result as the status of ``node_id``: 1 healthy, 0 over a limit.

        Only this host can be looked at, so each node calls this with its own id. The CPUs are watched for 0.1 s.
        """
        if node_id < 0:
            raise UsageError(f"HealthChecker.perform_health_check(node_id={node_id!r}): expected 0 or more")
        over = [one for one in readings(self._places, 0.1) if one.share > self._limits[one.sign]]
        if node_id < len(self._health_status):
            self._health_status[node_id] = int(not over)
        return int(not over)

    def get_health_status(self, node_id: int) -> int:
        """Return the kept status: 1 healthy, 0 over a limit, never looked at, or beyond ``capacity``."""
        return self._health_status[node_id] if 0 <= node_id < len(self._health_status) else 0
