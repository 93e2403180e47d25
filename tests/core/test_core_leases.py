"""Leases: when they end, where the cool-down counts from, and a scheduler that was paused."""

from __future__ import annotations

import pytest

from samebits.core.messages import Activity, Heartbeat, Process, ReportEnvelope, RoundOpened
from samebits.core.records import SeatLost, SeatResumed
from samebits.core.reports import LastWords, PeerGone
from samebits.core.scheduler import SchedulerPaused
from samebits.core.values import replace
from tests.core.house import House, policy, training_house

# ---- how a lease ends


def test_silence_ends_a_lease() -> None:
    house = training_house()
    begin = house.now
    house.tick(4.999)
    assert not house.seat("1").is_lost
    assert house.core.wake_at() == pytest.approx(begin + 5)
    house.beat("0")
    house.tick(0.001)
    assert house.records(SeatLost) == [SeatLost("1", 1, since=begin, reason="silent for 5 s (NODE_TIMEOUT)")]
    assert house.notes[-2:] == [
        "worker 1 (pid 1001 on host-a) is lost: silent for 5 s (NODE_TIMEOUT)",
        "round 1.2 opened: worker 1 (pid 1001 on host-a) is lost: silent for 5 s (NODE_TIMEOUT)",
    ]


@pytest.mark.parametrize("way", ["message", "registration"])
def test_return_of_a_lost_worker_in_its_session_is_reported_once(way: str) -> None:
    house = training_house()
    house.tick(4.999)
    house.beat("0")
    house.tick(0.001)
    assert house.seat("1").is_lost
    if way == "registration":
        house.register("1")
    house.beat("1")
    house.beat("1")
    assert house.seat("1").is_held
    told = [note for note in house.notes if "is back" in note]
    assert told == ["worker 1 is back (pid 1001 on host-a), same incarnation 1"]


def test_every_accepted_message_renews_the_lease() -> None:
    house = training_house()
    for renew in (
        lambda: house.beat("1"),
        lambda: house.join("1"),
        lambda: house.publish("1", b"x"),
        lambda: house.receive("s1", ReportEnvelope(house.credential("1"), LastWords("text"), step=3)),
        lambda: house.register("1"),
    ):
        house.now += 4
        house.beat("0")
        renew()
        house.tick()
        assert not house.seat("1").is_lost


def test_close_ends_a_lease_after_its_grace() -> None:
    house = training_house()
    house.close("s1")
    closed = house.now
    assert house.core.wake_at() == pytest.approx(closed + 0.5)
    house.tick(0.499)
    assert not house.seat("1").is_lost
    house.tick(0.001)
    assert house.records(SeatLost) == [
        SeatLost("1", 1, since=closed, reason="its connection closed and stayed closed for 0.5 s")
    ]


def test_reconnect_within_the_grace_loses_nothing() -> None:
    house = training_house()
    house.close("s1")
    house.now += 0.4
    house.beat("1")
    house.tick(2.0)
    assert not house.seat("1").is_lost
    house.close("s1")
    house.tick(0.3)
    assert not house.seat("1").is_lost, "a second close has its own grace"
    house.tick(0.2)
    assert house.seat("1").is_lost


def test_close_does_not_lengthen_a_lease() -> None:
    house = training_house(node_timeout_s=5.0, reconnect_grace_s=20.0)
    house.now += 4
    house.beat("0")
    house.close("s1")
    house.tick(1.0)
    assert house.seat("1").reason == "silent for 5 s (NODE_TIMEOUT)"


def test_process_seen_dead_is_lost_at_once() -> None:
    house = training_house()
    house.close("s1", gone=True)
    assert house.records(SeatLost) == [SeatLost("1", 1, house.now, "its connection closed and its process is gone")]


def test_death_seen_on_its_host_is_accepted_at_once() -> None:
    house = training_house(3)
    house.receive("s0", ReportEnvelope(house.credential("0"), PeerGone("s1")))
    lost = SeatLost("1", 1, house.now, "its process ended (seen by worker 0 on the same host)")
    assert house.records(SeatLost) == [lost]
    assert house.invited().keys() == {"s0", "s2"}
    house.now += 0.1
    house.receive("s2", ReportEnvelope(house.credential("2"), PeerGone("s1")))
    house.beat("1")  # was already on the way
    house.close("s1", gone=True)
    assert house.records(SeatLost) == []
    assert house.seat("1").is_lost


