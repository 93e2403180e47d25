"""Elastic worlds: bounds, grace periods, places, and growing, shrinking or giving up."""

from __future__ import annotations

import pytest

from samebits.core.end_kinds import EndKind
from samebits.core.membership.rebuild import UNHEARD_GENERATIONS
from samebits.core.messages import (
    Activity,
    AddressMap,
    Heartbeat,
    Leave,
    MemberRecord,
    Pairs,
    RankPosition,
    Refusal,
    RoundId,
    RoundOpened,
)
from samebits.core.point import Point
from samebits.core.records import (
    GenerationCommitted,
    JobInterrupted,
    JobRebuilt,
    SeatGranted,
    SeatLeft,
    SeatRetired,
    SlotGiven,
    SpareAdmitted,
    TrainingFinished,
)
from samebits.core.rounds.rendezvous import LEAVE_TOGETHER_S
from samebits.core.scheduler import Received
from tests.core.house import House, policy


def elastic(world_size: int = 3, low: int = 2, high: int = 4, **changes: float | bool | str | Pairs) -> House:
    """Return a scheduler before any worker has registered."""
    return House(policy(world_size, min_world_size=low, max_world_size=high, **changes))


def training(world_size: int = 3, low: int = 2, high: int = 4, **changes: float | bool | str | Pairs) -> House:
    """Return a scheduler in its first generation, with nodes named by digits."""
    return elastic(world_size, low, high, **changes).fill().train()


def places_told(house: House) -> dict[str, RankPosition | None]:
    """Return the places that the last step sent, by session."""
    return {send.session: send.message.place for send in house.ready.sends if isinstance(send.message, RoundOpened)}


def retired(house: House) -> list[int]:
    return [record.slot for record in house.records(SeatRetired)]


# ---- bounds


def test_bounds_default_to_the_world_size() -> None:
    assert (policy(5).min_world_size, policy(5).max_world_size, policy(5).is_elastic) == (5, 5, False)
    assert policy(5, min_world_size=2).is_elastic and policy(5, max_world_size=6).is_elastic


# ---- the start


def test_first_generation_forms_when_worker_num_have_registered() -> None:
    house = elastic().fill()
    assert set(house.invited()) == {"s0", "s1", "s2"}
    assert house.answer("s2", RoundOpened).text == "all 3 workers are registered"


def test_worker_num_suffice_whatever_slots_they_name() -> None:
    house = elastic()
    for node in "013":
        house.register(node)
    assert set(house.invited()) == {"s0", "s1", "s3"}
    house.train()
    assert house.committed().slots == (0, 1, 3)


def test_world_forms_with_fewer_after_start_grace() -> None:
    house = elastic(start_grace_s=20.0, node_timeout_s=60.0)
    house.tick(500.0)
    house.register("2")
    began = house.now
    house.tick(7.0)
    house.register("0")
    assert house.core.wake_at() == began + 20.0
    house.tick(12.0)
    assert house.invited() == {}
    house.tick(1.0)
    assert house.invited() == {"s0": RoundId(1, 1), "s2": RoundId(1, 1)}
    said = house.answer("s2", RoundOpened)
    assert said.text == "2 of 3 workers are registered after 20 s (start in GRACE)"
    assert (said.place, said.missing) == (RankPosition(2, 1, 2), "")
    house.train()
    assert house.committed().members == (("0", 1), ("2", 1)) and house.committed().slots == (0, 2)
    started = house.start_of("2")
    assert (started.rank, started.slot, started.world_size) == (1, 2, 2)


def test_start_grace_needs_the_minimum_and_ends_when_it_is_reached() -> None:
    house = elastic(start_grace_s=20.0, node_timeout_s=60.0)
    house.register("2")
    house.tick(25.0)
    assert house.invited() == {}
    house.register("1")
    assert set(house.invited()) == {"s1", "s2"}


