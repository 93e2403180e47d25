"""Generations: which members learn what, where their state comes from, the address map, and equal numerics."""

from __future__ import annotations

from samebits.core.messages import (
    Activity,
    AddressMap,
    GenerationStarted,
    Refusal,
    Refused,
    RoundId,
)
from samebits.core.point import Point
from samebits.core.records import Cut, SeatLeft
from tests.core.house import House, policy, training_house

# ---- generations


def test_ranks_follow_slots_whatever_the_order_of_joining() -> None:
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


def test_member_that_missed_its_start_gets_it_again() -> None:
    house = House(policy(2)).fill()
    house.join("0")
    house.join("1")
    first = house.start_of("1")
    house.beat("1", Activity.WAITING, generation=0)
    assert house.answer("s1", GenerationStarted) == first
    assert house.ready.records == []
    house.beat("1", Activity.FORMING)
    assert house.ready.sends == []


def test_newcomer_is_invited_when_it_registers() -> None:
    house = training_house(cool_down_s=0.0)
    house.close("s1", gone=True)
    house.register("1", session="new")
    assert house.invited() == {"new": RoundId(1, 2)}


def test_second_start_of_a_member_breaks_the_generation() -> None:
    """The grant reached the disk; the round that it opens did not."""
    house = training_house(cool_down_s=0.0)
    house.leave("1")
    house.join("0")
    house.register("1", session="new")
    house.crash(after_s=1.0)
    assert "worker 1 of generation 1 was replaced" in house.notes[-1]
    house.tick(1.0)
    house.beat("0")
    assert house.invited() == {"s0": RoundId(2, 1)}


# ---- the restore point on its way to the members


def test_members_learn_the_source_of_their_state() -> None:
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
    assert started[0].text == "restore point: step 20 of generation 1, held by ranks 0 and 2; sent to ranks 1 and 3"


# ---- addresses


def test_address_map_is_sent_when_the_last_part_is_in() -> None:
    house = training_house(3)
    house.publish("0", b"a")
    house.publish("2", b"c")
    assert house.ready.sends == []
    house.publish("1", b"b")
    for session in ("s0", "s1", "s2"):
        assert house.answer(session, AddressMap) == AddressMap("job-1", 1, 1, (b"a", b"b", b"c"))


def test_member_that_repeats_its_part_alone_gets_the_map_again() -> None:
    house = training_house(2)
    house.publish("0", b"a")
    house.publish("1", b"b")
    house.publish("0", b"a")
    assert [send.session for send in house.ready.sends] == ["s0"]


def test_changed_part_is_sent_to_all() -> None:
    house = training_house(2)
    house.publish("0", b"a")
    house.publish("1", b"b")
    house.publish("0", b"A")
    assert house.answer("s1", AddressMap).blobs == (b"A", b"b")


def test_parts_of_another_generation_are_ignored() -> None:
    house = training_house(2)
    house.publish("0", b"a", generation=2)
    house.publish("0", b"a", generation=0)
    house.publish("1", b"b")
    assert house.ready.sends == []


def test_parts_that_came_with_the_joins_go_out_with_the_places() -> None:
    house = training_house(2)
    house.beat("1", Activity.WAITING)
    house.join("1", blob=b"b")
    house.join("0", blob=b"a")
    for session in ("s0", "s1"):
        told = [type(message) for message in house.sent[session]]
        assert told.index(AddressMap) > told.index(GenerationStarted)
        assert house.answer(session, AddressMap) == AddressMap("job-1", 1, 2, (b"a", b"b"))


def test_join_without_its_part_delays_the_map_until_the_last_part() -> None:
    house = training_house(2)
    house.beat("1", Activity.WAITING)
    house.join("1", blob=b"b")
    house.join("0")
    assert not [send for send in house.ready.sends if isinstance(send.message, AddressMap)]
    house.publish("0", b"a", generation=2)
    assert house.answer("s1", AddressMap).blobs == (b"a", b"b")


def test_successor_does_not_inherit_the_part_of_a_lost_member() -> None:
    house = training_house(2)
    house.beat("1", Activity.WAITING)
    house.join("1", blob=b"old")
    house.close("s1", gone=True)
    house.now += 30
    house.register("1", session="new")
    house.join("1")
    house.join("0", blob=b"a")
    assert house.committed().generation == 2
    assert not [send for send in house.ready.sends if isinstance(send.message, AddressMap)]


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


def test_member_with_other_numerics_than_rank_0_is_refused() -> None:
    house = House(policy(2)).fill()
    house.join("0")
    house.join("1", numerics=OTHER)
    assert house.answer("s1", Refused) == Refused(
        "s1",
        Refusal.NUMERICS,
        0.0,
        "worker 1 would compute different bits than rank 0: threads is 4 here and 1 there. Start it with the same "
        "values",
        "job-1",
        1,
    )
    assert house.ready.records == [SeatLeft("1", 1)], "it may return at once with the same values"
    assert house.core.phase() == "forming; waiting for 1"
    house.register("1", session="new")
    house.join("1")
    assert house.core.state.generation_number == 1


def test_worker_with_other_numerics_than_the_job_is_refused_at_once() -> None:
    house = training_house(3, cool_down_s=0.0)
    house.close("s2", gone=True)
    house.register("2", session="new")
    house.join("2", numerics=(("threads", "1"),))
    assert house.answer("new", Refused).text == (
        "worker 2 would compute different bits than the job: torch is unset here and 2.13.0 there. "
        "Start it with the same values"
    )
    house.join("0")
    house.join("1")
    assert house.core.phase() == "forming; waiting for 2"


def test_numerics_survive_a_scheduler_restart() -> None:
    house = training_house(cool_down_s=0.0)
    house.close("s1", gone=True)
    house.crash(after_s=1.0)
    house.beat("0", Activity.WAITING)
    house.join("0", numerics=OTHER)
    assert house.answer("s0", Refused).refusal is Refusal.NUMERICS
