"""Admission of known nodes: rules 3 to 8 of docs/contributors/architecture.md, with every refusal's message."""

from __future__ import annotations

import pytest

from samebits.core.membership.admission import MAX_REFUSED
from samebits.core.messages import (
    PROTOCOL,
    EndJob,
    Fenced,
    Process,
    Refusal,
    Refused,
    RoundOpened,
)
from samebits.core.records import SeatGranted, SeatResumed
from tests.core.house import SETTINGS, House, policy, training_house


def on(host: str, pid: int = 7) -> Process:
    return Process(host, pid, 1, "cpu")


# ---- rule 3: another process holds the lease


def test_refusal_names_the_living_holder() -> None:
    house = House(policy(2))
    house.register("0", process=on("host-7", 4711))
    house.now += 1
    house.register("0", session="other")
    assert house.refusal("other") == Refused(
        "other",
        Refusal.ALIVE,
        29.0,
        "worker 0 is held by pid 4711 on host-7, whose lease ends in 4.0 s of silence; "
        "its seat is free 30 s (REGISTER_COOLDOWN) after its last message",
        "job-1",
        1,
    )
    assert house.ready.records == []


def test_first_refusal_gives_thirty_seconds() -> None:
    house = House(policy(2))
    house.register("0")
    house.register("0", session="other")
    assert house.refusal("other").retry_after_s == 30.0


def test_wait_is_the_lease_if_it_is_longer_than_the_cool_down() -> None:
    house = House(policy(2, cool_down_s=1.0))
    house.register("0")
    house.now += 2
    house.register("0", session="other")
    assert house.refusal("other").retry_after_s == 3.0


def test_closed_connection_shortens_the_rest_of_the_lease() -> None:
    house = House(policy(2, cool_down_s=0.0))
    house.register("0")
    house.close("s0")
    house.register("0", session="other")
    assert house.refusal("other").refusal is Refusal.ALIVE
    assert house.refusal("other").retry_after_s == 0.5


def test_refusal_never_gives_zero_seconds() -> None:
    house = House(policy(2, cool_down_s=0.0))
    house.register("0")
    house.now += 5
    house.register("0", session="other")
    assert house.refusal("other").refusal is Refusal.ALIVE, "the lease has expired and no Tick has judged it yet"
    assert house.refusal("other").retry_after_s == 0.05


def test_duplicate_does_not_renew_the_holders_lease() -> None:
    house = House(policy(1))
    house.register("0")
    house.now += 4
    house.register("0", session="other")
    house.tick(1.0)
    assert house.seat("0").is_lost


# ---- rule 4: the cool-down


@pytest.mark.parametrize(("after_s", "left_s"), [(0.0, 30.0), (0.5, 29.5), (12.25, 17.75), (29.99, 0.05)])
def test_known_node_waits_for_its_cool_down(after_s: float, left_s: float) -> None:
    house = training_house()
    house.close("s1", gone=True)
    house.now += after_s
    house.register("1", session="new")
    refused = house.refusal("new")
    assert refused.refusal is Refusal.COOLING_DOWN
    assert refused.retry_after_s == pytest.approx(left_s)
    assert refused.text == (
        "the last process of worker 1, pid 1001 on host-a, was lost (its connection closed and its process is gone); "
        f"its seat is free again in {30 - after_s:.1f} s (REGISTER_COOLDOWN=30)"
    )
    assert house.ready.records == []


def test_refusal_does_not_extend_the_wait() -> None:
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


def test_refusal_quotes_the_last_words_of_the_dying_worker() -> None:
    house = training_house()
    house.leave("1", on_purpose=False, text="ValueError: no such sample")
    house.register("1", session="new")
    assert ", was lost (ValueError: no such sample); its seat is free again in" in house.refusal("new").text


# ---- rule 5: lease and cool-down are over


def test_known_node_returns_to_its_slot_with_the_next_incarnation() -> None:
    house = training_house()
    house.close("s1", gone=True)
    house.now += 30
    house.register("1", session="new")
    granted = house.records(SeatGranted)[0]
    assert (granted.slot, granted.incarnation, granted.session) == (1, 2, "new")
    assert (house.admission("new").slot, house.admission("new").incarnation) == (1, 2)
    assert "2/2 registered: worker 1 (pid 1002 on host-a) has slot 1, incarnation 2" in house.notes