@pytest.mark.parametrize("case", ["another host", "itself", "an older session", "nobody", "a fenced witness"])
def test_only_a_process_on_the_same_host_can_see_a_death(case: str) -> None:
    house = training_house(3, cool_down_s=0.0)
    witness, session = "0", "s1"
    match case:
        case "another host":
            house.close("s0", gone=True)
            house.register("0", session="t0", process=Process("host-b", 7, 7, "cpu"))
            witness = "t0"
        case "itself":
            session = "s0"
        case "an older session":
            house.close("s1", gone=True)
            house.register("1", session="t1")
        case "nobody":
            session = "s9"
        case _:
            house.close("s0", gone=True)
            house.register("0", session="t0")
    before = {node: house.seat(node).is_lost for node in "012"}
    credential = house.credential("0")
    house.receive(
        witness,
        ReportEnvelope(
            replace(credential, session="s0") if case == "a fenced witness" else credential, PeerGone(session)
        ),
    )
    assert {node: house.seat(node).is_lost for node in "012"} == before
    assert house.records(SeatLost) == []


def test_failed_collective_makes_a_close_final() -> None:
    house = training_house(3)
    house.close("s1")
    house.beat("0", Activity.WAITING)
    assert house.records(SeatLost) == [
        SeatLost("1", 1, house.now, "its connection closed and a collective with it failed")
    ]
    assert house.core.phase() == "forming; waiting for 1", "the others only have to arrive"
    assert house.invited().keys() == {"s0", "s2"}


def test_close_after_the_failed_collective_is_final_too() -> None:
    house = training_house(3)
    house.beat("0", Activity.WAITING)
    house.join("0")
    house.close("s1")
    assert house.records(SeatLost)


def test_failed_collective_loses_no_member_with_an_open_connection() -> None:
    house = training_house(3)
    house.beat("0", Activity.WAITING)
    house.tick()
    assert not any(house.seat(node).is_lost for node in "012")


@pytest.mark.parametrize("reason", ["a newcomer", "an earlier generation"])
def test_only_a_members_report_of_its_generation_corroborates(reason: str) -> None:
    house = training_house(3, cool_down_s=0.0)
    if reason == "a newcomer":
        house.close("s2", gone=True)
        house.register("2", session="new")
        house.close("s1")
        house.beat("2", Activity.WAITING)
    else:
        house.close("s1")
        house.beat("0", Activity.WAITING, generation=0)
    assert not house.seat("1").is_lost


@pytest.mark.parametrize(("node", "is_lost"), [("0", True), ("2", False)], ids=["a member", "a newcomer"])
def test_members_join_to_a_round_opened_by_another_loss_corroborates(node: str, is_lost: bool) -> None:
    house = training_house(3, cool_down_s=0.0)
    house.close("s2", gone=True)
    house.register("2", session="new")
    house.close("s1")
    house.join(node)
    assert house.seat("1").is_lost is is_lost


def test_deadlines_of_earlier_incarnations_are_forgotten() -> None:
    house = training_house(cool_down_s=0.0)
    for number in range(20):
        house.close(house.seat("1").session, gone=True)
        house.register("1", session=f"again{number}")
        for _ in range(2):
            house.now += 4.0
            house.beat("0"), house.beat("1", Activity.SEATED)
            house.tick()
    assert len(house.core._leases._deadlines) <= 4


def test_loss_of_many_is_one_step() -> None:
    house = training_house(4)
    house.now += 5
    house.beat("3")
    house.tick()
    assert [record.node for record in house.records(SeatLost)] == ["0", "1", "2"]
    assert house.invited().keys() == {"s3"}


def test_last_words_are_the_reason() -> None:
    house = training_house()
    house.receive("s1", ReportEnvelope(house.credential("1"), LastWords("CUDA out of memory"), step=41))
    house.close("s1", gone=True)
    assert house.records(SeatLost)[0].reason == "CUDA out of memory"
    assert house.core.first_cause == (
        "rank 1 (node 1, host host-a, pid 1001) failed first, at step 41: CUDA out of memory "
        "(software fault; the others wait for it)"
    )
    house.close("s0", gone=True)
    assert house.core.first_cause.startswith(
        "2 failed at once: rank 1 (node 1, host host-a, pid 1001), at step 41: CUDA"
    )
    assert "; rank 0 (node 0, host host-a, pid 1000): its connection closed" in house.core.first_cause


