"""A lost journal rebuilt from living workers: which reports count, and the messages to the other workers."""

from __future__ import annotations

import pytest

from samebits.core.membership.rebuild import UNHEARD_GENERATIONS, UNHEARD_TERMS, highest_unheard_incarnation
from samebits.core.messages import (
    Activity,
    Admitted,
    Fenced,
    MemberRecord,
    Process,
    Refusal,
    Refused,
    RoundId,
    RoundOpened,
)
from samebits.core.point import Cut, Point
from samebits.core.records import JobRebuilt, SeatGranted, SeatRetired
from samebits.core.state import JobState, is_on_line
from samebits.core.values import replace
from tests.core.house import House, policy, training_house

RESTORE = Point(40, 2)


def standing(slot: int, *, generation: int = 3, world_size: int = 4, term: int = 2, number: int = 5) -> MemberRecord:
    return MemberRecord(term, generation, RoundId(2, number), slot, world_size, RESTORE, None, slot)


def empty_house(world_size: int = 4, **changes: float | bool) -> House:
    """Return a scheduler on a wiped recovery path."""
    return House(policy(world_size, **changes), new_job_id="job-new")


def report(
    house: House, slot: int, *, node: str = "", incarnation: int = 1, job: str = "job-old", **changes: object
) -> None:
    """Let the member of that slot register again."""
    said = replace(standing(slot, world_size=house.policy.world_size), **changes)  # type: ignore[arg-type]
    house.register(node or str(slot), session=f"old{slot}", job=job, incarnation=incarnation, standing=said)


# ---- all agree


def test_job_resumes_where_it_was_if_all_members_report() -> None:
    house = empty_house()
    for slot in range(4):
        report(house, slot, incarnation=7 if slot == 3 else slot + 1)
        assert house.ready.sends == [] and house.core.state.seats == {}
    house.tick(5.0)
    assert [house.last(f"old{slot}", Admitted).slot for slot in range(4)] == [0, 1, 2, 3]
    term = 3 + UNHEARD_TERMS
    assert house.admission("old3") == Admitted("old3", "job-old", term, 3, 7, 4, None, generation=3)
    state = house.core.state
    assert (state.job, state.term, state.generation_number) == ("job-old", term, 3)
    assert state.next_generation == 4, "all have reported, so no worker can know of another one"
    assert state.generation is not None
    assert state.generation.members == (("0", 1), ("1", 2), ("2", 3), ("3", 7))
    for node in "0123":
        house.beat(node, Activity.TRAINING)
    house.tick(6.0)
    assert house.invited() == {}, "training continues without a round"


def test_rebuilt_state_is_durable_and_survives_the_next_crash() -> None:
    house = empty_house(2)
    report(house, 0)
    report(house, 1)
    house.tick(5.0)
    (record,) = house.records(JobRebuilt)
    assert record.job == "job-old"
    assert JobState.replay(house.journal) == house.core.state
    assert JobState.replay(house.core.state.snapshot()).generation == house.core.state.generation
    house.crash()
    house.register("0", session="old0", job="job-old", incarnation=1, standing=standing(0, world_size=2))
    assert house.admission("old0").term == 4 + UNHEARD_TERMS


def test_only_points_of_the_restored_line_stay_valid() -> None:
    house = empty_house(2)
    report(house, 0)
    report(house, 1)
    house.tick(5.0)
    committed = house.committed()
    assert committed.line == (Cut(2, 40),)
    assert is_on_line(Point(60, 3), committed) and is_on_line(Point(40, 2), committed)
    assert not is_on_line(Point(50, 2), committed)


def test_finished_training_stays_finished() -> None:
    house = empty_house(2)
    report(house, 0, final=Point(99, 3))
    report(house, 1)
    house.tick(5.0)
    assert house.core.state.final == Point(99, 3)
    assert house.answer("old1", Admitted).finished == Point(99, 3)


# ---- a majority agrees