def test_unnamed_nodes_are_seated_after_start_grace() -> None:
    house = elastic(start_grace_s=20.0, node_timeout_s=60.0)
    house.register("b")
    house.register("a")
    house.tick(20.0)
    assert [(record.node, record.slot) for record in house.records(SeatGranted)] == [("a", 0), ("b", 1)]
    assert set(house.invited()) == {"sa", "sb"}


def test_stalled_scheduler_prolongs_start_grace() -> None:
    house = elastic(start_grace_s=20.0, node_timeout_s=60.0)
    house.register("1")
    house.register("2")
    house.tick(10.0)
    house.stall(15.0)
    assert house.invited() == {}
    house.tick(10.0)
    assert set(house.invited()) == {"s1", "s2"}


def test_worker_that_arrives_during_the_first_round_joins_it() -> None:
    house = elastic(start_grace_s=0.0).fill()
    house.join("0")
    house.register("3")
    assert places_told(house) == {f"s{slot}": RankPosition(slot, slot, 4) for slot in range(4)}
    for node in "123":
        house.join(node)
    assert house.committed().slots == (0, 1, 2, 3)


def test_loss_in_the_first_round_shrinks_it_after_the_grace() -> None:
    house = elastic(node_timeout_s=60.0).fill()
    house.close("s1", gone=True)
    house.join("0")
    house.join("2")
    house.tick(9.5)
    assert house.core.state.generation is None
    house.tick(0.5)
    assert retired(house) == [1] and house.committed().slots == (0, 2)


def test_extra_worker_takes_part_if_a_needed_one_is_lost() -> None:
    house = elastic(2, 2, 3, node_timeout_s=60.0)
    house.register("a")
    house.register("b")
    house.close("sb", gone=True)
    house.crash(after_s=1.0)
    house.register("c")
    assert house.seat("c").slot == 2


# ---- shrinking


def test_world_shrinks_after_the_grace_and_not_before() -> None:
    house = training(node_timeout_s=60.0)
    house.close("s1", gone=True)
    assert house.answer("s0", RoundOpened).missing == "1, at most 10 s (shrink in GRACE)"
    assert places_told(house) == {"s0": RankPosition(0, 0, 2), "s2": RankPosition(2, 1, 2)}
    house.join("0", [(5, 1)])
    house.join("2", [(5, 1)])
    assert house.core.wake_at() == house.now + 10.0
    house.tick(9.75)
    assert house.core.state.generation_number == 1 and not retired(house)
    house.tick(0.25)
    assert retired(house) == [1]
    assert "the world continues without worker 1: 2 are left" in house.notes
    assert house.committed().members == (("0", 1), ("2", 1)) and house.committed().slots == (0, 2)
    assert [house.start_of(node).rank for node in ("0", "2")] == [0, 1]


def test_loss_that_shrinks_an_open_round_opens_no_second_round() -> None:
    house = training(4, 2, 4, shrink_grace_s=0.0)
    house.close("s1", gone=True)
    house.tick()
    house.join("0", [(5, 1)])
    house.join("2", [(5, 1)])
    house.now += 4
    for node in "02":
        house.beat(node, Activity.WAITING)
    house.tick(1.0)
    assert retired(house) == [3] and house.committed().slots == (0, 2)
    assert house.invited() == {} and house.core.phase() == "training"


def test_loss_that_closes_an_open_round_sends_no_second_invitation() -> None:
    house = training(shrink_grace_s=0.0)
    house.beat("0", Activity.WAITING)
    house.join("0", [(5, 1)])
    house.join("2", [(5, 1)])
    house.close("s1", gone=True)
    assert house.committed().slots == (0, 2) and house.invited() == {}


def test_world_shrinks_at_once_without_a_grace() -> None:
    house = training(shrink_grace_s=0.0)
    house.close("s1", gone=True)
    assert retired(house) == [1]
    house.train(n0=[(5, 1)])
    assert house.committed().slots == (0, 2)