def test_recovered_loss_is_not_the_first_cause_of_the_next() -> None:
    house = training_house(cool_down_s=0.0)
    house.close("s1", gone=True)
    house.register("1", session="new")
    house.join("0")
    house.join("1")
    assert house.core.state.generation_number == 2
    house.close("new", gone=True)
    house.beat("0")
    assert house.core.first_cause == (
        "rank 1 (node 1, host host-a, pid 1002) failed first: its connection closed and its process is gone "
        "(node fault; the others wait for it)"
    )
    house.register("1", session="newest")
    house.train()
    assert house.core.first_cause == ""


def test_close_of_an_unknown_session_is_ignored() -> None:
    house = training_house()
    house.close("nobody", gone=True)
    assert house.ready.records == [] and not house.seat("1").is_lost


def test_close_of_a_replaced_session_is_ignored() -> None:
    house = training_house(cool_down_s=0.0)
    house.close("s1", gone=True)
    house.register("1", session="new")
    house.close("s1", gone=True)
    assert not house.seat("1").is_lost


def test_endless_reconnecting_leaves_nothing_behind() -> None:
    """Deadlines are re-examined when they are due; a node has a bounded number of them (S16)."""
    house = training_house()
    for _ in range(500):
        house.now += 1
        house.beat("0")
        house.close("s1")
        house.beat("1")
        house.tick()
    assert len(house.core._leases._deadlines) <= 20


# ---- the cool-down


def cool_down_left(house: House, node: str) -> float:
    house.register(node, session="probe")
    return house.refusal("probe").retry_after_s


def test_cool_down_counts_from_the_last_accepted_message_not_the_loss() -> None:
    house = training_house()
    house.now += 5
    house.beat("0")
    house.tick()
    assert house.seat("1").is_lost
    assert cool_down_left(house, "1") == 25.0


def test_cool_down_counts_from_a_later_close() -> None:
    house = training_house()
    house.now += 2
    house.close("s1")
    house.beat("0")
    house.tick(0.5)
    assert cool_down_left(house, "1") == 29.5


def test_close_observed_after_the_loss_counts() -> None:
    """A link that died long ago is reset. Only now is it certain that no more messages follow."""
    house = training_house()
    house.now += 5
    house.beat("0")
    house.tick()
    house.now += 7
    house.close("s1")
    assert house.records(SeatLost) == [SeatLost("1", 1, house.now, "silent for 5 s (NODE_TIMEOUT)")]
    assert cool_down_left(house, "1") == 30.0


def test_death_of_a_process_after_its_close_does_not_count_again() -> None:
    """The kernel may take time to free a killed process's memory; its connection closed long before."""
    house = training_house()
    house.close("s1")
    house.beat("0")
    house.tick(0.5)
    house.now += 3.0
    house.close("s1", gone=True)
    assert cool_down_left(house, "1") == 26.5


def test_cool_down_is_independent_of_the_lease() -> None:
    """A short cool-down is over before the lease, a long one long after it."""
    house = training_house(cool_down_s=1.0)
    house.now += 4.9
    assert cool_down_left(house, "1") == pytest.approx(0.1), "the rest is the lease"
    house = training_house(cool_down_s=0.0)
    house.close("s1", gone=True)
    house.register("1", session="new")
    assert house.admission("new").incarnation == 2


def test_resumed_node_that_is_lost_again_waits_the_full_cool_down() -> None:
    house = training_house()
    house.close("s1")
    house.tick(0.5)
    house.now += 20
    house.beat("0")
    house.beat("1")
    assert house.records(SeatResumed)
    house.close("s1", gone=True)
    assert cool_down_left(house, "1") == 30.0


# ---- fencing (S6)


