"""S1, S2, S3, S5: one process a rank, one node a slot, a slot for life, nobody seated before its cool-down is over."""

from __future__ import annotations

from runtime.core.agent_events import Began, Notice
from runtime.core.ready import Ready
from runtime.core.records import SeatGranted, SeatRetired
from runtime.core.scheduler import Event, SchedulerCore
from tests.simulation.checkers.base import EPSILON_S, Checker
from tests.simulation.worker import Worker


class Seats(Checker):
    """Watches every grant, and every process that takes a rank."""

    def watch(self) -> None:
        self._incarnations: dict[str, int] = {}
        self._slots: dict[str, int] = {}
        self._ranks: dict[tuple[int, int], Worker] = {}
        self.world.watch_loaded.append(self._loaded)
        self.world.watch_decided.append(self._decided)
        self.world.watch_notice.append(self._noticed)

    def _loaded(self, core: SchedulerCore) -> None:
        """What was granted and never durable was never told; the next life may decide otherwise."""
        holders = self.world.witness.holders.values()
        self._slots = {holder.node: holder.slot for holder in holders if holder.slot is not None}
        self._incarnations = {holder.node: holder.incarnation for holder in holders}

    def _decided(self, event: Event | None, ready: Ready) -> None:
        for record in ready.records:
            if isinstance(record, SeatRetired):
                self._slots.pop(record.node, None)
            elif isinstance(record, SeatGranted):
                self._granted(record)
        for old, record in self.world.witness.replaced:
            if old is not None and not old.has_left:
                quiet_s = self.world.now - old.quiet_since
                if quiet_s < self.world.policy.cool_down_s - EPSILON_S:
                    self.violated("S3", f"{record.node} seated anew {quiet_s:.3f} s after {old} was last heard")

    def _granted(self, record: SeatGranted) -> None:
        if record.incarnation <= self._incarnations.get(record.node, 0):
            self.violated("S5", f"{record} after incarnation {self._incarnations[record.node]}")
        self._incarnations[record.node] = record.incarnation
        if self._slots.get(record.node, record.slot) != record.slot:
            self.violated("S2", f"{record}, but the node had slot {self._slots[record.node]}")
        self._slots[record.node] = record.slot
        if list(self._slots.values()).count(record.slot) > 1:
            self.violated("S1", f"{record}: two nodes in one slot: {self._slots}")
        if not 0 <= record.slot < self.world.policy.world_size:
            self.violated("S14", f"{record}: no such slot")

    def _noticed(self, worker: Worker, notice: Notice) -> None:
        if isinstance(notice, Began):
            key = (notice.started.generation, notice.started.rank)
            other = self._ranks.setdefault(key, worker)
            if other is not worker and other.is_alive:
                self.violated("S1", f"{worker} and {other} both have rank {key[1]} in generation {key[0]}")
            self._ranks[key] = worker