def test_node_without_its_old_slot_gets_a_lost_one_and_keeps_its_incarnations() -> None:
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


def test_node_whose_slot_was_reassigned_gets_a_free_one() -> None:
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


def test_numeric_node_whose_slot_was_reassigned_gets_any_lost_one() -> None:
    house = training_house()
    house.close("s1", gone=True)
    house.now += 30
    house.beat("0")
    house.register("c")
    assert house.admission("sc").slot == 1
    house.close("s0", gone=True)
    house.now += 30
    house.beat("c")
    house.register("1", session="new")
    assert (house.admission("new").slot, house.admission("new").incarnation) == (0, 2)


# ---- rule 6: resume


def test_session_resumes_at_once_after_its_connection_broke() -> None:
    house = training_house()
    house.close("s1")
    house.now += 0.3
    house.register("1", incarnation=1, job="job-1")
    assert house.admission("s1").incarnation == 1
    assert house.ready.records == []
    house.tick(4.0)
    assert not house.seat("1").is_lost, "the close is forgotten"


def test_lost_session_resumes_without_a_cool_down() -> None:
    house = training_house()
    house.now += 5
    house.beat("0")
    house.tick()
    assert house.seat("1").is_lost
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
    assert not house.seat("1").is_lost


def test_session_resumes_after_a_scheduler_restart() -> None:
    house = training_house()
    house.crash(after_s=2.0)
    house.register("1", incarnation=1, job="job-1")
    assert house.admission("s1").term == 2
    assert house.ready.records == [SeatResumed("1", 1)]


def test_replaced_session_is_fenced() -> None:
    house = training_house(cool_down_s=0.0)
    house.close("s1", gone=False)
    house.tick(0.5)
    house.register("1", session="new", process=on("host-b", 99))
    assert house.admission("new").incarnation == 2
    house.register("1", incarnation=1, job="job-1")
    assert house.answer("s1", Fenced) == Fenced(
        "job-1",
        "s1",
        1,
        "the seat of worker 1 is now held by pid 99 on host-b, incarnation 2: "
        "this process must not touch the job again",
        term=1,
    )
    assert house.ready.records == []


def test_replaced_session_cannot_resume_a_seat_by_a_late_message() -> None:
    """If the replaced session's late message gave it the seat back, neither process would yield to the other."""
    house = House(policy(2, cool_down_s=0.0)).fill()
    house.close("s1", gone=True)
    house.register("1", session="other")
    house.close("other", gone=True)
    house.register("1")
    assert house.admission("s1").incarnation == 3
    heard_at = house.now
    house.now += 1.0
    house.register("1", incarnation=1, job="job-1")
    assert house.answer("s1", Fenced).incarnation == 1
    presence = house.core.presence("1")
    assert presence is not None and presence.heard_at == heard_at, "a fenced session renews nothing"
    house.register("1", incarnation=3, job="job-1")
    assert house.admission("s1").incarnation == 3


def test_session_whose_seat_went_to_another_node_is_fenced() -> None:
    house = House(policy(1, cool_down_s=0.0))
    house.register("a")
    house.tick(5.0)
    house.register("b")
    house.register("a", incarnation=1, job="job-1")
    assert house.answer("sa", Fenced).text == (
        "the seat of worker a is taken away: another node has its slot, or the world continued without it: "
        "this process must not touch the job again"
    )


@pytest.mark.parametrize("how", ["said so", "seen dead"])
def test_dead_process_does_not_resume(how: str) -> None:
    """The dead process's Register was still on the way when it died (invariant S17)."""
    house = training_house()
    if how == "said so":
        house.leave("1", on_purpose=False, text="ValueError")
    else:
        house.close("s1", gone=True)
    house.register("1", incarnation=1, job="job-1")
    assert house.ready.records == []
    assert house.seat("1").is_lost
    assert house.answer("s1", Fenced)


# ---- rule 7: leaving on purpose; recovery off


