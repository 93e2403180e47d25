"""Spares: admission, which spare takes a lost slot, and that a spare's own end does not affect the job."""

from __future__ import annotations

import pytest

from samebits.core.end_kinds import EndKind
from samebits.core.job_end import END_GRACE_S
from samebits.core.membership.rebuild import UNHEARD_TERMS
from samebits.core.messages import (
    PROTOCOL,
    Activity,
    Admitted,
    EndJob,
    Fenced,
    Finished,
    GenerationStarted,
    MemberRecord,
    Process,
    RankPosition,
    Refusal,
    Refused,
    Register,
    ReportEnvelope,
    RoundId,
    RoundOpened,
)
from samebits.core.point import Point
from samebits.core.records import (
    CauseFound,
    GenerationCommitted,
    JobFinished,
    JobRebuilt,
    SeatGranted,
    SeatLeft,
    SeatLost,
    SeatRetired,
    SlotGiven,
    SpareAdmitted,
    TrainingFinished,
)
from samebits.core.reports import PeerGone
from tests.core.house import JOB_NAME, SETTINGS, House, policy


def spared(world_size: int = 2, spares: int = 1, *, waiting: bool = True, **changes: float | bool) -> House:
    """Return a scheduler in its first generation; its spares are called 10, 11, …"""
    house = House(policy(world_size, spare_num=spares, **changes)).fill()
    for number in range(spares):
        house.register(str(10 + number))
    house.train()
    for number in range(spares if waiting else 0):
        house.beat(str(10 + number), Activity.WAITING, generation=0)
    return house


# ---- admission


def test_node_beyond_the_world_is_a_spare() -> None:
    house = House(policy(2, spare_num=1)).fill()
    house.register("x")
    assert house.records(SpareAdmitted)[0].node == "x" and not house.records(SeatGranted)
    assert house.admission("sx") == Admitted("sx", "job-1", 1, None, 1, 2, None)
    assert house.seat("x").is_spare and not house.seat("x").is_retired
    assert house.invited() == {}
    house.register("y")
    assert house.refusal("sy").refusal is Refusal.FULL and house.refusal("sy").retry_after_s > 0


def test_numbers_from_the_largest_world_on_name_spares_and_never_a_slot() -> None:
    house = House(policy(2, spare_num=1))
    house.register("2")
    assert house.admission("s2").slot is None
    assert house.core.phase() == "filling; waiting for 0, 1"
    house.register("3")
    said = house.refusal("s3")
    assert said.refusal is Refusal.FULL and said.retry_after_s > 0
    assert said.text == "NODE_ID=3 names a spare, and all 1 (SPARE_NUM) are here: 2"


def test_spare_is_no_registered_worker() -> None:
    house = House(policy(2, spare_num=1))
    house.register("7")
    house.register("0")
    assert "1/2 registered" in house.notes[-1]
    assert house.core.state.generation is None and house.invited() == {}
    house.register("1")
    assert set(house.invited()) == {"s0", "s1"}


def test_spare_waits_in_its_role_until_all_have_registered() -> None:
    house = House(policy(2, spare_num=1, topo_timeout_s=100.0))
    house.register("7")
    for _ in range(9):
        house.now += 10
        house.beat("7", Activity.WAITING, generation=0)
        house.tick()
    assert house.ended is None
    house.now += 10
    house.beat("7", Activity.WAITING, generation=0)
    house.tick()
    assert house.answer("s7", EndJob).kind is EndKind.FORMATION_TIMEOUT


def test_before_the_first_generation_a_spare_leaves_named_slots_alone() -> None:
    house = House(policy(2, spare_num=1))
    house.register("7")
    house.register("1")
    assert not house.core.state.generation and house.seat("7").is_spare


def test_worker_killed_before_the_first_generation_is_replaced() -> None:
    """With a new name at every start, no other process would ever come for its slot."""
    house = House(policy(2, spare_num=1))
    house.register("7")
    house.register("0")
    house.close("s0", gone=True)
    house.register("1")
    assert house.seat("7").slot == 0
    assert house.seat("0").is_retired
    house.join("7")
    house.join("1")
    assert [node for node, _ in house.committed().members] == ["7", "1"]


