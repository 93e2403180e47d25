"""What a worker's process says once and its agent repeats: what its disk holds, its digests, its figures, where it is.

Here live the last words of each kind and the messages that are made of them. Never here: when they are sent
(``agent``). The one idea: each message is the whole truth of its kind, so that any of them may be lost.
"""

from __future__ import annotations

from samebits.core.agent_events import Pace
from samebits.core.messages import (
    MAX_DIGESTS,
    MAX_FIGURES,
    MAX_PARTS,
    MAX_SAVED_POINTS,
    Ailment,
    Credential,
    Digest,
    Digests,
    Figure,
    Figures,
    FromWorker,
    Paced,
    Progress,
    SavedPoints,
    Still,
    Unwell,
)
from samebits.core.point import Point
from samebits.core.values import replace


class Reports:
    """Of one process.

    Attributes:
        saved: the points that its disk holds, the newest last.
        stalled_s: how long its steps have waited for saves.
        digests: of its commits.
        to_explain: which of them is wanted with its parts: the point and the number of the commit.
        progress: where it stands still; None where it comes on.
        ailments: what is wrong with its host.
        pace: how long its last steps took; None where that is not known.
        figures: what it measures.
    """

    def __init__(self) -> None:
        self.saved: tuple[Point, ...] = ()
        self.stalled_s = 0.0
        self.digests: tuple[Digest, ...] = ()
        self.to_explain: tuple[Point, int] | None = None
        self.progress: Progress | None = None
        self.ailments: tuple[Ailment, ...] = ()
        self.pace: Pace | None = None
        self._told_pace: Pace | None = None
        self.figures: tuple[Figure, ...] = ()
        self._told_figures: tuple[Figure, ...] = ()
        self._is_told_still = False
        self._is_told_unwell = False

    def of_saved(self, sender: Credential) -> list[FromWorker]:
        """What the disk holds, where it holds anything."""
        return [SavedPoints(sender, self.saved[-MAX_SAVED_POINTS:], self.stalled_s)] if self.saved else []

    def of_digests(self, sender: Credential) -> list[FromWorker]:
        """The newest digests, where there are any; one has its parts where those were asked for."""
        told = [
            replace(one, parts=one.parts[:MAX_PARTS] if (one.point, one.commits) == self.to_explain else ())
            for one in self.digests[-MAX_DIGESTS:]
        ]
        return [Digests(sender, tuple(told))] if told else []

    def of_stillness(self, sender: Credential, generation: int, step: int, *, trains: bool) -> list[FromWorker]:
        """That it stands still while it trains; and once that it does so no longer."""
        progress, was_told = self.progress if trains else None, self._is_told_still
        self._is_told_still = progress is not None
        return [Still(sender, generation, step, progress)] if progress is not None or was_told else []

    def of_pace(self, sender: Credential, generation: int, *, trains: bool) -> list[FromWorker]:
        """How long its last steps took, while it trains, once for each window of them."""
        pace = self.pace if trains else None
        if pace is None or pace is self._told_pace:
            return []
        self._told_pace = pace
        return [Paced(sender, generation, pace.steps, pace.time)]

    def of_health(self, sender: Credential) -> list[FromWorker]:
        """What is wrong with its host; and once that nothing is any longer."""
        was_told, self._is_told_unwell = self._is_told_unwell, bool(self.ailments)
        return [Unwell(sender, self.ailments)] if self.ailments or was_told else []

    def of_figures(self, sender: Credential) -> list[FromWorker]:
        """What it measures, where that is not what was said last."""
        figures = self.figures[:MAX_FIGURES]
        if figures == self._told_figures:
            return []
        self._told_figures = figures
        return [Figures(sender, figures)]

    def say_figures_again(self) -> None:
        """What was said before may not have arrived."""
        self._told_figures = ()
