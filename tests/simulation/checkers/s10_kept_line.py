"""S10: restore points are ordered by (step, generation); an abandoned line is never resumed."""

from __future__ import annotations

from samebits.core.records import GenerationCommitted, TrainingFinished
from samebits.core.scheduler import SchedulerEvent
from tests.simulation.checkers.base import Checker
from tests.simulation.checkers.line import is_kept


class KeptLine(Checker):
    """Walks the line back itself and checks that resumed and final points are on it."""

    name = "S10"

    def watch(self) -> None:
        self.world.when_recorded[GenerationCommitted].append(self._committed)
        self.world.when_recorded[TrainingFinished].append(self._finished)

    def _committed(self, event: SchedulerEvent | None, record: GenerationCommitted) -> None:
        line = self.world.witness.line
        kept = line.kept()
        if record.restore is not None and not is_kept(record.restore, kept):
            self.violated(f"{record} resumes {record.restore}; kept were {kept}")

    def _finished(self, event: SchedulerEvent | None, record: TrainingFinished) -> None:
        kept = self.world.witness.line.kept()
        if not is_kept(record.point, kept):
            self.violated(f"{record} is final; kept were {kept}")
