"""Who gets a seat: rules 1 to 8 of DESIGN section 4, and every refusal with its sentence and its seconds."""

from __future__ import annotations

import pytest

from runtime.core.messages import (
    PROTOCOL,
    Admitted,
    EndJob,
    Fenced,
    Pending,
    Process,
    Refusal,
    Refused,
    RoundOpened,
)
from runtime.core.records import SeatGranted, SeatResumed, SeatRetired
from tests.core.house import SETTINGS, House, policy, training_house


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
        "s2", Refusal.FULL, 0.0, "NODE_ID=2 names a spare, and this job has none: the slots are 0..1"
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


# ---- rule 3: somebody holds the lease


def test_a_living_holder_is_named() -> None:
    house = House(policy(2))
    house.register("0", process=on("host-7", 4711))
    house.now += 1
    house.register("0", session="other")
    assert house.refusal("other") == Refused(
        "other",
        Refusal.ALIVE,
        29.0,
        "worker 0 is held by pid 4711 on host-7, whose lease ends in 4.0 s of silence",
    )
    assert house.ready.records == []


def test_a_first_refusal_says_thirty() -> None:
    house = House(policy(2))
    house.register("0")
    house.register("0", session="other")
    assert house.refusal("other").retry_after_s == 30.0


def test_where_the_lease_is_longer_than_the_cool_down_it_is_what_one_waits_for() -> None:
    house = House(policy(2, cool_down_s=1.0))
    house.register("0")
    house.now += 2
    house.register("0", session="other")
    assert house.refusal("other").retry_after_s == 3.0


def test_a_closed_connection_shortens_what_is_left_of_the_lease() -> None:
    house = House(policy(2, cool_down_s=0.0))
    house.register("0")
    house.close("s0")
    house.register("0", session="other")
    assert house.refusal("other").refusal is Refusal.ALIVE
    assert house.refusal("other").retry_after_s == 0.5


def test_a_refusal_is_never_of_no_seconds() -> None:
    house = House(policy(2, cool_down_s=0.0))
    house.register("0")
    house.now += 5
    house.register("0", session="other")
    assert house.refusal("other").refusal is Refusal.ALIVE, "the lease is over, and no Tick has judged it yet"
    assert house.refusal("other").retry_after_s == 0.05


def test_a_duplicate_does_not_renew_the_lease_of_the_holder() -> None:
    house = House(policy(1))
    house.register("0")
    house.now += 4
    house.register("0", session="other")
    house.tick(1.0)
    assert house.seat("0").lost


# ---- rule 4: the cool-down


@pytest.mark.parametrize(("after_s", "left_s"), [(0.0, 30.0), (0.5, 29.5), (12.25, 17.75), (29.99, 0.05)])
def test_a_known_node_waits_for_its_cool_down(after_s: float, left_s: float) -> None:
    house = training_house()
    house.close("s1", gone=True)
    house.now += after_s
    house.register("1", session="new")
    refused = house.refusal("new")
    assert refused.refusal is Refusal.COOLING_DOWN
    assert refused.retry_after_s == pytest.approx(left_s)
    assert refused.text == (
        "worker 1 was lost (its connection closed and its process is gone); its seat is free again in "
        f"{30 - after_s:.1f} s (REGISTER_COOLDOWN=30)"
    )
    assert house.ready.records == []


def test_a_refusal_never_extends_the_wait() -> None:
    house = training_house()
    house.close("s1", gone=True)
    lost_at = house.now
    for _ in range(29):
        house.now += 1
        house.register("1", session="new")
        assert house.now + house.refusal("new").retry_after_s == pytest.approx(lost_at + 30)
    house.now = lost_at + 30
    house.register("1", session="new")
    assert house.admission("new").incarnation == 2


def test_the_first_words_of_a_dying_worker_are_the_reason_of_the_refusal() -> None:
    house = training_house()
    house.leave("1", on_purpose=False, text="ValueError: no such sample")
    house.register("1", session="new")
    assert house.refusal("new").text.startswith("worker 1 was lost (ValueError: no such sample); ")


# ---- rule 5: both are over


