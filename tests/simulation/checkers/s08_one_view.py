"""S8: all members of a generation see the same members, ranks and restore point, from its record to its steps."""

from __future__ import annotations

from samebits.core.agent.agent_events import Began
from samebits.core.messages import AddressMap, GenerationStarted, RankPosition
from samebits.core.records import GenerationCommitted
from samebits.core.scheduler import SchedulerEvent
from tests.simulation.checkers.base import Checker
from tests.simulation.group import Group, blob_of, session_in
from tests.simulation.worker import Worker


class OneView(Checker):
    """Compares what is committed, announced, started and trained."""

    name = "S8"

    def begin_job(self) -> None:
        self._told: dict[tuple[int, str], GenerationStarted] = {}

    def watch(self) -> None:
        self.world.when_recorded[GenerationCommitted].append(self._decided)
        self.world.when_said[GenerationStarted].append(self._started)
        self.world.when_said[AddressMap].append(self._mapped)
        self.world.when_noticed[Began].append(self._began)
        self.world.when_noticed[AddressMap].append(self._has_map)
        self.world.watch_trained.append(self._trained)

    def _committed(self, generation: int) -> GenerationCommitted | None:
        return self.world.witness.line.of(generation)

    def _decided(self, event: SchedulerEvent | None, record: GenerationCommitted) -> None:
        witness = self.world.witness
        for rank, (node, incarnation) in enumerate(record.members):
            holder = witness.holders[node]
            if holder.is_lost or holder.has_left or holder.incarnation != incarnation:
                self.violated(f"{record}: rank {rank} is no live member: {holder}")
            if witness.line.join_of(record.round, node, incarnation) is None:
                self.violated(f"{record}: {node} never joined this round")

    def _started(self, session: str, message: GenerationStarted) -> None:
        first = self._told.setdefault((message.generation, session), message)
        if first != message:
            self.violated(f"{session} gets {message}, and got {first} before")

    def _mapped(self, session: str, message: AddressMap) -> None:
        committed = self._committed(message.generation)
        holders = self.world.witness.holders
        if committed is None or committed is not self.world.witness.line.committed[-1]:
            return
        for blob, (node, incarnation) in zip(message.blobs, committed.members, strict=True):
            if holders[node].incarnation == incarnation and session_in(blob) != holders[node].session:
                self.violated(f"{message}: {node} is {holders[node].session}")
        size = len(committed.members)
        for rank, (slot, blob) in enumerate(zip(committed.slots, message.blobs, strict=True)):
            if blob != blob_of(session_in(blob), RankPosition(slot, rank, size)):
                self.violated(f"{message}: {blob!r} was made for another place than slot {slot}, rank {rank} of {size}")

    def _began(self, worker: Worker, notice: Began) -> None:
        if worker.agent.job != self.world.witness.job:
            return  # of a job whose journal is gone
        started, committed = notice.started, self._committed(notice.started.generation)
        if committed is None:
            self.violated(f"{worker} began {started}, of which there is no durable record")
        if committed.members[started.rank] != (worker.node, worker.agent.incarnation):
            self.violated(f"{worker} began {started}, the record says {committed}")
        if started.slot != committed.slots[started.rank]:
            self.violated(f"{worker} began {started}, the record says {committed}")
        if (started.world_size, started.restore) != (len(committed.members), committed.restore):
            self.violated(f"{worker} began {started}, the record says {committed}")

    def _has_map(self, worker: Worker, notice: AddressMap) -> None:
        if worker.agent.job == self.world.witness.job and notice.generation == worker.generation:
            own = session_in(notice.blobs[worker.rank])
            if own != worker.session:
                self.violated(f"{worker} is rank {worker.rank} and gets a map where that is {own}")

    def _trained(self, group: Group) -> None:
        members = [group.members[rank] for rank in sorted(group.members)]
        first = members[0]
        if any(member.step != first.step or member.restored != first.restored for member in members):
            told = [(member.session, member.restored, member.step) for member in members]
            self.violated(f"these train together: {told}")
        if group.job != self.world.witness.job:
            return
        committed = self._committed(group.generation)
        nodes = tuple([(member.node, member.agent.incarnation) for member in members])
        if committed is None or nodes != committed.members:
            self.violated(f"{nodes} train generation {group.generation}, the record says {committed}")