def test_majority_waits_for_the_rest_then_resumes_and_keeps_their_seats() -> None:
    house = empty_house()
    for slot in (0, 1, 3):
        report(house, slot)
    house.tick(4.9)
    assert house.core.state.seats == {}
    house.tick(0.2)
    assert house.core.state.job == "job-old"
    house.beat("0"), house.beat("1"), house.beat("3")
    house.register("2", session="fresh")
    assert house.refusal("fresh").refusal is Refusal.ALIVE, "the process that has not reported may still be alive"
    for _ in range(6):
        house.tick(1.0)
        house.beat("0"), house.beat("1"), house.beat("3")
    assert house.core.state.seats["2"].is_lost
    house.register("2", session="fresh")
    assert house.refusal("fresh").refusal is Refusal.COOLING_DOWN
    house.now += 30
    house.beat("0"), house.beat("1"), house.beat("3")
    house.register("2", session="fresh")
    assert house.admission("fresh").incarnation > 1 << 20, "above anything the old holder can have had"


def test_reports_in_the_queue_at_the_deadline_count() -> None:
    house = empty_house()
    report(house, 0)
    report(house, 1)
    house.now += 60  # it was paused
    report(house, 2)
    assert house.core.state.seats == {}, "three of four agree, and the fourth is here"
    report(house, 3)
    house.tick()
    assert [house.admission(f"old{slot}").slot for slot in range(4)] == [0, 1, 2, 3]
    assert {seat.session for seat in house.core.state.seats.values()} == {"old0", "old1", "old2", "old3"}


def test_early_newcomers_do_not_start_another_job_while_reports_arrive() -> None:
    """GRACE's start lets fewer than all workers start, which would discard a job that is about to be rebuilt."""
    house = empty_house(min_world_size=2, start_grace_s=2.0)
    house.register("blue", session="new-blue")
    house.register("red", session="new-red")
    for slot in (0, 1, 3):
        report(house, slot)
    house.tick(4.0)
    assert house.core.state.seats == {}
    house.tick(1.0)
    assert house.core.state.job == "job-old" and set(house.core.state.seats) == {"0", "1", "2", "3"}


def test_early_newcomers_start_a_job_if_the_reports_do_not_agree() -> None:
    house = empty_house(min_world_size=2, start_grace_s=2.0)
    house.register("blue", session="new-blue")
    house.register("red", session="new-red")
    report(house, 0)
    house.tick(4.0)
    for node in ("blue", "red"):
        house.register(node, session=f"new-{node}")
        assert house.refusal(f"new-{node}").retry_after_s == pytest.approx(1.0)
    house.tick(1.0)
    assert house.core.state.seats == {}
    for node in ("blue", "red"):
        house.register(node, session=f"new-{node}")
    house.tick(2.0)
    assert house.core.state.job == "job-new" and set(house.core.state.seats) == {"blue", "red"}


def test_members_of_a_replaced_generation_yield_to_its_successors() -> None:
    """The replaced members were cut off from the scheduler, but not from each other, and they arrive first."""
    house = empty_house()
    for slot in range(4):
        report(house, slot)
    for slot in range(4):
        said = standing(slot, generation=4, number=6)
        house.register(str(slot), session=f"new{slot}", job="job-old", incarnation=2, standing=said)
    house.tick(5.0)
    assert house.core.state.generation_number == 4
    assert {seat.session for seat in house.core.state.seats.values()} == {"new0", "new1", "new2", "new3"}


def test_late_member_gets_its_own_seat() -> None:
    house = empty_house()
    for slot in (0, 1, 3):
        report(house, slot)
    house.tick(5.1)
    report(house, 2, incarnation=4)
    assert house.admission("old2").slot == 2
    assert house.admission("old2").incarnation == 4
    assert [type(record) for record in house.ready.records] == [SeatGranted], "the seat kept for it is its own node's"