def test_node_that_returns_within_the_grace_keeps_its_slot() -> None:
    house = training(cool_down_s=0.0, node_timeout_s=60.0)
    house.close("s1", gone=True)
    house.join("0", [(5, 1)])
    house.join("2")
    house.now += 9.0
    house.register("1", session="again")
    assert house.answer("again", RoundOpened).place == RankPosition(1, 1, 3)
    assert places_told(house) == {
        "s0": RankPosition(0, 0, 3),
        "again": RankPosition(1, 1, 3),
        "s2": RankPosition(2, 2, 3),
    }
    house.tick(5.0)
    assert not retired(house)
    house.join("1")
    assert house.committed().slots == (0, 1, 2)


def test_each_lost_slot_has_its_own_grace() -> None:
    house = training(4, 2, 4, node_timeout_s=60.0)
    house.close("s1", gone=True)
    house.tick(6.0)
    house.close("s3", gone=True)
    house.tick(4.0)
    assert retired(house) == [1]
    house.join("0", [(5, 1)])
    house.join("2")
    assert house.core.state.generation_number == 1
    house.tick(6.0)
    assert retired(house) == [3] and house.committed().slots == (0, 2)


def test_world_never_shrinks_below_its_minimum() -> None:
    house = training(node_timeout_s=60.0, topo_timeout_s=100.0)
    house.close("s1", gone=True)
    house.close("s2", gone=True)
    house.join("0", [(5, 1)])
    house.tick(50.0)
    assert not retired(house) and house.core.state.generation_number == 1
    house.beat("0", Activity.WAITING)


def test_below_the_minimum_all_wait_and_learn_what_for() -> None:
    house = training(node_timeout_s=60.0, topo_timeout_s=90.0)
    house.close("s1", gone=True)
    house.close("s2", gone=True)
    house.tick(1.0)
    house.beat("0", Activity.WAITING)
    assert house.answer("s0", RoundOpened).missing == "1, 2; 1 of at least 2 (MIN_WORKER_NUM) are here"
    house.now += 40
    house.beat("0", Activity.WAITING)
    house.tick(49.0)
    text = "the round waited 90 s (TOPO_TIMEOUT) for worker 0, 1, 2; 1 of at least 2 (MIN_WORKER_NUM) are here"
    assert house.records(JobInterrupted) == [JobInterrupted(EndKind.FORMATION_TIMEOUT, 0, text, generation=1)]


def test_reaching_the_minimum_again_applies_the_other_slots_grace() -> None:
    house = training(cool_down_s=0.0, node_timeout_s=60.0)
    house.close("s1", gone=True)
    house.close("s2", gone=True)
    house.tick(30.0)
    house.register("1", session="again")
    assert retired(house) == [2]
    house.join("0", [(5, 1)])
    house.join("1")
    assert house.committed().slots == (0, 1)


def test_graceful_leave_shrinks_the_world_at_once() -> None:
    house = training()
    house.leave("1", text="SIGTERM")
    assert retired(house) == [1]
    house.join("0", [(5, 1)])
    house.join("2", [(5, 1)])
    assert house.committed().slots == (0, 2)


def test_graceful_leave_at_the_minimum_waits_for_the_node() -> None:
    house = training(2, 2, 3)
    house.leave("1")
    house.tick()
    assert not retired(house)
    house.register("1", session="again")
    assert house.records(SeatGranted) == [SeatGranted("1", 1, 2, "again", house.seat("1").process)]


def test_spare_is_preferred_to_shrinking() -> None:
    house = training(spare_num=1, shrink_grace_s=0.0)
    house.register("9")
    house.close("s1", gone=True)
    house.tick()
    assert house.seat("9").slot == 1 and house.core.policy.world_size == 3
    house.train(n0=[(5, 1)])
    assert house.committed().slots == (0, 1, 2)


def test_stalled_scheduler_prolongs_the_grace() -> None:
    house = training(node_timeout_s=60.0)
    house.close("s1", gone=True)
    house.tick(5.0)
    house.stall(20.0)
    assert not retired(house)
    house.tick(5.0)
    assert retired(house) == [1]


