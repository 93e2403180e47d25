"""S1: no two live processes hold the same rank in one generation; slots are pairwise distinct."""

from __future__ import annotations

from samebits.core.agent.agent_events import Began
from samebits.core.records import SeatGranted, SlotGiven
from samebits.core.scheduler import SchedulerEvent
from tests.simulation.checkers.base import Checker
from tests.simulation.worker import Worker


class OneHolder(Checker):
    """Observes every grant, and every process that takes a rank."""

    name = "S1"

    def watch(self) -> None:
        self._ranks: dict[tuple[str, int, int], Worker] = {}  # (job, generation, rank) → the process that started it
        self.world.when_recorded[SeatGranted].append(self._granted)
        self.world.when_recorded[SlotGiven].append(self._granted)
        self.world.when_noticed[Began].append(self._began)

    def _granted(self, event: SchedulerEvent | None, record: SeatGranted | SlotGiven) -> None:
        holders = self.world.witness.holders.values()
        sharing = [holder.node for holder in holders if holder.slot == record.slot]
        if len(sharing) > 1:
            self.violated(f"{record}: slot {record.slot} is held by {sharing}")

    def _began(self, worker: Worker, notice: Began) -> None:
        key = (worker.agent.job, notice.started.generation, notice.started.rank)
        other = self._ranks.get(key)
        if other is not None and other is not worker and other.is_alive:
            self.violated(f"{worker} and {other} both have rank {key[2]} in generation {key[1]}")
        self._ranks[key] = worker
