"""Find problems of this host without a job, with ``samebits.HealthChecker``.

The sensors are those of ``service.health``. The limits and their hysteresis come from ``core.watch.health_limits``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from samebits.core.reports import Sign
from samebits.core.watch.health_limits import HealthWatch, Limit, said
from samebits.errors import UsageError
from samebits.service.health.host_sensor import nearest, readings

__all__ = ["HealthChecker"]


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
