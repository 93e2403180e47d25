"""S11: a worker's generation, term and round never decrease, and no step is made under a generation that is over."""

from __future__ import annotations

from samebits.core.agent.agent_events import Began
from samebits.core.messages import RoundId
from samebits.core.records import GenerationCommitted
from tests.simulation.checkers.base import Checker
from tests.simulation.group import Group
from tests.simulation.worker import Stage, Worker

FIRST = (0, 0, RoundId(0, 0))


class NoWayBack(Checker):
    """Examines every agent after each of its steps, and every training step."""

    name = "S11"

    def watch(self) -> None:
        self._agents: dict[str, tuple[int, int, RoundId]] = {}
        self.world.watch_agent.append(self._agent)
        self.world.watch_trained.append(self._trained)
        self.world.when_noticed[Began].append(self._began)

    def _agent(self, worker: Worker) -> None:
        agent = worker.agent
        before = self._agents.get(worker.session, FIRST)
        generation, term, round_ = agent.generation, agent.term, agent.joined or before[2]
        if generation == before[0] and term == before[1] and round_ is before[2]:
            return
        if generation < before[0] or term < before[1] or round_ < before[2]:
            self.violated(f"{worker} went back from {before} to {(generation, term, round_)}")
        self._agents[worker.session] = (generation, term, round_)

    def _is_cut_off(self, group: Group, newest: GenerationCommitted) -> bool:
        """Return whether each member was replaced while unreachable, so that their steps are on no line."""
        return all((worker.node, worker.agent.incarnation) not in newest.members for worker in group.members.values())

    def _began(self, worker: Worker, notice: Began) -> None:
        if worker.stage not in (Stage.RENDEZVOUS, Stage.ENDING):
            self.violated(f"{worker} is {worker.stage.value} and begins {notice.started}")

    def _trained(self, group: Group) -> None:
        committed = self.world.witness.line.committed
        if group.job != self.world.witness.job or not committed:
            return
        if group.generation < committed[-1].generation and not self._is_cut_off(group, committed[-1]):
            self.violated(f"{group.sessions} train generation {group.generation} after {committed[-1]}")
        for worker in group.members.values():
            if worker.agent.generation != group.generation:
                self.violated(f"{worker} trains generation {group.generation}, its agent is in another one")
