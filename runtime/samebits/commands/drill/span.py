"""Measure how long a drill's job lasts by the drill's own clock, from its first event on disk to its last.

The job's account is checked against a time that does not come from its events, so a thread watches the file meanwhile.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from samebits.store.event_log import EVENTS_FILE

LOOK_S = 0.05


class Span:
    """Watches the events file of this folder until it is closed."""

    def __init__(self, recovery_path: Path) -> None:
        self._path = recovery_path / EVENTS_FILE
        self._known = (0, 0)  # the file's size and inode
        self._first_s: float | None = None
        self._last_s = 0.0
        self._over = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="samebits-drill-span", daemon=True)
        self._thread.start()

    def close(self) -> float | None:
        """Return the seconds between the file's first and last change, or None if it never changed."""
        self._over.set()
        self._thread.join()
        self._look()
        return None if self._first_s is None else self._last_s - self._first_s

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        try:
            found = self._path.stat()
        except OSError:
            return
        if found.st_size and (found.st_size, found.st_ino) != self._known:
            self._known, self._last_s = (found.st_size, found.st_ino), time.monotonic()
            self._first_s = self._last_s if self._first_s is None else self._first_s
