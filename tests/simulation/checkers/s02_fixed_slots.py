"""S2: a node's slot never changes until it is durably retired; at fixed size neither does its rank."""

from __future__ import annotations

from samebits.core.records import GenerationCommitted, JobRebuilt, SeatGranted, SeatRetired, SlotGiven
from samebits.core.scheduler import SchedulerCore, SchedulerEvent
from tests.simulation.checkers.base import Checker


class FixedSlots(Checker):
    """Remembers each node's slot until it is retired."""

    name = "S2"

    def begin_job(self) -> None:
        self._slots: dict[str, int] = {}

    def rebuilt(self, record: JobRebuilt) -> None:
        self._slots = {seat.node: seat.slot for seat in record.seats}

    def watch(self) -> None:
        self.world.watch_loaded.append(self._loaded)
        self.world.when_recorded[SeatGranted].append(self._granted)
        self.world.when_recorded[SlotGiven].append(self._granted)
        self.world.when_recorded[SeatRetired].append(self._retired)
        self.world.when_recorded[GenerationCommitted].append(self._committed)

    def _loaded(self, core: SchedulerCore) -> None:
        """A grant that was never durable was never announced; the next start may decide otherwise."""
        holders = self.world.witness.holders.values()
        self._slots = {holder.node: holder.slot for holder in holders if holder.slot is not None}

    def _granted(self, event: SchedulerEvent | None, record: SeatGranted | SlotGiven) -> None:
        if self._slots.setdefault(record.node, record.slot) != record.slot:
            self.violated(f"{record}, but the node had slot {self._slots[record.node]}")

    def _retired(self, event: SchedulerEvent | None, record: SeatRetired) -> None:
        if self._slots.pop(record.node, None) != record.slot:
            self.violated(f"{record}, but the node did not have this slot")

    def _committed(self, event: SchedulerEvent | None, record: GenerationCommitted) -> None:
        policy = self.world.policy
        if policy.min_world_size == policy.max_world_size and record.slots != tuple(range(policy.world_size)):
            self.violated(f"{record}: at fixed size a rank is a slot")
        if list(record.slots) != sorted(set(record.slots)):
            self.violated(f"{record}: slots do not rise with the ranks")
        for slot, (node, _) in zip(record.slots, record.members, strict=True):
            if self._slots.get(node) != slot:
                self.violated(f"{record}: slot {slot} is {node}'s, whose slot is {self._slots.get(node)}")
