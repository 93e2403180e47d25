"""A killed scheduler: what it knows after its restart, what it must learn, and how long workers wait."""

from __future__ import annotations

import pytest

from samebits.core.messages import Activity, AddressMap, Finished, Refusal, RoundId, RoundOpened
from samebits.core.records import GenerationCommitted, SeatLost, SeatResumed, TermStarted
from samebits.core.state import JobState
from tests.core.house import House, policy, training_house


def left_s(house: House, node: str) -> float:
    """Return the wait in seconds that a new session of the node gets."""
    house.register(node, session="probe")
    return house.refusal("probe").retry_after_s


# ---- leases and cool-downs


def test_terms_rise() -> None:
    house = House(policy(2))
    assert house.core.state.term == 1
    house.crash()
    house.crash()
    assert house.core.state.term == 3
    assert house.ready.records == [TermStarted(3, "boot-1", house.now)]


def test_first_start_creates_the_job_and_a_second_keeps_it() -> None:
    house = House(policy(2))
    assert [type(record).__name__ for record in house.journal] == ["JobCreated", "TermStarted"]
    house.crash(keep=1)
    assert house.core.state.job == "job-1"
    assert [type(record).__name__ for record in house.ready.records] == ["TermStarted"]


def test_leases_start_over() -> None:
    house = training_house()
    house.crash(after_s=1000.0)
    loaded = house.now
    house.tick(4.99)
    assert not house.seat("0").is_lost and house.core.phase() == "training"
    house.tick(0.01)
    assert house.records(SeatLost) == [
        SeatLost(node, 1, since=loaded, reason="silent for 5 s (NODE_TIMEOUT)") for node in "01"
    ]


def test_cool_down_counts_from_load() -> None:
    """Everything was killed. No wait exceeds one cool-down from the scheduler's load."""
    house = training_house()
    house.crash(after_s=3.0)
    loaded = house.now
    house.now += 1
    refused = left_s(house, "1")
    assert refused == 29.0
    assert house.refusal("probe").refusal is Refusal.ALIVE
    house.tick(4.0)
    assert left_s(house, "1") == 25.0
    assert house.refusal("probe").refusal is Refusal.COOLING_DOWN
    house.now = loaded + 30
    house.register("1", session="probe")
    assert house.admission("probe").incarnation == 2


def test_further_restart_never_lengthens_a_wait() -> None:
    house = training_house()
    house.crash(after_s=3.0)
    loaded = house.now
    for _ in range(11):
        house.crash(after_s=2.5)
        assert left_s(house, "1") == pytest.approx(max(loaded + 30 - house.now, 5.0))
    house.now = loaded + 30
    house.register("1", session="probe")
    assert house.refusal("probe").refusal is Refusal.ALIVE, "this start has not listened for NODE_TIMEOUT yet"
    assert house.refusal("probe").retry_after_s == pytest.approx(2.5)
    house.tick(2.5)
    house.register("1", session="probe")
    assert house.admission("probe").incarnation == 2


def test_wait_proven_by_the_journal_continues() -> None:
    house = training_house()
    house.close("s1", gone=True)
    lost_at = house.now
    house.crash(after_s=20.0)
    assert left_s(house, "1") == pytest.approx(lost_at + 30 - house.now)
    house.crash(after_s=10.0)
    house.register("1", session="new")
    assert house.admission("new").incarnation == 2


def test_wait_of_another_boot_starts_over() -> None:
    house = training_house()
    house.close("s1", gone=True)
    house.now = 5.0  # the machine was rebooted, so its clock restarted
    house.crash(boot_id="boot-2")
    assert left_s(house, "1") == 30.0
    house.crash(after_s=10.0)
    assert left_s(house, "1") == 20.0, "a second start in that boot continues the count"


def test_node_heard_again_waits_from_load_after_the_next_crash() -> None:
    house = training_house()
    house.crash(after_s=1.0)
    house.now += 20
    house.beat("1")
    assert house.records(SeatResumed) == [SeatResumed("1", 1)]
    house.crash(after_s=1.0)
    assert left_s(house, "1") == 30.0


def test_loss_that_was_never_announced_is_still_known() -> None:
    house = training_house()
    house.close("s1", gone=True)
    house.crash(after_s=1.0)
    assert house.seat("1").is_lost
    assert house.core.phase() == "forming; waiting for 1"
    assert house.notes[-1].startswith("round 2.1 opened: worker 1 of generation 1 is lost: its connection closed")


# ---- rounds and generations


def test_all_resume_without_a_round() -> None:
    house = training_house()
    house.crash(after_s=5.0)
    for node in "01":
        house.register(node, incarnation=1, job="job-1")
        house.beat(node, step=120)
    house.tick(1.0)
    assert house.core.phase() == "training"
    assert house.core.state.generation_number == 1
    assert not any(isinstance(record, GenerationCommitted) for record in house.ready.records)


