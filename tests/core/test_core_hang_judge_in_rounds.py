"""Standstills during an open round or after the machine was suspended: when a worker is ended and when not."""

from __future__ import annotations

from samebits.core.messages import Activity, RoundOpened
from tests.core.house import House
from tests.core.test_core_hang_judge import SLEEPS, STEP, WAITS, ended, pass_time, report, training_for_a_while

TIMEOUT_S = 6.0


def without_worker_0(**changes: float | bool) -> House:
    """Worker 0 is dead, and worker 1 has joined the round that replaces it."""
    house = training_for_a_while(3, step_timeout_s=TIMEOUT_S, **changes)
    house.close("s0", gone=True)
    house.join("1", live=(STEP, 1))
    assert house.core.phase().startswith("forming")
    return house


def wait_for_worker_2(house: House, seconds: int, since_s: float = 0.0, *, progress: object = SLEEPS) -> float:
    """Worker 1 waits in the round; worker 2 reports that it does not move."""
    for _ in range(seconds):
        house.tick(0.5)
        since_s += 1.0
        house.beat("1", Activity.WAITING, step=STEP)
        report(house, "2", None if progress is None else progress._replace(still_s=since_s))  # type: ignore[attr-defined]
        house.tick(0.5)
    return since_s


def test_worker_that_does_not_join_a_round_is_named_and_ended() -> None:
    house = without_worker_0()
    since_s = wait_for_worker_2(house, 5)
    assert house.core.standstill == "" and ended(house) == []
    since_s = wait_for_worker_2(house, 2, since_s)
    assert house.core.standstill == (
        "the round waits: worker 2 is in train.py:46 (time.sleep) for 6 s; it is ended and replaced after 12 s "
        "(HANG=end)"
    )
    since_s = wait_for_worker_2(house, 4, since_s)
    assert ended(house) == []
    wait_for_worker_2(house, 2, since_s)
    assert ended(house) == ["it held the others up for 12 s in train.py:46 (time.sleep) (HANG=end)"]


def test_tell_only_names_it() -> None:
    house = without_worker_0(ends_stuck=False)
    wait_for_worker_2(house, 30)
    assert "nothing is done about it (HANG=tell)" in house.core.standstill and ended(house) == []


def test_no_worker_is_waited_for_before_one_has_joined() -> None:
    house = training_for_a_while(3, step_timeout_s=TIMEOUT_S)
    house.close("s0", gone=True)
    wait_for_worker_2(house, 30)
    assert ended(house) == []


def test_worker_in_a_collective_is_left_to_its_own_process() -> None:
    house = without_worker_0()
    wait_for_worker_2(house, 30, progress=WAITS)
    assert ended(house) == []


def test_worker_that_joins_is_not_ended() -> None:
    house = without_worker_0()
    since_s = wait_for_worker_2(house, 11)
    house.join("2", live=(STEP, 1))
    house.tick(since_s)
    assert ended(house) == [] and house.core.standstill == ""


def test_hang_is_found_while_a_newcomer_waits_for_a_commit() -> None:
    house = training_for_a_while(2, step_timeout_s=TIMEOUT_S, min_world_size=2, max_world_size=3)
    house.register("2")
    house.beat("2", Activity.WAITING, generation=0)
    house.tick(0.01)
    assert house.last("s0", RoundOpened).gently
    since_s = pass_time(house, 14, n1=SLEEPS)
    assert ended(house) == ["it held the others up for 12 s in train.py:46 (time.sleep) (HANG=end)"], since_s


def test_stuck_collective_is_given_up_while_a_newcomer_waits_too() -> None:
    house = training_for_a_while(2, step_timeout_s=TIMEOUT_S, min_world_size=2, max_world_size=3)
    house.register("2")
    house.beat("2", Activity.WAITING, generation=0)
    house.tick(0.01)
    pass_time(house, 14)
    assert not house.last("s0", RoundOpened).gently
    assert any("does not wait for a commit: no step for 12 s" in note for note in house.notes)


def test_suspended_machine_gets_time_before_anything_is_done() -> None:
    house = training_for_a_while(3, step_timeout_s=TIMEOUT_S)
    house.stall(60.0)
    for node in "012":
        report(house, node, WAITS._replace(still_s=61.0))
    house.tick(0.5)
    assert house.core.standstill.startswith("no step for 61 s") and house.invited() == {}
    for node in "012":
        report(house, node, None, step=STEP + 1)
    house.tick(0.5)
    assert house.core.standstill == "" and house.notes[-1] == "the job makes progress again"


def test_reports_from_before_the_pause_do_not_age_during_it() -> None:
    house = training_for_a_while(3, step_timeout_s=TIMEOUT_S)
    pass_time(house, 3, n2=SLEEPS)
    house.stall(60.0)
    assert house.core.standstill == "" and ended(house) == []


def test_report_of_a_lost_process_does_not_apply_to_its_successor() -> None:
    house = training_for_a_while(2, step_timeout_s=TIMEOUT_S, cool_down_s=0.0)
    pass_time(house, 5, n1=SLEEPS)
    house.close("s1", gone=True)
    house.tick(0.01)
    house.register("1", "again")
    house.join("0", live=(STEP, 1))
    house.join("1", live=(STEP, 1))
    for _ in range(20):
        house.tick(1.0)
        report(house, "0", WAITS._replace(still_s=50.0))
        house.beat("1", step=STEP)
    assert ended(house) == [] and house.core.standstill == ""
