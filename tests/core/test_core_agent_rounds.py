"""The worker's side: heartbeats, rounds and generations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samebits.core.agent.agent_events import (
    Addressed,
    AgentEvent,
    Began,
    BreakGroup,
    Completed,
    Connected,
    Disconnected,
    Entered,
    Failed,
    Heard,
    Invited,
    Observed,
    Passed,
    Trains,
    Waits,
)
from samebits.core.messages import (
    Activity,
    AddressMap,
    Finished,
    Heartbeat,
    Holdings,
    Join,
    Publish,
    Register,
    ReportEnvelope,
    RoundId,
    RoundOpened,
)
from samebits.core.point import Point
from samebits.core.reports import Phase, Progress, StallReport
from tests.core.desk import (
    CREDENTIAL,
    POINTS,
    STAGES,
    Desk,
    done,
    finished,
    forming,
    seated,
    started,
    training,
    waiting,
)
from tests.core.house import NUMERICS


def test_each_helper_reaches_the_stage_it_is_named_for() -> None:
    assert {activity: stage().agent.activity for activity, stage in STAGES.items()} == {one: one for one in STAGES}


# ---- heartbeats


@pytest.mark.parametrize("stage", STAGES.values(), ids=[one.name for one in STAGES])
def test_heartbeats_report_the_full_state_at_every_interval(stage: Callable[[], Desk]) -> None:
    desk = stage()
    activity, generation = desk.agent.activity, desk.agent.generation
    round_id = RoundId(1, 1) if generation else None
    desk.passes(1.0, step=60)
    assert desk.said(Heartbeat) == [Heartbeat(CREDENTIAL, 1, activity, generation, round_id, 60)]
    assert desk.ready.wake_at == desk.now + 1
    desk.passes(0.5, step=60)
    assert desk.ready.sends == []


def test_every_change_is_reported_at_once() -> None:
    desk = seated()
    seen = []
    for event in (
        Entered(Holdings(POINTS, False, NUMERICS)),
        Heard(RoundOpened("job-1", 1, 1, RoundId(1, 1), "because", "")),
        Heard(started()),
        Trains(1),
        Completed(1, 60),
        Heard(Finished("job-1", 1, Point(60, 1))),
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


def test_only_the_register_is_sent_before_the_scheduler_has_answered() -> None:
    desk = done()
    desk.step(Disconnected())
    desk.step(Connected())
    for _ in range(3):
        desk.passes(1.0, step=60)
        assert [type(message) for message in desk.ready.sends] == [Register]
    desk.admitted(term=2)
    assert desk.said(Heartbeat) == [Heartbeat(CREDENTIAL, 2, Activity.DONE, 1, RoundId(1, 1), 60)]


@pytest.mark.parametrize("stage", [forming, training])
def test_stall_position_is_sent_with_each_heartbeat_in_a_generation(stage: Callable[[], Desk]) -> None:
    still = Progress(Phase.COMMUNICATION, 812, 10, 9.0, 0.5, rests=True, place="all_reduce")
    desk = stage()
    for _ in range(2):
        desk.now += 1.0
        desk.step(Observed(StallReport(still)))
        desk.step(Passed(60))
        assert desk.reported(StallReport) == [ReportEnvelope(CREDENTIAL, StallReport(still), 1, 60)]
    desk.step(Trains(1))
    desk.step(Completed(1, 60))
    desk.now += 1.0
    desk.step(Observed(StallReport(still)))
    desk.step(Passed(60))
    assert desk.reported(StallReport) == [ReportEnvelope(CREDENTIAL, StallReport(None), 1, 60)], (
        "no worker waits for one that is done"
    )


# ---- rounds


def test_worker_invited_before_it_enters_joins_on_entering() -> None:
    desk = seated()
    desk.opens()
    assert desk.ready.sends == [] and desk.ready.notices == [Invited()]
    desk.enters()
    assert desk.said(Join) == [Join(CREDENTIAL, RoundId(1, 1), Holdings(POINTS, False, NUMERICS))]


def test_waiting_worker_joins_when_it_is_invited() -> None:
    desk = waiting()
    assert desk.said(Join) == []
    desk.opens()
    assert desk.said(Join) == [Join(CREDENTIAL, RoundId(1, 1), Holdings(POINTS, False, NUMERICS))]


def test_entering_again_uninvited_reports_waiting_at_once() -> None:
    """An uninvited entry is the scheduler's only sign that a collective has failed."""
    desk = training()
    desk.enters()
    assert [beat.activity for beat in desk.said(Heartbeat)] == [Activity.WAITING]
    desk = training()
    desk.opens(number=2)
    desk.enters()
    assert desk.said(Heartbeat) == [], "the join to the new round carries it all"


def test_worker_joins_again_for_each_new_invitation() -> None:
    desk = waiting()
    for _ in range(3):
        desk.opens()
        assert len(desk.said(Join)) == 1
    desk.opens(number=2)
    assert desk.said(Join)[0].round == RoundId(1, 2)


@pytest.mark.parametrize("stage", [forming, training, done])
def test_new_round_breaks_the_group_once(stage: Callable[[], Desk]) -> None:
    desk = stage()
    desk.opens(number=2, missing="1, 2")
    assert desk.ready.notices == [BreakGroup("because; waiting for 1, 2")]
    assert desk.said(Join) == [], "first the process must leave its group"
    desk.opens(number=2, missing="2")
    assert desk.told(BreakGroup) == []
    desk.enters()
    assert desk.said(Join)[0].round == RoundId(1, 2)