def test_restarted_scheduler_starts_the_grace_again() -> None:
    house = training(node_timeout_s=60.0)
    house.close("s1", gone=True)
    house.crash(after_s=60.0)
    house.beat("0", Activity.WAITING)
    house.beat("2", Activity.WAITING)
    house.tick(9.0)
    assert not retired(house)
    house.tick(1.0)
    assert retired(house) == [1]


def test_world_at_its_minimum_waits_for_no_other_worker_after_a_restart() -> None:
    house = training(node_timeout_s=60.0)
    house.close("s1", gone=True)
    house.join("0")
    house.join("2")
    house.tick(10.0)
    assert house.committed().slots == (0, 2)
    house.notes.clear()
    house.crash(after_s=1.0)
    house.beat("0")
    house.beat("2")
    assert house.core.phase() == "training" and not house.core._ledger.absent
    assert not any("continues without" in note for note in house.notes)


def test_fixed_size_job_never_shrinks() -> None:
    house = House(policy(3, shrink_grace_s=0.0, node_timeout_s=60.0)).fill().train()
    house.close("s1", gone=True)
    house.tick(50.0)
    assert not retired(house) and house.core.wake_at() is not None


def test_finish_counts_the_members_of_the_smaller_world() -> None:
    house = training(shrink_grace_s=0.0)
    house.close("s1", gone=True)
    house.tick()
    house.train(n0=[(5, 1)])
    house.beat("0", Activity.DONE, step=9)
    house.beat("2", Activity.DONE, step=9)
    assert house.records(TrainingFinished) == [TrainingFinished(Point(9, 2))]
    house.leave("0")
    house.leave("2")
    assert house.ended is not None and house.ended.kind is EndKind.FINISHED


def test_remaining_workers_of_a_failing_script_are_not_waited_for() -> None:
    house = training(2, 1, 2, shrink_grace_s=0.0)
    for node in ("0", "1"):
        house.leave(node, on_purpose=False, text="ValueError")
        house.tick()
    house.tick(1.0)
    house.tick(20.0)
    assert house.ended is not None and house.ended.kind is EndKind.INTERRUPTED


# ---- growing


def grown(activity: Activity = Activity.WAITING, **changes: float | bool | str | Pairs) -> House:
    """Admit a newcomer while a generation trains, and bring it to the given stage."""
    house = training(**changes)
    house.register("3")
    house.beat("3", activity, generation=0)
    return house


def test_newcomer_disturbs_nothing_before_it_is_ready() -> None:
    house = training()
    house.register("3")
    assert house.records(SeatGranted)[0].slot == 3 and house.admission("s3").slot == 3
    assert house.invited() == {}
    house.beat("3", Activity.SEATED, generation=0)
    assert house.invited() == {} and house.core.phase() == "training"


def test_newcomer_that_leaves_in_the_message_that_makes_it_ready_disturbs_nothing() -> None:
    """Both were in one batch. The round would open for a process that is known to be gone."""
    house = training(high=5)
    for node in "34":
        house.register(node)
    for node in "34":
        ready = Heartbeat(house.credential(node), 1, Activity.WAITING, 0, None, 0)
        house.core.step(Received(f"s{node}", ready), house.now)
    house.core.step(Received("s3", Leave(house.credential("3"), True, "SIGTERM")), house.now)
    house.tick()
    assert house.last("s0", RoundOpened).text.startswith("worker 4 (pid "), "of two newcomers, one is there"

    house = training()
    house.register("3")
    house.core.step(Received("s3", Heartbeat(house.credential("3"), 1, Activity.WAITING, 0, None, 0)), house.now)
    house.core.step(Received("s3", Leave(house.credential("3"), True, "SIGTERM")), house.now)
    house.tick()
    assert house.invited() == {} and house.core.phase() == "training"