def test_steps_of_unreported_members_are_abandoned_and_numbers_not_reused() -> None:
    """A member that does not report may have continued without these, and saved points under the next numbers."""
    house = empty_house(reset_limit=1)
    for slot in (0, 1, 3):
        report(house, slot)
    house.tick(5.1)
    assert house.core.state.generation_number == 3, "the newest reported generation counts"
    assert JobState.replay(house.core.state.snapshot()).next_generation == 4 + UNHEARD_GENERATIONS
    report(house, 2)
    assert house.invited(), "the count of RESET_LIMIT starts over"
    for node in "0123":
        house.join(node, [(60, 3), (70, 4)])
    assert house.committed().restore == Point(60, 3)
    assert house.committed().generation == 4 + UNHEARD_GENERATIONS
    assert house.core.state.next_generation == 5 + UNHEARD_GENERATIONS
    house.beat("0", Activity.WAITING)
    assert house.invited(), "one reset"
    for node in "0123":
        house.join(node, [(60, 3)])
    house.beat("0", Activity.WAITING)
    assert house.core.phase() == "ending", "and no other"


def test_process_waiting_for_a_new_job_gets_no_second_seat_in_the_old_one() -> None:
    house = empty_house(3, min_world_size=1, max_world_size=4)
    house.register("new", session="new")
    house.register("other", session="other")
    report(house, 0, world_size=1)
    house.tick(5.0)
    assert house.core.state.job == "job-old"
    house.register("new", session="new")
    first = 1 + highest_unheard_incarnation(house.core.state.term)
    assert (house.seat("new").slot, house.seat("new").incarnation) == (1, first), "above what the lost journal recorded"
    house.register("other", session="other")
    assert house.core.state.by_slot == {0: "0", 1: "new", 2: "other"}


def test_late_member_takes_nothing_from_its_nodes_new_process() -> None:
    house = empty_house(spare_num=1)
    for slot in (0, 1, 3):
        report(house, slot, node=f"host-{slot}")
    house.tick(5.1)
    house.register("host-2", session="fresh")
    assert house.admission("fresh").slot is None
    report(house, 2, node="host-2")
    assert house.answer("old2", Fenced).incarnation == 1
    assert house.seat("host-2").session == "fresh"


@pytest.mark.parametrize("end", ["lost", "left"])
def test_late_member_gets_its_seat_if_its_nodes_new_process_has_ended(end: str) -> None:
    house = empty_house(spare_num=1)
    for slot in (0, 1, 3):
        report(house, slot, node=f"host-{slot}")
    house.tick(5.1)
    house.register("host-2", session="fresh")
    if end == "lost":
        house.close("fresh", gone=True)
    else:
        house.leave("host-2")
    report(house, 2, node="host-2")
    assert house.admission("old2").slot == 2


def test_late_process_of_another_generation_is_fenced() -> None:
    house = empty_house()
    for slot in (0, 1, 3):
        report(house, slot)
    house.tick(5.1)
    report(house, 2, generation=2)
    assert house.answer("old2", Fenced).incarnation == 1


def test_unnamed_nodes_leave_the_unreported_seat_to_its_holder() -> None:
    house = empty_house()
    for slot in (0, 1, 3):
        report(house, slot, node=f"host-{slot}")
    house.tick(5.1)
    report(house, 2, node="host-2")
    assert house.admission("old2").slot == 2
    assert house.records(SeatRetired) == [SeatRetired("unknown holder of slot 2", 2)]
    assert sorted(house.core.state.by_slot.values()) == ["host-0", "host-1", "host-2", "host-3"]


def test_generation_known_to_a_minority_is_not_reused() -> None:
    house = empty_house()
    for slot in (0, 1, 2):
        report(house, slot)
    report(house, 3, generation=4)
    house.tick(5.1)
    committed = house.committed()
    assert committed.generation == 4 and committed.members == ()
    assert house.invited(), "all meet for generation 5"
    assert is_on_line(Point(60, 3), committed)


def test_generation_lost_with_the_journal_stays_lost_after_the_next_crash() -> None:
    """The generation has no members, so no lost member shows that it cannot continue."""
    house = empty_house(3)
    report(house, 0)
    report(house, 1)
    report(house, 2, generation=4)
    house.tick(5.0)
    assert house.committed().generation == 4 and house.committed().members == ()
    house.crash(after_s=2.0)
    for slot in (0, 1):
        report(house, slot)
    house.tick(0.1)
    for session in ("old0", "old1"):
        opened = house.last(session, RoundOpened)
        assert opened.round.term == house.core.state.term, "by this scheduler"
        assert opened.text == "generation 4 was lost with the journal"


