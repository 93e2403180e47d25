"""S5: a node's incarnation strictly increases, over all lives of the scheduler."""

from __future__ import annotations

from runtime.core.agent_events import Seated
from runtime.core.records import SeatGranted, SpareAdmitted
from runtime.core.scheduler import Event, SchedulerCore
from tests.simulation.checkers.base import Checker
from tests.simulation.worker import Worker


class Incarnations(Checker):
    """Compares every grant with those before it, and what two processes of one node were told."""

    name = "S5"

    def begin_job(self) -> None:
        self._highest: dict[str, int] = {}
        self._durable_highest: dict[str, int] = {}

    def watch(self) -> None:
        self._told: dict[tuple[str, str, int], str] = {}  # (job, node, incarnation) → session
        self.world.when_recorded[SeatGranted].append(self._granted)
        self.world.when_recorded[SpareAdmitted].append(self._granted)
        self.world.when_durable[SeatGranted].append(self._durable)
        self.world.when_durable[SpareAdmitted].append(self._durable)
        self.world.watch_loaded.append(self._loaded)
        self.world.when_noticed[Seated].append(self._seated)

    def _granted(self, event: Event | None, record: SeatGranted | SpareAdmitted) -> None:
        if record.incarnation <= self._highest.get(record.node, 0):
            self.violated(f"{record} after incarnation {self._highest[record.node]}")
        self._highest[record.node] = record.incarnation

    def _durable(self, record: SeatGranted | SpareAdmitted) -> None:
        self._durable_highest[record.node] = record.incarnation

    def _loaded(self, core: SchedulerCore) -> None:
        """A number that never became durable was never handed out."""
        self._highest = dict(self._durable_highest)

    def _seated(self, worker: Worker, notice: Seated) -> None:
        admitted = notice.admitted
        key = (admitted.job, worker.node, admitted.incarnation)
        if self._told.setdefault(key, worker.session) != worker.session:
            self.violated(f"{worker} and {self._told[key]} are both incarnation {admitted.incarnation}")