def test_gentle_round_opens_when_the_newcomer_is_ready() -> None:
    house = grown()
    told = {send.session: send.message for send in house.ready.sends if isinstance(send.message, RoundOpened)}
    assert set(told) == {"s0", "s1", "s2", "s3"}
    assert all(message.gently for message in told.values())
    assert told["s3"].place == RankPosition(3, 3, 4) and told["s0"].text.startswith("worker 3 (pid ")
    assert house.core.phase() == "training"
    for node in "0123":
        house.join(node, live=None if node == "3" else (7, 1))
    assert house.committed().slots == (0, 1, 2, 3)
    assert house.start_of("3").restore == Point(7, 1)


def test_gentle_round_has_no_timeout_and_takes_a_members_leaving_for_no_failure() -> None:
    house = grown(topo_timeout_s=20.0)
    for _ in range(30):
        house.now += 1.0
        for node in "012":
            house.beat(node)
        house.beat("3", Activity.WAITING, generation=0)
        house.tick()
    assert house.ended is None
    house.close("s2")
    house.join("0", live=(7, 1))  # it left at a commit: no collective failed, the closed connection has its grace
    assert not house.seat("2").is_lost


def test_loss_turns_a_gentle_round_urgent() -> None:
    house = grown()
    round_id = house.last("s0", RoundOpened).round
    house.close("s1", gone=True)
    told = {send.session: send.message for send in house.ready.sends if isinstance(send.message, RoundOpened)}
    assert set(told) == {"s0", "s2", "s3"}
    assert not any(message.gently for message in told.values())
    assert {message.round for message in told.values()} == {round_id}
    assert "worker 1" in told["s0"].text and "is lost" in told["s0"].text
    assert house.core.phase().startswith("forming")


def test_failed_collective_turns_a_gentle_round_urgent() -> None:
    house = grown()
    house.beat("1", Activity.WAITING)
    told = {send.session: send.message for send in house.ready.sends if isinstance(send.message, RoundOpened)}
    assert not any(message.gently for message in told.values()) and "s0" in told
    assert told["s0"].text == "a collective of generation 1 failed at worker 1"


def test_member_that_does_not_leave_with_the_others_is_interrupted() -> None:
    """The member trains a step in which the members that left at the last commit take no part."""
    house = grown()
    house.join("0", live=(7, 1))
    house.tick(0.75)
    house.stall(5.0)
    assert house.invited() == {}
    house.tick(1.0)
    told = {send.session: send.message for send in house.ready.sends if isinstance(send.message, RoundOpened)}
    assert set(told) == {"s0", "s1", "s2", "s3"} and not any(message.gently for message in told.values())
    assert told["s1"].text == "the others have left the generation at a commit"


def test_it_is_interrupted_when_all_should_have_left() -> None:
    house = grown()
    house.join("0", live=(7, 1))
    house.tick(LEAVE_TOGETHER_S)
    assert house.answer("s1", RoundOpened).text == "the others have left the generation at a commit"


def test_join_of_a_newcomer_makes_no_round_urgent() -> None:
    house = grown()
    house.join("3")
    house.tick(3.0)
    assert house.invited() == {} and house.core.phase() == "training"


def test_more_newcomers_join_the_gentle_round() -> None:
    house = training(2, 2, 4)
    for node in ("2", "3"):
        house.register(node)
    house.beat("2", Activity.WAITING, generation=0)
    first = house.invited()
    assert set(first) == {"s0", "s1", "s2"}
    house.beat("3", Activity.WAITING, generation=0)
    assert set(house.invited().values()) == {first["s0"]}
    assert places_told(house) == {f"s{slot}": RankPosition(slot, slot, 4) for slot in range(4)}
    assert all(send.message.gently for send in house.ready.sends if isinstance(send.message, RoundOpened))
    house.train()
    assert house.committed().slots == (0, 1, 2, 3)


