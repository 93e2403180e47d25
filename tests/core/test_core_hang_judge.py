"""Standstills: which worker holds up the others, how long that is tolerated, and what is done about it."""

from __future__ import annotations

from typing import Any

import pytest

from samebits.core.end_kinds import EndKind
from samebits.core.hangs import Hang
from samebits.core.ledger import NAMED, Trust
from samebits.core.messages import Activity, GiveUp, Heartbeat, ReportEnvelope, RoundOpened
from samebits.core.point import Point
from samebits.core.records import JobInterrupted, RolledBack
from samebits.core.reports import Digest, Digests, Phase, Progress, StallReport
from samebits.core.watch.hang_culprits import Member, different_collectives, find_culprits, sentence
from samebits.core.watch.hang_judge import FIRST_STEPS_S, FORMING_S
from tests.core.house import House, training_house

WAITS = Progress(Phase.COMMUNICATION, 812, 10, 0.0, 0.5, rests=True, place="all_reduce at train.py:50")
SLEEPS = Progress(Phase.USER, 811, 10, 0.0, 0.5, rests=True, place="train.py:46 (time.sleep)")
COMPUTES = SLEEPS._replace(rests=False)
READS = SLEEPS._replace(phase=Phase.DATA)
STEP = 10


def report(house: House, node: str, progress: Progress | None, step: int = STEP) -> None:
    """Send a heartbeat followed by the process's position, as an agent does."""
    house.beat(node, step=step)
    credential = house.credential(node)
    house.receive(
        credential.session, ReportEnvelope(credential, StallReport(progress), house.core.state.generation_number, step)
    )


def training_for_a_while(workers: int = 3, **changes: float | bool) -> House:
    house = training_house(workers, **changes)
    for node in range(workers):
        house.beat(str(node), step=STEP)
    house.notes.clear()
    return house


def pass_time(house: House, seconds: float, since_s: float = 0.0, **stands: Progress | None) -> float:
    """Send heartbeats once a second without progress.

    ``since_s`` is how long they have stood still; ``n2`` is worker 2's position, the others wait. Returns the new
    ``since_s``.
    """
    for _ in range(int(seconds)):
        house.tick(0.5)
        since_s += 1.0
        for node in range(house.policy.world_size):
            progress = stands.get(f"n{node}", WAITS)
            report(house, str(node), None if progress is None else progress._replace(still_s=since_s))
        house.tick(0.5)
    return since_s


def ended(house: House) -> list[str]:
    return [message.text for sent in house.sent.values() for message in sent if isinstance(message, GiveUp)]


# ---- the judgement, a function of all positions


def member(node: int, progress: Progress | None, silent_s: float = 0.0) -> Member:
    return Member(str(node), 10, progress, silent_s)


def test_sleeping_worker_is_named_with_its_line_and_the_waiting_ranks() -> None:
    found = find_culprits([member(0, WAITS), member(1, WAITS), member(2, SLEEPS)])
    assert [(one.node, hang) for one, hang in found.culprits] == [("2", Hang.STUCK)]
    assert sentence(found, 12.2) == (
        "no step for 12 s: worker 2 is in train.py:46 (time.sleep), workers 0 and 1 wait for it in all_reduce #812"
    )


@pytest.mark.parametrize(
    ("progress", "hang", "words"),
    [
        (COMPUTES, Hang.BUSY, "worker 1 is in train.py:46 (time.sleep) and computes"),
        (READS, Hang.LOADING, "worker 1 is in train.py:46 (time.sleep) and waits for data"),
        (SLEEPS._replace(phase=Phase.COMMIT), Hang.SAVING, "and commits"),
        (SLEEPS._replace(phase=Phase.STORING), Hang.SAVING, "and waits for the disk of CHECKPOINT_PATH"),
        (SLEEPS._replace(phase=Phase.COMPILING), Hang.COMPILING, "and compiles"),
        (SLEEPS._replace(place=""), Hang.STUCK, "worker 1 is in code that is not the script's"),
        (SLEEPS._replace(place="a\nb\x1b[2J" + "x" * 999), Hang.STUCK, "worker 1 is in a b\\u001b[2Jxxx"),
    ],
)
def test_causes_of_a_standstill_are_distinguished(progress: Progress, hang: Hang, words: str) -> None:
    found = find_culprits([member(0, WAITS), member(1, progress)])
    assert [one for _, one in found.culprits] == [hang]
    text = sentence(found, 6.0)
    assert words in text and text.isprintable() and len(text) < 400