def test_spares_session_resumes_and_repeats() -> None:
    house = spared(waiting=False)
    house.register("10")
    assert not house.records(SpareAdmitted) and house.admission("s10").slot is None
    house.close("s10")
    house.register("10", incarnation=1, job="job-1")
    assert house.admission("s10").incarnation == 1 and len(house.core.state.spares) == 1


def test_second_session_of_a_live_spare_is_refused() -> None:
    house = spared(waiting=False)
    house.register("10", session="twin")
    assert house.refusal("twin").refusal is Refusal.ALIVE


def test_spares_former_process_learns_which_has_its_place() -> None:
    house = spared(cool_down_s=0.0)
    house.leave("10")
    house.register("10", session="new")
    house.register("10", incarnation=1, job="job-1")
    assert house.answer("s10", Fenced).text == (
        f"the seat of worker 10 is now held by {house.seat('10').process}, incarnation 2: "
        "this process must not touch the job again"
    )


def test_lost_spare_cools_down_and_is_a_spare_again() -> None:
    house = spared()
    house.close("s10", gone=True)
    house.register("10", session="again")
    assert (house.refusal("again").refusal, house.refusal("again").retry_after_s) == (Refusal.COOLING_DOWN, 30.0)
    house.now += 30.0
    house.register("10", session="again")
    assert house.records(SpareAdmitted)[0].incarnation == 2
    assert house.admission("again").slot is None


def test_lost_spare_makes_room_for_another_node() -> None:
    house = spared()
    house.close("s10", gone=True)
    house.register("11")
    assert house.admission("s11").slot is None
    house.now += 30.0
    house.register("10", session="again")
    assert house.refusal("again").refusal is Refusal.FULL


# ---- a loss


def test_spare_takes_a_lost_slot_at_once() -> None:
    house = spared()
    house.close("s1", gone=True)
    kinds = [type(record) for record in house.ready.records]
    assert kinds == [SeatLost, CauseFound, SeatRetired, SlotGiven]
    assert house.records(SlotGiven) == [SlotGiven("10", 1)]
    assert house.seat("10").slot == 1 and house.seat("10").incarnation == 1 and house.seat("1").is_retired
    assert house.invited() == {"s0": RoundId(1, 2), "s10": RoundId(1, 2)}
    offered = house.answer("s10", RoundOpened)
    assert (offered.place, offered.missing, offered.gently) == (RankPosition(1, 1, 2), "", False)
    house.join("0", [(5, 1)])
    house.join("10")
    started = house.answer("s10", GenerationStarted)
    assert (started.generation, started.rank, started.slot, started.world_size) == (2, 1, 1, 2)
    assert (started.restore, started.source) == (Point(5, 1), 0)
    assert house.committed().members == (("0", 1), ("10", 1)) and house.committed().slots == (0, 1)


def test_lost_holder_is_fenced_once_its_slot_is_given() -> None:
    house = spared()
    credential = house.credential("1")
    house.now += 4
    house.beat("0")
    house.beat("10", Activity.WAITING, generation=0)
    house.tick(1.0)
    assert house.seat("10").slot == 1
    house.receive("s1", Register(PROTOCOL, "job-1", JOB_NAME, "1", "s1", credential.incarnation, ME, SETTINGS))
    fenced = house.answer("s1", Fenced)
    assert fenced.text.startswith("the seat of worker 1 is taken away")
    assert fenced.may_return, "its node id has no other holder, and the job keeps spares"
    assert not house.ready.records


ME = Process("host-a", 7, 1, "cpu")


@pytest.mark.parametrize(
    ("spares", "taken_by"),
    [
        ({"10": (Activity.SEATED, "a"), "11": (Activity.WAITING, "b")}, "11"),
        ({"10": (Activity.WAITING, "b"), "11": (Activity.WAITING, "a")}, "11"),
        ({"10": (Activity.SEATED, "b"), "11": (Activity.SEATED, "a")}, "11"),
        ({"10": (Activity.WAITING, "b"), "11": (Activity.SEATED, "a")}, "10"),
        ({"11": (Activity.WAITING, "b"), "10": (Activity.WAITING, "b")}, "11"),
    ],
)
def test_readiest_spare_is_taken(spares: dict[str, tuple[Activity, str]], taken_by: str) -> None:
    """A waiting spare before a starting one, then one on the lost worker's host, then the first to arrive."""
    house = House(policy(2, spare_num=2))
    for slot in range(2):
        house.register(str(slot), process=Process("a", slot, 1, "cpu"))
    house.train()
    for node, (activity, host) in spares.items():
        house.register(node, process=Process(host, 5, 1, "cpu"))
        house.beat(node, activity, generation=0)
    house.close("s1", gone=True)
    assert house.records(SlotGiven) == [SlotGiven(taken_by, 1)]


