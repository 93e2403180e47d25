"""The results of ``benchmarks.detection``, in memory and in a file to which each trial is added (``parts``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks import parts

__all__ = ["FLOOR", "OURS", "Trial", "Trials"]

OURS = "samebits"
FLOOR = "floor"


class Trial(msgspec.Struct, frozen=True):
    """One fault: seconds to the notice (None: none in time), the notice's text, and whether the text is right."""

    noticed_s: float | None
    said: str = ""
    right: bool = False


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    who: str
    fault: str
    trial: Trial


@dataclass(slots=True)
class Trials:
    """All measurements.

    Attributes:
        of: trials by contestant (``OURS``, ``FLOOR``, a peer's name) and by fault.
        into: the file to which each trial is added.
    """

    of: dict[str, dict[str, list[Trial]]] = field(default_factory=dict)
    into: Path | None = None

    def add(self, who: str, fault: str, trial: Trial) -> None:
        """Add a finished trial."""
        self.of.setdefault(who, {}).setdefault(fault, []).append(trial)
        if self.into is not None:
            parts.add(self.into, _Line(who, fault, trial))

    def seen_s(self, who: str, fault: str) -> list[float]:
        """Return the seconds to each notice."""
        return [one.noticed_s for one in self.of.get(who, {}).get(fault, []) if one.noticed_s is not None]

    @classmethod
    def read(cls, path: Path) -> Trials:
        """Read all trials that were added; raises the errors of ``parts.read``."""
        trials = cls()
        for found in parts.read(path, _Line):
            trials.add(found.who, found.fault, found.trial)
        return trials