def test_recovery_does_not_wait_for_a_newcomer_that_is_still_starting() -> None:
    house = grown(Activity.SEATED, shrink_grace_s=0.0)
    house.close("s1", gone=True)
    house.tick()
    assert places_told(house) == {} and house.last("s2", RoundOpened).place == RankPosition(2, 1, 2)
    house.join("0", [(5, 1)])
    house.join("2", [(5, 1)])
    assert house.committed().slots == (0, 2)
    house.beat("0")
    house.beat("2")
    house.beat("3", Activity.WAITING, generation=0)
    assert house.answer("s3", RoundOpened).gently
    for node in "023":
        house.join(node, [(5, 1)])
    assert house.committed().slots == (0, 2, 3)
    assert [house.start_of(node).rank for node in "023"] == [0, 1, 2]


def test_recovery_waits_for_a_newcomer_if_the_world_would_be_too_small() -> None:
    house = grown(Activity.SEATED, shrink_grace_s=0.0)
    house.close("s1", gone=True)
    house.close("s2", gone=True)
    house.tick()
    house.join("0", [(5, 1)])
    assert house.core.state.generation_number == 1
    house.beat("3", Activity.WAITING, generation=0)
    house.join("3")
    assert house.committed().slots == (0, 3)


def test_newcomer_that_dies_is_forgotten_without_a_grace() -> None:
    house = grown(Activity.SEATED)
    house.close("s3", gone=True)
    assert retired(house) == [3] and house.invited() == {}
    for node in "012":
        house.beat(node, Activity.DONE, step=9)
    assert house.records(TrainingFinished)


def test_newcomer_that_dies_in_its_gentle_round_leaves_it_to_the_others() -> None:
    house = grown()
    house.close("s3", gone=True)
    assert retired(house) == [3]
    assert places_told(house) == {f"s{slot}": RankPosition(slot, slot, 3) for slot in range(3)}
    house.train(n0=[(5, 1)])
    assert house.committed().slots == (0, 1, 2)


def test_world_at_its_maximum_admits_no_more() -> None:
    house = training(3, 2, 3, spare_num=1)
    house.register("x")
    assert house.records(SpareAdmitted)
    house.register("y")
    assert house.refusal("sy").refusal is Refusal.FULL


def test_node_whose_slot_was_removed_grows_the_world_after_its_cool_down() -> None:
    house = training(3, 2, 3, shrink_grace_s=0.0)
    house.close("s1", gone=True)
    house.tick()
    house.train(n0=[(5, 1)])
    house.register("1", session="again")
    assert house.refusal("again").refusal is Refusal.COOLING_DOWN
    house.now += 30.0
    house.beat("0")
    house.beat("2")
    house.register("1", session="again")
    assert house.seat("1").slot == 1 and house.seat("1").incarnation == 2
    house.tick()
    house.beat("1", Activity.WAITING, generation=0)
    assert house.answer("s0", RoundOpened).gently
    house.train(n0=[(6, 2)])
    assert house.committed().slots == (0, 1, 2)


def test_newcomer_is_still_one_after_a_scheduler_restart() -> None:
    house = grown(Activity.SEATED)
    house.crash(after_s=1.0)
    for node in "012":
        house.beat(node)
    house.beat("3", Activity.SEATED, generation=0)
    assert house.core.phase() == "training" and house.invited() == {}
    house.beat("3", Activity.WAITING, generation=0)
    assert house.answer("s1", RoundOpened).gently


@pytest.mark.parametrize("end", ["lost", "left"])
def test_newcomer_gone_before_a_restart_is_not_expected_after_it(end: str) -> None:
    house = training(3, 1, 5, shrink_grace_s=0.0)
    house.register("3")
    house.register("4")
    if end == "lost":
        house.close("s3", gone=True)
    else:
        house.leave("3")
    assert house.journal[-1] == SeatRetired("3", 3)
    house.crash(after_s=1.0, keep=len(house.journal) - 1)
    assert house.core._world.coming == {4}
    house.close("s2", gone=True)
    house.tick()
    house.join("0", [(5, 1)])
    assert house.core.state.generation_number == 1
    house.join("1", [(5, 1)])
    assert house.committed().slots == (0, 1)


