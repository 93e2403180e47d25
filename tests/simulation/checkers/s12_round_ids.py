"""S12: round ids are never reused, across scheduler restarts too."""

from __future__ import annotations

from samebits.core.messages import RoundId, RoundOpened
from samebits.core.records import GenerationCommitted
from samebits.core.scheduler import SchedulerEvent
from tests.simulation.checkers.base import Checker


class RoundIds(Checker):
    """Remembers which start of the scheduler announced a round, and which rounds are closed."""

    name = "S12"

    def begin_job(self) -> None:
        self._life: dict[RoundId, int] = {}
        self._closed: dict[RoundId, int] = {}  # by which start, durably or not

    def watch(self) -> None:
        self.world.when_recorded[GenerationCommitted].append(self._committed)
        self.world.when_answered[RoundOpened].append(self._answered)
        self.world.when_said[RoundOpened].append(self._said)

    def _committed(self, event: SchedulerEvent | None, record: GenerationCommitted) -> None:
        life = self.world.host.life
        durable = any(committed.round == record.round for committed in self.world.witness.line.committed)
        if durable or self._closed.get(record.round) == life:
            self.violated(f"{record}: its round was closed before")
        self._closed[record.round] = life

    def _answered(self, session: str, message: RoundOpened) -> None:
        if self._closed.get(message.round) == self.world.host.life:
            self.violated(f"{message}: this round was closed before")

    def _said(self, session: str, message: RoundOpened) -> None:
        life = self.world.host.life
        if self._life.setdefault(message.round, life) != life:
            self.violated(f"{message}: an earlier life of the scheduler opened a round of this id")
