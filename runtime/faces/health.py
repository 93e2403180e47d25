"""``runtime.HealthChecker``: what is wrong with this host, in sentences, without a job.

The sensors are ``service.health``'s, the limits with their hysteresis ``core.health``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runtime.core.health import HealthWatch, Limit, said
from runtime.core.messages import Sign
from runtime.errors import UsageError
from runtime.service.health import nearest, readings

__all__ = ["HealthChecker"]


class HealthChecker:
    """This host against limits.

    Args:
        cpu_limit, memory_limit, disk_limit: shares, above 0 and at most 1.
        paths: folders whose disks are looked at.
    """

    def __init__(
        self,
        cpu_limit: float = 0.9,
        memory_limit: float = 0.9,
        disk_limit: float = 0.9,
        paths: Sequence[str | Path] = (".", "/dev/shm"),
    ) -> None:
        limits = {Sign.CPU: cpu_limit, Sign.MEMORY: memory_limit, Sign.DISK: disk_limit, Sign.DESCRIPTORS: 0.9}
        if not all(0 < one <= 1 for one in limits.values()):
            raise UsageError(f"HealthChecker: limits are shares, above 0 and at most 1; found {list(limits.values())}")
        self._watch = HealthWatch({sign: Limit(share) for sign, share in limits.items()})
        self._places = [nearest(Path(path)) for path in paths]

    def check(self) -> list[str]:
        """Look once. What two looks in a row find is told, a sentence each, until two find that it is well again."""
        self._watch.look(readings(self._places))
        return [said(one) for one in self._watch.ailments]

    @property
    def is_healthy(self) -> bool:
        """Whether the last look left nothing to tell."""
        return not self._watch.ailments
