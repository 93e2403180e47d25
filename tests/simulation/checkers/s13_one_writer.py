"""S13: only the lock holder writes."""

from __future__ import annotations

from tests.simulation.checkers.base import Checker


class OneWriter(Checker):
    """Observes every call that changes the disk."""

    name = "S13"

    def watch(self) -> None:
        self.world.host.path.disk.watch_change.append(self._changes)

    def _changes(self) -> None:
        path = self.world.host.path
        if path.writer is None or path.writer != path.lock_holder:
            self.violated(f"process {path.writer} writes, the lock is held by {path.lock_holder}")
