"""S15: a minority or stale member never defines the recovered state.

Today nothing is rebuilt from workers: a lost journal begins a new job. So whoever comes from an older job, or from none
of this kind at all, is never taken in, and leaves no trace in what the scheduler knows.
"""

from __future__ import annotations

from runtime.core.agent_events import Began, Over, Seated
from runtime.core.messages import Admitted, FromScheduler, GenerationStarted, Pending, Register, RoundOpened
from runtime.core.ready import Ready
from runtime.core.scheduler import Event, Received
from tests.simulation.checkers.base import Checker
from tests.simulation.worker import Oddity, Worker


class OtherJobs(Checker):
    """Knows which sessions belong to the job that the journal holds."""

    name = "S15"

    def watch(self) -> None:
        self._jobs: dict[str, str] = {}  # session → the job it was taken into
        self.world.watch_decided.append(self._decided)
        self.world.watch_agent.append(self._agent)
        for kind in (Admitted, Pending, RoundOpened, GenerationStarted):
            self.world.when_said[kind].append(self._said)
        for notice in (Seated, Began, Over):
            self.world.when_noticed[notice].append(self._noticed)

    def _agent(self, worker: Worker) -> None:
        job = worker.agent.job
        if job and self._jobs.setdefault(worker.session, job) != job:
            self.violated(f"{worker} of {self._jobs[worker.session]} is taken into {job}")

    def _is_foreign(self, event: Event | None) -> bool:
        if not isinstance(event, Received):
            return False
        message, job = event.message, self.world.witness.job
        if isinstance(message, Register):
            policy = self.world.policy
            is_odd = (message.job_name, message.settings) != (policy.job_name, policy.settings)
            return is_odd or message.job not in ("", job)
        return message.sender.job != job

    def _decided(self, event: Event | None, ready: Ready) -> None:
        if self._is_foreign(event):
            if ready.records:
                self.violated(f"{event} comes from another job and made {ready.records}")
            if any(isinstance(send.message, Admitted | Pending | RoundOpened) for send in ready.sends):
                self.violated(f"{event} comes from another job and was answered {ready.sends}")

    def _said(self, session: str, message: FromScheduler) -> None:
        number = session.rpartition("#")[2]
        if not number.isdigit() or self.world.started[int(number) - 1].oddity is not Oddity.NONE:
            self.violated(f"{message} is said to {session}, a stranger")

    def _noticed(self, worker: Worker, notice: Seated | Began | Over) -> None:
        if worker.oddity is not Oddity.NONE:
            self.violated(f"{worker}, a stranger ({worker.oddity.value}), is told {notice}")
