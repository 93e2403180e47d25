"""S15: a minority or stale member never defines the recovered state.

A lost journal is rebuilt from the workers to exactly what it held as far as any of them knew, which is compared with
the lost one. A process of an older job, or of none, is never admitted, and leaves no trace in the scheduler's state.
"""

from __future__ import annotations

from samebits.core.agent.agent_events import Began, Over
from samebits.core.messages import Admitted, FromScheduler, GenerationStarted, Pending, Register, RoundOpened
from samebits.core.ready import Ready
from samebits.core.records import GenerationCommitted, JobRebuilt
from samebits.core.scheduler import Received, SchedulerEvent
from tests.simulation.checkers.base import Checker
from tests.simulation.worker import Oddity, Worker


class OtherJobs(Checker):
    """Knows which sessions belong to the job that the journal holds."""

    name = "S15"

    def watch(self) -> None:
        self._jobs: dict[str, str] = {}  # session → the job it was admitted to
        self.world.watch_decided.append(self._decided)
        self.world.watch_agent.append(self._agent)
        for kind in (Admitted, Pending, RoundOpened, GenerationStarted):
            self.world.when_said[kind].append(self._said)
        for notice in (Admitted, Began, Over):
            self.world.when_noticed[notice].append(self._noticed)

    def _agent(self, worker: Worker) -> None:
        job = worker.agent.job
        if job and self._jobs.setdefault(worker.session, job) != job:
            self.violated(f"{worker} of {self._jobs[worker.session]} is taken into {job}")

    def _is_foreign(self, event: SchedulerEvent | None) -> bool:
        if not isinstance(event, Received):
            return False
        message, job = event.message, self.world.witness.job
        if isinstance(message, Register):
            policy = self.world.policy
            is_odd = (message.job_name, message.settings) != (policy.job_name, policy.settings)
            return is_odd or message.job not in ("", job)
        return message.sender.job != job

    def rebuilt(self, record: JobRebuilt) -> None:
        generation, lost = record.generation, self.world.witness.lost_journals.get(record.job)
        known = [] if lost is None else [one for one in lost.generations if one.generation == generation.generation]
        if lost is None or not known:
            self.violated(f"{record}: no journal of this job ever held that")
        truth = known[0]
        if record.final not in (None, lost.final):
            self.violated(f"{record}: the lost journal said that {lost.final} is final")
        if generation.members:
            self._compare_members(record, truth)
        self._compare_line(record, lost.generations)
        if any(worker.agent.job == record.job and worker.agent.term > record.term for worker in self.world.workers):
            self.violated(f"{record}: a worker has a later term")
        heard = sum(bool(seat.session) for seat in record.seats)
        if 2 * heard <= len(record.seats):
            self.violated(f"{record}: {heard} of {len(record.seats)} members were heard")

    def _compare_members(self, record: JobRebuilt, truth: GenerationCommitted) -> None:
        """Members that reported have their own place and incarnation; of the others only the number is known."""
        generation = record.generation
        is_alike = generation.restore == truth.restore and len(generation.slots) == len(truth.slots)
        if not is_alike or list(generation.slots) != sorted(set(generation.slots)):
            self.violated(f"{record}: the lost journal said {truth}")
        incarnations = dict(truth.members)
        for seat, member, slot in zip(record.seats, truth.members, truth.slots, strict=True):
            if seat.session and (seat.slot, (seat.node, seat.incarnation)) != (slot, member):
                self.violated(f"{record}: slot {slot} was held by {member}")
            if not seat.session and seat.incarnation <= incarnations.get(seat.node, 0):
                self.violated(f"{record}: {seat.node} was incarnation {incarnations[seat.node]} already")

    def _compare_line(self, record: JobRebuilt, lost: list[GenerationCommitted]) -> None:
        """The starting point of the reported generation belongs to the job, and nothing before it does."""
        cuts = [cut for cut in record.generation.line if not cut.is_a_loss]
        heard_of = record.generation.generation
        if not record.generation.members:
            heard_of = max(cut.generation for cut in cuts)
        kept = [cut for one in lost if one.generation == heard_of for cut in one.line]
        if any(cut not in kept for cut in cuts if cut.generation != heard_of):
            self.violated(f"{record}: the lost journal kept {kept}")

    def _decided(self, event: SchedulerEvent | None, ready: Ready) -> None:
        if any(isinstance(record, JobRebuilt) for record in ready.records):
            return
        if self._is_foreign(event):
            if ready.records:
                self.violated(f"{event} comes from another job and made {ready.records}")
            if any(isinstance(send.message, Admitted | Pending | RoundOpened) for send in ready.sends):
                self.violated(f"{event} comes from another job and was answered {ready.sends}")

    def _said(self, session: str, message: FromScheduler) -> None:
        number = session.rpartition("#")[2]
        if not number.isdigit() or self.world.started[int(number) - 1].oddity is not Oddity.NONE:
            self.violated(f"{message} is sent to {session}, a stranger")

    def _noticed(self, worker: Worker, notice: Admitted | Began | Over) -> None:
        if worker.oddity is not Oddity.NONE:
            self.violated(f"{worker}, a stranger ({worker.oddity.value}), gets {notice}")