@pytest.mark.parametrize(
    ("error", "taken_by", "where"),
    [
        ("KeyError: 1", "11", "the same twice at one step ends the job"),
        ("RuntimeError: Connection reset by peer", "11", "a spare on its host takes its place"),
        ("CUDA error: uncorrectable ECC error encountered", "10", "a spare on another host takes its place"),
        ("MemoryError", "10", "a spare on another host takes its place"),
    ],
)
def test_spare_on_another_host_is_taken_if_the_host_or_device_failed(error: str, taken_by: str, where: str) -> None:
    house = House(policy(2, spare_num=2, token="its own"))
    for slot in range(2):
        house.register(str(slot), process=Process("a", slot, 1, "cpu"))
    house.train()
    for node, host in (("10", "b"), ("11", "a")):
        house.register(node, process=Process(host, 5, 1, "cpu"))
        house.beat(node, Activity.WAITING, generation=0)
    house.say_last("1", error)
    (cause,) = house.records(CauseFound)
    assert where in cause.text
    house.close("s1", gone=True)
    assert house.records(SlotGiven) == [SlotGiven(taken_by, 1)]


def test_spare_with_a_closed_connection_is_skipped_until_it_returns() -> None:
    house = spared()
    house.close("s10")
    house.close("s1", gone=True)
    assert not house.records(SlotGiven)
    house.beat("10", Activity.WAITING, generation=0)
    assert house.records(SlotGiven) == [SlotGiven("10", 1)]
    assert house.answer("s10", RoundOpened).place == RankPosition(1, 1, 2)


def test_many_losses_make_one_round_and_each_slot_gets_one_spare() -> None:
    house = spared(4, 2)
    for slot in (3, 1, 2):
        house.close(f"s{slot}", gone=True)
    assert [record for record in house.journal if isinstance(record, SlotGiven)] == [
        SlotGiven("10", 3),
        SlotGiven("11", 1),
    ]
    opened = {message.round for message in house.sent["s0"] if isinstance(message, RoundOpened)}
    assert opened == {RoundId(1, 1), RoundId(1, 2)}
    assert house.last("s11", RoundOpened).missing == ""
    house.register("12")
    assert house.records(SlotGiven) == [SlotGiven("12", 2)]


def test_spare_that_arrives_while_a_slot_is_lost_takes_it() -> None:
    house = spared(2, 1)
    house.close("s10", gone=True)
    house.close("s1", gone=True)
    assert not house.records(SlotGiven)
    house.register("11")
    assert house.records(SlotGiven) == [SlotGiven("11", 1)]
    assert house.admission("s11").slot == 1, "it learns at once, so that init() returns with its rank"
    assert house.answer("s11", RoundOpened).place == RankPosition(1, 1, 2)


def test_member_that_leaves_on_purpose_is_replaced_too() -> None:
    house = spared()
    house.leave("1", text="SIGTERM")
    assert house.records(SeatLeft) and house.records(SlotGiven) == [SlotGiven("10", 1)]
    assert house.answer("s10", RoundOpened).text == "worker 1 left before training was finished: SIGTERM"


def test_spare_that_took_a_slot_and_dies_is_a_loss() -> None:
    house = spared(2, 2)
    house.close("s1", gone=True)
    house.train(n0=[(5, 1)])
    house.beat("11", Activity.WAITING, generation=0)
    house.close("s10", gone=True)
    assert house.records(SlotGiven) == [SlotGiven("11", 1)]


