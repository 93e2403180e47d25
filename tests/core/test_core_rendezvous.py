"""Rounds and generations: one round for any number of losses, who is told what, and what a round waits for."""

from __future__ import annotations

import pytest

from runtime.core.messages import (
    Activity,
    AddressMap,
    EndJob,
    EndKind,
    GenerationStarted,
    Process,
    Refusal,
    Refused,
    RoundId,
    RoundOpened,
)
from runtime.core.point import Point
from runtime.core.records import Cut, GenerationCommitted, JobInterrupted, SeatLeft
from tests.core.house import NUMERICS, House, policy, training_house

# ---- rounds


def test_the_first_round_opens_when_the_house_is_full() -> None:
    house = House(policy(2))
    house.register("0")
    assert house.core.phase() == "filling; waiting for 1"
    house.register("1")
    assert house.invited() == {"s0": RoundId(1, 1), "s1": RoundId(1, 1)}
    assert house.answer("s1", RoundOpened) == RoundOpened(
        term=1, incarnation=1, round=RoundId(1, 1), text="all 2 workers are registered", missing=""
    )
    assert house.core.phase() == "forming; waiting for 0, 1"


def test_the_last_join_commits_the_generation_and_tells_everybody() -> None:
    house = House(policy(2)).fill()
    house.join("1")
    assert house.ready.records == [] and house.core.phase() == "forming; waiting for 0"
    house.join("0")
    assert house.ready.records == [
        GenerationCommitted(
            generation=1, round=RoundId(1, 1), members=(("0", 1), ("1", 1)), restore=None, line=(), numerics=NUMERICS
        )
    ]
    assert {send.session for send in house.ready.sends} == {"s0", "s1"}
    started = house.answer("s1", GenerationStarted)
    assert (started.term, started.incarnation, started.generation, started.round) == (1, 1, 1, RoundId(1, 1))
    assert (started.rank, started.world_size, started.restore, started.source) == (1, 2, None, 1)
    assert house.core.phase() == "training"


def test_local_ranks_count_the_ranks_of_one_host() -> None:
    house = House(policy(5))
    for slot, host in enumerate(["a", "b", "a", "c", "a"]):
        house.register(str(slot), process=Process(host, slot, 1, "cpu"))
    house.train()
    started = [house.start_of(str(slot)) for slot in range(5)]
    assert [(one.local_rank, one.local_world_size) for one in started] == [(0, 3), (0, 1), (1, 3), (0, 1), (2, 3)]


def test_one_loss_makes_one_round() -> None:
    house = training_house(3)
    house.close("s2", gone=True)
    assert house.invited() == {"s0": RoundId(1, 2), "s1": RoundId(1, 2)}
    opened = house.answer("s0", RoundOpened)
    assert opened.text == "worker 2 (pid 1002 on host-a) is lost: its connection closed and its process is gone"
    assert opened.missing == "2"


@pytest.mark.parametrize("lost", [2, 40, 999])
def test_any_number_of_losses_makes_one_round(lost: int) -> None:
    house = training_house(1000)
    for slot in range(lost):
        house.close(f"s{slot}", gone=True)
    rounds = {message.round for messages in house.sent.values() for message in messages if type(message) is RoundOpened}
    assert rounds == {RoundId(1, 1), RoundId(1, 2)}
    assert house.core.phase().startswith("forming; waiting for 0, 1, 2, 3, ")


def test_many_silent_at_once_are_one_round_with_their_number() -> None:
    house = training_house(4)
    house.now += 5
    house.beat("3")
    house.tick()
    assert [note for note in house.notes if note.startswith("round")][-1] == (
        "round 1.2 opened: worker 0 (pid 1000 on host-a) is lost: silent for 5 s (NODE_TIMEOUT) (and 2 more)"
    )


