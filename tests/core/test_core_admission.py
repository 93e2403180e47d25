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


def test_numeric_node_id_is_its_slot() -> None:
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
def test_other_names_get_slots_by_host_and_node_once_all_have_registered(
    nodes: list[tuple[str, str]], order: list[str]
) -> None:
    house = House(policy(len(nodes)))
    for count, (host, node) in enumerate(nodes[:-1], start=1):
        house.register(node, process=on(host))
        assert house.ready.records == [], "nothing is written before every slot can be filled"
        assert house.answer(f"s{node}", Pending) == Pending(f"s{node}", 1, count, len(nodes))
    host, node = nodes[-1]
    house.register(node, process=on(host))
    assert [record.node for record in house.records(SeatGranted)] == order
    assert [house.core.state.by_slot[slot] for slot in range(len(nodes))] == order
    for slot, name in enumerate(order):
        assert house.admission(f"s{name}").slot == slot


def test_unnamed_nodes_fill_the_slots_that_are_left() -> None:
    house = House(policy(4))
    house.register("b")
    house.register("1")
    house.register("a")
    assert house.answer("sa", Pending).registered == 3
    house.register("c")
    assert house.core.state.by_slot == {0: "a", 1: "1", 2: "b", 3: "c"}


def test_numeric_node_that_completes_the_world_seats_the_pending_ones() -> None:
    house = House(policy(2))
    house.register("a")
    house.register("0")
    assert house.core.state.by_slot == {0: "0", 1: "a"}
    assert house.admission("sa").slot == 1
    assert house.invited().keys() == {"s0", "sa"}


def test_repeated_register_while_pending_counts_once() -> None:
    house = House(policy(3))
    house.register("a")
    house.register("a")
    assert house.answer("sa", Pending).registered == 1
    house.register("a", session="again")
    assert house.answer("again", Pending).registered == 1


def test_pending_process_is_forgotten_when_its_connection_closes() -> None:
    house = House(policy(2))
    house.register("a")
    house.close("sa")
    house.register("b")
    assert house.answer("sb", Pending).registered == 1


def test_pending_process_is_forgotten_after_its_timeout() -> None:
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


def test_node_id_of_a_spare_is_refused_permanently() -> None:
    house = House(policy(2))
    house.register("2")
    assert house.refusal("s2") == Refused(
        "s2", Refusal.FULL, 0.0, "NODE_ID=2 names a spare, and this job has none: the slots are 0..1", "job-1", 1
    )
    assert house.ready.records == []


def test_full_refusal_names_the_holders() -> None:
    house = training_house()
    house.register("x")
    refused = house.refusal("sx")
    assert (refused.refusal, refused.retry_after_s) == (Refusal.FULL, 5.0)
    assert refused.text == "no seat for worker x: held by 0 (pid 1000 on host-a), 1 (pid 1001 on host-a)"


def test_full_refusal_counts_holders_beyond_four() -> None:
    house = House(policy(6)).fill()
    house.register("x")
    assert house.refusal("sx").text.endswith("3 (pid 1003 on host-a) and 2 more")


def test_named_slot_held_by_another_node_is_refused() -> None:
    house = House(policy(2))
    house.register("a", process=on("h", 21))
    house.register("b", process=on("h", 22))
    house.register("1")
    refused = house.refusal("s1")
    assert (refused.refusal, refused.text) == (Refusal.FULL, "no seat for worker 1: held by b (pid 22 on h)")


def test_lost_seat_is_reassigned_after_its_cool_down() -> None:
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


def test_vacated_seat_is_reassigned_at_once() -> None:
    house = House(policy(2))
    house.register("a")
    house.register("b")
    house.train()
    house.leave("b")
    house.register("c")
    assert house.admission("sc").slot == 1


def test_of_several_lost_seats_the_earliest_then_lowest_is_reassigned() -> None:
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


def test_seat_of_a_silent_node_is_not_reassigned_before_it_is_lost() -> None:
    house = training_house(cool_down_s=0.0)
    house.now += 100
    house.register("x")
    assert house.refusal("sx").refusal is Refusal.FULL, "only a Tick, after the socket is drained, may declare a loss"


@pytest.mark.parametrize("name", ["²", "1" * 5000, "9" * 18, "node-" + "7" * 5000, "٣", "", "-1", "+1", "1_0", " 1"])
def test_no_node_name_crashes_the_scheduler(name: str) -> None:
    house = House(policy(2))
    house.register(name, process=on(name))
    house.register("other", process=on("²"))
    assert house.sent["s" + name]


def test_pending_nodes_are_counted_with_the_seated_ones() -> None:
    house = House(policy(3))
    house.register("blue")
    house.register("1")
    assert house.notes[-1] == "2/3 registered: worker 1 (pid 1001 on host-a) has slot 1"


def test_waiting_for_a_full_world_is_logged_once() -> None:
    house = House(policy(2))
    house.register("blue")
    assert house.notes[-1] == "1/2 registered"
    house.register("blue")
    assert house.ready.notes == [], "asked again"


# ---- rule 2: the same session again


def test_repeated_register_gets_the_same_answer() -> None:
    house = House(policy(2))
    house.register("0")
    first = house.admission("s0")
    house.now += 1
    house.register("0")
    assert house.admission("s0") == first
    assert house.ready.records == []


def test_repeated_register_in_a_running_generation_changes_nothing() -> None:
    house = training_house()
    house.register("0")
    assert house.admission("s0").incarnation == 1
    assert house.ready.records == []
    assert house.core.phase() == "training"