def test_two_culprits_are_both_named() -> None:
    found = find_culprits([member(0, SLEEPS), member(1, WAITS), member(2, READS)])
    assert "worker 0 is in" in sentence(found, 6.0) and "worker 2 is in" in sentence(found, 6.0)
    assert sentence(found, 6.0).endswith("worker 1 waits for them in all_reduce #812")


@pytest.mark.parametrize(("sleeping", "waiting"), [(NAMED, 1), (1, NAMED)])
def test_named_culprits_are_bounded_and_the_rest_counted(sleeping: int, waiting: int) -> None:
    members = [member(node, SLEEPS if node < sleeping else WAITS) for node in range(sleeping + waiting)]
    text = sentence(find_culprits(members), 6.0)
    assert all(f"{node} " in text or f"{node}," in text for node in range(sleeping + waiting))
    assert "more workers" not in text and f"{NAMED} workers" not in text
    more = [member(99, SLEEPS if sleeping > 1 else WAITS), *members]
    expected = ", 1 more workers hold the others up, too, " if sleeping > 1 else f", {NAMED + 1} workers wait for it"
    assert expected in sentence(find_culprits(more), 6.0)


def test_rank_missing_from_a_collective_is_found_by_its_number() -> None:
    found = find_culprits([member(0, WAITS), member(1, WAITS._replace(collectives=811)), member(2, WAITS)])
    assert [(one.node, hang) for one, hang in found.culprits] == [("1", Hang.APART)]


def test_rank_that_has_returned_early_is_the_missing_one() -> None:
    found = find_culprits([member(0, WAITS), member(1, None), member(2, WAITS)])
    assert [(one.node, hang) for one, hang in found.culprits] == [("1", Hang.APART)]
    assert "worker 1 has returned from the training function" in sentence(found, 6.0)


def test_no_rank_is_blamed_if_all_wait_in_the_same_collective() -> None:
    found = find_culprits([member(0, WAITS), member(1, WAITS)])
    assert found.culprits == () and found.common is Hang.LINK
    assert "all workers wait in the same collective, all_reduce #812" in sentence(found, 6.0)
    found = find_culprits([member(0, WAITS), member(1, WAITS._replace(place="all_reduce at train.py:60"))])
    assert found.common is Hang.LINK and different_collectives(found) == ""


def test_rank_in_a_collective_of_another_name_is_found_although_the_numbers_agree() -> None:
    other = WAITS._replace(place="broadcast at train.py:60")
    found = find_culprits([member(0, WAITS), member(1, WAITS), member(2, other)])
    assert [(one.node, hang) for one, hang in found.culprits] == [("2", Hang.APART)]
    assert sentence(found, 6.0).endswith(
        "worker 2 is in another collective, broadcast #812, workers 0 and 1 wait for it in all_reduce #812"
    )
    sends, receives = (WAITS._replace(place=f"{name} at train.py:60") for name in ("send", "recv"))
    assert find_culprits([member(0, sends), member(1, receives)]).common is Hang.LINK


BUILDS = Progress(Phase.COMMUNICATION, 0, 0, 0.0, 0.0, rests=True, place="group/meshes.py:330 (form_all)")
SENDS = BUILDS._replace(place="group/transfer.py:93 (send)")


def forming(node: int, progress: Progress) -> Member:
    return Member(str(node), 10, progress, forms=True)


