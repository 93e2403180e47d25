"""S14, at fixed size: min = world size = max, and ranks are exactly 0..n-1.

That survivors keep their relative order is here S2: a rank is a slot. Growing and shrinking are not built yet.
"""

from __future__ import annotations

from runtime.core.messages import Admitted, GenerationStarted
from runtime.core.records import GenerationCommitted, SeatGranted
from runtime.core.scheduler import Event
from tests.simulation.checkers.base import Checker


class WorldSize(Checker):
    """Counts members and ranks, as they are written and as they are told."""

    name = "S14"

    def watch(self) -> None:
        self.world.when_recorded[SeatGranted].append(self._granted)
        self.world.when_recorded[GenerationCommitted].append(self._committed)
        self.world.when_said[GenerationStarted].append(self._started)
        self.world.when_said[Admitted].append(self._admitted)

    def _granted(self, event: Event | None, record: SeatGranted) -> None:
        if not 0 <= record.slot < self.world.policy.world_size:
            self.violated(f"{record}: no such slot")

    def _committed(self, event: Event | None, record: GenerationCommitted) -> None:
        nodes = {node for node, _ in record.members}
        if not len(nodes) == len(record.members) == self.world.policy.world_size:
            self.violated(f"{record}: its members are not {self.world.policy.world_size} different nodes")

    def _started(self, session: str, message: GenerationStarted) -> None:
        local_fits = 0 <= message.local_rank < message.local_world_size <= message.world_size
        if message.world_size != self.world.policy.world_size or not local_fits:
            self.violated(f"{message} in a job of {self.world.policy.world_size}")
        members = self.world.witness.line.committed[message.generation - 1].members
        node = session.split("#")[0]
        if not 0 <= message.rank < message.world_size or members[message.rank][0] != node:
            self.violated(f"{message} is told to {node}")

    def _admitted(self, session: str, message: Admitted) -> None:
        if message.world_size != self.world.policy.world_size:
            self.violated(f"{message} in a job of {self.world.policy.world_size}")
