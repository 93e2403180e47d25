"""The trace of one command: what happened, in lines that a newcomer can read and a diff can compare.

What several workers do alike in one pass becomes one line, as long as no worker's own order is changed by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.core.scenario_words import seconds


@dataclass(slots=True)
class Line:
    """One line: who did what, when. ``kind`` "" stands alone."""

    at: float
    kind: str
    actors: list[str]
    text: str
    number: int  # of the pass

    def who(self) -> str:
        names = " ".join(self.actors)
        return {"up": f"{names} -> s", "down": f"s -> {names}"}.get(self.kind, names)


@dataclass(slots=True)
class Trace:
    """Collects lines; a new pass begins with ``next_pass``."""

    _lines: list[Line] = field(default_factory=list)
    _number: int = 0

    def next_pass(self) -> None:
        self._number += 1

    def add(self, at: float, kind: str, actor: str, text: str) -> None:
        """One event; joins the line of others who did the same in this pass."""
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
        """As text; the time stands where it changes."""
        shown, before = [], None
        for line in self._lines:
            time = seconds(line.at) if line.at != before else ""
            before = line.at
            shown.append(f"{time:>8}  {line.who():<16} {line.text}".rstrip())
        return shown