def test_a_round_takes_in_later_losses() -> None:
    house = training_house(3, cool_down_s=0.0)
    house.close("s2", gone=True)
    house.join("0")
    house.join("1")
    assert house.core.phase() == "forming; waiting for 2"
    house.close("s1", gone=True)
    assert house.core.phase() == "forming; waiting for 1, 2"
    house.register("1", session="one")
    house.register("2", session="two")
    assert house.invited() == {"two": RoundId(1, 2)}
    house.join("2")
    assert house.core.phase() == "forming; waiting for 1", "what the dead process brought is void"
    house.join("1")
    assert house.committed().members == (("0", 1), ("1", 2), ("2", 2))
    assert house.committed().round == RoundId(1, 2)


def test_a_member_that_is_lost_and_comes_back_joins_again() -> None:
    house = training_house(3, cool_down_s=0.0)
    house.close("s2", gone=True)
    house.join("0")
    house.close("s0")
    house.beat("1")
    house.tick(0.5)
    assert house.seat("0").lost
    house.register("0", incarnation=1, job="job-1")
    assert house.invited() == {"s0": RoundId(1, 2)}
    house.register("2", session="two")
    house.join("1")
    house.join("2")
    assert house.core.phase() == "forming; waiting for 0"
    house.join("0")
    assert house.committed().members == (("0", 1), ("1", 1), ("2", 2))


def test_who_missed_the_invitation_is_told_by_its_next_heartbeat() -> None:
    house = training_house(3)
    house.close("s2", gone=True)
    house.beat("1", Activity.TRAINING)
    assert house.invited() == {"s1": RoundId(1, 2)}
    house.join("1")
    house.beat("1", Activity.WAITING)
    assert house.invited() == {}, "who has joined is left in peace"


def test_a_join_of_another_round_is_nothing() -> None:
    house = House(policy(2)).fill()
    house.join("0", round_id=RoundId(1, 7))
    house.join("1", round_id=RoundId(0, 1))
    assert house.core.phase() == "forming; waiting for 0, 1"


def test_a_join_after_the_round_is_nothing() -> None:
    house = training_house()
    house.join("0", [(100, 1)])
    assert house.ready.records == [] and house.core.phase() == "training"


def test_a_second_join_replaces_the_first() -> None:
    house = House(policy(2)).fill().train()
    house.close("s1", gone=True)
    house.join("0", [(5, 1)])
    house.join("0", [(5, 1), (10, 1)])
    house.register("1", incarnation=1, job="job-1", session="s1")
    house.now += 30
    house.register("1", session="new")
    house.join("1")
    assert house.committed().restore == Point(10, 1)


def test_a_failed_collective_without_a_loss_makes_a_round() -> None:
    house = training_house()
    house.beat("0", Activity.WAITING)
    assert house.invited().keys() == {"s0", "s1"}
    house.train()
    assert house.core.state.generation_number == 2


def test_the_cause_of_a_failed_collective_is_told_once_it_is_known() -> None:
    house = training_house(3)
    house.beat("0", Activity.WAITING)
    assert house.answer("s1", RoundOpened).text == "a collective of generation 1 failed at worker 0"
    house.close("s2", gone=True)
    opened = house.answer("s1", RoundOpened)
    assert (opened.round, opened.missing) == (RoundId(1, 2), "2")
    assert opened.text == "worker 2 (pid 1002 on host-a) is lost: its connection closed and its process is gone"


def test_a_round_waits_topo_timeout() -> None:
    house = training_house(topo_timeout_s=60.0)
    house.close("s1", gone=True)
    opened = house.now
    for _ in range(59):
        house.now += 1
        house.beat("0", Activity.WAITING)
        house.tick()
    assert house.ready.wake_at is not None and house.ready.wake_at <= opened + 60
    assert house.ended is None
    house.now += 1
    house.beat("0", Activity.WAITING)
    house.tick()
    text = "the round waited 60 s (TOPO_TIMEOUT) for worker 0, 1"
    assert house.records(JobInterrupted) == [JobInterrupted(EndKind.FORMATION_TIMEOUT, 0, text)]
    assert house.answer("s0", EndJob) == EndJob(1, EndKind.FORMATION_TIMEOUT, text)