def test_spare_that_dies_before_it_joins_is_replaced_in_the_same_round() -> None:
    house = spared(2, 2)
    house.close("s1", gone=True)
    house.join("0", [(5, 1)])
    house.close("s10", gone=True)
    assert house.records(SlotGiven) == [SlotGiven("11", 1)] and set(house.invited()) == {"s11"}
    house.join("11")
    assert house.committed().members == (("0", 1), ("11", 1))


# ---- the dead node returns


def test_dead_node_returns_as_a_spare_after_its_cool_down() -> None:
    house = spared()
    house.close("s1", gone=True)
    house.train(n0=[(5, 1)])
    house.now += 10.0
    house.register("1", session="again")
    said = house.refusal("again")
    assert (said.refusal, said.retry_after_s) == (Refusal.COOLING_DOWN, 20.0)
    assert "its slot was given away; it may return in 20.0 s (REGISTER_COOLDOWN=30)" in said.text
    house.now += 20.0
    for node in ("0", "10"):
        house.beat(node)
    house.register("1", session="again")
    assert house.admission("again") == Admitted("again", "job-1", 1, None, 2, 2, None, generation=2)
    house.close("s10", gone=True)
    assert house.records(SlotGiven) == [SlotGiven("1", 1)]


def test_dead_node_is_refused_if_its_spare_was_replaced() -> None:
    house = spared(cool_down_s=0.0)
    house.close("s1", gone=True)
    house.register("12")
    house.register("1", session="again")
    assert house.refusal("again").refusal is Refusal.FULL


def test_cool_down_of_a_retired_node_survives_the_scheduler() -> None:
    house = spared()
    house.close("s1", gone=True)
    house.crash(after_s=10.0)
    house.register("1", session="again")
    assert house.refusal("again").retry_after_s == pytest.approx(20.0)


# ---- a spare's own end does not affect the job


@pytest.mark.parametrize("how", ["gone", "silence", "leaves", "words"])
def test_spares_end_is_durable_and_does_not_affect_the_job(how: str) -> None:
    house = spared()
    if how == "gone":
        house.close("s10", gone=True)
    elif how == "silence":
        house.now += 4
        house.beat("0")
        house.beat("1")
        house.tick(1.0)
    elif how == "leaves":
        house.leave("10")
    else:
        house.leave("10", on_purpose=False, text="ValueError")
    (record,) = house.ready.records
    assert isinstance(record, SeatLeft if how == "leaves" else SeatLost)
    assert house.invited() == {} and house.core.phase() == "training" and house.core.first_cause == ""
    assert house.notes[-1].startswith("spare 10 ")
    assert not house.core.state.spares
    house.close("s1", gone=True)
    assert not house.records(SlotGiven)


def test_spares_death_with_recovery_off_ends_no_job() -> None:
    house = spared(recovery=False)
    house.close("s10", gone=True)
    assert house.ended is None and not house.ready.sends
    house.close("s1", gone=True)
    assert house.answer("s0", EndJob).kind is EndKind.FAILED
    assert not house.records(SlotGiven)


# ---- the scheduler's death


def test_spares_are_known_after_a_restart_and_used_once_heard() -> None:
    house = spared()
    house.crash(after_s=1.0)
    house.beat("0")
    house.close("s1", gone=True)
    assert not house.records(SlotGiven)  # not known yet whether the spare lives
    house.beat("10", Activity.WAITING, generation=0)
    assert house.records(SlotGiven) == [SlotGiven("10", 1)]
    assert house.answer("s10", RoundOpened).place == RankPosition(1, 1, 2)


def test_slot_removed_but_not_reassigned_before_the_crash_is_assigned_after_it() -> None:
    """The journal's end is torn between the two records."""
    house = spared()
    house.close("s1", gone=True)
    keep = next(index for index, record in enumerate(house.journal) if isinstance(record, SlotGiven))
    house.crash(after_s=1.0, keep=keep)
    assert "1" in house.core.phase()
    house.beat("10", Activity.WAITING, generation=0)
    assert house.records(SlotGiven) == [SlotGiven("10", 1)]


# ---- the end


def test_training_is_finished_without_the_spares_and_they_are_notified() -> None:
    house = spared()
    for node in ("0", "1"):
        house.beat(node, Activity.DONE, step=9)
    assert house.records(TrainingFinished) == [TrainingFinished(Point(9, 1))]
    assert house.answer("s10", Finished).point == Point(9, 1)


