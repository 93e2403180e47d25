"""S14: min ≤ world size ≤ max, ranks are exactly 0..n-1, survivors keep their relative order.

A world also shrinks only for a reason: no slot is taken away while it is held, nor before its grace unless a spare
takes it, nor if too few would be left. A world with a mesh shrinks by whole shard groups, and
one of the last generation stays.
"""

from __future__ import annotations

import math

from samebits.core.messages import Admitted, GenerationStarted
from samebits.core.ready import Ready
from samebits.core.records import GenerationCommitted, JobRebuilt, SeatGranted, SeatRetired, SlotGiven
from samebits.core.scheduler import SchedulerEvent
from tests.simulation.checkers.base import EPSILON_S, Checker
from tests.simulation.checkers.witness import Holder


class WorldSize(Checker):
    """Counts members and ranks, as written and as announced."""

    name = "S14"

    def begin_job(self) -> None:
        self._forgotten: set[tuple[str, int]] = set()

    def rebuilt(self, record: JobRebuilt) -> None:
        """Name and incarnation of an unreported member are unknown; both may return."""
        last = self.world.witness.line.committed[-1:]
        known = {(seat.node, seat.incarnation) for seat in record.seats}
        self._forgotten = {member for one in last for member in one.members} - known

    def watch(self) -> None:
        self.world.watch_decided.append(self._decided)
        self.world.when_recorded[SeatGranted].append(self._granted)
        self.world.when_recorded[SlotGiven].append(self._granted)
        self.world.when_recorded[GenerationCommitted].append(self._committed)
        self.world.when_said[GenerationStarted].append(self._started)
        self.world.when_said[Admitted].append(self._admitted)

    def _granted(self, event: SchedulerEvent | None, record: SeatGranted | SlotGiven) -> None:
        if not 0 <= record.slot < self.world.policy.max_world_size:
            self.violated(f"{record}: no such slot")

    def _decided(self, event: SchedulerEvent | None, ready: Ready) -> None:
        if not any(isinstance(record, SeatRetired) for record in ready.records):
            return
        taken = {record.slot for record in ready.records if isinstance(record, SeatGranted | SlotGiven)}
        for old in self.world.witness.retired:
            # rebuilt without a report of its holder, which has arrived by now
            if not old.session and old.slot in taken:
                continue
            if not (old.is_lost or old.has_left):
                self.violated(f"slot {old.slot} is taken away from {old}, who holds it")
            if old.slot not in taken:
                self._may_be_given_up(old)

    def _may_be_given_up(self, old: Holder) -> None:
        witness, policy = self.world.witness, self.world.policy
        if policy.min_world_size == policy.max_world_size:
            self.violated(f"slot {old.slot} of {old} is given up in a world of fixed size")
        holders = witness.holders.values()
        live = {one.slot for one in holders if one.slot is not None and not (one.is_lost or one.has_left)}
        last = witness.line.last
        if last is not None and last.sharding is not None:
            groups = self._groups(live)
            if not any(group <= set(last.slots) for group in groups):
                self.violated(f"slot {old.slot} of {old} is given up, and {groups} are left of {last}")
            live = {slot for group in groups for slot in group}
        if len(live) < policy.min_world_size:
            self.violated(f"slot {old.slot} of {old} is given up, and {len(live)} are left")
        waited_s = self.world.host.clock - max(old.lost_at, witness.loaded_at)
        was_member = last is not None and old.slot in last.slots
        if was_member and not old.has_left and waited_s < policy.shrink_grace_s - EPSILON_S:
            self.violated(f"slot {old.slot} of {old} is given up {waited_s:.3f} s after its loss")

    def _groups(self, slots: set[int]) -> list[set[int]]:
        """Return the shard groups of which all slots are among these."""
        mesh = self.world.mix.sharding
        assert mesh is not None and mesh.shrinks is not None, "only such a world notes a mesh in its journal"
        below = math.prod(mesh.sizes[mesh.shrinks + 1 :])
        groups: dict[int, set[int]] = {}
        for slot in range(math.prod(mesh.sizes)):
            groups.setdefault(slot // below % mesh.sizes[mesh.shrinks], set()).add(slot)
        return [group for group in groups.values() if group <= slots]

    def _committed(self, event: SchedulerEvent | None, record: GenerationCommitted) -> None:
        mesh = self.world.mix.sharding
        if mesh is not None and mesh.shrinks is not None:
            whole = {slot for group in self._groups(set(record.slots)) for slot in group}
            if whole != set(record.slots):
                self.violated(f"{record}: slots {set(record.slots) - whole} are of incomplete shard groups")
        policy, nodes = self.world.policy, {node for node, _ in record.members}
        if len(nodes) != len(record.members):
            self.violated(f"{record}: its members are not different nodes")
        if not policy.min_world_size <= len(nodes) <= policy.max_world_size:
            self.violated(f"{record}: {policy.min_world_size} to {policy.max_world_size} members are allowed")
        line = self.world.witness.line.committed
        last = [member for one in line[-1:] for member in one.members if member not in self._forgotten]
        before = [member for member in last if member in record.members]
        after = [member for member in record.members if member in before]
        if before != after:
            self.violated(f"{record}: those who stay were in the order {before}")

    def _started(self, session: str, message: GenerationStarted) -> None:
        record = self.world.witness.line.of(message.generation)
        assert record is not None, "S7: what is sent is durable"
        local_fits = 0 <= message.local_rank < message.local_world_size <= message.world_size
        if message.world_size != len(record.members) or not local_fits:
            self.violated(f"{message} of {record}")
        node = session.split("#")[0]
        if not 0 <= message.rank < message.world_size or record.members[message.rank][0] != node:
            self.violated(f"{message} is sent to {node}")

    def _admitted(self, session: str, message: Admitted) -> None:
        if message.world_size != self.world.policy.world_size:
            self.violated(f"{message} in a job of {self.world.policy.world_size}")
