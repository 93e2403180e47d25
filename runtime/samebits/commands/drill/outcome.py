"""The result of one job of a drill: injected faults, faults that could not be injected, and how the job ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.account.events import JobEvent
from samebits.commands.drill.plan import DrillFault


@dataclass(slots=True)
class Injected:
    """A fault that was injected after a step, and what was done.

    ``recovered_s`` is the time in seconds until every member trained again, or, after a fault that interrupted no
    member (``trained_on``), until a scheduler answered again; None if this never happened.
    """

    fault: DrillFault
    node: str
    step: int
    at: float
    recovered_s: float | None = None
    did: str = ""
    trained_on: bool = False

    def plain(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "fault": str(self.fault)}

    def __str__(self) -> str:
        if self.recovered_s is None:
            after = "the job did not train again"
        elif self.trained_on or not self.recovered_s:
            after = "the ranks trained on"
            after += f"; a scheduler answered again after {self.recovered_s:.1f} s" if self.recovered_s else ""
        else:
            after = f"all ranks trained again after {self.recovered_s:.1f} s"
        return f"{self.fault}, after step {self.step}: {self.did}; {after}"


@dataclass(frozen=True, slots=True)
class NotInjected:
    """A planned fault that was not injected, and the reason."""

    fault: DrillFault
    why: str

    def __str__(self) -> str:
        return f"{self.fault}: not given: {self.why}"


@dataclass(slots=True)
class DrillOutcome:
    """How one job of the drill went. ``problem`` is empty if it finished.

    ``damaged`` are checkpoints in which the drill has changed a bit. ``said`` has the workers' warnings. ``seen_s`` is
    the time from the first to the last event by the drill's own clock (None: there was no event). ``retaken`` is the
    message about a step whose result differed when the step was repeated.
    """

    events: list[JobEvent] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    not_injected: list[NotInjected] = field(default_factory=list)
    damaged: set[Path] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    seen_s: float | None = None
    problem: str = ""
    retaken: str = ""

    @property
    def last_step(self) -> int:
        """The step at which the job ended, or 0 if it committed none."""
        return max((event.step for event in self.events), default=0)

    def add(self, one: Injected | NotInjected) -> None:
        """Record the outcome of a planned fault."""
        if isinstance(one, Injected):
            self.injected.append(one)
        else:
            self.not_injected.append(one)