def test_round_ids_are_never_reused() -> None:
    house = House(policy(2)).fill()
    assert house.last("s0", RoundOpened).round == RoundId(1, 1)
    house.crash()
    house.register("0", incarnation=1, job="job-1")
    assert house.answer("s0", RoundOpened).round == RoundId(2, 1)


def test_worker_left_in_a_dead_schedulers_round_is_invited_again() -> None:
    house = training_house()
    house.close("s1")
    house.beat("0", Activity.WAITING)
    house.crash(after_s=1.0)
    house.register("0", incarnation=1, job="job-1")
    house.beat("0", Activity.WAITING)
    assert house.last("s0", RoundOpened).round == RoundId(2, 1)


def test_member_that_waits_without_a_loss_opens_a_new_round() -> None:
    """The dead scheduler's round was opened by a loss that was recovered before it died."""
    house = training_house()
    house.crash(after_s=1.0)
    house.beat("0", Activity.TRAINING)
    house.beat("1", Activity.WAITING)
    assert house.invited().keys() == {"s0", "s1"}


def test_generation_committed_but_not_announced_is_formed_again() -> None:
    house = House(policy(2)).fill()
    house.join("0")
    house.join("1")
    assert house.core.state.generation_number == 1
    house.crash(after_s=1.0)
    house.beat("0", Activity.FORMING, generation=1)
    assert house.invited() == {}
    house.beat("1", Activity.WAITING, generation=0)
    assert house.invited().keys() == {"s0", "s1"}
    assert house.notes[-1].endswith("worker 1 did not receive generation 1 before the scheduler died")
    house.join("0")
    house.join("1")
    assert house.core.state.generation_number == 2


def test_heartbeat_to_an_earlier_term_changes_nothing() -> None:
    """The heartbeat was queued before its sender learned of the generation in which all now train."""
    house = training_house()
    house.crash(after_s=1.0)
    for node in "01":
        house.register(node, incarnation=1, job="job-1")
        house.beat(node)
    house.beat("1", Activity.WAITING, generation=0, term=1)
    assert house.invited() == {} and house.core.phase() == "training"


def test_worker_that_addresses_an_earlier_term_learns_of_this_one() -> None:
    """A late admission told it that it is registered, so it would wait for a start forever."""
    house = House(policy(1)).fill()
    house.join("0")
    house.crash(after_s=1.0)
    for _ in range(2):  # and again, in case that was lost
        house.beat("0", Activity.WAITING, generation=0, term=1)
        assert house.admission("s0").term == 2
        house.now += 1
    house.beat("0", Activity.WAITING, generation=0)
    assert house.invited() == {"s0": RoundId(2, 1)}


def test_address_map_is_collected_again() -> None:
    house = training_house()
    house.publish("0", b"a")
    house.crash(after_s=1.0)
    house.publish("1", b"b")
    assert not any(isinstance(send.message, AddressMap) for send in house.ready.sends)
    house.publish("0", b"a")
    assert house.answer("s0", AddressMap).blobs == (b"a", b"b")
    assert house.answer("s1", AddressMap) == AddressMap("job-1", 2, 1, (b"a", b"b"))


def test_replacement_granted_but_not_notified_resumes() -> None:
    house = training_house(cool_down_s=0.0)
    house.close("s1", gone=True)
    house.register("1", session="new")
    house.crash(after_s=1.0)
    assert house.core.phase() == "forming; waiting for 0, 1"
    house.register("1", session="new")
    assert house.admission("new").incarnation == 2


def test_half_seated_world_is_filled_in_the_same_order_after_a_crash() -> None:
    house = House(policy(3))
    for node in ("c", "a", "b"):
        house.register(node)
    whole = dict(house.core.state.by_slot)
    house.crash(keep=len(house.journal) - 2)  # one grant of three is on disk
    for node in ("c", "b", "a"):
        house.register(node)
    assert house.core.state.by_slot == whole == {0: "a", 1: "b", 2: "c"}


def test_all_done_workers_are_counted_again() -> None:
    house = training_house()
    house.beat("0", Activity.DONE, step=50)
    house.crash(after_s=1.0)
    house.beat("1", Activity.DONE, step=50)
    assert house.core.state.final is None
    house.beat("0", Activity.DONE, step=50)
    assert house.core.state.final is not None
    assert house.answer("s1", Finished).point.step == 50


# ---- the state on disk


def test_scheduler_starts_from_every_prefix_of_the_journal() -> None:
    house = House(policy(2, cool_down_s=0.0))
    house.register("b")
    house.register("a")
    house.train()
    house.close("sb", gone=True)
    house.register("c")
    house.train(na=[(10, 1)])
    house.leave("c", on_purpose=False, text="ValueError")
    house.crash(after_s=1.0)
    for keep in range(len(house.journal) + 1):
        again = House(house.policy, now=house.now, journal=list(house.journal[:keep]))
        assert again.core.state == JobState.replay(again.journal)
        again.tick(5.0)
        assert again.core.state == JobState.replay(again.journal)
