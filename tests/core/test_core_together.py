"""Scheduler and agents together: any one message may be lost, doubled or late, and the job still forms and ends."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from samebits.core.agent.agent_core import AgentCore, AgentPolicy
from samebits.core.agent.agent_events import (
    Addressed,
    AgentEvent,
    Began,
    Completed,
    Connected,
    Disconnected,
    Entered,
    Heard,
    Leaving,
    Observed,
    Over,
    Passed,
    Trains,
)
from samebits.core.messages import (
    SCHEMA,
    Activity,
    AddressMap,
    FromScheduler,
    FromWorker,
    Holdings,
    Process,
    ProcessEnded,
)
from samebits.core.point import Point
from samebits.core.reports import FINAL, Digest, Digests
from samebits.core.scheduler import Received
from tests.core.house import JOB_NAME, NUMERICS, SETTINGS, House, policy


@dataclass
class Room:
    """Two workers that react at once, and a wire on which message number ``at`` meets ``fate``."""

    fate: str = "arrives"
    at: int = -1
    house: House = field(default_factory=lambda: House(policy(2)))
    agents: dict[str, AgentCore] = field(default_factory=dict)
    wire: deque[tuple[str, FromWorker | FromScheduler, bool]] = field(default_factory=deque)
    late: list[tuple[str, FromWorker | FromScheduler, bool]] = field(default_factory=list)
    carried: int = 0
    over: set[str] = field(default_factory=set)

    def start(self, node: str) -> None:
        session = f"s{node}"
        identity = AgentPolicy(node, session, Process("host-a", 1, 1, "cpu"), JOB_NAME, SETTINGS)
        self.agents[session] = AgentCore(identity, self.house.now)
        self.do(session, Connected())
        self.do(session, Entered(Holdings((), False, NUMERICS)))

    def do(self, session: str, event: AgentEvent) -> None:
        ready = self.agents[session].step(event, self.house.now)
        for message in ready.sends:
            self.put(session, message, up=True)
        for notice in ready.notices:
            match notice:
                case Began(started):
                    self.do(session, Addressed(started.generation, session.encode()))
                case AddressMap(generation=generation, blobs=blobs):
                    assert blobs == (b"s0", b"s1")
                    self.do(session, Trains(generation))
                case Over():
                    self.over.add(session)

    def put(self, session: str, message: FromWorker | FromScheduler, *, up: bool) -> None:
        self.carried += 1
        fate = self.fate if self.carried - 1 == self.at else "arrives"
        plain = SCHEMA.unpack(SCHEMA.pack(message))
        if fate == "is late":
            self.late.append((session, plain, up))
        elif fate != "is lost":
            self.wire += [(session, plain, up)] * (2 if fate == "comes twice" else 1)

    def settle(self) -> None:
        while self.wire:
            session, message, up = self.wire.popleft()
            if up:
                for send in self.house.step(Received(session, message)).sends:
                    self.put(send.session, send.message, up=False)
            else:
                self.do(session, Heard(message))

    def pass_time(self, seconds: int) -> None:
        for second in range(seconds):
            self.house.now += 1
            for session in self.agents:
                self.do(session, Passed(60))
            self.settle()
            for send in self.house.tick().sends:
                self.put(send.session, send.message, up=False)
            self.settle()
            if second == 2:
                self.wire += self.late
                self.late.clear()
                self.settle()

    def activities(self) -> set[Activity]:
        return {agent.activity for agent in self.agents.values()}

    def life(self) -> None:
        """Run from two starts to the finished job, with a scheduler restart on the way."""
        for node in "01":
            self.start(node)
            self.settle()
        self.pass_time(4)
        assert self.activities() == {Activity.TRAINING}
        for session in self.agents:
            self.do(session, Disconnected())
        self.wire.clear()
        self.house.crash(after_s=2.0)
        for session in self.agents:
            self.do(session, Connected())
        self.settle()
        self.pass_time(4)
        assert self.activities() == {Activity.TRAINING}
        assert self.house.core.phase() == "training" and self.house.core.state.term == 2
        for session, agent in self.agents.items():
            self.do(session, Observed(Digests.of((Digest(Point(60, agent.generation), FINAL, b"same"),))))
            self.do(session, Completed(agent.generation, 60))
        self.settle()
        self.pass_time(4)
        assert self.over == {"s0", "s1"}
        for session in self.agents:
            self.do(session, Leaving(True, "status 0"))
        self.settle()


UNDISTURBED = Room()
UNDISTURBED.life()


def test_undisturbed_life_is_short() -> None:
    assert UNDISTURBED.house.ended is not None
    assert UNDISTURBED.house.core.state.finished
    assert UNDISTURBED.house.core.state.generation_number == 1
    assert 40 <= UNDISTURBED.carried <= 120, UNDISTURBED.carried


@pytest.mark.parametrize("fate", ["is lost", "comes twice", "is late"])
@pytest.mark.parametrize("at", range(UNDISTURBED.carried))
def test_any_single_message_may_be_disturbed(at: int, fate: str) -> None:
    room = Room(fate, at)
    room.life()
    assert room.house.core.state.generation_number == 1, "no second formation was needed"
    if not room.house.core.state.finished:  # a Leave was lost: the launcher has seen the process end
        room.agents.clear()
        room.pass_time(20)
        for node in "01":
            process = room.house.seat(node).process
            room.house.step(ProcessEnded(node, *process[:3], "ended with status 0", status=0))
    assert room.house.core.state.finished


def test_same_life_gives_the_same_journal() -> None:
    room = Room()
    room.life()
    assert room.house.journal == UNDISTURBED.house.journal