def test_world_does_not_grow_after_the_end_of_training() -> None:
    house = training()
    for node in "012":
        house.beat(node, Activity.DONE, step=9)
    house.register("3")
    assert house.refusal("s3").refusal is Refusal.FULL


# ---- places


def test_address_part_counts_only_in_the_place_it_was_made_for() -> None:
    house = training(shrink_grace_s=0.0)
    house.close("s1", gone=True)
    house.tick()
    house.join("0", [(5, 1)], blob=b"a", place=RankPosition(0, 0, 2))
    house.join("2", [(5, 1)], blob=b"old", place=RankPosition(2, 2, 3))
    assert house.committed().slots == (0, 2)
    assert not [send for send in house.ready.sends if isinstance(send.message, AddressMap)]
    house.publish("2", b"c", generation=2)
    assert house.answer("s0", AddressMap).blobs == (b"a", b"c")


def test_join_after_the_close_brings_its_address_part() -> None:
    """The join answers the same round and gives the final place; the worker has nothing more to send."""
    house = training(shrink_grace_s=0.0)
    house.close("s1", gone=True)
    house.tick()
    opened = house.core.state.generation_number
    house.join("0", [(5, 1)], blob=b"a", place=RankPosition(0, 0, 2))
    house.join("2", [(5, 1)], blob=b"old", place=RankPosition(2, 2, 3))
    round_ = house.committed().round
    assert house.core.state.generation_number == opened + 1
    house.join("2", [(5, 1)], blob=b"old", place=RankPosition(2, 2, 3), round_id=round_)
    assert not [send for send in house.ready.sends if isinstance(send.message, AddressMap)]
    house.join("2", [(5, 1)], blob=b"c", place=RankPosition(2, 1, 2), round_id=round_)
    assert house.answer("s0", AddressMap).blobs == (b"a", b"c")


@pytest.mark.parametrize(("slot", "counts"), [(0, False), (2, False)])
def test_address_part_without_a_place_is_made_for_the_full_world(slot: int, counts: bool) -> None:
    house = training(shrink_grace_s=0.0)
    house.close("s1", gone=True)
    house.tick()
    for node, place in (("0", RankPosition(0, 0, 2)), ("2", RankPosition(2, 1, 2))):
        house.join(node, [(5, 1)], blob=b"x", place=None if int(node) == slot else place)
    assert bool([send for send in house.ready.sends if isinstance(send.message, AddressMap)]) is counts
    whole = House(policy(2)).fill()
    whole.join("0", blob=b"x")
    whole.join("1", blob=b"y", place=RankPosition(1, 1, 2))
    assert whole.answer("s0", AddressMap).blobs == (b"x", b"y")


def test_only_workers_that_change_places_are_invited_again() -> None:
    house = training(4, 2, 4)
    house.close("s3", gone=True)
    assert places_told(house) == {f"s{slot}": RankPosition(slot, slot, 3) for slot in range(3)}
    house.tick()
    assert places_told(house) == {}
    house.close("s1", gone=True)
    assert places_told(house) == {"s0": RankPosition(0, 0, 2), "s2": RankPosition(2, 1, 2)}


# ---- the limit


def test_job_ends_after_too_many_restarts() -> None:
    house = training(2, 2, 2, reset_limit=2, cool_down_s=0.0)
    for again in range(2):
        house.close(house.seat("1").session, gone=True)
        house.register("1", session=f"again {again}")
        house.train(n0=[(again, again + 1)])
    assert house.core.state.generation_number == 3 and house.ended is None
    house.close(house.seat("1").session, gone=True)
    (record,) = house.records(JobInterrupted)
    assert record.kind is EndKind.INTERRUPTED and record.generation == 3
    assert record.cause.startswith("training restarted 2 times (RESET_LIMIT); now worker 1 (")