@pytest.mark.parametrize("stage", [seated, waiting, finished])
def test_worker_outside_a_group_has_nothing_to_break(stage: Callable[[], Desk]) -> None:
    desk = stage()
    desk.opens(number=2)
    assert desk.told(BreakGroup) == []


def test_round_that_formed_the_generation_does_not_break_it() -> None:
    desk = training()
    desk.opens(number=1)
    assert desk.ready.notices == []


def test_older_round_is_ignored() -> None:
    desk = waiting()
    desk.opens(number=5)
    desk.opens(number=4)
    assert desk.ready.sends == []
    desk.opens(number=1, term=2)
    assert desk.said(Join)[0].round == RoundId(2, 1), "rounds of a later term are later"
    desk.opens(number=6, term=1)
    assert desk.ready.sends == []


def test_message_to_another_incarnation_is_ignored() -> None:
    desk = training()
    desk.opens(number=2, incarnation=2)
    assert desk.ready.notices == []
    desk = waiting()
    desk.opens()
    desk.starts(incarnation=2)
    assert desk.ready.notices == []


def test_waiting_worker_learns_once_per_change_what_it_waits_for() -> None:
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
def test_failed_collective_is_reported_at_once(stage: Callable[[], Desk]) -> None:
    desk = stage()
    desk.step(Failed())
    assert desk.said(Heartbeat) == [Heartbeat(CREDENTIAL, 1, Activity.WAITING, 1, RoundId(1, 1), desk.agent.step_count)]
    desk.opens(number=2)
    assert desk.said(Join) == [], "it has not entered the rendezvous yet"
    desk.enters()
    assert desk.said(Join)[0].round == RoundId(1, 2)


@pytest.mark.parametrize("stage", [seated, waiting, finished])
def test_failure_outside_a_group_is_ignored(stage: Callable[[], Desk]) -> None:
    desk = stage()
    activity = desk.agent.activity
    desk.step(Failed())
    assert desk.ready.sends == [] and desk.agent.activity is activity


# ---- generations


def test_generation_begins() -> None:
    desk = waiting()
    desk.opens()
    desk.starts()
    assert desk.ready.notices == [Began(started())]
    assert desk.said(Heartbeat) == [Heartbeat(CREDENTIAL, 1, Activity.FORMING, 1, RoundId(1, 1), 0)]


def test_repeated_start_begins_once() -> None:
    desk = training()
    desk.starts()
    assert desk.ready.notices == [] and desk.agent.activity is Activity.TRAINING


def test_start_from_a_round_it_did_not_join_is_ignored() -> None:
    desk = waiting()
    desk.opens(number=2)
    desk.starts(number=1)
    assert desk.ready.notices == []
    desk.starts(number=2)
    assert desk.told(Began)


def test_start_of_an_older_generation_is_ignored() -> None:
    desk = training()
    desk.step(Failed())
    desk.enters()
    desk.opens(number=2)
    desk.starts(1, number=2)
    assert desk.ready.notices == []
    desk.starts(2, number=2)
    assert desk.agent.generation == 2


def test_start_of_an_older_term_is_ignored() -> None:
    desk = waiting()
    desk.opens()
    desk.opens(number=1, term=2)
    desk.starts(number=1, term=1)
    assert desk.ready.notices == []


def test_start_from_a_superseded_round_is_ignored() -> None:
    """A process that obeyed it would form a group alone and ignore the newer round."""
    desk = waiting()
    desk.opens(number=1)
    desk.step(Disconnected())
    desk.step(Connected())
    desk.opens(number=2)
    desk.starts(number=1)
    assert desk.ready.notices == []


def test_start_before_the_process_waits_is_ignored() -> None:
    desk = seated()
    desk.opens()
    desk.starts()
    assert desk.ready.notices == []


def test_address_is_repeated_until_the_group_is_formed() -> None:
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


def test_known_address_travels_with_the_join_and_is_repeated_while_forming() -> None:
    desk = seated()
    desk.opens()
    desk.step(Entered(Holdings(POINTS, False, NUMERICS, b"me")))
    assert [join.holdings.blob for join in desk.said(Join)] == [b"me"]
    desk.starts()
    assert desk.said(Publish) == []
    desk.passes(1.0)
    assert desk.said(Publish) == [Publish(CREDENTIAL, 1, b"me")]
    desk.step(Trains(1))
    desk.passes(1.0)
    assert desk.said(Publish) == []


def test_address_of_another_generation_is_ignored() -> None:
    desk = forming()
    desk.step(Addressed(2, b"me"))
    assert desk.ready.sends == []
    desk = training()
    desk.step(Addressed(1, b"me"))
    assert desk.ready.sends == []


def test_address_map_is_passed_on() -> None:
    desk = forming()
    desk.hear(AddressMap("job-1", 1, 1, (b"a", b"b")))
    assert desk.ready.notices == [AddressMap("job-1", 1, 1, (b"a", b"b"))]
    desk.hear(AddressMap("job-1", 1, 2, (b"a", b"b")))
    assert desk.ready.notices == []
    desk.hear(AddressMap("job-1", 0, 1, (b"a", b"b")))
    assert desk.ready.notices == []


@pytest.mark.parametrize("event", [Trains(2), Completed(2, 60), Completed(1, 60)])
def test_reports_that_do_not_fit_the_stage_change_nothing(event: AgentEvent) -> None:
    desk = forming()
    desk.step(event)
    assert desk.agent.activity is Activity.FORMING
