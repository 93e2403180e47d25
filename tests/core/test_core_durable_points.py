"""Committed points: the newest that every member holds, and which members learn of it when."""

from __future__ import annotations

import pytest

from samebits.core.agent.agent_events import Connected as Reconnected
from samebits.core.agent.agent_events import Disconnected, Observed
from samebits.core.end_kinds import EndKind
from samebits.core.messages import CommittedPoint, ReportEnvelope, RoundOpened
from samebits.core.point import Point
from samebits.core.records import PointCommitted
from samebits.core.reports import MAX_SAVED_POINTS, SavedPoints
from samebits.core.state import JobState
from tests.core.desk import CREDENTIAL, seated, training
from tests.core.house import House, policy, training_house


def told(house: House, node: str) -> list[Point]:
    """Return the committed points that the last step sent to the node."""
    session = house.seat(node).session
    return [
        send.message.point
        for send in house.ready.sends
        if send.session == session and isinstance(send.message, CommittedPoint)
    ]


def test_point_is_committed_when_the_last_member_holds_it() -> None:
    house = training_house(3)
    house.saved("0", (10, 1))
    house.saved("2", (10, 1))
    assert not house.records(PointCommitted) and house.core.state.committed_point is None
    house.saved("1", (10, 1))
    assert house.records(PointCommitted) == [PointCommitted(Point(10, 1))]
    assert [told(house, node) for node in "012"] == [[Point(10, 1)]] * 3


def test_newest_common_point_counts_whatever_else_each_rank_holds() -> None:
    """A rank whose disk refused the save of step 20 holds 10 and 30."""
    house = training_house(2)
    house.saved("0", (10, 1), (20, 1))
    house.saved("1", (10, 1))
    assert house.records(PointCommitted) == [PointCommitted(Point(10, 1))]
    house.saved("1", (10, 1), (30, 1))
    assert not house.records(PointCommitted)
    house.saved("0", (10, 1), (20, 1), (30, 1))
    assert house.records(PointCommitted) == [PointCommitted(Point(30, 1))]


def test_repeated_report_commits_nothing() -> None:
    house = training_house(2)
    for _ in range(2):
        house.saved("0", (10, 1))
    assert house.core.state.committed_point is None
    house.saved("1", (10, 1))
    house.saved("1", (10, 1))
    assert not house.records(PointCommitted) and not told(house, "1") and not told(house, "0")


def test_deleted_point_no_longer_counts() -> None:
    house = training_house(2)
    house.saved("0", (10, 1))
    house.saved("0", (20, 1))
    house.saved("1", (10, 1))
    assert house.core.state.committed_point is None


def test_only_members_of_the_generation_count() -> None:
    house = House(policy(2, spare_num=1)).fill()
    house.register("7")
    house.train()
    house.saved("0", (10, 1))
    house.saved("7", (10, 1))
    assert house.core.state.committed_point is None
    house.close("s1", gone=True)  # the spare takes its slot
    house.train(n0=[(10, 1)])
    house.saved("7", (10, 1))
    assert house.core.state.committed_point == Point(10, 1), "the survivor's earlier report still holds"


def test_report_of_a_dead_process_is_requested_again_from_its_successor() -> None:
    house = training_house(2, cool_down_s=0.0)
    house.saved("1", (10, 1))
    house.close("s1", gone=True)
    house.register("1", session="1 again")
    house.train(n0=[(10, 1)])
    house.saved("0", (10, 1))
    assert house.core.state.committed_point is None
    house.saved("1", (10, 1))
    assert house.core.state.committed_point == Point(10, 1)


def test_point_of_an_abandoned_line_is_never_committed() -> None:
    house = training_house(2, cool_down_s=0.0)
    house.close("s1", gone=True)
    house.register("1", session="1 again")
    house.train(n0=[(10, 1)])  # generation 2 resumes from (10, 1): (20, 1) is off the line
    for node in "01":
        house.saved(node, (10, 1), (20, 1))
    assert house.core.state.committed_point == Point(10, 1)