def test_a_new_round_has_a_new_deadline() -> None:
    house = training_house(topo_timeout_s=60.0, cool_down_s=0.0)
    house.close("s1", gone=True)
    house.now += 50
    house.register("1", session="new")
    house.join("0")
    house.join("1")
    house.now += 50
    for node in "01":
        house.beat(node)
    house.tick()
    assert house.ended is None and house.core.phase() == "training"
    house.close("new", gone=True)
    house.tick(4.0)
    assert house.ended is None


def test_a_pause_of_the_scheduler_is_added_to_the_round() -> None:
    house = training_house(topo_timeout_s=60.0)
    house.close("s1", gone=True)
    house.now += 30
    house.beat("0", Activity.WAITING)
    house.stall(45.0)
    house.beat("0", Activity.WAITING)
    assert house.core.phase().startswith("forming")
    for _ in range(30):
        house.now += 1
        house.beat("0", Activity.WAITING)
        house.tick()
    assert house.core.phase() == "ending"


def test_a_house_that_never_fills_ends_too() -> None:
    house = House(policy(3, topo_timeout_s=60.0))
    house.tick(10.0)
    house.register("0")
    for _ in range(60):
        assert house.core.phase() == "filling; waiting for 1, 2"
        house.now += 1
        house.beat("0", Activity.SEATED)
        house.tick()
    assert house.records(JobInterrupted) == [
        JobInterrupted(EndKind.FORMATION_TIMEOUT, 0, "waited 60 s (TOPO_TIMEOUT) for worker 1, 2")
    ]


def test_a_node_that_left_is_waited_for() -> None:
    house = training_house()
    house.leave("1", text="SIGTERM")
    assert house.invited().keys() == {"s0"}
    assert house.answer("s0", RoundOpened).text == "worker 1 left before training was finished: SIGTERM"


# ---- generations


def test_ranks_are_slots_whatever_the_order_of_joining() -> None:
    house = House(policy(4)).fill()
    for node in "3102":
        house.join(node)
    assert [house.start_of(str(slot)).rank for slot in range(4)] == [0, 1, 2, 3]
    house.close("s2", gone=True)
    house.now += 30
    for node in "310":
        house.beat(node, Activity.WAITING)
    house.register("2", session="new")
    for node in "2031":
        house.join(node)
    assert [house.start_of(str(slot)).rank for slot in range(4)] == [0, 1, 2, 3]
    assert house.committed().members == (("0", 1), ("1", 1), ("2", 2), ("3", 1))


def test_who_missed_its_start_is_told_again() -> None:
    house = House(policy(2)).fill()
    house.join("0")
    house.join("1")
    first = house.start_of("1")
    house.beat("1", Activity.WAITING, generation=0)
    assert house.answer("s1", GenerationStarted) == first
    assert house.ready.records == []
    house.beat("1", Activity.FORMING)
    assert house.ready.sends == []


def test_a_newcomer_is_told_of_the_round_when_it_registers() -> None:
    house = training_house(cool_down_s=0.0)
    house.close("s1", gone=True)
    house.register("1", session="new")
    assert house.invited() == {"new": RoundId(1, 2)}


def test_a_second_start_of_a_member_breaks_the_generation() -> None:
    """The grant reached the disk, the round that it opens did not."""
    house = training_house(cool_down_s=0.0)
    house.leave("1")
    house.join("0")
    house.register("1", session="new")
    house.crash(after_s=1.0)
    assert "worker 1 of generation 1 is gone: " in house.notes[-1]
    house.beat("0")
    assert house.invited() == {"s0": RoundId(2, 1)}


# ---- the restore point on its way to the members


