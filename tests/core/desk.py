"""One agent with a clock that the test sets, for the tests of the worker's side.

``Desk`` passes events to a real :class:`AgentCore`. The functions below bring an agent to each stage of a worker's
life.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from samebits.core.agent.agent_core import AgentCore, AgentPolicy
from samebits.core.agent.agent_events import (
    AgentEvent,
    AgentReady,
    Completed,
    Connected,
    Entered,
    Heard,
    Passed,
    Trains,
)
from samebits.core.messages import (
    Activity,
    Admitted,
    Credential,
    Finished,
    FromScheduler,
    GenerationStarted,
    Holdings,
    Process,
    RankPosition,
    ReportEnvelope,
    RoundId,
    RoundOpened,
)
from samebits.core.point import Point
from samebits.core.reports import Figure, Report
from tests.core.house import JOB_NAME, NUMERICS, SETTINGS

T = TypeVar("T")
ME = Process("host-a", 77, 1, "cpu")
CREDENTIAL = Credential("job-1", "3", "mine", 1)
POINTS = (Point(10, 1), Point(20, 1))


@dataclass
class Desk:
    """One agent that receives its events from the test."""

    topo_timeout_s: float = 1800.0
    first_beat_s: float = 1.0
    failover_s: float | None = None
    job: str = ""
    now: float = 50.0
    ready: AgentReady = field(default_factory=AgentReady)
    figures: tuple[Figure, ...] = ()

    def __post_init__(self) -> None:
        patience = {"first_beat_s": self.first_beat_s, "topo_timeout_s": self.topo_timeout_s}
        policy = AgentPolicy("3", "mine", ME, JOB_NAME, SETTINGS, failover_s=self.failover_s, job=self.job, **patience)
        self.agent = AgentCore(policy, self.now)

    def step(self, event: AgentEvent) -> AgentReady:
        self.ready = self.agent.step(event, self.now)
        return self.ready

    def hear(self, message: FromScheduler) -> AgentReady:
        return self.step(Heard(message))

    def passes(self, after_s: float, step: int = 0) -> AgentReady:
        self.now += after_s
        return self.step(Passed(step))

    def said(self, kind: type[T]) -> list[T]:
        return [message for message in self.ready.sends if isinstance(message, kind)]

    def reported(self, kind: type[Report]) -> list[ReportEnvelope]:
        return [message for message in self.said(ReportEnvelope) if isinstance(message.body, kind)]

    def told(self, kind: type[T]) -> list[T]:
        return [notice for notice in self.ready.notices if isinstance(notice, kind)]

    # ---- common starting points

    def admitted(self, *, term: int = 1, finished: Point | None = None) -> AgentReady:
        return self.hear(Admitted("mine", "job-1", term, 3, 1, 4, finished))

    def opens(
        self,
        number: int = 1,
        *,
        term: int = 1,
        incarnation: int = 1,
        missing: str = "",
        place: RankPosition | None = None,
        look: bool = False,
        gently: bool = False,
        committed: Point | None = None,
    ) -> AgentReady:
        round_id = RoundId(term, number)
        return self.hear(
            RoundOpened("job-1", term, incarnation, round_id, "because", missing, place, look, gently, committed)
        )

    def starts(self, generation: int = 1, *, number: int = 1, term: int = 1, incarnation: int = 1) -> AgentReady:
        return self.hear(started(generation, number=number, term=term, incarnation=incarnation))

    def enters(
        self, *, blob: bytes = b"", place: RankPosition | None = None, live: Point | None = None, looked: bool = True
    ) -> AgentReady:
        return self.step(Entered(Holdings(POINTS, False, NUMERICS, blob, place, live, looked)))


def started(generation: int = 1, *, number: int = 1, term: int = 1, incarnation: int = 1) -> GenerationStarted:
    return GenerationStarted(
        "job-1", term, incarnation, generation, RoundId(term, number), 3, 4, 0, 1, Point(20, 1), 3, (), "from 20", 3
    )


def seated() -> Desk:
    desk = Desk()
    desk.step(Connected())
    desk.admitted()
    return desk


def waiting() -> Desk:
    desk = seated()
    desk.enters()
    return desk


def forming() -> Desk:
    desk = waiting()
    desk.opens()
    desk.starts()
    return desk


def training() -> Desk:
    desk = forming()
    desk.step(Trains(1))
    return desk


def done() -> Desk:
    desk = training()
    desk.step(Completed(1, 60))
    return desk


def finished() -> Desk:
    desk = done()
    desk.hear(Finished("job-1", 1, Point(60, 1)))
    return desk


STAGES = {
    Activity.SEATED: seated,
    Activity.WAITING: waiting,
    Activity.FORMING: forming,
    Activity.TRAINING: training,
    Activity.DONE: done,
    Activity.FINISHED: finished,
}