def test_committed_point_survives_the_scheduler_and_is_sent_again() -> None:
    house = training_house(2)
    for node in "01":
        house.saved(node, (10, 1))
    house.crash(after_s=1.0)
    assert house.core.state.committed_point == Point(10, 1)
    assert JobState.replay(house.core.state.snapshot()).committed_point == Point(10, 1)
    house.saved("0", (10, 1))
    assert not house.records(PointCommitted) and told(house, "0") == [Point(10, 1)]
    house.saved("0", (10, 1), (20, 1))
    house.saved("1", (20, 1))
    assert house.core.state.committed_point == Point(20, 1), "counted afresh in this term"


def test_committed_point_is_dropped_with_its_line_if_every_copy_is_damaged() -> None:
    house = training_house(2, cool_down_s=0.0)
    for node in "01":
        house.saved(node, (10, 1), (20, 1))
    house.close("s1", gone=True)
    house.register("1", session="1 again")
    house.train(n0=[(10, 1)])
    assert house.core.state.committed_point is None
    for node in "01":
        house.saved(node, (10, 1))
    assert house.core.state.committed_point == Point(10, 1)


@pytest.mark.parametrize("is_compacted", [False, True])
def test_no_restart_from_step_0_if_the_rollback_point_is_lost_as_well(is_compacted: bool) -> None:
    """No point has been saved by all since, so none is committed, but every rank had the older one."""
    house = training_house(2, cool_down_s=0.0)
    for node in "01":
        house.saved(node, (10, 1), (20, 1))
    house.close("s1", gone=True)
    house.register("1", session="1 again")
    house.train(n0=[(10, 1)])
    assert house.core.state.committed_point is None
    if is_compacted:
        house.journal[:] = house.core.state.snapshot()
    house.crash(after_s=1.0)
    assert house.core.state.known_point == Point(10, 1)
    for node in "01":
        house.close(house.seat(node).session, gone=True)
        house.register(node, session=f"{node} at last")
    house.train()
    ended = house.core.state.interruptions[-1]
    assert ended.kind is EndKind.POINTS_LOST
    assert "every rank had the restore point of step 10 of generation 1" in ended.cause


# ---- the worker's side


def test_request_for_a_disk_check_says_how_far() -> None:
    house = training_house(2, cool_down_s=0.0)
    for node in "01":
        house.saved(node, (10, 1))
    house.close("s1", gone=True)
    house.register("1", "t1")
    for node in "01":
        house.join(node, looked=False)
    before, asked = [message for message in house.sent["s0"] if isinstance(message, RoundOpened)][-2:]
    assert (before.look, before.committed) == (False, None)
    assert (asked.look, asked.committed) == (True, Point(10, 1))


def test_agent_reports_saved_points_and_again_after_reconnecting() -> None:
    desk = training()
    points = tuple(Point(step, 1) for step in range(1, MAX_SAVED_POINTS + 3))
    desk.step(Observed(SavedPoints.of(points)))
    assert desk.reported(SavedPoints) == [ReportEnvelope(CREDENTIAL, SavedPoints(points[-MAX_SAVED_POINTS:]), 1)]
    desk.step(Disconnected())
    desk.step(Observed(SavedPoints.of(points[:1])))
    assert not desk.reported(SavedPoints)
    desk.step(Reconnected())
    desk.admitted(term=2)
    assert desk.reported(SavedPoints) == [ReportEnvelope(CREDENTIAL, SavedPoints(points[:1]), 1)]


def test_agent_without_points_does_not_report_any() -> None:
    desk = seated()
    desk.step(Disconnected())
    desk.step(Reconnected())
    desk.admitted(term=2)
    assert not desk.reported(SavedPoints)


def test_process_learns_the_committed_point_but_not_from_an_earlier_term() -> None:
    desk = training()
    desk.hear(CommittedPoint("job-1", 1, 1, Point(10, 1)))
    assert [notice.point for notice in desk.told(CommittedPoint)] == [Point(10, 1)]
    desk.step(Disconnected())
    desk.step(Reconnected())
    desk.admitted(term=3)
    desk.hear(CommittedPoint("job-1", 2, 1, Point(20, 1)))
    assert not desk.told(CommittedPoint)


def test_process_ignores_messages_to_an_earlier_generation() -> None:
    """The current one may have started from an older point, which would then be deleted."""
    desk = training()
    desk.hear(CommittedPoint("job-1", 1, 0, Point(30, 0)))
    assert not desk.told(CommittedPoint)
