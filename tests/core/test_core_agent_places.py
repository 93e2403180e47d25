"""A worker and its place: spares, invitations to another place, disk checks and gentle leaving."""

from __future__ import annotations

import pytest

from samebits.core.agent.agent_events import (
    Addressed,
    Began,
    BreakGroup,
    Completed,
    Connected,
    EnterAgain,
    Entered,
    Failed,
    LeaveGently,
    Trains,
    Waits,
)
from samebits.core.messages import (
    Activity,
    Admitted,
    Heartbeat,
    Holdings,
    Join,
    MemberRecord,
    Publish,
    RankPosition,
    Register,
    RoundId,
)
from samebits.core.point import Point
from samebits.core.values import replace
from tests.core.desk import NUMERICS, POINTS, STAGES, Desk, done, forming, seated, started, training, waiting

MINE = RankPosition(3, 3, 4)  # the desk's seat in a full world
SMALLER = RankPosition(3, 2, 3)


def spare() -> Desk:
    """Return a spare that has reached elastic.run and waits there."""
    desk = Desk()
    desk.step(Connected())
    desk.hear(Admitted("mine", "job-1", 1, None, 1, 4, None))
    desk.enters()
    return desk


# ---- a spare


def test_spare_has_no_slot_and_waits_uninvited() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.hear(Admitted("mine", "job-1", 1, None, 1, 4, None))
    assert [notice.slot for notice in desk.told(Admitted)] == [None]
    assert desk.agent.slot is None and desk.agent.offered_place is None
    desk.enters()
    (beat,) = desk.said(Heartbeat)
    assert beat.activity is Activity.WAITING and not desk.said(Join)


def test_spare_learns_its_slot_from_the_invitation() -> None:
    desk = spare()
    desk.opens(5, place=RankPosition(1, 1, 4))
    assert (desk.agent.slot, desk.agent.offered_place) == (1, RankPosition(1, 1, 4))
    assert desk.told(EnterAgain) == [EnterAgain(RankPosition(1, 1, 4), look=False)] and not desk.said(Join)
    desk.enters(blob=b"here", place=RankPosition(1, 1, 4))
    (join,) = desk.said(Join)
    assert (join.holdings.blob, join.holdings.place) == (b"here", RankPosition(1, 1, 4))


def test_spare_reports_no_standing_before_its_first_generation() -> None:
    desk = spare()
    desk.opens(5, place=RankPosition(1, 1, 4))
    desk.step(Connected())
    assert [message.standing for message in desk.said(Register)] == [None]


def test_member_reports_its_place_in_its_last_generation() -> None:
    desk = spare()
    desk.opens(1, place=SMALLER)
    desk.enters(place=SMALLER)
    desk.hear(replace(started(), rank=2, world_size=3))
    desk.opens(2, place=RankPosition(3, 1, 2))
    desk.step(Connected())
    (standing,) = [message.standing for message in desk.said(Register)]
    assert isinstance(standing, MemberRecord)
    assert (standing.slot, standing.rank, standing.world_size) == (3, 2, 3)


# ---- another place


def test_place_in_a_full_world_needs_no_notice() -> None:
    desk = waiting()
    desk.opens(1, place=MINE)
    assert len(desk.said(Join)) == 1 and not desk.told(EnterAgain)


def test_another_place_is_requested_once_and_entering_again_joins() -> None:
    desk = waiting()
    desk.opens(1, place=SMALLER)
    assert desk.told(EnterAgain) == [EnterAgain(SMALLER, look=False)] and not desk.said(Join)
    desk.opens(1, place=SMALLER)
    assert not desk.told(EnterAgain) and not desk.said(Join)
    desk.enters(blob=b"x", place=SMALLER)
    assert [join.holdings.place for join in desk.said(Join)] == [SMALLER]
    desk.opens(1, place=SMALLER)
    assert len(desk.said(Join)) == 1 and not desk.told(EnterAgain)