def test_job_that_ended_so_can_be_resumed() -> None:
    house = training(2, 2, 2, reset_limit=1, cool_down_s=0.0)
    for again in range(2):
        house.close(house.seat("1").session, gone=True)
        if again == 0:
            house.register("1", session="again")
            house.train(n0=[(1, 1)])
    assert house.core.state.interruptions
    house.leave("0")
    house.crash(after_s=1.0)
    house.register("0", session="new 0")
    house.register("1", session="new 1")
    house.train(n0=[(1, 2)])
    assert house.core.state.generation_number == 3


def test_world_does_not_grow_once_no_generation_may_begin() -> None:
    house = training(2, 2, 4, reset_limit=1, cool_down_s=0.0)
    house.close("s1", gone=True)
    house.register("1", session="again")
    house.train(n0=[(1, 1)])
    house.register("2")
    assert house.refusal("s2").refusal is Refusal.FULL
    assert house.refusal("s2").text.endswith("has restarted 1 times (RESET_LIMIT) and admits no more workers")


# ---- a lost journal


def standing(rank: int, slot: int, world_size: int = 3) -> MemberRecord:
    return MemberRecord(2, 4, RoundId(2, 3), slot, world_size, Point(5, 3), None, rank)


def test_world_with_gaps_is_rebuilt_with_its_ranks() -> None:
    house = elastic(4, 2, 6)
    for rank, slot in ((0, 1), (2, 5)):
        house.register(f"n{slot}", job="job-old", incarnation=3, standing=standing(rank, slot))
    house.tick(5.0)
    (record,) = house.records(JobRebuilt)
    assert record.generation.slots == (1, 2, 5)
    assert [seat.node for seat in record.seats] == ["n1", "unknown holder of slot 2", "n5"]
    house.register("n4", job="job-old", incarnation=2, standing=standing(1, 4))
    assert house.seat("n4").slot == 2 and house.seat("n4").incarnation == 2


@pytest.mark.parametrize(("rank", "slot", "world_size"), [(0, 6, 3), (2, 1, 3), (3, 3, 3), (0, 0, 1), (0, 0, 7)])
def test_impossible_places_are_ignored(rank: int, slot: int, world_size: int) -> None:
    house = elastic(4, 2, 6)
    house.register("x", job="job-old", incarnation=3, standing=standing(rank, slot, world_size))
    assert house.refusal("sx").refusal is Refusal.OTHER_JOB


def test_rebuilt_world_shrinks_without_its_unknown_members() -> None:
    house = elastic(4, 2, 6, shrink_grace_s=0.0)
    for rank in range(2):
        house.register(str(rank), job="job-old", incarnation=3, standing=standing(rank, rank))
    for _ in range(6):
        house.now += 1
        for node in ("0", "1") if house.core.state.seats else ():
            house.beat(node, generation=4)
        house.tick()
    house.tick(4.0)
    assert 2 not in house.core.state.by_slot
    assert [type(one) for one in house.journal if isinstance(one, SlotGiven | SeatLeft)] == []
    house.train(n0=[(5, 4)])
    assert house.committed().slots == (0, 1)
    assert house.start_of("0").generation == house.committed().generation == 5 + UNHEARD_GENERATIONS


def test_ranks_are_dense_in_every_generation() -> None:
    house = training(4, 2, 6, shrink_grace_s=0.0)
    for slot in (0, 2):
        house.close(f"s{slot}", gone=True)
        house.tick()
    house.train(n1=[(3, 1)])
    house.register("x")
    house.beat("x", Activity.WAITING, generation=0)
    house.train(n1=[(4, 2)])
    generations = [record for record in house.journal if isinstance(record, GenerationCommitted)]
    assert [record.slots for record in generations] == [(0, 1, 2, 3), (1, 3), (0, 1, 3)]
    assert [house.start_of(node).rank for node in ("x", "1", "3")] == [0, 1, 2]