def test_a_known_node_comes_back_to_its_slot_with_the_next_incarnation() -> None:
    house = training_house()
    house.close("s1", gone=True)
    house.now += 30
    house.register("1", session="new")
    granted = house.records(SeatGranted)[0]
    assert (granted.slot, granted.incarnation, granted.session) == (1, 2, "new")
    assert (house.admission("new").slot, house.admission("new").incarnation) == (1, 2)
    assert "2/2 registered: worker 1 (pid 1002 on host-a) has slot 1, incarnation 2" in house.notes


def test_a_node_whose_slot_was_given_away_gets_a_lost_one_and_its_count_goes_on() -> None:
    house = House(policy(2))
    house.register("a")
    house.register("b")
    house.train()
    house.close("sb", gone=True)
    house.now += 30
    house.register("c")
    assert house.admission("sc").slot == 1
    house.register("b", session="b again")
    assert house.refusal("b again").refusal is Refusal.FULL
    house.close("sa", gone=True)
    house.now += 30
    house.beat("c")
    house.register("b", session="b again")
    granted = house.records(SeatGranted)[0]
    assert (granted.node, granted.slot, granted.incarnation) == ("b", 0, 2)
    assert house.seat("a").slot is None


def test_a_node_whose_slot_was_given_away_gets_a_free_one() -> None:
    house = House(policy(2))
    house.register("a")
    house.register("b")
    house.train()
    house.close("sb", gone=True)
    house.now += 30
    house.register("c")
    # The scheduler dies in its fsync: b's seat is retired, c's grant is not on disk.
    house.crash(keep=len(house.journal) - len(house.ready.records) + 1)
    assert house.core.state.by_slot == {0: "a"}
    house.register("b", session="b again")
    assert (house.admission("b again").slot, house.admission("b again").incarnation) == (1, 2)


# ---- rule 6: resume


def test_a_session_resumes_at_once_after_its_connection_broke() -> None:
    house = training_house()
    house.close("s1")
    house.now += 0.3
    house.register("1", incarnation=1, job="job-1")
    assert house.admission("s1").incarnation == 1
    assert house.ready.records == []
    house.tick(4.0)
    assert not house.seat("1").lost, "the close is forgotten"


def test_a_session_that_was_declared_lost_resumes_without_a_cool_down() -> None:
    house = training_house()
    house.now += 5
    house.beat("0")
    house.tick()
    assert house.seat("1").lost
    house.now += 3
    house.register("1", incarnation=1, job="job-1")
    assert house.admission("s1").incarnation == 1
    assert house.ready.records == [SeatResumed("1", 1)]
    assert "worker 1 is back (pid 1001 on host-a), same incarnation 1" in house.notes
    assert house.answer("s1", RoundOpened).round == house.last("s0", RoundOpened).round


def test_any_accepted_message_resumes_a_lost_session() -> None:
    house = training_house()
    house.now += 5
    house.beat("0")
    house.tick()
    house.beat("1")
    assert house.ready.records == [SeatResumed("1", 1)]
    assert not house.seat("1").lost


def test_a_session_resumes_after_a_scheduler_restart() -> None:
    house = training_house()
    house.crash(after_s=2.0)
    house.register("1", incarnation=1, job="job-1")
    assert house.admission("s1").term == 2
    assert house.ready.records == [SeatResumed("1", 1)]


def test_a_replaced_session_is_fenced() -> None:
    house = training_house(cool_down_s=0.0)
    house.close("s1", gone=False)
    house.tick(0.5)
    house.register("1", session="new", process=on("host-b", 99))
    assert house.admission("new").incarnation == 2
    house.register("1", incarnation=1, job="job-1")
    assert house.answer("s1", Fenced) == Fenced(
        "s1",
        1,
        "the seat of worker 1 is now held by pid 99 on host-b, incarnation 2: "
        "this process must not touch the job again",
    )
    assert house.ready.records == []


def test_a_session_whose_seat_was_given_to_another_node_is_fenced() -> None:
    house = House(policy(1, cool_down_s=0.0))
    house.register("a")
    house.tick(5.0)
    house.register("b")
    house.register("a", incarnation=1, job="job-1")
    assert house.answer("sa", Fenced).text == (
        "the seat of worker a is given to another node: this process must not touch the job again"
    )


