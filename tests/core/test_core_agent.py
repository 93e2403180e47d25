"""The worker's side: what an agent says, when, and what its process is told. A clock in hand, no scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from runtime.core.agent import AgentCore, AgentPolicy
from runtime.core.agent_events import (
    Addressed,
    AgentEvent,
    AgentReady,
    Began,
    BreakGroup,
    Completed,
    Connected,
    Disconnected,
    EndReason,
    Entered,
    Failed,
    Heard,
    Leaving,
    Mapped,
    MustEnd,
    Over,
    Passed,
    SchedulerAway,
    SchedulerBack,
    Seated,
    Spoke,
    ToldToWait,
    Trains,
    Waits,
)
from runtime.core.messages import (
    PROTOCOL,
    Activity,
    AddressMap,
    Admitted,
    Credential,
    EndJob,
    EndKind,
    Fenced,
    Finished,
    FromScheduler,
    GenerationStarted,
    Heartbeat,
    Join,
    LastWords,
    Leave,
    Pending,
    Process,
    Publish,
    Refusal,
    Refused,
    Register,
    RoundId,
    RoundOpened,
)
from runtime.core.point import Point
from tests.core.house import JOB_NAME, NUMERICS, SETTINGS

T = TypeVar("T")
ME = Process("host-a", 77, 1, "cpu")
CREDENTIAL = Credential("job-1", "3", "mine", 1)
POINTS = (Point(10, 1), Point(20, 1))


@dataclass
class Desk:
    """One agent on a desk: events go in by hand."""

    topo_timeout_s: float = 1800.0
    now: float = 50.0
    ready: AgentReady = field(default_factory=AgentReady)

    def __post_init__(self) -> None:
        policy = AgentPolicy("3", "mine", ME, JOB_NAME, SETTINGS, topo_timeout_s=self.topo_timeout_s)
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

    def told(self, kind: type[T]) -> list[T]:
        return [notice for notice in self.ready.notices if isinstance(notice, kind)]

    # ---- the usual beginnings

    def admitted(self, *, term: int = 1, finished: Point | None = None) -> AgentReady:
        return self.hear(Admitted("mine", "job-1", term, 3, 1, 4, finished))

    def opens(self, number: int = 1, *, term: int = 1, incarnation: int = 1, missing: str = "") -> AgentReady:
        return self.hear(RoundOpened(term, incarnation, RoundId(term, number), "because", missing))

    def starts(self, generation: int = 1, *, number: int = 1, term: int = 1, incarnation: int = 1) -> AgentReady:
        return self.hear(started(generation, number=number, term=term, incarnation=incarnation))

    def enters(self) -> AgentReady:
        return self.step(Entered(POINTS, False, NUMERICS))


def started(generation: int = 1, *, number: int = 1, term: int = 1, incarnation: int = 1) -> GenerationStarted:
    return GenerationStarted(
        term, incarnation, generation, RoundId(term, number), 3, 4, 0, 1, Point(20, 1), 3, (), "from 20"
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
    desk.hear(Finished(1, Point(60, 1)))
    return desk


STAGES = {
    Activity.SEATED: seated,
    Activity.WAITING: waiting,
    Activity.FORMING: forming,
    Activity.TRAINING: training,
    Activity.DONE: done,
    Activity.FINISHED: finished,
}


def test_the_stages_are_what_they_are_called() -> None:
    assert {activity: stage().agent.activity for activity, stage in STAGES.items()} == {one: one for one in STAGES}


# ---- registering


def test_it_registers_on_every_connection() -> None:
    desk = Desk()
    desk.step(Connected())
    assert desk.ready.sends == [Register(PROTOCOL, "", JOB_NAME, "3", "mine", 0, ME, SETTINGS)]
    desk.admitted()
    desk.step(Disconnected())
    assert desk.ready.sends == []
    desk.step(Connected())
    assert desk.ready.sends == [Register(PROTOCOL, "job-1", JOB_NAME, "3", "mine", 1, ME, SETTINGS)]


def test_it_asks_again_until_it_is_answered() -> None:
    desk = Desk()
    desk.step(Connected())
    assert desk.ready.wake_at == desk.now + 1
    desk.passes(0.9)
    assert desk.ready.sends == []
    for _ in range(3):
        desk.passes(1.0)
        assert len(desk.said(Register)) == 1
    desk.admitted()
    desk.passes(1.0)
    assert desk.said(Register) == []


def test_it_says_nothing_without_a_connection() -> None:
    desk = Desk()
    for _ in range(5):
        desk.passes(10.0)
        assert desk.ready.sends == []


def test_the_seat_is_told_once_and_answered_by_a_heartbeat() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.admitted()
    assert desk.told(Seated) == [Seated(Admitted("mine", "job-1", 1, 3, 1, 4, None))]
    assert desk.said(Heartbeat) == [Heartbeat(CREDENTIAL, 1, Activity.SEATED, 0, None, 0)]
    desk.admitted()
    assert desk.told(Seated) == []


def test_an_admission_of_another_session_is_nothing() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.hear(Admitted("other", "job-1", 1, 3, 1, 4, None))
    assert not desk.agent.seated and desk.ready.notices == []


def test_pending_is_told() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.hear(Pending("mine", 1, 3, 8))
    assert desk.ready.notices == [ToldToWait("3/8 registered; waiting for the others", 0.0)]
    desk.passes(1.0)
    assert desk.said(Register), "it stays known by asking"


# ---- refusals


def refused(desk: Desk, refusal: Refusal, retry_after_s: float, session: str = "mine") -> AgentReady:
    return desk.hear(Refused(session, refusal, retry_after_s, "text"))


@pytest.mark.parametrize("refusal", [Refusal.ALIVE, Refusal.COOLING_DOWN, Refusal.FULL])
def test_who_is_told_to_wait_asks_again_at_that_moment(refusal: Refusal) -> None:
    desk = Desk()
    desk.step(Connected())
    refused(desk, refusal, 12.5)
    assert desk.ready.notices == [ToldToWait("text", 12.5)]
    assert desk.ready.wake_at == pytest.approx(desk.now + 12.5)
    desk.passes(12.4)
    assert desk.ready.sends == []
    desk.passes(0.1)
    assert len(desk.said(Register)) == 1


def test_a_new_connection_asks_at_once() -> None:
    desk = Desk()
    desk.step(Connected())
    refused(desk, Refusal.COOLING_DOWN, 30.0)
    desk.step(Disconnected())
    desk.step(Connected())
    assert len(desk.said(Register)) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal.FULL,
        Refusal.OTHER_JOB,
        Refusal.OTHER_SETTINGS,
        Refusal.PROTOCOL,
        Refusal.RECOVERY_OFF,
        Refusal.STOPPING,
    ],
)
def test_where_waiting_cannot_help_the_process_must_end(refusal: Refusal) -> None:
    desk = Desk()
    desk.step(Connected())
    refused(desk, refusal, 0.0)
    assert desk.ready.notices == [MustEnd(EndReason.REFUSED, "text")]
    assert desk.ready.wake_at is None
    desk.passes(100.0)
    assert desk.ready.sends == [] and desk.ready.notices == []


@pytest.mark.parametrize("stage", [seated, waiting, forming, training])
def test_other_bits_end_the_process_in_every_stage(stage: type[Desk]) -> None:
    desk = stage()
    refused(desk, Refusal.NUMERICS, 0.0)
    assert desk.ready.notices == [MustEnd(EndReason.NUMERICS, "text")]


def test_a_refusal_of_another_session_is_nothing() -> None:
    desk = Desk()
    desk.step(Connected())
    refused(desk, Refusal.OTHER_JOB, 0.0, session="other")
    assert desk.ready.notices == []


def test_a_refusal_that_was_overtaken_by_the_admission_is_nothing() -> None:
    desk = seated()
    refused(desk, Refusal.ALIVE, 30.0)
    assert desk.ready.notices == []
    desk.passes(1.0)
    assert len(desk.said(Heartbeat)) == 1


def test_a_duplicate_gives_up_after_topo_timeout() -> None:
    desk = Desk(topo_timeout_s=60.0)
    desk.step(Connected())
    for _ in range(11):
        refused(desk, Refusal.ALIVE, 5.0)
        desk.passes(5.0)
        assert desk.told(MustEnd) == []
    refused(desk, Refusal.ALIVE, 5.0)
    desk.passes(5.0)
    assert desk.ready.notices == [
        MustEnd(EndReason.DUPLICATE, "worker 3: its seat is still held after 60 s (TOPO_TIMEOUT)")
    ]


def test_the_patience_of_a_duplicate_begins_anew_once_the_holder_is_lost() -> None:
    desk = Desk(topo_timeout_s=60.0)
    desk.step(Connected())
    refused(desk, Refusal.ALIVE, 30.0)
    desk.passes(30.0)
    refused(desk, Refusal.COOLING_DOWN, 28.0)
    desk.passes(28.0)
    refused(desk, Refusal.ALIVE, 30.0)
    desk.passes(30.0)
    assert desk.told(MustEnd) == []


def test_who_waits_for_any_seat_gives_up_after_topo_timeout() -> None:
    desk = Desk(topo_timeout_s=60.0)
    desk.step(Connected())
    for _ in range(12):
        refused(desk, Refusal.FULL, 5.0)
        desk.passes(5.0)
    assert desk.ready.notices == [
        MustEnd(EndReason.REFUSED, "worker 3: every seat is still held after 60 s (TOPO_TIMEOUT)")
    ]


def test_a_stranger_at_the_schedulers_address_does_not_stop_training() -> None:
    desk = training()
    desk.step(Disconnected())
    desk.step(Connected())
    refused(desk, Refusal.OTHER_JOB, 0.0)
    assert desk.told(MustEnd) == []
    assert desk.ready.notices == [ToldToWait("text", 5.0)]
    desk.passes(4.9)
    assert desk.ready.sends == []
    desk.passes(0.1)
    assert len(desk.said(Register)) == 1
    desk.passes(100_000.0)
    assert desk.told(MustEnd) == []


# ---- heartbeats


@pytest.mark.parametrize("stage", STAGES.values(), ids=[one.name for one in STAGES])
def test_a_heartbeat_every_interval_tells_the_whole_truth(stage: type[Desk]) -> None:
    desk = stage()
    activity, generation = desk.agent.activity, desk.agent.generation
    round_id = RoundId(1, 1) if generation else None
    desk.passes(1.0, step=60)
    assert desk.said(Heartbeat) == [Heartbeat(CREDENTIAL, 1, activity, generation, round_id, 60)]
    assert desk.ready.wake_at == desk.now + 1
    desk.passes(0.5, step=60)
    assert desk.ready.sends == []


def test_every_change_is_told_at_once() -> None:
    desk = seated()
    seen = []
    for event in (
        Entered(POINTS, False, NUMERICS),
        Heard(RoundOpened(1, 1, RoundId(1, 1), "because", "")),
        Heard(started()),
        Trains(1),
        Completed(1, 60),
        Heard(Finished(1, Point(60, 1))),
    ):
        desk.step(event)
        seen += [beat.activity for beat in desk.said(Heartbeat)]
    assert seen == [
        Activity.WAITING,
        Activity.FORMING,
        Activity.TRAINING,
        Activity.DONE,
        Activity.FINISHED,
    ]


def test_nothing_but_the_question_is_said_to_a_scheduler_that_has_not_answered() -> None:
    desk = done()
    desk.step(Disconnected())
    desk.step(Connected())
    for _ in range(3):
        desk.passes(1.0, step=60)
        assert [type(message) for message in desk.ready.sends] == [Register]
    desk.admitted(term=2)
    assert desk.said(Heartbeat) == [Heartbeat(CREDENTIAL, 2, Activity.DONE, 1, RoundId(1, 1), 60)]


# ---- rounds


def test_it_joins_when_it_enters_after_the_invitation() -> None:
    desk = seated()
    desk.opens()
    assert desk.ready.sends == [] and desk.ready.notices == []
    desk.enters()
    assert desk.said(Join) == [Join(CREDENTIAL, RoundId(1, 1), POINTS, False, NUMERICS)]


def test_it_joins_when_it_is_invited_after_it_entered() -> None:
    desk = waiting()
    assert desk.said(Join) == []
    desk.opens()
    assert desk.said(Join) == [Join(CREDENTIAL, RoundId(1, 1), POINTS, False, NUMERICS)]


def test_it_joins_again_whenever_it_is_invited_again() -> None:
    desk = waiting()
    for _ in range(3):
        desk.opens()
        assert len(desk.said(Join)) == 1
    desk.opens(number=2)
    assert desk.said(Join)[0].round == RoundId(1, 2)


@pytest.mark.parametrize("stage", [forming, training, done])
def test_a_new_round_breaks_the_group_once(stage: type[Desk]) -> None:
    desk = stage()
    desk.opens(number=2, missing="1, 2")
    assert desk.ready.notices == [BreakGroup("because; waiting for 1, 2")]
    assert desk.said(Join) == [], "first the process must leave its group"
    desk.opens(number=2, missing="2")
    assert desk.told(BreakGroup) == []
    desk.enters()
    assert desk.said(Join)[0].round == RoundId(1, 2)


@pytest.mark.parametrize("stage", [seated, waiting, finished])
def test_who_is_in_no_group_has_nothing_to_break(stage: type[Desk]) -> None:
    desk = stage()
    desk.opens(number=2)
    assert desk.told(BreakGroup) == []


def test_the_round_that_formed_the_generation_does_not_break_it() -> None:
    desk = training()
    desk.opens(number=1)
    assert desk.ready.notices == []


def test_an_older_round_is_nothing() -> None:
    desk = waiting()
    desk.opens(number=5)
    desk.opens(number=4)
    assert desk.ready.sends == []
    desk.opens(number=1, term=2)
    assert desk.said(Join)[0].round == RoundId(2, 1), "rounds of a later term are later"
    desk.opens(number=6, term=1)
    assert desk.ready.sends == []


def test_words_to_another_incarnation_are_nothing() -> None:
    desk = training()
    desk.opens(number=2, incarnation=2)
    assert desk.ready.notices == []
    desk = waiting()
    desk.opens()
    desk.starts(incarnation=2)
    assert desk.ready.notices == []


def test_who_waits_is_told_for_whom_and_only_when_that_changes() -> None:
    desk = waiting()
    desk.opens(missing="1, 2")
    assert desk.ready.notices == [Waits("because; waiting for 1, 2")]
    desk.opens(missing="1, 2")
    assert desk.ready.notices == []
    desk.opens(missing="2")
    assert desk.ready.notices == [Waits("because; waiting for 2")]
    desk.opens()
    assert desk.ready.notices == []


@pytest.mark.parametrize("stage", [forming, training, done])
def test_a_failed_collective_is_told_at_once(stage: type[Desk]) -> None:
    desk = stage()
    desk.step(Failed())
    assert desk.said(Heartbeat) == [Heartbeat(CREDENTIAL, 1, Activity.WAITING, 1, RoundId(1, 1), desk.agent.step_count)]
    desk.opens(number=2)
    assert desk.said(Join) == [], "it has not entered the rendezvous yet"
    desk.enters()
    assert desk.said(Join)[0].round == RoundId(1, 2)


@pytest.mark.parametrize("stage", [seated, waiting, finished])
def test_a_failure_outside_a_group_is_nothing(stage: type[Desk]) -> None:
    desk = stage()
    activity = desk.agent.activity
    desk.step(Failed())
    assert desk.ready.sends == [] and desk.agent.activity is activity


# ---- generations


def test_a_generation_begins() -> None:
    desk = waiting()
    desk.opens()
    desk.starts()
    assert desk.ready.notices == [Began(started())]
    assert desk.said(Heartbeat) == [Heartbeat(CREDENTIAL, 1, Activity.FORMING, 1, RoundId(1, 1), 0)]


def test_a_start_said_twice_begins_once() -> None:
    desk = training()
    desk.starts()
    assert desk.ready.notices == [] and desk.agent.activity is Activity.TRAINING


def test_a_start_of_a_round_it_did_not_join_is_nothing() -> None:
    desk = waiting()
    desk.opens(number=2)
    desk.starts(number=1)
    assert desk.ready.notices == []
    desk.starts(number=2)
    assert desk.told(Began)


def test_a_start_of_an_older_generation_is_nothing() -> None:
    desk = training()
    desk.step(Failed())
    desk.enters()
    desk.opens(number=2)
    desk.starts(1, number=2)
    assert desk.ready.notices == []
    desk.starts(2, number=2)
    assert desk.agent.generation == 2


def test_a_start_of_an_older_term_is_nothing() -> None:
    desk = waiting()
    desk.opens()
    desk.opens(number=1, term=2)
    desk.starts(number=1, term=1)
    assert desk.ready.notices == []


def test_a_start_before_the_process_waits_is_nothing() -> None:
    desk = seated()
    desk.opens()
    desk.starts()
    assert desk.ready.notices == []


def test_its_address_is_repeated_until_the_group_stands() -> None:
    desk = forming()
    desk.step(Addressed(1, b"me"))
    assert desk.said(Publish) == [Publish(CREDENTIAL, 1, b"me")]
    for _ in range(3):
        desk.passes(1.0)
        assert desk.said(Publish) == [Publish(CREDENTIAL, 1, b"me")]
    desk.step(Disconnected())
    desk.step(Connected())
    desk.admitted(term=2)
    assert desk.said(Publish) == [Publish(CREDENTIAL, 1, b"me")]
    desk.step(Trains(1))
    desk.passes(1.0)
    assert desk.said(Publish) == []


def test_an_address_of_another_generation_is_nothing() -> None:
    desk = forming()
    desk.step(Addressed(2, b"me"))
    assert desk.ready.sends == []
    desk = training()
    desk.step(Addressed(1, b"me"))
    assert desk.ready.sends == []


def test_the_address_map_is_handed_on() -> None:
    desk = forming()
    desk.hear(AddressMap(1, 1, (b"a", b"b")))
    assert desk.ready.notices == [Mapped(1, (b"a", b"b"))]
    desk.hear(AddressMap(1, 2, (b"a", b"b")))
    assert desk.ready.notices == []
    desk.hear(AddressMap(0, 1, (b"a", b"b")))
    assert desk.ready.notices == []


@pytest.mark.parametrize("event", [Trains(2), Completed(2, 60), Completed(1, 60)])
def test_reports_that_do_not_fit_the_stage_change_nothing(event: AgentEvent) -> None:
    desk = forming()
    desk.step(event)
    assert desk.agent.activity is Activity.FORMING


# ---- the end of training


@pytest.mark.parametrize("stage", [seated, waiting, forming, training, done])
def test_the_end_is_told_once_in_every_stage(stage: type[Desk]) -> None:
    desk = stage()
    desk.hear(Finished(1, Point(60, 1)))
    assert desk.ready.notices == [Over(Point(60, 1))]
    assert desk.said(Heartbeat)[0].activity is Activity.FINISHED
    desk.hear(Finished(1, Point(60, 1)))
    assert desk.ready.notices == [] and desk.ready.sends == []


def test_the_step_of_a_done_worker_is_its_commits() -> None:
    """Optimizer steps after the last commit are lost; the final point must be one that is on disk."""
    desk = training()
    desk.step(Completed(1, 60))
    desk.passes(1.0, step=63)
    assert desk.said(Heartbeat) == [Heartbeat(CREDENTIAL, 1, Activity.DONE, 1, RoundId(1, 1), 60)]


def test_who_is_seated_after_the_end_is_told_at_once() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.admitted(finished=Point(60, 1))
    assert [type(notice) for notice in desk.ready.notices] == [Seated, Over]
    desk.enters()
    assert desk.agent.activity is Activity.FINISHED and desk.ready.sends == []


# ---- a scheduler that is away


@pytest.mark.parametrize("stage", STAGES.values(), ids=[one.name for one in STAGES])
def test_its_going_and_its_coming_back_are_told_once(stage: type[Desk]) -> None:
    desk = stage()
    desk.step(Disconnected())
    assert desk.ready.notices == [SchedulerAway()]
    desk.step(Disconnected())
    assert desk.ready.notices == []
    desk.now += 3.0
    desk.step(Connected())
    desk.now += 0.5
    desk.admitted(term=2)
    assert desk.ready.notices == [SchedulerBack(2, 3.5)]
    assert desk.agent.term == 2


@pytest.mark.parametrize("stage", [seated, waiting, forming, done])
def test_who_does_not_train_waits_topo_timeout_for_a_scheduler(stage: type[Desk]) -> None:
    desk = stage()
    desk.step(Disconnected())
    desk.passes(1799.9)
    assert desk.ready.notices == []
    assert desk.ready.wake_at == pytest.approx(desk.now + 0.1)
    desk.passes(0.1)
    assert desk.ready.notices == [
        MustEnd(EndReason.UNREACHABLE, "worker 3: no scheduler answered after 1800 s (TOPO_TIMEOUT)")
    ]
    desk.passes(1.0)
    assert desk.ready.notices == []


@pytest.mark.parametrize("stage", [training, finished])
def test_who_trains_or_is_through_does_not_wait_at_all(stage: type[Desk]) -> None:
    desk = stage()
    desk.step(Disconnected())
    desk.passes(1e6)
    assert desk.ready.notices == []


def test_who_never_found_a_scheduler_gives_up_too() -> None:
    desk = Desk(topo_timeout_s=60.0)
    assert desk.passes(59.9).notices == []
    desk.passes(0.1)
    assert desk.told(MustEnd)[0].reason is EndReason.UNREACHABLE


def test_a_connection_that_nobody_answers_is_no_scheduler() -> None:
    desk = Desk(topo_timeout_s=60.0)
    desk.step(Connected())
    for _ in range(59):
        assert desk.passes(1.0).notices == []
    desk.passes(1.0)
    assert desk.told(MustEnd)[0].reason is EndReason.UNREACHABLE


def test_a_pending_process_is_not_alone() -> None:
    """It is the scheduler that ends a house that never fills; until then its answers count as answers."""
    desk = Desk(topo_timeout_s=60.0)
    desk.step(Connected())
    for _ in range(40):
        desk.passes(1.0)
        desk.hear(Pending("mine", 1, 1, 8))
    desk.passes(30.0)
    assert desk.told(MustEnd) == []


def test_an_admission_of_an_older_term_is_nothing() -> None:
    desk = seated()
    desk.step(Disconnected())
    desk.step(Connected())
    desk.admitted(term=3)
    desk.admitted(term=2)
    assert desk.agent.term == 3 and desk.ready.sends == []


# ---- the end of the process


@pytest.mark.parametrize("stage", STAGES.values(), ids=[one.name for one in STAGES])
def test_a_fenced_process_must_end_and_says_no_other_word(stage: type[Desk]) -> None:
    desk = stage()
    desk.hear(Fenced("mine", 1, "the seat is held by another"))
    assert desk.ready.notices == [MustEnd(EndReason.FENCED, "the seat is held by another")]
    for event in (Passed(9), Leaving(True, "bye"), Connected(), Heard(Finished(1, Point(60, 1)))):
        desk.now += 5
        desk.step(event)
        assert desk.ready.sends == [] and desk.ready.notices == []
    assert desk.ready.wake_at is None


def test_a_fence_for_another_session_is_nothing() -> None:
    desk = training()
    desk.hear(Fenced("other", 1, "text"))
    assert desk.ready.notices == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (EndKind.STOPPED, EndReason.STOPPED),
        (EndKind.INTERRUPTED, EndReason.INTERRUPTED),
        (EndKind.FORMATION_TIMEOUT, EndReason.FORMATION_TIMEOUT),
        (EndKind.FAILED, EndReason.FAILED),
    ],
)
def test_the_end_of_the_job_ends_the_process(kind: EndKind, reason: EndReason) -> None:
    desk = training()
    desk.hear(EndJob(1, kind, "why"))
    assert desk.ready.notices == [MustEnd(reason, "why")]
    desk.hear(EndJob(1, kind, "why"))
    assert desk.ready.notices == []
    desk.passes(1.0)
    assert desk.said(Heartbeat), "its seat is held until it really leaves"
    desk.step(Leaving(True, "why"))
    assert desk.ready.sends == [Leave(CREDENTIAL, True, "why")]


def test_the_end_of_an_earlier_scheduler_start_is_nothing() -> None:
    desk = training()
    desk.step(Disconnected())
    desk.step(Connected())
    desk.admitted(term=2)
    desk.hear(EndJob(1, EndKind.FORMATION_TIMEOUT, "late"))
    assert desk.ready.notices == []


def test_the_finished_job_turns_a_newcomer_away_and_leaves_members_alone() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.hear(EndJob(1, EndKind.FINISHED, "job finished"))
    assert desk.ready.notices == [MustEnd(EndReason.REFUSED, "the job is finished: there is nothing left to do")]
    desk = finished()
    desk.hear(EndJob(1, EndKind.FINISHED, "job finished"))
    assert desk.ready.notices == []


def test_last_words_and_leave_go_out() -> None:
    desk = training()
    desk.passes(0.1, step=17)
    desk.step(Spoke("ValueError: no such sample"))
    assert desk.ready.sends == [LastWords(CREDENTIAL, "ValueError: no such sample", 17)]
    desk.step(Leaving(False, "ValueError"))
    assert desk.ready.sends == [Leave(CREDENTIAL, False, "ValueError")]
    desk.passes(10.0)
    assert desk.ready.sends == [] and desk.ready.wake_at is None


def test_who_was_never_seated_leaves_without_a_word() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.step(Spoke("text"))
    assert desk.ready.sends == []
    desk.step(Leaving(True, "text"))
    assert desk.ready.sends == []