def test_rank_elsewhere_than_most_is_named_while_the_group_forms() -> None:
    found = find_culprits([forming(0, BUILDS), forming(1, SENDS), forming(2, BUILDS)])
    assert [(one.node, hang) for one, hang in found.culprits] == [("1", Hang.APART)]
    assert sentence(found, 60.0) == (
        "no step for 60 s: worker 1 still forms the generation's group at group/transfer.py:93 (send), workers 0 and 2 "
        "wait for it at group/meshes.py:330 (form_all)"
    )
    assert different_collectives(found) == "", "the script's collectives are not the cause"


def test_rank_that_still_forms_is_named_if_others_train() -> None:
    found = find_culprits([member(0, WAITS), forming(1, BUILDS), member(2, WAITS)])
    assert [one.node for one, _ in found.culprits] == ["1"]
    assert sentence(found, 60.0).endswith("workers 0 and 2 wait for it in all_reduce #812")


def test_two_ranks_at_different_places_are_both_named_while_the_group_forms() -> None:
    found = find_culprits([forming(0, BUILDS), forming(1, SENDS)])
    assert [one.node for one, _ in found.culprits] == ["0", "1"]


def test_no_rank_is_blamed_if_all_form_the_group_at_the_same_place() -> None:
    found = find_culprits([forming(0, BUILDS), forming(1, BUILDS)])
    assert found.culprits == () and found.common is Hang.LINK
    assert sentence(found, 60.0) == (
        "no step for 60 s: all workers form the generation's group at group/meshes.py:330 (form_all), and none "
        "continues"
    )


def test_evaluation_on_all_ranks_blames_no_rank() -> None:
    assert find_culprits([member(0, COMPUTES), member(1, COMPUTES)]).common is Hang.NOBODY_WAITS


def test_silent_worker_is_called_silent_whatever_it_reported_last() -> None:
    found = find_culprits([member(0, WAITS), member(1, WAITS, silent_s=4.0)])
    assert [(one.node, hang) for one, hang in found.culprits] == [("1", Hang.SILENT)]
    assert "worker 1 has not been heard from for 4 s, worker 0 waits for it" in sentence(found, 6.0)


# ---- the clock


def test_standstill_is_reported_at_the_timeout_and_ended_at_twice_that() -> None:
    house = training_for_a_while(step_timeout_s=6.0)
    since_s = pass_time(house, 5, n2=SLEEPS)
    assert house.notes == [] and house.core.standstill == ""
    since_s = pass_time(house, 2, since_s, n2=SLEEPS)
    (said,) = house.notes
    assert said.startswith("no step for 6 s: worker 2 is in train.py:46 (time.sleep), workers 0 and 1 wait for it")
    assert said.endswith("; it is ended and replaced after 12 s (HANG=end)") and house.core.standstill == said
    since_s = pass_time(house, 4, since_s, n2=SLEEPS)
    assert house.notes == [said] and ended(house) == []
    pass_time(house, 2, since_s, n2=SLEEPS)
    (why,) = ended(house)
    assert why == "it held the others up for 12 s in train.py:46 (time.sleep) (HANG=end)"
    house.leave("2", on_purpose=False, text=why)
    assert house.seat("2").is_lost and house.seat("2").reason == why
    assert set(house.invited()) == {"s0", "s1"} and house.core.standstill == ""


def test_report_and_end_happen_at_the_exact_second() -> None:
    house = training_for_a_while(step_timeout_s=6.0)
    since_s = pass_time(house, 5, n2=SLEEPS)  # and half a second
    assert house.notes == []
    house.tick(0.5)
    assert len(house.notes) == 1
    pass_time(house, 6, since_s, n2=SLEEPS)
    assert ended(house) == []
    house.tick(0.5)
    assert len(ended(house)) == 1


def test_process_is_examined_exactly_when_it_is_due() -> None:
    house = training_for_a_while(2, step_timeout_s=6.0)
    house.tick(1.0)
    for node, progress in (("0", WAITS), ("1", SLEEPS)):
        report(house, node, progress._replace(still_s=5.2))
    house.tick(0.5)
    wake_at = house.core.wake_at()
    assert wake_at is not None and 0.29 < wake_at - house.now < 0.31 and house.notes == []
    house.tick(wake_at - house.now)
    assert house.notes[0].startswith("no step for 6 s: worker 1 is in")