def test_members_are_told_where_their_state_comes_from() -> None:
    house = training_house(4)
    house.close("s3", gone=True)
    house.now += 30
    for node in "012":
        house.beat(node, Activity.WAITING)
    house.register("3", session="new")
    house.join("0", [(10, 1), (20, 1)])
    house.join("1", [(10, 1)])
    house.join("2", [(20, 1)])
    house.join("3", [])
    started = [house.start_of(str(slot)) for slot in range(4)]
    assert {one.restore for one in started} == {Point(20, 1)}
    assert [one.source for one in started] == [0, 0, 2, 2]
    assert [one.serves for one in started] == [(1,), (), (3,), ()]
    assert house.committed().line == (Cut(1, 20),)
    assert started[0].text == "restore point: step 20 of generation 1, held by rank 0, 2; sent to rank 1, 3"


# ---- addresses


def test_the_address_map_goes_out_when_the_last_part_is_in() -> None:
    house = training_house(3)
    house.publish("0", b"a")
    house.publish("2", b"c")
    assert house.ready.sends == []
    house.publish("1", b"b")
    for session in ("s0", "s1", "s2"):
        assert house.answer(session, AddressMap) == AddressMap(1, 1, (b"a", b"b", b"c"))


def test_who_repeats_its_part_gets_the_map_again_alone() -> None:
    house = training_house(2)
    house.publish("0", b"a")
    house.publish("1", b"b")
    house.publish("0", b"a")
    assert [send.session for send in house.ready.sends] == ["s0"]


def test_a_changed_part_is_told_to_everybody() -> None:
    house = training_house(2)
    house.publish("0", b"a")
    house.publish("1", b"b")
    house.publish("0", b"A")
    assert house.answer("s1", AddressMap).blobs == (b"A", b"b")


def test_parts_of_another_generation_are_nothing() -> None:
    house = training_house(2)
    house.publish("0", b"a", generation=2)
    house.publish("0", b"a", generation=0)
    house.publish("1", b"b")
    assert house.ready.sends == []


def test_parts_do_not_outlive_their_generation() -> None:
    house = training_house(2)
    house.publish("0", b"old")
    house.beat("1", Activity.WAITING)
    house.publish("0", b"a")
    assert house.ready.sends == [], "no addresses while a round is open"
    house.train()
    house.publish("1", b"b", generation=2)
    assert house.ready.sends == []
    house.publish("0", b"a", generation=2)
    assert house.answer("s0", AddressMap).blobs == (b"a", b"b")


# ---- numerics

OTHER = (("threads", "4"), ("torch", "2.13.0"))


def test_who_would_compute_other_bits_than_rank_0_is_refused() -> None:
    house = House(policy(2)).fill()
    house.join("0")
    house.join("1", numerics=OTHER)
    assert house.answer("s1", Refused) == Refused(
        "s1",
        Refusal.NUMERICS,
        0.0,
        "worker 1 would compute other bits than rank 0: threads is 4 here and 1 there. Start it with the same values",
    )
    assert house.ready.records == [SeatLeft("1", 1)], "it may come back at once, with the same values"
    assert house.core.phase() == "forming; waiting for 1"
    house.register("1", session="new")
    house.join("1")
    assert house.core.state.generation_number == 1


def test_who_would_compute_other_bits_than_the_job_is_refused_at_once() -> None:
    house = training_house(3, cool_down_s=0.0)
    house.close("s2", gone=True)
    house.register("2", session="new")
    house.join("2", numerics=(("threads", "1"),))
    assert house.answer("new", Refused).text == (
        "worker 2 would compute other bits than the job: torch is unset here and 2.13.0 there. "
        "Start it with the same values"
    )
    house.join("0")
    house.join("1")
    assert house.core.phase() == "forming; waiting for 2"


def test_the_jobs_numerics_survive_the_scheduler() -> None:
    house = training_house(cool_down_s=0.0)
    house.close("s1", gone=True)
    house.crash(after_s=1.0)
    house.beat("0", Activity.WAITING)
    house.join("0", numerics=OTHER)
    assert house.answer("s0", Refused).refusal is Refusal.NUMERICS