def test_entering_joins_in_any_place_and_asks_only_once() -> None:
    desk = waiting()
    desk.opens(1, place=SMALLER)
    desk.enters()
    assert len(desk.said(Join)) == 1
    desk.opens(1, place=SMALLER)
    assert len(desk.said(Join)) == 1 and not desk.told(EnterAgain)
    desk.opens(1, place=RankPosition(3, 1, 2))
    assert desk.told(EnterAgain) == [EnterAgain(RankPosition(3, 1, 2), look=False)]
    desk.enters(place=RankPosition(3, 1, 2))
    desk.opens(2, place=SMALLER)
    assert desk.told(EnterAgain) == [EnterAgain(SMALLER, look=False)]


def test_return_to_the_first_place_joins_with_its_old_address() -> None:
    desk = waiting()
    desk.opens(1, place=SMALLER)
    desk.opens(1, place=MINE)
    assert len(desk.said(Join)) == 1


def test_address_made_for_another_place_is_not_published() -> None:
    desk = waiting()
    desk.opens(1, place=SMALLER)
    desk.enters(blob=b"for three", place=SMALLER)
    desk.hear(replace(started(), rank=1, world_size=2))
    assert desk.told(Began)
    desk.passes(1.0)
    assert desk.said(Heartbeat) and not desk.said(Publish)
    desk.step(Addressed(1, b"for two"))
    assert [message.blob for message in desk.said(Publish)] == [b"for two"]


def test_address_for_the_place_is_published_until_the_group_is_formed() -> None:
    desk = waiting()
    desk.opens(1, place=SMALLER)
    desk.enters(blob=b"for three", place=SMALLER)
    desk.hear(replace(started(), rank=2, world_size=3))
    desk.passes(1.0)
    assert [message.blob for message in desk.said(Publish)] == [b"for three"]


# ---- disks


def test_disk_is_checked_once_when_asked() -> None:
    desk = seated()
    desk.enters(live=Point(7, 1), looked=False)
    desk.opens(1, place=MINE)
    assert len(desk.said(Join)) == 1
    desk.opens(1, place=MINE, look=True)
    assert desk.told(EnterAgain) == [EnterAgain(MINE, look=True)] and not desk.said(Join)
    desk.opens(1, place=MINE, look=True)
    assert not desk.told(EnterAgain)
    desk.enters(live=Point(7, 1), looked=True)
    assert [join.holdings.looked for join in desk.said(Join)] == [True]


def test_oldest_point_to_look_for_is_passed_on() -> None:
    desk = seated()
    desk.enters(looked=False)
    desk.opens(1, place=MINE, look=True, committed=Point(40, 1))
    assert desk.told(EnterAgain) == [EnterAgain(MINE, look=True, committed=Point(40, 1))]


def test_worker_that_enters_without_a_disk_check_is_asked_again() -> None:
    desk = seated()
    desk.enters(looked=False)
    desk.opens(1, look=True)
    desk.enters(looked=False)
    assert desk.told(EnterAgain) and not desk.said(Join)


def test_another_place_and_a_disk_check_are_requested_together() -> None:
    desk = seated()
    desk.enters(looked=False)
    desk.opens(1, place=SMALLER, look=True)
    assert desk.told(EnterAgain) == [EnterAgain(SMALLER, look=True)]


@pytest.mark.parametrize(("look", "looked"), [(False, False), (True, True)])
def test_disk_check_is_requested_only_if_wanted_and_not_yet_done(look: bool, looked: bool) -> None:
    desk = seated()
    desk.enters(looked=looked)
    desk.opens(1, place=SMALLER, look=look)
    assert desk.told(EnterAgain) == [EnterAgain(SMALLER, look=False)]


# ---- gently