# ---- no agreement


def refusals(house: House) -> set[Refusal]:
    return {send.message.refusal for send in house.ready.sends if isinstance(send.message, Refused)}


def test_half_of_the_members_is_not_a_majority() -> None:
    house = empty_house()
    report(house, 0)
    report(house, 1)
    house.tick(5.1)
    assert house.core.state.job == "job-new"
    assert "2 of 4 report generation 3 of job job-old; a majority" in house.notes[-1]
    report(house, 0)
    assert refusals(house) == {Refusal.OTHER_JOB}


def test_last_process_of_an_older_job_does_not_override_a_new_one() -> None:
    house = empty_house()
    report(house, 2)
    for slot in range(4):
        house.register(str(slot))
        assert refusals(house) == {Refusal.ALIVE}, "no process is seated until the reports are judged"
    house.tick(5.1)
    house.fill()
    assert house.invited().keys() == {"s0", "s1", "s2", "s3"}
    assert house.core.state.job == "job-new"


def test_nothing_is_rebuilt_once_a_seat_is_granted() -> None:
    house = empty_house(2)
    house.register("0")
    report(house, 1)
    assert refusals(house) == {Refusal.OTHER_JOB}


def test_two_jobs_with_a_majority_each_are_named_and_neither_wins() -> None:
    house = empty_house(3)
    for slot in (0, 1):
        report(house, slot)
        said = standing(slot, world_size=3)
        house.register(f"x{slot}", session=f"x{slot}", job="job-other", incarnation=1, standing=said)
    house.tick(5.1)
    assert house.core.state.job == "job-new"
    assert "job job-old" in house.notes[-1] and "job job-other" in house.notes[-1]


def test_two_processes_on_one_slot_do_not_count() -> None:
    house = empty_house(3)
    report(house, 0)
    report(house, 1)
    house.register("y", session="twin", job="job-old", incarnation=1, standing=standing(1, world_size=3))
    house.tick(5.1)
    assert house.core.state.job == "job-new"


@pytest.mark.parametrize("spare_num", [0, 1])
@pytest.mark.parametrize(
    "changes", [{"world_size": 5}, {"slot": 4}, {"slot": -1}, {"term": 0}, {"generation": 2**50}, {"generation": 0}]
)
def test_nonsense_is_not_a_report(changes: dict[str, int], spare_num: int) -> None:
    house = empty_house(spare_num=spare_num)
    said = replace(standing(0), **changes)  # type: ignore[arg-type]
    house.register("0", session="old0", job="job-old", incarnation=1, standing=said)
    assert refusals(house) == {Refusal.OTHER_JOB}


def test_spare_that_comes_first_announces_the_members_of_its_job() -> None:
    house = empty_house(spare_num=1)
    house.register("9", session="old9", job="job-old", incarnation=2)
    assert refusals(house) == {Refusal.ALIVE}
    house.register("0")
    assert refusals(house) == {Refusal.ALIVE}, "no process is seated meanwhile"


@pytest.mark.parametrize(
    ("term", "newest"), [(1004, 1004), (1, 2), pytest.param(2**50, 2, id="a lie")], ids=lambda value: str(value)
)
def test_generation_known_only_to_a_spare_is_used_as_well(term: int, newest: int) -> None:
    """The scheduler was rebuilt, admitted a spare, and lost its journal again before it reached a member."""
    house = empty_house(2, spare_num=1)
    house.register("9", session="old9", job="job-old", incarnation=2, term=term)
    report(house, 0)
    report(house, 1)
    house.tick(5.0)
    assert house.admission("old0").term == newest + 1 + UNHEARD_TERMS
    house.register("9", session="old9", job="job-old", incarnation=2, term=term)
    assert house.admission("old9").term == newest + 1 + UNHEARD_TERMS


@pytest.mark.parametrize(
    ("job", "incarnation", "spare_num"), [("", 2, 1), ("job-new", 2, 1), ("job-old", 0, 1), ("job-old", 2, 0)]
)
def test_only_a_spare_of_another_job_announces_members(job: str, incarnation: int, spare_num: int) -> None:
    house = empty_house(spare_num=spare_num)
    house.register("9", session="old9", job=job, incarnation=incarnation)
    house.register("0")
    assert house.admission("s0").slot == 0


