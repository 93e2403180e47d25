"""Admission of unknown nodes: rules 1 and 2 of docs/contributors/architecture.md, with every refusal's message."""

from __future__ import annotations

import pytest

from samebits.core.messages import (
    Admitted,
    Pending,
    Process,
    Refusal,
    Refused,
)
from samebits.core.records import SeatGranted, SeatRetired
from tests.core.house import House, policy, training_house


def on(host: str, pid: int = 7) -> Process:
    return Process(host, pid, 1, "cpu")


# ---- rule 1: unknown nodes


def test_digits_name_the_slot() -> None:
    house = House(policy(3))
    house.register("2")
    assert house.ready.records == [
        SeatGranted("2", slot=2, incarnation=1, session="s2", process=house.seat("2").process)
    ]
    assert house.admission("s2") == Admitted(
        session="s2", job="job-1", term=1, slot=2, incarnation=1, world_size=3, finished=None
    )
    assert "1/3 registered: worker 2 (pid 1000 on host-a) has slot 2; waiting for 0, 1" in house.notes


@pytest.mark.parametrize(
    ("nodes", "order"),
    [
        # (host, node id): numbers inside a name count as numbers
        ([("10.0.0.10", "a"), ("10.0.0.9", "b")], ["b", "a"]),
        ([("h", "n10"), ("h", "n9")], ["n9", "n10"]),
        ([("h2", "a"), ("h10", "b"), ("h1", "c")], ["c", "a", "b"]),
        ([("h", "07"), ("h", "6x")], ["6x", "07"]),
        ([("beta", "a"), ("alpha", "b")], ["b", "a"]),
        ([("²", "a"), ("h", "½")], ["½", "a"]),
    ],
)
def test_other_names_get_slots_by_host_and_node_once_the_house_is_full(
    nodes: list[tuple[str, str]], order: list[str]
) -> None:
    house = House(policy(len(nodes)))
    for count, (host, node) in enumerate(nodes[:-1], start=1):
        house.register(node, process=on(host))
        assert house.ready.records == [], "nothing is written before the house is full"
        assert house.answer(f"s{node}", Pending) == Pending(f"s{node}", 1, count, len(nodes))
    host, node = nodes[-1]
    house.register(node, process=on(host))
    assert [record.node for record in house.records(SeatGranted)] == order
    assert [house.core.state.by_slot[slot] for slot in range(len(nodes))] == order
    for slot, name in enumerate(order):
        assert house.admission(f"s{name}").slot == slot


def test_the_rest_of_the_slots_when_some_are_named() -> None:
    house = House(policy(4))
    house.register("b")
    house.register("1")
    house.register("a")
    assert house.answer("sa", Pending).registered == 3
    house.register("c")
    assert house.core.state.by_slot == {0: "a", 1: "1", 2: "b", 3: "c"}


def test_a_named_slot_that_fills_the_house_seats_those_who_wait() -> None:
    house = House(policy(2))
    house.register("a")
    house.register("0")
    assert house.core.state.by_slot == {0: "0", 1: "a"}
    assert house.admission("sa").slot == 1
    assert house.invited().keys() == {"s0", "sa"}


def test_asking_again_while_the_house_fills_counts_once() -> None:
    house = House(policy(3))
    house.register("a")
    house.register("a")
    assert house.answer("sa", Pending).registered == 1
    house.register("a", session="again")
    assert house.answer("again", Pending).registered == 1


def test_a_pending_process_whose_connection_closes_is_forgotten() -> None:
    house = House(policy(2))
    house.register("a")
    house.close("sa")
    house.register("b")
    assert house.answer("sb", Pending).registered == 1


def test_a_pending_process_that_falls_silent_is_forgotten() -> None:
    house = House(policy(2))
    house.register("a")
    house.tick(4.9)
    house.register("b", session="probe")
    assert house.core.state.by_slot == {0: "a", 1: "b"}

    house = House(policy(2))
    house.register("a")
    house.tick(5.0)
    house.register("b")
    assert house.answer("sb", Pending).registered == 1


def test_a_node_id_that_names_a_spare_is_refused_for_good() -> None:
    house = House(policy(2))
    house.register("2")
    assert house.refusal("s2") == Refused(
        "s2", Refusal.FULL, 0.0, "NODE_ID=2 names a spare, and this job has none: the slots are 0..1", "job-1", 1
    )
    assert house.ready.records == []


