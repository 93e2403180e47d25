"""S5: a node's incarnation strictly increases, across all starts of the scheduler."""

from __future__ import annotations

from samebits.core.messages import Admitted
from samebits.core.records import JobRebuilt, SeatGranted, SpareAdmitted
from samebits.core.scheduler import SchedulerCore, SchedulerEvent
from tests.simulation.checkers.base import Checker
from tests.simulation.worker import Worker


class Incarnations(Checker):
    """Compares every grant with earlier ones, and the incarnations of a node's processes."""

    name = "S5"

    def begin_job(self) -> None:
        self._highest: dict[str, int] = {}
        self._durable_highest: dict[str, int] = {}

    def rebuilt(self, record: JobRebuilt) -> None:
        """Unreported numbers were lost; processes that held them are distinguished by their sessions."""
        known = self._highest = {seat.node: seat.incarnation for seat in record.seats}
        self._told = {
            (job, node, incarnation): told
            for (job, node, incarnation), told in self._told.items()
            if job != record.job or incarnation <= known.get(node, 0)
        }

    def watch(self) -> None:
        self._told: dict[tuple[str, str, int], str] = {}  # (job, node, incarnation) → session
        self.world.when_recorded[SeatGranted].append(self._granted)
        self.world.when_recorded[SpareAdmitted].append(self._granted)
        self.world.when_durable[SeatGranted].append(self._durable)
        self.world.when_durable[SpareAdmitted].append(self._durable)
        self.world.when_durable[JobRebuilt].append(self._durably_rebuilt)
        self.world.watch_loaded.append(self._loaded)
        self.world.when_noticed[Admitted].append(self._seated)

    def _granted(self, event: SchedulerEvent | None, record: SeatGranted | SpareAdmitted) -> None:
        is_late = self.world.witness.is_late(event, record)
        if record.incarnation <= self._highest.get(record.node, 0) and not is_late:
            self.violated(f"{record} after incarnation {self._highest[record.node]}")
        self._highest[record.node] = record.incarnation
        if is_late:  # later numbers were lost with the journal
            self._told = {key: told for key, told in self._told.items() if key[1] != record.node}

    def _durable(self, record: SeatGranted | SpareAdmitted) -> None:
        self._durable_highest[record.node] = record.incarnation

    def _durably_rebuilt(self, record: JobRebuilt) -> None:
        self._durable_highest |= {seat.node: seat.incarnation for seat in record.seats}

    def _loaded(self, core: SchedulerCore) -> None:
        """A number that never became durable was never handed out."""
        self._highest = dict(self._durable_highest)

    def _seated(self, worker: Worker, admitted: Admitted) -> None:
        key = (admitted.job, worker.node, admitted.incarnation)
        if self._told.setdefault(key, worker.session) != worker.session:
            self.violated(f"{worker} and {self._told[key]} are both incarnation {admitted.incarnation}")
