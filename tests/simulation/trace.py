"""What happened, kept cheaply and written out only when somebody has to read it; and the error that makes them.

An entry is a tuple whose parts are formatted late: most runs pass, and nobody reads them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

TAIL = 60


class Violation(AssertionError):
    """An invariant of DESIGN section 9 does not hold; ``name`` is its name there."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Trace:
    """The last events of a run, or with ``whole`` all of them."""

    def __init__(self, *, whole: bool = False) -> None:
        self._entries: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=None if whole else 600)

    def add(self, now: float, kind: str, *what: Any) -> None:
        """Remember one event."""
        self._entries.append((now, kind, what))

    def lines(self, last: int | None = None) -> list[str]:
        """The events as text, the oldest first."""
        entries = list(self._entries)[-last if last else 0 :]
        return [f"{now:10.4f}  {kind:<12} {' '.join(map(str, what))}" for now, kind, what in entries]