@pytest.mark.parametrize("activity", list(STAGES))
def test_gentle_invitation(activity: Activity) -> None:
    desk = STAGES[activity]()
    desk.opens(9, gently=True, missing="7")
    gently = [LeaveGently("because; waiting for 7")] if activity is Activity.TRAINING else []
    broken = [BreakGroup("because; waiting for 7")] if activity in (Activity.FORMING, Activity.DONE) else []
    assert (desk.told(LeaveGently), desk.told(BreakGroup)) == (gently, broken)
    assert len(desk.said(Join)) == (activity is Activity.WAITING)
    assert len(desk.told(Waits)) == (activity is Activity.WAITING)


def test_gentle_invitation_is_announced_once() -> None:
    desk = training()
    desk.opens(2, gently=True)
    desk.opens(2, gently=True)
    assert not desk.ready.notices


def test_loss_makes_the_invitation_urgent_for_workers_still_in_the_generation() -> None:
    desk = training()
    desk.opens(2, gently=True)
    desk.opens(2)
    assert desk.told(BreakGroup) == [BreakGroup("because")]
    desk.opens(2)
    assert not desk.ready.notices
    gone = training()
    gone.opens(2, gently=True)
    gone.enters()
    gone.opens(2)
    assert not gone.told(BreakGroup) and gone.said(Join)


def test_new_round_after_a_gentle_one_breaks_the_group_once() -> None:
    desk = training()
    desk.opens(2, gently=True)
    desk.opens(3)
    assert desk.told(BreakGroup) == [BreakGroup("because")]


def test_worker_that_leaves_gently_joins_with_its_commit() -> None:
    desk = training()
    desk.opens(2, gently=True, place=MINE)
    desk.enters(live=Point(30, 1))
    assert [join.holdings.live for join in desk.said(Join)] == [Point(30, 1)]
    assert desk.agent.activity is Activity.WAITING and not desk.said(Heartbeat)


def test_failure_after_a_gentle_invitation_is_reported_at_once() -> None:
    desk = training()
    desk.opens(2, gently=True)
    desk.step(Failed())
    (beat,) = desk.said(Heartbeat)
    assert (beat.activity, beat.round) == (Activity.WAITING, RoundId(1, 1))


def test_done_worker_without_a_commit_to_leave_at_is_called_back() -> None:
    desk = training()
    desk.opens(2, gently=True)
    desk.step(Completed(1, 60))
    assert desk.told(BreakGroup) == [BreakGroup("because")]
    assert not done().told(BreakGroup)


def test_done_worker_in_the_generation_of_a_gentle_round_is_not_called_back() -> None:
    desk = waiting()
    desk.opens(1, gently=True)
    desk.starts()
    desk.step(Trains(1))
    desk.step(Completed(1, 60))
    assert desk.agent.activity is Activity.DONE and not desk.told(BreakGroup)


def test_done_worker_is_called_back_only_once() -> None:
    desk = training()
    desk.opens(2)
    assert desk.told(BreakGroup)
    desk.step(Completed(1, 60))
    assert not desk.told(BreakGroup)


def test_closed_round_calls_no_worker_back() -> None:
    desk = waiting()
    desk.opens(1, gently=True)
    desk.starts()
    desk.step(Addressed(1, b"x"))
    assert forming().agent.activity is desk.agent.activity is Activity.FORMING
    assert not desk.told(BreakGroup)


def test_entry_that_crossed_the_start_of_a_generation_changes_nothing() -> None:
    """The message answers an earlier question; if it counted as a failed collective, the process would be stranded."""
    desk = seated()
    desk.opens()
    desk.step(Entered(Holdings(POINTS, False, NUMERICS, b"me"), 0))
    desk.starts()
    desk.step(Entered(Holdings(POINTS, False, NUMERICS, b"late"), 0))
    assert desk.ready.sends == []
    assert desk.agent.activity is Activity.FORMING
    desk.step(Entered(Holdings(POINTS, False, NUMERICS, b"me again"), 1))
    assert desk.agent.activity is Activity.WAITING, "it knew of the generation: its collective has failed"