def test_stranger_with_other_settings_is_not_a_report() -> None:
    house = empty_house()
    house.register("0", job="job-old", incarnation=1, standing=standing(0), settings=(("WORKER_NUM", "9"),))
    assert refusals(house) == {Refusal.OTHER_JOB}
    house.tick(5.1)
    assert not any("alive" in note for note in house.notes), "and no process waits for it"


def test_process_that_leaves_before_the_verdict_does_not_count() -> None:
    house = empty_house(3)
    report(house, 0)
    report(house, 1)
    house.close("old1")
    house.tick(5.1)
    assert house.core.state.job == "job-new"


def test_rebuilding_can_be_forbidden() -> None:
    house = empty_house(2, rebuild=False)
    report(house, 0)
    assert refusals(house) == {Refusal.OTHER_JOB}


def test_flood_of_reports_is_bounded() -> None:
    house = empty_house(2)
    for number in range(50):
        said = standing(0, world_size=2)
        house.register("0", session=f"f{number}", job=f"job-{number}", incarnation=1, standing=said, term=2)
    assert len(house.core._rebuild._reports) <= 8
    assert len(house.core._rebuild._terms) <= 8


def test_scheduler_pause_does_not_shorten_the_time_for_reports() -> None:
    house = empty_house()
    for slot in (0, 1):
        report(house, slot)
    house.stall(5.1)
    report(house, 2)
    report(house, 3)
    assert house.core.state.seats == {}
    house.tick(5.0)
    assert house.core.state.job == "job-old"


# ---- workers know enough to rebuild


def test_lost_journal_and_rebuilt_journal_agree() -> None:
    """Members report what the first scheduler sent them."""
    old = training_house(2)
    started = [old.start_of(node) for node in "01"]
    new = House(policy(2), new_job_id="job-new")
    for slot, place in enumerate(started):
        said = MemberRecord(
            place.term, place.generation, place.round, slot, place.world_size, place.restore, None, slot
        )
        seat = old.seat(str(slot))
        new.register(seat.node, session=seat.session, job="job-1", incarnation=1, standing=said, process=seat.process)
    new.tick(5.0)
    assert new.core.state.seats.keys() == old.core.state.seats.keys()
    for node in "01":
        assert new.seat(node).slot == old.seat(node).slot
    assert replace(new.committed(), numerics=()) == replace(old.committed(), numerics=())
    assert isinstance(old.seat("0").process, Process)
    assert not [send for send in new.ready.sends if isinstance(send.message, RoundOpened)]


# ---- a scheduler started by a launcher, which knows the job's id


def launched_house(world_size: int = 2) -> House:
    """Return a scheduler on a wiped path, restarted by the launcher of "job-old"."""
    return House(policy(world_size, job="job-old"), new_job_id="job-old")


def test_launched_scheduler_rebuilds_its_own_job() -> None:
    house = launched_house()
    report(house, 0)
    report(house, 1)
    house.tick(5.1)
    assert house.core.state.job == "job-old"
    assert house.committed().generation == 3
    assert [house.last(f"old{slot}", Admitted).slot for slot in (0, 1)] == [0, 1]


def test_launched_scheduler_accepts_no_report_of_another_job() -> None:
    house = launched_house()
    report(house, 0, job="job-of-another-folder")
    assert refusals(house) == {Refusal.OTHER_JOB}
    report(house, 1, job="job-of-another-folder")
    assert refusals(house) == {Refusal.OTHER_JOB}
    house.tick(5.1)
    assert house.core.state.seats == {}


def test_fresh_worker_of_its_launcher_is_seated_at_once() -> None:
    house = launched_house()
    house.register("0", job="job-old")
    assert house.admission("s0").slot == 0
    house.register("1", job="job-of-another-folder")
    assert house.refusal("s1").refusal is Refusal.OTHER_JOB
    assert "Fix: start each job with its own SCHED_PORT" in house.refusal("s1").text