def test_timeout_is_learned_from_the_longest_wait_seen() -> None:
    house = training_for_a_while()  # then three times four
    since_s = pass_time(house, 11, n0=WAITS._replace(longest_s=4.0), n2=SLEEPS)
    assert house.notes == []
    pass_time(house, 2, since_s, n0=WAITS._replace(longest_s=4.0), n2=SLEEPS)
    assert house.notes[0].startswith("no step for 12 s: ")


def test_short_steps_allow_five_seconds_and_thirty_outside_a_collective() -> None:
    house = training_for_a_while()
    since_s = pass_time(house, 6, n2=SLEEPS)
    assert house.notes[0].startswith("no step for 5 s: ") and "after 30 s" in house.notes[0]
    since_s = pass_time(house, 23, since_s, n2=SLEEPS)
    assert ended(house) == []
    pass_time(house, 3, since_s, n2=SLEEPS)
    assert len(ended(house)) == 1


def test_computing_worker_has_ten_minutes() -> None:
    house = training_for_a_while()
    since_s = pass_time(house, 590, n0=COMPUTES)
    assert len(house.notes) == 1 and ended(house) == []
    pass_time(house, 12, since_s, n0=COMPUTES)
    assert len(ended(house)) == 1


def test_progress_ends_the_standstill() -> None:
    house = training_for_a_while()
    pass_time(house, 8, n0=COMPUTES)
    assert house.core.standstill
    report(house, "0", None)
    house.tick(0.5)
    assert house.notes[-1] == "the job makes progress again" and house.core.standstill == ""
    assert house.core.wake_at() is not None


def test_progress_of_one_worker_is_enough() -> None:
    house = training_for_a_while(step_timeout_s=6.0)
    pass_time(house, 60, n1=None)
    assert house.notes == []


def test_report_of_an_earlier_step_is_ignored() -> None:
    house = training_for_a_while(step_timeout_s=6.0)
    pass_time(house, 5, n1=SLEEPS)
    house.beat("1", step=STEP + 1)
    house.tick(0.5)
    assert house.notes == []


def test_first_steps_have_their_own_allowance() -> None:
    house = training_for_a_while(2, step_timeout_s=2.0)
    fresh = WAITS._replace(steps=1)
    since_s = pass_time(house, FIRST_STEPS_S - 1, n0=fresh, n1=SLEEPS._replace(steps=1))
    assert house.core.standstill == ""
    pass_time(house, 2, since_s, n0=fresh, n1=SLEEPS._replace(steps=1))
    assert house.core.standstill.startswith("no step for 600 s: worker 1 is in train.py:46")


def test_tell_only_reports_the_standstill() -> None:
    house = training_for_a_while(step_timeout_s=6.0, ends_stuck=False)
    pass_time(house, 100, n1=SLEEPS)
    assert len(house.notes) == 1 and house.notes[0].endswith("; nothing is done about it (HANG=tell)")
    assert ended(house) == []


def test_nothing_is_reported_without_the_watchdog() -> None:
    house = training_for_a_while(step_timeout_s=6.0, watches=False)
    pass_time(house, 100, n1=SLEEPS)
    assert house.notes == [] and ended(house) == []


def test_collective_stuck_on_all_ranks_forms_a_new_group_and_ends_no_worker() -> None:
    house = training_for_a_while(2, step_timeout_s=6.0)
    pass_time(house, 13)
    assert ended(house) == [] and {"s0", "s1"} == {
        session for session, sent in house.sent.items() if any(isinstance(one, RoundOpened) for one in sent[-2:])
    }
    assert "the group is formed again after 12 s" in house.notes[0]


