"""S8, S11, S12, S14: one truth about each generation, nobody goes back, no round id comes twice."""

from __future__ import annotations

from runtime.core.agent_events import Began, Notice
from runtime.core.messages import FromScheduler, GenerationStarted, RoundId, RoundOpened
from runtime.core.ready import Ready
from runtime.core.records import GenerationCommitted, Record
from runtime.core.scheduler import Event, SchedulerCore
from tests.simulation.checkers.base import Checker
from tests.simulation.group import Group
from tests.simulation.worker import Worker


class Generations(Checker):
    """Watches generations from their record to the steps trained in them."""

    def watch(self) -> None:
        self._committed: dict[int, GenerationCommitted] = {}
        self._told: dict[tuple[int, str], GenerationStarted] = {}
        self._round_life: dict[RoundId, int] = {}
        self._closed_rounds: set[RoundId] = set()
        self._closed_in_this_life: set[RoundId] = set()
        self._agents: dict[str, tuple[int, int]] = {}
        self.world.watch_durable.append(self._durable)
        self.world.watch_loaded.append(self._loaded)
        self.world.watch_decided.append(self._decided)
        self.world.watch_said.append(self._said)
        self.world.watch_notice.append(self._noticed)
        self.world.watch_agent.append(self._agent)
        self.world.watch_trained.append(self._trained)

    def _loaded(self, core: SchedulerCore) -> None:
        self._closed_in_this_life.clear()

    def _decided(self, event: Event | None, ready: Ready) -> None:
        for send in ready.sends:
            if isinstance(send.message, RoundOpened) and send.message.round in self._closed_in_this_life:
                self.violated("S12", f"{send.message}: this round was closed before")
        for record in ready.records:
            if isinstance(record, GenerationCommitted):
                self._judge_membership(record)
                if record.round in self._closed_rounds or record.round in self._closed_in_this_life:
                    self.violated("S12", f"{record}: its round was closed before")
                self._closed_in_this_life.add(record.round)

    def _judge_membership(self, record: GenerationCommitted) -> None:
        nodes = [node for node, _ in record.members]
        if len(nodes) != self.world.policy.world_size or len(set(nodes)) != len(nodes):
            self.violated("S14", f"{record}: its members")
        for rank, (node, incarnation) in enumerate(record.members):
            holder = self.world.witness.holders[node]
            if (holder.slot, holder.incarnation) != (rank, incarnation):
                self.violated("S2", f"{record}: rank {rank} is {holder}")
            if holder.is_lost or holder.has_left:
                self.violated("S8", f"{record}: rank {rank} is no live member: {holder}")

    def _durable(self, records: list[Record]) -> None:
        for record in records:
            if isinstance(record, GenerationCommitted):
                self._committed[record.generation] = record
                self._closed_rounds.add(record.round)

    def _said(self, session: str, message: FromScheduler) -> None:
        if isinstance(message, RoundOpened):
            life = self.world.host.life
            if self._round_life.setdefault(message.round, life) != life:
                self.violated("S12", f"{message}: an earlier life of the scheduler opened a round of this id")
        elif isinstance(message, GenerationStarted):
            first = self._told.setdefault((message.generation, session), message)
            if first != message:
                self.violated("S8", f"{session} is told {message}, and before {first}")

    def _noticed(self, worker: Worker, notice: Notice) -> None:
        if not isinstance(notice, Began):
            return
        started, committed = notice.started, self._committed.get(notice.started.generation)
        if committed is None:
            self.violated("S7", f"{worker} began {started}, of which there is no durable record")
        if committed.members[started.rank] != (worker.node, worker.agent.incarnation):
            self.violated("S8", f"{worker} began {started}, the record says {committed}")
        if (started.world_size, started.restore) != (len(committed.members), committed.restore):
            self.violated("S8", f"{worker} began {started}, the record says {committed}")

    def _agent(self, worker: Worker) -> None:
        agent = worker.agent
        before = self._agents.get(worker.session, (0, 0))
        if agent.generation < before[0] or agent.term < before[1]:
            self.violated("S11", f"{worker} went back from (generation, term) {before}")
        self._agents[worker.session] = (agent.generation, agent.term)

    def _trained(self, group: Group) -> None:
        newest = max(self._committed)
        sessions = [group.members[rank].session for rank in sorted(group.members)]
        restored = {member.restored for member in group.members.values()}
        steps = {member.step for member in group.members.values()}
        if len(restored) > 1 or len(steps) > 1:
            self.violated("S8", f"{sessions} train together from {restored}, at steps {steps}")
        nodes = tuple((member.node, member.agent.incarnation) for _, member in sorted(group.members.items()))
        if nodes != self._committed[group.generation].members:
            self.violated("S8", f"{nodes} train generation {group.generation}, the record names others")
        if group.generation < newest and len(nodes) > 1:
            self.violated("S11", f"{sessions} train generation {group.generation} after {newest} was committed")