def test_node_that_left_on_purpose_is_readmitted_at_once() -> None:
    house = training_house()
    house.leave("1")
    house.register("1", session="new")
    assert house.admission("new").incarnation == 2


def test_node_that_left_on_purpose_is_readmitted_after_a_scheduler_restart() -> None:
    house = training_house()
    house.leave("1")
    house.crash(1.0)
    house.register("1", session="new")
    assert house.admission("new").incarnation == 2


def test_exception_does_not_count_as_leaving_on_purpose() -> None:
    house = training_house()
    house.leave("1", on_purpose=False, text="SystemExit: 3")
    house.register("1", session="new")
    assert house.refusal("new").refusal is Refusal.COOLING_DOWN


@pytest.mark.parametrize("end", ["alive", "left"])
def test_known_node_is_always_refused_with_recovery_off(end: str) -> None:
    house = House(policy(2, recovery=False)).fill()
    if end == "left":
        house.leave("1")
    house.now += 100
    house.register("1", session="new")
    assert house.refusal("new") == Refused(
        "new",
        Refusal.RECOVERY_OFF,
        0.0,
        "worker 1 was in this job before, and no worker can return with ENABLE_RECOVERY=0: "
        "set ENABLE_RECOVERY=1 to let it return",
        "job-1",
        1,
    )


# ---- rule 8: strangers


@pytest.mark.parametrize(
    ("changes", "refusal", "text"),
    [
        (
            {"protocol": PROTOCOL + 1},
            Refusal.PROTOCOL,
            f"this scheduler speaks protocol {PROTOCOL}, worker 0 speaks {PROTOCOL + 1}, so their releases differ. "
            "Fix: install the same samebits release on all hosts",
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
            "worker 0 ('here') was started with other settings than the scheduler ('there'): "
            "WORKER_NUM is 8 here and 2 there. Start it with the job's values",
        ),
        (
            {"settings": (*SETTINGS, ("ENABLE_RECOVERY", "1"))},
            Refusal.OTHER_SETTINGS,
            "worker 0 ('here') was started with other settings than the scheduler ('there'): "
            "ENABLE_RECOVERY is 1 here and unset there. Start it with the job's values",
        ),
    ],
)
def test_stranger_is_refused_with_both_values(changes: dict[str, object], refusal: Refusal, text: str) -> None:
    house = House(policy(2))
    house.register("0", **changes)
    assert house.refusal("s0") == Refused("s0", refusal, 0.0, text, "job-1", 1)
    assert house.ready.records == []
    assert house.core.state.seats == {}


def test_stranger_with_a_members_node_id_changes_nothing() -> None:
    house = training_house()
    before = house.core.presence("0")
    assert before is not None
    until = before.lease_until
    house.now += 3
    house.register("0", session="stranger", job="job-9", incarnation=1)
    assert house.refusal("stranger").refusal is Refusal.OTHER_JOB
    after = house.core.presence("0")
    assert after is not None and after.lease_until == until


def test_register_while_the_job_ends_is_refused_with_the_reason() -> None:
    house = training_house()
    house.stop("Ctrl-C")
    house.register("1", session="new")
    assert house.answer("new", EndJob).text == "stopped by Ctrl-C"


def test_refusal_of_the_longest_wait_gives_the_time_of_the_next_free_seat() -> None:
    house = training_house(3)
    assert house.core.seat_free_in_s() is None
    for node in "12":
        house.close(f"s{node}", gone=True)
        house.now += 4.0
        house.beat("0")
        house.register(node, session=f"again{node}")
    assert house.core.seat_free_in_s() == 26.0
    house.now += 10.0
    house.beat("0")
    assert house.core.seat_free_in_s() == 16.0


def test_number_of_remembered_refusals_is_bounded() -> None:
    house = training_house(2)
    for number in range(MAX_REFUSED + 10):
        house.register("0", session=f"duplicate-{number}")
    assert len(house.core._admission.refused) == MAX_REFUSED + 2 * 2
    assert house.refusal(f"duplicate-{MAX_REFUSED + 9}").refusal is Refusal.ALIVE, "the others get the same answer"