@pytest.mark.parametrize(("step_timeout_s", "limit_s"), [(6.0, FORMING_S), (2 * FORMING_S, 2 * FORMING_S)])
def test_group_that_does_not_form_is_formed_again(step_timeout_s: float, limit_s: float) -> None:
    """No step has been taken, so no limit is learned; the first steps' limit is for ranks that compute."""
    house = training_house(3, step_timeout_s=step_timeout_s)
    house.notes.clear()

    def stand(seconds: float, since_s: float) -> float:
        for second in range(int(seconds)):
            house.tick(1.0)
            for node, progress in (("0", BUILDS), ("1", SENDS), ("2", BUILDS)):
                house.beat(node, Activity.FORMING, step=STEP)
                credential, still_s = house.credential(node), since_s + second + 1.0
                stall = StallReport(progress._replace(still_s=still_s))
                house.receive(credential.session, ReportEnvelope(credential, stall, 1, STEP))
        return since_s + seconds

    since_s = stand(limit_s - 1, 0.0)
    assert house.notes == []
    since_s = stand(2, since_s)
    assert house.notes[0].startswith(f"no step for {limit_s:.0f} s: worker 1 still forms the generation's group")
    assert house.notes[0].endswith(f"the group is formed again after {2 * limit_s:.0f} s (HANG=end)")
    assert house.core.phase() == "training"
    stand(limit_s + 1, since_s)
    assert house.core.phase().startswith("forming") and ended(house) == [], "a new round is open"


def test_rank_whose_function_returns_early_again_ends_the_job() -> None:
    """The rank's loader has fewer batches, so the others would wait for it in every generation, ever longer."""
    house = training_for_a_while(2, step_timeout_s=6.0)
    for generation in (1, 2):
        for second in range(1, 40):
            if house.core.phase() != "training":
                break
            house.tick(1.0)
            report(house, "0", WAITS._replace(still_s=float(second), steps=0 if generation == 2 else 10))
            house.beat("1", Activity.DONE, step=STEP)
        if generation == 1:
            assert house.ended is None
            house.train()
    (ended,) = [one for one in house.journal if isinstance(one, JobInterrupted)]
    assert ended.kind is EndKind.SCRIPT_FAILED
    assert "worker 1 has returned from the training function, worker 0 waits for it in all_reduce #812" in ended.cause
    assert "(all_reduce at train.py:50), as it did before the group was formed again" in ended.cause


@pytest.mark.parametrize(("second", "ends"), [("broadcast at train.py:60", True), ("broadcast at train.py:70", False)])
def test_different_collectives_in_two_generations_end_the_job(second: str, ends: bool) -> None:
    """The second group was connected, so only the script can be the cause; another place may be another cause."""
    house = training_for_a_while(2, step_timeout_s=6.0)
    for generation, place in ((1, "broadcast at train.py:60"), (2, second)):
        for second_of in range(1, 40):
            if house.core.phase() != "training":
                break
            house.tick(1.0)
            still = WAITS._replace(still_s=float(second_of), steps=0 if generation == 2 else 10)
            report(house, "0", still)
            report(house, "1", still._replace(place=place))
        if generation == 1:
            assert house.ended is None
            house.train()
    found = [one for one in house.journal if isinstance(one, JobInterrupted)]
    assert bool(found) == ends and house.core.phase() != "training"
    for one in found:
        assert one.kind is EndKind.SCRIPT_FAILED
        assert one.cause == (
            "the ranks call different collectives after step 10: worker 0 is in all_reduce at train.py:50, worker 1 in "
            "broadcast at train.py:60, as they did before the group was formed again. Fix: call the same collectives "
            "in the same order on every rank"
        )


def equal_after(house: House, step: int) -> None:
    """Let all workers report equal digests of a commit."""
    for node in sorted(house.core.state.by_slot.values()):
        credential = house.credential(node)
        digest = Digest(Point(step, house.core.state.generation_number), step, b"same", is_kept=True)
        house.receive(credential.session, ReportEnvelope(credential, Digests((digest,))))


