"""The events of a run for a reader, and the violations that cause it to be read.

Most runs pass and are never traced. Since a seed determines a run, a failing one is simply repeated.
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
    """Every event of a traced run."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, str, tuple[Any, ...]]] = []

    def add(self, now: float, kind: str, *what: Any) -> None:
        """Remember one event."""
        self._entries.append((now, kind, tuple(map(str, what))))

    def lines(self, last: int | None = None) -> list[str]:
        """Return the events as text, the oldest first."""
        return [
            f"{now:10.4f}  {kind:<12} {' '.join(what)}" for now, kind, what in self._entries[-last if last else 0 :]
        ]
