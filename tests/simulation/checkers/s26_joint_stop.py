"""S26: once the commit of a joint stop is durable, no member makes a later one, and the job ends with all at it."""

from __future__ import annotations

from samebits.core.records import GenerationCommitted, JobInterrupted, StopPlanned
from samebits.core.scheduler import SchedulerCore, SchedulerEvent
from tests.simulation.checkers.base import Checker
from tests.simulation.group import Group

BY = "stopped by samebits stop"


class JointlyStopped(Checker):
    """Remembers the agreed commit of each generation."""

    name = "S26"

    def begin_job(self) -> None:
        self._generation = 0
        self._agreed: dict[int, int] = {}  # generation → number of the commit after which its members stop
        self._recorded = 0  # the same of the present generation, perhaps not durable yet
        self._asked_durably = self._is_asked = False

    def watch(self) -> None:
        durable, recorded = self.world.when_durable, self.world.when_recorded
        durable[GenerationCommitted].append(self._formed)
        durable[StopPlanned].append(self._planned)
        durable[JobInterrupted].append(self._is_over)
        recorded[StopPlanned].append(self._asked)
        recorded[JobInterrupted].append(self._ends)
        self.world.watch_loaded.append(self._loaded)
        self.world.watch_trained.append(self._trained)

    def _loaded(self, core: SchedulerCore) -> None:
        self._is_asked, self._recorded = self._asked_durably, self._agreed.get(self._generation, 0)

    def _formed(self, record: GenerationCommitted) -> None:
        self._generation = record.generation

    def _asked(self, event: SchedulerEvent | None, record: StopPlanned) -> None:
        self._is_asked, self._recorded = True, record.commits

    def _planned(self, record: StopPlanned) -> None:
        self._asked_durably = True
        if not record.commits:
            return
        before = self._agreed.setdefault(self._generation, record.commits)
        if before != record.commits:
            self.violated(f"{record}: generation {self._generation} has agreed on commit {before}")
        self.world.count("joint stop agreed")

    def _is_over(self, record: JobInterrupted) -> None:
        self._asked_durably = False
        self._agreed.clear()  # a later start may continue this generation and agree again

    def _trained(self, group: Group) -> None:
        agreed = self._agreed.get(group.generation)
        if agreed is None or group.job != self.world.witness.job:
            return
        for member in group.members.values():
            if member.commits_here >= agreed:
                self.violated(f"{member} trains behind commit {member.commits_here}; all were to stop after {agreed}")

    def _ends(self, event: SchedulerEvent | None, record: JobInterrupted) -> None:
        is_asked, self._is_asked = self._is_asked, False
        if not is_asked or not record.cause.startswith(BY):
            return
        core = self.world.host.core
        assert core is not None and core.state.generation is not None
        if core.state.final is not None:
            return  # training was finished first, and the scripts are stopped at once
        agreed = self._recorded
        members = dict(core.state.generation.members)
        for worker in self.world.workers:
            is_member = members.get(worker.node) == worker.agent.incarnation
            if is_member and worker.generation == core.state.generation_number and worker.commits_here != agreed:
                self.violated(f"{record}: {worker} stops after commit {worker.commits_here}, not after {agreed}")
        self.world.count("joint stop made")