@pytest.mark.parametrize(
    ("changes", "was_equal", "number", "rolls_back"),
    [
        ({"trust": Trust.MAJORITY}, True, 812, True),
        ({"trust": Trust.MAJORITY}, True, 813, False),  # the others may only have missed the end of #812
        ({"trust": Trust.MAJORITY}, False, 812, False),
        ({"trust": Trust.STOP}, True, 812, False),
    ],
    ids=["mismatch", "other number", "never equal", "stop"],
)
def test_mismatched_collectives_roll_all_ranks_back(
    changes: dict[str, Any], was_equal: bool, number: int, rolls_back: bool
) -> None:
    """A rank that left out a collective has committed a step alone; its state must not be given to the others."""
    house = training_for_a_while(3, step_timeout_s=6.0, **changes)
    if was_equal:
        equal_after(house, 5)
    gathers = WAITS._replace(place="all_gather at train.py:60", collectives=number)
    pass_time(house, 14, n2=gathers)
    assert house.core.phase() != "training"
    records = [one for one in house.journal if isinstance(one, RolledBack)]
    assert bool(records) == rolls_back
    interrupted = [one for one in house.journal if isinstance(one, JobInterrupted)]
    assert len(interrupted) == (changes["trust"] is Trust.STOP)
    for one in interrupted:
        assert one.kind is EndKind.UNEQUAL and one.cause.endswith("no rollback (CONSISTENCY=stop)")
    for record in records:
        assert (record.to, record.suspects) == (Point(5, 1), ())
        assert "worker 2 is in another collective, all_gather #812, workers 0 and 1 wait for it" in record.text
        assert record.text.endswith(
            "most likely a rank left out a collective, or called one too many; all ranks roll back to step 5, where "
            "all were equal, and repeat 5 steps"
        )
        assert house.last("s0", RoundOpened).back_to == Point(5, 1)


def test_stopped_process_is_named_before_its_lease_is_over() -> None:
    house = training_for_a_while(2, step_timeout_s=6.0, node_timeout_s=20.0)
    for second in range(1, 13):
        house.tick(1.0)
        report(house, "0", WAITS._replace(still_s=float(second)))
    assert house.notes[0].startswith("no step for ")
    assert "worker 1 has not been heard from for" in house.notes[0] and ended(house) == []


def test_worker_that_hangs_at_the_same_step_again_gets_twice_the_time() -> None:
    house = training_for_a_while(2, step_timeout_s=6.0)
    since_s = pass_time(house, 13, n1=SLEEPS)
    assert len(ended(house)) == 1
    since_s = pass_time(house, 10, since_s, n1=SLEEPS)  # it cannot be ended: its agent does not answer
    assert len(ended(house)) == 1
    pass_time(house, 2, since_s, n1=SLEEPS)
    assert len(ended(house)) == 2 and "after 24 s (HANG=end), as once before" in house.notes[1]


def test_only_the_last_steps_with_an_ended_member_are_remembered() -> None:
    watch = training_for_a_while(2).core._watch
    for step in range(NAMED + 1):
        watch._end_them([], step)
    first_s, *later_s = (watch._patience_s(Hang.STUCK, 60.0, step) for step in range(NAMED + 1))
    assert later_s == [2 * first_s] * NAMED


def test_paused_scheduler_blames_no_worker() -> None:
    house = training_for_a_while(step_timeout_s=6.0)
    house.stall(60.0)
    for node in range(3):
        report(house, str(node), None)
    house.tick(1.0)
    assert [note for note in house.notes if "no step" in note] == []


def test_report_of_another_generation_is_ignored() -> None:
    house = training_for_a_while(2, step_timeout_s=6.0)
    for second in range(1, 20):
        house.tick(1.0)
        for node in ("0", "1"):
            house.beat(node, step=STEP)
            credential = house.credential(node)
            progress = WAITS._replace(still_s=float(second))
            house.receive(credential.session, ReportEnvelope(credential, StallReport(progress), 99, STEP))
    assert house.notes == []


def test_repeated_heartbeats_of_many_stalled_workers_are_not_judged_again() -> None:
    house = training_for_a_while(2)
    pass_time(house, 2, n1=SLEEPS)
    credential = house.credential("0")
    beat = Heartbeat(credential, 1, Activity.TRAINING, 1, None, STEP)
    house.receive(credential.session, beat)
    house.receive(credential.session, ReportEnvelope(credential, StallReport(WAITS), 1, STEP))
    assert house.core.repeats(credential.session, beat, house.now)