@pytest.mark.parametrize("how", ["said so", "seen dead"])
def test_a_dead_process_does_not_resume(how: str) -> None:
    """A Register that was still under way when its process died (DESIGN S17)."""
    house = training_house()
    if how == "said so":
        house.leave("1", on_purpose=False, text="ValueError")
    else:
        house.close("s1", gone=True)
    house.register("1", incarnation=1, job="job-1")
    assert house.ready.records == []
    assert house.seat("1").lost
    assert house.answer("s1", Fenced)


# ---- rule 7: leaving on purpose; recovery off


def test_a_node_that_left_on_purpose_comes_back_at_once() -> None:
    house = training_house()
    house.leave("1")
    house.register("1", session="new")
    assert house.admission("new").incarnation == 2


def test_a_node_that_left_on_purpose_may_come_back_after_a_scheduler_restart_too() -> None:
    house = training_house()
    house.leave("1")
    house.crash(1.0)
    house.register("1", session="new")
    assert house.admission("new").incarnation == 2


def test_an_exception_is_not_on_purpose() -> None:
    house = training_house()
    house.leave("1", on_purpose=False, text="SystemExit: 3")
    house.register("1", session="new")
    assert house.refusal("new").refusal is Refusal.COOLING_DOWN


@pytest.mark.parametrize("end", ["alive", "left"])
def test_without_recovery_a_known_node_is_always_refused(end: str) -> None:
    house = House(policy(2, recovery=False)).fill()
    if end == "left":
        house.leave("1")
    house.now += 100
    house.register("1", session="new")
    assert house.refusal("new") == Refused(
        "new",
        Refusal.RECOVERY_OFF,
        0.0,
        "worker 1 was here before and ENABLE_RECOVERY=0: set ENABLE_RECOVERY=1 to let it return",
    )


# ---- rule 8: strangers


@pytest.mark.parametrize(
    ("changes", "refusal", "text"),
    [
        (
            {"protocol": PROTOCOL + 1},
            Refusal.PROTOCOL,
            f"this scheduler speaks protocol {PROTOCOL}, worker 0 speaks {PROTOCOL + 1}: "
            "install the same samebits on all hosts",
        ),
        (
            {"job": "job-9", "incarnation": 3},
            Refusal.OTHER_JOB,
            "worker 0 belongs to job job-9, this scheduler runs job job-1: "
            "its recovery path is not the one the worker's job was started with",
        ),
        (
            {"job_name": "other.py"},
            Refusal.OTHER_JOB,
            "worker 0 was started for 'other.py', this scheduler runs 'train.py': "
            "set SCHED_HOST and SCHED_PORT to its own scheduler, or the same JOB_NAME on both",
        ),
        (
            {"settings": (("WORKER_NUM", "8"),)},
            Refusal.OTHER_SETTINGS,
            "worker 0 ('here') and the scheduler ('there'): WORKER_NUM is 8 here and 2 there",
        ),
        (
            {"settings": (*SETTINGS, ("ENABLE_RECOVERY", "1"))},
            Refusal.OTHER_SETTINGS,
            "worker 0 ('here') and the scheduler ('there'): ENABLE_RECOVERY is 1 here and unset there",
        ),
    ],
)
def test_a_stranger_is_refused_with_both_values(changes: dict[str, object], refusal: Refusal, text: str) -> None:
    house = House(policy(2))
    house.register("0", **changes)
    assert house.refusal("s0") == Refused("s0", refusal, 0.0, text)
    assert house.ready.records == []
    assert house.core.state.seats == {}


def test_a_stranger_with_the_node_id_of_a_member_changes_nothing() -> None:
    house = training_house()
    before = house.core.presence("0")
    assert before is not None
    until = before.lease_until
    house.now += 3
    house.register("0", session="stranger", job="job-9", incarnation=1)
    assert house.refusal("stranger").refusal is Refusal.OTHER_JOB
    after = house.core.presence("0")
    assert after is not None and after.lease_until == until


def test_who_asks_while_the_job_ends_is_told_so() -> None:
    house = training_house()
    house.stop("Ctrl-C")
    house.register("1", session="new")
    assert house.answer("new", EndJob).text == "stopped by Ctrl-C"