def test_messages_of_a_superseded_incarnation_change_nothing() -> None:
    house = training_house(3, cool_down_s=0.0)
    stale = house.credential("1")
    house.close("s1")
    house.beat("0")
    house.beat("2")
    house.tick(0.5)
    house.register("1", session="new")
    presence = house.core.presence("1")
    assert presence is not None
    until, round_ = presence.lease_until, house.last("new", RoundOpened).round
    house.now += 3
    house.receive("s1", Heartbeat(stale, 1, Activity.DONE, 1, round_, 99))
    assert house.ready.records == []
    assert (presence.lease_until, presence.activity, presence.step) == (until, Activity.SEATED, 0)
    (answer,) = house.ready.sends
    assert answer.session == "s1" and type(answer.message).__name__ == "Fenced"
    house.beat("0")
    house.beat("2")
    house.tick(2.0)
    assert house.seat("1").is_lost, "the new incarnation's lease was not renewed by the old one"


def test_message_of_another_job_is_not_answered() -> None:
    house = training_house()
    credential = house.credential("1")
    stranger = type(credential)("job-9", "1", credential.session, credential.incarnation)
    house.receive("s1", Heartbeat(stranger, 1, Activity.TRAINING, 1, None, 1))
    assert house.ready.sends == [] and house.ready.records == []


def test_duplicate_of_the_last_message_changes_nothing() -> None:
    house = training_house()
    last = house.credential("1")
    house.leave("1", on_purpose=False, text="ValueError")
    house.now += 3
    for _ in range(2):
        house.receive("s1", Heartbeat(last, 1, Activity.TRAINING, 1, None, 1))
        assert house.ready.records == []
    assert cool_down_left(house, "1") == 27.0


# ---- a paused scheduler (S18)


@pytest.mark.parametrize("stalled_first", [True, False])
def test_scheduler_pause_loses_no_worker(stalled_first: bool) -> None:
    house = training_house()
    house.now += 60.0
    if stalled_first:
        house.step(SchedulerPaused(60.0))
    house.beat("0")  # one heartbeat was in the queue, the other worker's arrives shortly after
    if not stalled_first:
        house.step(SchedulerPaused(60.0))
    house.tick()
    house.tick(0.9)
    assert not house.seat("1").is_lost
    house.beat("1")
    house.tick(0.1)
    assert not house.seat("1").is_lost and house.core.phase() == "training"
    assert "this scheduler was paused for 60.0 s; no lease expires because of it" in house.notes


@pytest.mark.parametrize("stalled_first", [True, False])
def test_pause_gives_no_more_than_a_fresh_lease(stalled_first: bool) -> None:
    """A lease renewed by the drained queue needs no extension, however long the host was suspended."""
    house = training_house()
    house.now += 8 * 3600.0
    events = [lambda: house.beat("1"), lambda: house.step(SchedulerPaused(8 * 3600.0))]
    for event in reversed(events) if stalled_first else events:
        event()
    house.beat("0")
    house.tick(4.99)
    assert not house.seat("1").is_lost
    house.beat("0")
    house.tick(0.01)
    assert house.seat("1").is_lost


def test_failed_collective_makes_no_close_final_while_workers_look_for_a_paused_scheduler() -> None:
    """Workers close their connections to look for a scheduler, so only a vanished process counts as dead."""
    house = training_house(3)
    house.close("s1", gone=True)
    house.now += 15.0  # while the loss is made durable
    house.step(SchedulerPaused(15.0))
    house.close("s2")
    house.beat("0", Activity.WAITING)
    assert [node for node in "012" if house.seat(node).is_lost] == ["1"]
    house.register("2", session="s2", incarnation=1)
    house.tick(4.0)
    assert not house.seat("2").is_lost


def test_close_in_the_drained_queue_has_its_usual_grace() -> None:
    house = training_house()
    house.now += 60.0
    house.beat("0")
    house.close("s1")
    house.step(SchedulerPaused(60.0))
    house.tick(0.5)
    assert house.seat("1").is_lost


def test_pause_does_not_shorten_a_running_grace() -> None:
    house = training_house()
    house.close("s1")
    house.now += 0.1
    house.stall(8.0)
    assert not house.seat("1").is_lost
    house.beat("0")
    house.tick(0.4)
    assert house.seat("1").is_lost


def test_pause_does_not_lengthen_a_cool_down() -> None:
    house = training_house()
    house.close("s1", gone=True)
    house.now += 1
    house.stall(20.0)
    assert cool_down_left(house, "1") == pytest.approx(9.0)


def test_pause_forgets_no_waiting_process() -> None:
    house = House(policy(2))
    house.register("a")
    house.stall(60.0)
    house.register("b")
    assert house.core.state.by_slot == {0: "a", 1: "b"}