def test_worker_that_left_untrained_and_returned_has_not_finished_the_job() -> None:
    """For a moment all holders of a slot had left and the job waited for a spare; that wait is over with the return."""
    house = House(policy(1, spare_num=1, cool_down_s=0.0)).fill()
    house.register("a")
    house.leave("0")
    house.close("sa")
    house.tick(0.5)
    house.register("0", session="back")
    house.join("0")
    house.beat("0")
    house.close("back", gone=True)
    assert house.core.phase() == "forming; waiting for 0"
    house.tick(END_GRACE_S - 0.5)
    assert house.ended is None


def test_job_is_finished_when_the_spares_have_left_too() -> None:
    house = spared()
    for node in ("0", "1"):
        house.beat(node, Activity.DONE, step=9)
    house.leave("0")
    house.leave("1")
    assert house.ended is None
    house.leave("10")
    assert house.records(JobFinished) and house.ended is not None


def test_spare_delays_a_finished_job_only_for_a_while() -> None:
    house = spared(node_timeout_s=60.0)
    for node in ("0", "1"):
        house.beat(node, Activity.DONE, step=9)
    house.leave("0")
    house.leave("1")
    assert house.core.wake_at() is not None and house.core.wake_at() <= house.now + END_GRACE_S
    house.tick(END_GRACE_S - 0.5)
    assert house.ended is None
    house.tick(0.5)
    assert house.records(JobFinished) and house.ended is not None


def test_stop_is_sent_to_spares_and_waits_for_them() -> None:
    house = spared()
    house.stop()
    assert house.answer("s10", EndJob).kind is EndKind.STOPPED
    house.leave("0")
    house.leave("1")
    assert house.ready.ended is None
    house.leave("10")
    assert house.ready.ended is not None


def test_no_slot_is_given_after_the_end() -> None:
    house = spared()
    for node in ("0", "1"):
        house.beat(node, Activity.DONE, step=9)
    house.close("s1", gone=True)
    assert not house.records(SlotGiven)


# ---- a lost journal


def report(slot: int, world_size: int = 3) -> dict[str, object]:
    standing = MemberRecord(2, 4, RoundId(2, 3), slot, world_size, Point(5, 3), None, slot)
    return {"job": "job-old", "incarnation": 3, "standing": standing}


@pytest.mark.parametrize("first", [True, False])
def test_live_spare_is_a_spare_of_the_rebuilt_job(first: bool) -> None:
    house = House(policy(3, spare_num=1))
    late = {"job": "job-old", "incarnation": 5}
    if first:  # it waits for the members to report
        house.register("10", **late)
        assert house.answer("s10", Refused).refusal is Refusal.ALIVE
    for slot in range(3):
        house.register(str(slot), **report(slot))
    house.tick(5.0)
    assert house.records(JobRebuilt)
    house.register("10", **late)
    assert house.admission("s10") == Admitted("s10", "job-old", 3 + UNHEARD_TERMS, None, 5, 3, None, generation=4)
    house.register("11", **late)
    assert house.answer("s11", Fenced).text.startswith("the seat of worker 11 is unknown to this scheduler")


def test_unknown_process_of_the_rebuilt_job_is_fenced_without_spares() -> None:
    house = House(policy(3))
    for slot in range(3):
        house.register(str(slot), **report(slot))
    house.tick(5.0)
    house.register("10", job="job-old", incarnation=5)
    assert house.answer("s10", Fenced)


def test_committed_generation_names_its_slots() -> None:
    house = spared()
    assert [record.slots for record in house.journal if isinstance(record, GenerationCommitted)] == [(0, 1)]


def test_known_death_does_not_imply_the_loss_of_a_closed_connection() -> None:
    house = spared(4)
    house.close("s3", gone=True)
    house.close("s2", gone=True)
    house.close("s1")  # it may return: it has its grace
    house.join("10", place=RankPosition(3, 3, 4))
    house.receive("s0", ReportEnvelope(house.credential("0"), PeerGone("s2")))
    assert house.seat("2").is_lost and not house.seat("1").is_lost
    house.tick(house.policy.reconnect_grace_s)
    assert house.seat("1").is_lost