def test_full_names_the_holders() -> None:
    house = training_house()
    house.register("x")
    refused = house.refusal("sx")
    assert (refused.refusal, refused.retry_after_s) == (Refusal.FULL, 5.0)
    assert refused.text == "no seat for worker x: held by 0 (pid 1000 on host-a), 1 (pid 1001 on host-a)"


def test_full_counts_the_holders_beyond_four() -> None:
    house = House(policy(6)).fill()
    house.register("x")
    assert house.refusal("sx").text.endswith("3 (pid 1003 on host-a) and 2 more")


def test_a_named_slot_is_refused_while_somebody_else_lives_in_it() -> None:
    house = House(policy(2))
    house.register("a", process=on("h", 21))
    house.register("b", process=on("h", 22))
    house.register("1")
    refused = house.refusal("s1")
    assert (refused.refusal, refused.text) == (Refusal.FULL, "no seat for worker 1: held by b (pid 22 on h)")


def test_a_lost_seat_is_given_away_after_its_cool_down() -> None:
    house = House(policy(2))
    house.register("a")
    house.register("b")
    house.train()
    house.close("sb", gone=True)
    house.now += 10
    house.register("c")
    refused = house.refusal("sc")
    assert (refused.refusal, refused.retry_after_s) == (Refusal.COOLING_DOWN, 20.0)
    assert refused.text == (
        "slot 1 of worker b, lost (its connection closed and its process is gone), is free again in 20.0 s"
    )
    house.now += 20
    house.register("c")
    assert house.ready.records[0] == SeatRetired("b", 1)
    granted = house.records(SeatGranted)[0]
    assert (granted.node, granted.slot, granted.incarnation) == ("c", 1, 1)
    assert house.core.state.by_slot == {0: "a", 1: "c"}
    assert house.seat("b").slot is None


def test_a_seat_that_was_left_is_given_away_at_once() -> None:
    house = House(policy(2))
    house.register("a")
    house.register("b")
    house.train()
    house.leave("b")
    house.register("c")
    assert house.admission("sc").slot == 1


def test_of_several_lost_seats_the_first_that_is_free_and_then_the_lowest_is_given_away() -> None:
    house = House(policy(3))
    for node in "abc":
        house.register(node)
    house.train()
    house.close("sc", gone=True)
    house.now += 1
    house.close("sb", gone=True)
    house.register("x")
    assert house.refusal("sx").retry_after_s == 29.0, "c was lost first"
    house.now += 40
    house.register("x")
    assert house.admission("sx").slot == 1, "both are free: the lower slot"


def test_a_seat_of_a_node_that_is_silent_but_not_yet_lost_is_not_given_away() -> None:
    house = training_house(cool_down_s=0.0)
    house.now += 100
    house.register("x")
    assert house.refusal("sx").refusal is Refusal.FULL, "only a Tick, after the socket is drained, may declare a loss"


@pytest.mark.parametrize("name", ["²", "1" * 5000, "9" * 18, "node-" + "7" * 5000, "٣", "", "-1", "+1", "1_0", " 1"])
def test_no_name_breaks_the_scheduler(name: str) -> None:
    house = House(policy(2))
    house.register(name, process=on(name))
    house.register("other", process=on("²"))
    assert house.sent["s" + name]


def test_those_who_wait_for_a_full_house_are_counted_with_those_who_have_a_slot() -> None:
    house = House(policy(3))
    house.register("blue")
    house.register("1")
    assert house.notes[-1] == "2/3 registered: worker 1 (pid 1001 on host-a) has slot 1"


def test_it_is_said_once_that_somebody_waits_for_a_full_house() -> None:
    house = House(policy(2))
    house.register("blue")
    assert house.notes[-1] == "1/2 registered"
    house.register("blue")
    assert house.ready.notes == [], "asked again"


# ---- rule 2: the same session again


def test_the_same_session_gets_the_same_answer_again() -> None:
    house = House(policy(2))
    house.register("0")
    first = house.admission("s0")
    house.now += 1
    house.register("0")
    assert house.admission("s0") == first
    assert house.ready.records == []


def test_the_same_session_again_in_a_running_generation_changes_nothing() -> None:
    house = training_house()
    house.register("0")
    assert house.admission("s0").incarnation == 1
    assert house.ready.records == []
    assert house.core.phase() == "training"
