"""What happened in a run that somebody wants to read, and the error that makes them.

Most runs pass and are never traced; since one seed is one run, a failing one is run again to be read.
"""

from __future__ import annotations

from typing import Any

TAIL = 60


class Violation(AssertionError):
    """An invariant of docs/contributors/invariants.md does not hold; ``name`` is its name there."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Trace:
    """Every event of a run that is traced."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, str, tuple[Any, ...]]] = []

    def add(self, now: float, kind: str, *what: Any) -> None:
        """Remember one event."""
        self._entries.append((now, kind, tuple(map(str, what))))

    def lines(self, last: int | None = None) -> list[str]:
        """The events as text, the oldest first."""
        return [
            f"{now:10.4f}  {kind:<12} {' '.join(what)}" for now, kind, what in self._entries[-last if last else 0 :]
        ]
