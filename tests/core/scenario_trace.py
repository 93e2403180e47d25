"""The trace of one command, in lines that a newcomer can read and a diff can compare.

If several workers do the same in one pass, they share one line, unless that would change a worker's own order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.core.scenario_words import seconds


@dataclass(slots=True)
class Line:
    """One line: which processes did what, and when. A ``kind`` of "" is never merged."""

    at: float
    kind: str
    actors: list[str]
    text: str
    number: int  # number of the pass

    def who(self) -> str:
        names = " ".join(self.actors)
        return {"up": f"{names} -> s", "down": f"s -> {names}"}.get(self.kind, names)


@dataclass(slots=True)
class Trace:
    """Collects lines; ``next_pass`` begins a new pass."""

    _lines: list[Line] = field(default_factory=list)
    _number: int = 0

    def next_pass(self) -> None:
        self._number += 1

    def add(self, at: float, kind: str, actor: str, text: str) -> None:
        """Add one event. It joins the line of others that did the same in this pass."""
        for line in reversed(self._lines):
            if not kind or line.number != self._number or line.at != at:
                break
            if (line.kind, line.text) == (kind, text):
                line.actors.append(actor)
                return
            if line.kind == kind and actor in line.actors:
                break
        self._lines.append(Line(at, kind, [actor], text, self._number))

    def lines(self) -> list[str]:
        """Return the lines as text, with the time where it changes."""
        shown, before = [], None
        for line in self._lines:
            time = seconds(line.at) if line.at != before else ""
            before = line.at
            shown.append(f"{time:>8}  {line.who():<16} {line.text}".rstrip())
        return shown
