"""What ``benchmarks.detection`` has measured, in memory and in a file to which parts of a long measurement are added.

Only the record lives here. The one idea: a trial is a line of its own, written when the trial is through, so that a
part may end at any moment and costs no more than the trial it was in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

__all__ = ["FLOOR", "OURS", "Trial", "Trials"]

OURS = "samebits"
FLOOR = "floor"


class Trial(msgspec.Struct, frozen=True):
    """One fault: seconds to the notice (None: there was none in time), what was said, and whether that is right."""

    noticed_s: float | None
    said: str = ""
    right: bool = False


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    who: str
    fault: str
    trial: Trial


@dataclass(slots=True)
class Trials:
    """All that was measured.

    Attributes:
        of: trials by whose they are (``OURS``, ``FLOOR``, a peer's name) and by fault.
        into: the file to which each is added.
    """

    of: dict[str, dict[str, list[Trial]]] = field(default_factory=dict)
    into: Path | None = None

    def add(self, who: str, fault: str, trial: Trial) -> None:
        """It is through."""
        self.of.setdefault(who, {}).setdefault(fault, []).append(trial)
        if self.into is not None:
            with self.into.open("ab") as file:
                file.write(msgspec.json.encode(_Line(who, fault, trial)) + b"\n")

    def seen_s(self, who: str, fault: str) -> list[float]:
        """Seconds to each notice that there was."""
        return [one.noticed_s for one in self.of.get(who, {}).get(fault, []) if one.noticed_s is not None]

    @classmethod
    def read(cls, path: Path) -> Trials:
        """What parts have added.

        Raises:
            ValueError: a line is none of theirs.
        """
        trials = cls()
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                found = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}:{number} is no trial: {error}. Fix: remove that line") from None
            trials.add(found.who, found.fault, found.trial)
        return trials
