"""The driver's decisions as hosts come, go and fail, and the message for each."""

from __future__ import annotations

from samebits.core.messages import OperatorDecision
from samebits.hosts.host_list import Host, Resting
from samebits.hosts.placement import DEATHS_S, MOST_DEATHS, Placement, PlacementOrders


def hosts(**slots: int) -> tuple[Host, ...]:
    return tuple(Host(name, count) for name, count in slots.items())


def begun(most: int = 6, **slots: int) -> Placement:
    placement = Placement(most, Resting(10, 60))
    assert placement.seen(hosts(**slots)) == [], "the hosts at the start are no change"
    return placement


def texts(orders: PlacementOrders) -> list[str]:
    return [reason.text for reason in orders.reasons]


def test_nothing_is_done_before_the_script_has_answered() -> None:
    assert Placement(4, Resting()).next({"0": "a"}, {}, 0) == PlacementOrders()


def test_numbers_are_assigned_in_order_with_the_reason() -> None:
    orders = begun(a=2, b=1).next({}, {}, 0)
    assert orders.start == [("0", "a"), ("1", "a"), ("2", "b")]
    assert texts(orders) == ["starting 2 on a, 1 on b: 3 workers, and there is room for 3, at most 6"]


def test_numbers_in_use_are_skipped_and_lost_ones_come_last() -> None:
    orders = begun(a=3).next({}, {"1.2": "b"}, 0, used={"0"}, lost={"2"})
    assert [number for number, _ in orders.start] == ["3", "4", "5"]
    orders = begun(4, a=3).next({}, {"1.2": "b"}, 0, used={"0"}, lost={"2"})
    assert [number for number, _ in orders.start] == ["3", "2"]


def test_removed_host_is_drained_with_its_reason() -> None:
    placement = begun(a=1, b=2)
    running = {"0": "a", "1": "b", "2.1": "b"}
    assert placement.seen(hosts(a=1, c=2)) == [OperatorDecision("host c is there, with 2 slots; host b is gone")]
    orders = placement.next(running, {}, 0)
    assert (orders.drain, orders.start) == (["1", "2.1"], [("3", "c"), ("4", "c")])
    assert orders.reasons[0] == OperatorDecision("worker 1, 2.1 leave at the next commit: host b is gone", ("1", "2.1"))


def test_two_answers_between_turns_lose_no_change_and_a_flap_is_none() -> None:
    placement = begun(a=1, b=1)
    running = {"0": "a", "1": "b"}
    placement.seen(hosts(a=1, b=1, c=1))
    placement.seen(hosts(a=1, c=1, d=1))
    orders = placement.next(running, {}, 0)
    assert (orders.drain, orders.start) == (["1"], [("2", "c"), ("3", "d")])
    flapped = begun(a=1, b=1)
    flapped.seen(hosts(a=1))
    flapped.seen(hosts(a=1, b=1))
    assert flapped.next(running, {}, 0) == PlacementOrders()


def test_fewer_slots_or_a_smaller_request_drain_the_newest_workers() -> None:
    placement = begun(a=3)
    running = {"0": "a", "1": "a", "2": "a"}
    assert placement.seen(hosts(a=2)) == [OperatorDecision("host a has 2 slots instead of 3")]
    assert placement.next(running, {}, 0).reasons == [
        OperatorDecision("worker 2 leaves at the next commit: host a has 2 slots", ("2",))
    ]
    orders = placement.next({"0": "a", "1": "a"}, {}, 0, wish=1)
    assert orders.reasons == [OperatorDecision("worker 1 leaves at the next commit: 1 worker is wanted", ("1",))]


def test_drained_host_is_used_again_once_it_returns() -> None:
    placement = begun(a=1, b=1)
    assert placement.seen(hosts(a=1, b=1), ["b"]) == [OperatorDecision("host b is being drained")]
    assert placement.next({"0": "a", "1": "b"}, {}, 0).drain == ["1"]
    assert placement.seen(hosts(a=1, b=1)) == [OperatorDecision("host b is there, with 1 slot")]
    assert placement.next({"0": "a"}, {}, 0).start == [("1", "b")]


def test_leaving_workers_count_towards_the_maximum() -> None:
    placement = begun(3, a=3)
    assert placement.next({"0": "a"}, {"1": "b", "2": "b"}, 0).start == []
    assert placement.next({"0": "a"}, {"1": "b"}, 0).start == [("2", "a")]


def test_killed_worker_is_restarted_on_its_host_and_a_host_that_kills_rests() -> None:
    placement = begun(a=1, b=1)
    assert [placement.died("0", "a", now, has_joined=True) for now in range(MOST_DEATHS - 1)] == [None, None]
    reason = placement.died("0.2", "a", 5, has_joined=True)
    assert reason == OperatorDecision("host a is not used for 10 s: worker 0.2: 3 workers died there within 60 s")
    assert placement.next({"1": "b"}, {}, 5).start == []
    assert placement.wake_at(5) == 15
    orders = placement.next({"1": "b"}, {}, 15)
    assert (orders.start, texts(orders)[0]) == ([("0", "a")], "host a is used again")
    assert placement.died("0", "a", 16, has_joined=True) is None, "its earlier deaths no longer count"


def test_deaths_far_apart_are_not_the_hosts_failure() -> None:
    placement = begun(a=1)
    assert all(placement.died("0", "a", DEATHS_S * at, has_joined=True) is None for at in range(9))


def test_failed_start_is_the_hosts_failure_and_rests_grow() -> None:
    placement = begun(a=1)
    said = [placement.died("0", "a", now, has_joined=False) for now in (0, 10, 30)]
    assert [one.text.split(":")[0] for one in said if one is not None] == [
        "host a is not used for 10 s",
        "host a is not used for 20 s",
        "host a is not used for 40 s",
    ]
    placement.next({"1": "a"}, {}, 70 + 60)
    again = placement.failed("1", "a", 200, "what starts it there ended with status 255")
    assert again.text == "host a is not used for 10 s: worker 1: what starts it there ended with status 255"
