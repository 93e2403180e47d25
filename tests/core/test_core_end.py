"""How a job ends: finished by all, stopped, interrupted or failed; and that it does not end earlier."""

from __future__ import annotations

from typing import Any

import pytest

from samebits.core.end_kinds import EndKind
from samebits.core.messages import Activity, EndJob, Finished, ProcessEnded, Restarting, RoundOpened, StopJob
from samebits.core.point import Point
from samebits.core.ready import JobEnded
from samebits.core.records import (
    JobFinished,
    JobInterrupted,
    SeatLeft,
    SeatLost,
    SeatResumed,
    TrainingFinished,
)
from samebits.core.scheduler import STATUS_WAIT_S
from tests.core.house import House, policy, training_house


def finished_house(**changes: float | bytes) -> House:
    house = training_house(**changes)
    for node in "01":
        house.beat(node, Activity.DONE, step=60)
    return house


# ---- finish (S19)


def test_training_is_finished_when_every_member_is_done() -> None:
    house = training_house(3)
    for node in "02":
        house.beat(node, Activity.DONE, step=60)
        assert house.ready.records == [] and house.ready.sends == []
    house.beat("1", Activity.DONE, step=60)
    assert house.ready.records == [TrainingFinished(Point(60, 1))]
    for session in ("s0", "s1", "s2"):
        assert house.answer(session, Finished) == Finished("job-1", 1, Point(60, 1))
    assert house.core.phase() == "finished"


def test_done_in_an_earlier_generation_does_not_count() -> None:
    house = training_house()
    house.beat("0", Activity.DONE, step=60)
    house.beat("1", Activity.DONE, generation=0, step=60)
    assert house.core.state.final is None


def test_repeated_done_counts_once() -> None:
    house = training_house()
    house.beat("0", Activity.DONE, step=60)
    house.beat("0", Activity.DONE, step=60)
    assert house.core.state.final is None


def test_loss_while_others_are_done_voids_their_reports() -> None:
    house = training_house(cool_down_s=0.0)
    house.beat("0", Activity.DONE, step=60)
    house.close("s1", gone=True)
    assert house.answer("s0", RoundOpened).round.number == 2
    house.register("1", session="new")
    house.join("0", [(60, 1)])
    house.join("1", [])
    assert house.committed().restore == Point(60, 1)
    house.beat("1", Activity.DONE, step=60)
    assert house.core.state.final is None, "worker 0's report on generation 1 is void"
    house.beat("0", Activity.DONE, step=60)
    assert house.core.state.final == Point(60, 2)


def test_done_while_a_round_is_open_does_not_count() -> None:
    house = training_house(3)
    house.close("s2", gone=True)
    house.tick(1.0)
    for node in "01":
        house.beat(node, Activity.DONE, step=60)
        assert house.invited(), "it has missed the round and is invited again"
    assert house.core.state.final is None


def test_worker_that_dies_after_it_is_done_is_waited_for() -> None:
    house = training_house()
    house.beat("1", Activity.DONE, step=60)
    house.close("s1", gone=True)
    house.beat("0", Activity.DONE, step=60)
    assert house.core.state.final is None
    assert house.core.phase() == "forming; waiting for 1"


def test_worker_that_missed_the_end_is_notified_again() -> None:
    house = finished_house()
    house.beat("0", Activity.DONE, step=60)
    assert house.answer("s0", Finished).point == Point(60, 1)
    house.beat("0", Activity.FINISHED, step=60)
    assert house.ready.sends == []


def test_worker_restarted_after_the_end_learns_of_it_with_its_seat() -> None:
    house = finished_house(cool_down_s=0.0)
    house.close("s1", gone=True)
    assert house.core.phase() == "finished", "no round is needed"
    house.register("1", session="new")
    assert house.admission("new").finished == Point(60, 1)
    assert house.invited() == {}


def test_job_is_finished_when_all_have_left() -> None:
    house = finished_house()
    house.leave("0")
    assert house.ready.records == [SeatLeft("0", 1)] and house.ended is None
    house.leave("1")
    assert house.ready.records == [SeatLeft("1", 1), JobFinished()]
    assert house.ended == JobEnded(EndKind.FINISHED, "job finished")
    assert house.core.phase() == "ending"


NOT_DONE = "training is finished at step 60, but worker {} did not reach the end of its script: {}"
KILLED = NOT_DONE.format("1 (pid 1001 on host-a)", "its connection closed and its process is gone")


def test_worker_killed_after_training_is_named_as_not_done() -> None:
    house = finished_house()
    house.leave("0")
    house.close("s1", gone=True)
    assert house.ended is None, "it may be started again"
    assert house.core.phase() == "finished; the script still runs on 1"
    wait_for_the_end(house)
    assert house.ended == JobEnded(EndKind.INTERRUPTED, KILLED)
    assert house.core.state.interruptions[-1].step == 60 and not house.core.state.finished
    assert 130 < house.now < 150, "a restarted process may have had to wait for its cool-down"


def wait_for_the_end(house: House) -> None:
    while house.ended is None and house.now < 4000:
        wake_at = house.core.wake_at()
        assert wake_at is not None
        house.tick(wake_at - house.now)


def test_failure_after_training_ends_the_job_with_its_status_once_others_are_done() -> None:
    house = finished_house()
    house.say_last("0", "failed at train.py:9: OSError")
    house.leave("0", on_purpose=False, text="failed at train.py:9: OSError", status=1)
    for _ in range(400):  # the other worker evaluates
        house.now += 10
        house.beat("1", Activity.FINISHED, step=60)
        house.tick()
    assert house.ended is None
    house.leave("1")
    text = NOT_DONE.format("0 (pid 1000 on host-a)", "failed at train.py:9: OSError")
    assert house.records(JobInterrupted) == [JobInterrupted(EndKind.SCRIPT_FAILED, 60, text, 1, status=1)]
    assert house.ended == JobEnded(EndKind.SCRIPT_FAILED, text)


def test_recover_runs_only_the_rest_of_a_failed_script() -> None:
    """The status belongs to the start that it ended. The next scheduler waits for the process that tries again."""
    house = finished_house(cool_down_s=0.0)
    house.leave("1")
    house.leave("0", on_purpose=False, text="failed", status=3)
    assert house.ended is not None
    house.ended = None
    house.crash(after_s=1.0)
    house.tick(1.0)
    assert house.ended is None
    house.register("0", session="new")
    assert house.admission("new").finished == Point(60, 1)
    house.leave("0")
    assert house.ended == JobEnded(EndKind.FINISHED, "job finished")


def test_restarted_scheduler_ends_a_job_whose_last_script_failed() -> None:
    house = finished_house()
    house.leave("1")
    house.leave("0", on_purpose=False, text="failed", status=3)
    house.ended = None
    house.crash(after_s=1.0, keep=len(house.journal) - 1)  # without JobInterrupted
    house.tick()
    assert house.ended is not None and house.ended.kind is EndKind.SCRIPT_FAILED


def test_worker_asked_to_leave_after_training_is_not_done() -> None:
    house = finished_house()
    house.leave("0")
    house.leave("1", text="it was asked to (SIGTERM)", status=143)
    assert house.ended is None, "another process may do the rest"
    wait_for_the_end(house)
    assert house.ended is not None and house.ended.kind is EndKind.INTERRUPTED


@pytest.mark.parametrize(("status", "kind"), [(0, EndKind.FINISHED), (3, EndKind.SCRIPT_FAILED)])
def test_launcher_reports_a_status_that_the_script_could_not(status: int, kind: EndKind) -> None:
    house = finished_house(token=b"t")
    house.leave("0")
    house.leave("1", text="a SystemExit", status=None)
    assert house.ended is None
    seat = house.seat("1")
    end = ProcessEnded("1", *seat.process[:3], f"ended with status {status}", status=status)
    house.step(end)
    assert house.ended is not None and house.ended.kind is kind
    if status:
        assert house.core.state.interruptions[-1].status == status


def test_wait_for_the_launchers_status_is_short() -> None:
    house = finished_house(token=b"t", cool_down_s=0.0)
    house.leave("0")
    house.leave("1", text="a SystemExit", status=None)
    began = house.now
    wait_for_the_end(house)
    assert house.ended == JobEnded(EndKind.FINISHED, "job finished")
    assert house.now == began + STATUS_WAIT_S, "no other timeout ends it sooner"


def test_worker_waiting_for_its_seat_keeps_the_finished_job_open() -> None:
    house = finished_house()
    house.leave("0")
    house.close("s1", gone=True)
    for _ in range(29):
        house.now += 1
        house.register("1", session="new")
        house.tick()
        assert house.ended is None
    house.now += 1
    house.register("1", session="new")
    assert house.admission("new").finished == Point(60, 1)


def test_worker_waiting_for_a_seat_learns_that_the_job_is_finished() -> None:
    house = finished_house()
    house.register("1", session="duplicate")
    house.leave("0")
    house.leave("1")
    assert house.answer("duplicate", EndJob) == EndJob("job-1", 1, EndKind.FINISHED, "job finished")


@pytest.mark.parametrize("kept", ["the last leave", "all but the last leave"])
def test_restarted_scheduler_ends_a_finished_job(kept: str) -> None:
    """The scheduler died between the last SeatLeft and JobFinished, and no worker will return."""
    house = finished_house()
    house.leave("0")
    house.leave("1")
    house.ended = None
    house.crash(after_s=1.0, keep=len(house.journal) - (1 if kept == "the last leave" else 2))
    if kept != "the last leave":  # its launcher saw it end, and tells every scheduler
        house.tick(20.0)
        house.step(ProcessEnded("1", *house.seat("1").process[:3], "ended with status 0", status=0))
    wait_for_the_end(house)
    assert house.ended is not None and house.ended.kind is EndKind.FINISHED


def test_finished_job_ends_although_its_last_processes_were_lost() -> None:
    house = finished_house()
    for session in ("s0", "s1"):
        house.close(session, gone=True)
    house.crash()
    loaded_at = house.now
    wait_for_the_end(house)
    assert house.ended is not None and house.ended.kind is EndKind.INTERRUPTED
    assert house.now == loaded_at + house.policy.topo_timeout_s


def test_stop_after_training_ends_the_scripts_and_is_reported() -> None:
    house = finished_house()
    house.stop("Ctrl-C")
    assert house.records(JobFinished) == []
    assert house.answer("s0", EndJob).kind is EndKind.STOPPED
    house.leave("0", text="told to end", status=78)
    house.leave("1", text="told to end", status=78)
    assert house.ended == JobEnded(EndKind.STOPPED, "stopped by Ctrl-C")
    house.ended = None
    house.crash(after_s=1.0)
    house.tick(1.0)
    assert house.ended is None, "recover.sh runs the rest of the scripts"


# ---- stopped


@pytest.mark.parametrize("trains", [True, False])
def test_error_before_a_seat_ends_the_job_as_a_failure_with_its_code(trains: bool) -> None:
    """A follower reports it, since a process without a seat cannot."""
    house = training_house() if trains else House(policy(2))
    text = "worker 1 (pid 7) ended with status 64: NODE_TIMEOUT=abc: expected seconds. Fix: export NODE_TIMEOUT=5"
    house.step(StopJob(text, 64))
    (ended,) = house.records(JobInterrupted)
    assert (ended.kind, ended.cause, ended.status) == (EndKind.SCRIPT_FAILED, text, 64)
    assert ended.kind.words_with(ended.status) == "failed"


def test_stop_is_sent_to_all_and_waits_until_they_have_left() -> None:
    house = training_house()
    house.beat("1", step=17)
    house.register("0", session="waiting")
    house.stop("Ctrl-C in run.sh")
    text = "stopped by Ctrl-C in run.sh"
    assert house.ready.records == [JobInterrupted(EndKind.STOPPED, 17, text, generation=1)]
    for session in ("s0", "s1", "waiting"):
        assert house.answer(session, EndJob) == EndJob("job-1", 1, EndKind.STOPPED, text)
    assert house.ended is None
    house.leave("0", text=text)
    assert house.ended is None
    house.leave("1", text=text)
    assert house.ended == JobEnded(EndKind.STOPPED, text)
    assert not house.core.state.finished


def test_a_stop_after_a_loss_names_the_first_cause() -> None:
    house = training_house()
    house.say_last("1", "global rank 1 (pid 7) was killed by signal 9")
    house.stop("torchrun")
    assert "stopped by torchrun; first cause: rank 1 (node 1," in house.answer("s0", EndJob).text
    assert "global rank 1 (pid 7) was killed by signal 9" in house.answer("s0", EndJob).text


def test_worker_that_missed_the_stop_gets_it_after_its_next_heartbeat() -> None:
    house = training_house()
    house.stop("Ctrl-C")
    house.beat("0")
    assert house.answer("s0", EndJob).kind is EndKind.STOPPED


def test_stop_does_not_wait_forever() -> None:
    house = training_house()
    house.stop("Ctrl-C")
    for _ in range(9):
        house.now += 1
        house.beat("0")
        house.beat("1")
        house.tick()
        assert house.ended is None
    house.tick(1.0)
    assert house.ended == JobEnded(EndKind.STOPPED, "stopped by Ctrl-C")


def test_scheduler_pause_prolongs_the_wait_of_a_stop() -> None:
    house = training_house(node_timeout_s=100.0)
    house.stop("Ctrl-C")
    house.now += 2.0
    house.stall(4.0)
    house.tick(7.9)
    assert house.ended is None, "8 s were left, and no worker could leave meanwhile"
    house.tick(0.1)
    assert house.ended is not None


def test_second_stop_changes_nothing() -> None:
    house = training_house()
    house.stop("Ctrl-C")
    house.stop("SIGTERM")
    assert house.ready.records == []


@pytest.mark.parametrize("end", ["stop", "formation timeout"])
def test_ending_job_does_not_keep_the_shell_spinning(end: str) -> None:
    """Every wake_at lies ahead, otherwise the shell's loop would never sleep."""
    house = training_house(topo_timeout_s=60.0)
    house.close("s1", gone=True)
    if end == "stop":
        house.stop("Ctrl-C")
    while house.core.phase() != "ending":
        house.now += 1
        house.beat("0", Activity.WAITING)
        house.tick()
    for _ in range(9):
        wake_at = house.core.wake_at()
        assert wake_at is not None and wake_at > house.now
        house.now += 1
        house.beat("0", Activity.WAITING)
        house.tick()


def test_stopped_job_resumes_without_a_cool_down() -> None:
    house = training_house()
    house.stop("Ctrl-C")
    house.leave("0", text="stopped")
    house.leave("1", text="stopped")
    house.ended = None
    house.crash(after_s=1.0)
    for node in "01":
        house.register(node, session=f"{node} again")
        assert house.admission(f"{node} again").incarnation == 2
    house.train(n0=[(50, 1)])
    assert house.committed().restore == Point(50, 1)


@pytest.mark.parametrize("scheduler_knew", [True, False])
def test_unfinished_job_is_not_finished_when_all_leave(scheduler_knew: bool) -> None:
    """SIGTERM reached the workers before, or without, the scheduler; or the scheduler died in between."""
    house = training_house()
    if scheduler_knew:
        house.stop("Ctrl-C")
    house.leave("0", text="SIGTERM")
    if scheduler_knew:
        house.crash(after_s=1.0)
    house.leave("1", text="SIGTERM")
    assert house.ended is None
    house.tick(5.0)
    house.tick(10.0)
    assert house.ended is not None and house.ended.kind is EndKind.INTERRUPTED
    assert not house.core.state.finished


def test_workers_that_left_before_a_generation_have_trained_nothing() -> None:
    house = House(policy(2)).fill()
    house.leave("0", text="its script never called samebits.elastic.run")
    assert house.ended is None
    house.leave("1", text="its script never called samebits.elastic.run")
    text = "every worker left before training began: its script never called samebits.elastic.run"
    assert house.ended == JobEnded(EndKind.UNTRAINED, text)
    assert house.records(JobInterrupted) == [JobInterrupted(EndKind.UNTRAINED, 0, text, generation=0)]
    assert not house.core.state.finished


# ---- all restore points are lost


def killed_house(*, saved: bool = True) -> House:
    """Both disks held step 60, every process was killed, and both nodes are seated again."""
    house = training_house(cool_down_s=0.0)
    for node in "01" if saved else "0":
        house.saved(node, (60, 1))
    for node in "01":
        house.close(f"s{node}", gone=True)
    house.crash(1.0)
    for node in "01":
        house.register(node, f"again{node}")
    return house


def test_job_that_lost_all_restore_points_is_refused_until_they_return() -> None:
    house = killed_house()
    house.join("0")
    assert not house.core.state.interruptions
    house.join("1")
    (record,) = house.records(JobInterrupted)
    assert (record.kind, record.step) == (EndKind.POINTS_LOST, 60)
    assert "the restore point of step 60 of generation 1" in record.cause and "give up 60 steps" in record.cause
    assert {house.answer(f"again{node}", EndJob).kind for node in "01"} == {EndKind.POINTS_LOST}
    for node in "01":
        house.leave(node)
    assert house.ended == JobEnded(EndKind.POINTS_LOST, record.cause)
    house.ended = None
    house.crash(1.0)
    for node in "01":
        house.register(node, f"third{node}")
    house.train(n0=[(60, 1)])
    assert house.committed().restore == Point(60, 1) and house.ended is None


@pytest.mark.parametrize(
    ("brought", "restore", "is_said"),
    [
        ({"points": [(60, 1)]}, Point(60, 1), False),
        ({"copies": [(0, (60, 1))]}, Point(60, 1), False),  # a copy kept by a buddy
        ({"live": (70, 1)}, Point(70, 1), False),
        ({"points": [(40, 1)]}, Point(40, 1), True),
    ],
)
def test_point_of_a_single_member_saves_the_job(brought: dict[str, Any], restore: Point, is_said: bool) -> None:
    house = killed_house()
    house.join("0")
    house.join("1", **brought)
    assert house.committed().restore == restore
    assert any("goes back to step 40 and repeats 20 steps" in note for note in house.notes) == is_said


def test_point_that_some_disk_never_held_is_not_missed() -> None:
    house = killed_house(saved=False).train()
    assert house.committed().restore is None and house.committed().generation == 2 and house.ended is None


def test_job_that_never_trained_waits_for_its_spare_and_notifies_it() -> None:
    house = House(policy(1, spare_num=1)).fill()
    house.register("7")
    house.leave("0", text="its script never called samebits.elastic.run")
    for _ in range(10):
        assert house.ended is None
        house.beat("7", Activity.SEATED)
        house.tick(1.0)
    assert house.answer("s7", EndJob).kind is EndKind.UNTRAINED


def test_untrained_job_is_not_finished_while_a_worker_asks_for_a_seat() -> None:
    house = House(policy(1))
    house.register("0")
    house.register("0", session="replacement")
    house.leave("0", text="SIGTERM")
    assert house.ended is None
    house.register("0", session="replacement")
    assert house.admission("replacement").incarnation == 2


# ---- interrupted


def test_job_without_workers_is_interrupted() -> None:
    house = training_house()
    house.beat("0", step=33)
    house.leave("1", on_purpose=False, text="ValueError: no such sample")
    house.leave("0", on_purpose=False, text="RuntimeError: Connection reset by peer")
    house.tick()
    house.tick(9.9)
    assert house.ended is None
    house.tick(0.1)
    said = "ValueError: no such sample (software fault)"
    first = f"rank 1 (node 1, host host-a, pid 1001) failed first: {said}; rank 0 followed"
    assert house.records(JobInterrupted) == [
        JobInterrupted(EndKind.INTERRUPTED, 33, f"no worker is left; first cause: {first}", generation=1)
    ]
    assert house.ended is not None and house.ended.kind is EndKind.INTERRUPTED


def failed_house(error: str = "ValueError: loss is nan") -> House:
    house = training_house()
    for node in "10":
        house.say_last(node, f"failed at train.py:41: {error}")
        house.leave(node, on_purpose=False, text=error)
    return house


def test_job_ended_by_its_own_script_reports_this() -> None:
    house = failed_house()
    house.tick()
    house.tick(9.9)
    assert house.ended is None, "its workers may be started again"
    house.tick(0.1)
    failed = "failed at train.py:41: ValueError: loss is nan"
    failed += " (data fault)"
    first = f"rank 1 (node 1, host host-a, pid 1001) failed first: {failed}; rank 0 followed"
    assert house.ended == JobEnded(EndKind.SCRIPT_FAILED, f"no worker is left; first cause: {first}")


def test_end_after_one_of_two_workers_failed_counts_them() -> None:
    house = training_house()
    house.say_last("1", "failed at train.py:41: ValueError: loss is nan")
    house.leave("1", on_purpose=False, text="ValueError: loss is nan")
    house.stop("torchrun")
    (ended,) = house.records(JobInterrupted)
    assert ended.kind is EndKind.SCRIPT_FAILED
    assert ended.cause.startswith("1 of 2 workers failed; first cause: rank 1 (node 1, ")


def test_gradient_that_was_wrong_twice_puts_saved_points_in_doubt() -> None:
    """Found by an audit (AUDIT); the script is not at fault."""
    house = failed_house("samebits.errors.UnequalError: step 50: rank 1's gradient of 0.weight is not what …")
    house.tick()
    house.tick(10.0)
    assert house.ended is not None and house.ended.kind is EndKind.UNEQUAL
    assert "trying again cannot help: the job ends" in house.ended.text
    assert house.core.state.is_in_doubt


LOST = "train.py:24: a weight changed after state.commit(). Fix: change it before state.commit()"


@pytest.mark.parametrize(
    ("status", "kind"), [(95, EndKind.SCRIPT_FAILED), (80, EndKind.SCRIPT_FAILED), (89, EndKind.UNEQUAL)]
)
def test_error_that_every_retry_repeats_ends_the_job_at_once(status: int, kind: EndKind) -> None:
    house = House(policy(2, spare_num=1)).fill()
    house.register("2")
    house.train()
    house.say_last("1", LOST, status)
    (ended,) = house.records(JobInterrupted)
    assert (ended.kind, ended.cause, ended.status) == (kind, f"worker 1: {LOST}", 0 if status == 89 else status)
    assert {send.session for send in house.ready.sends if isinstance(send.message, EndJob)} == {"s0", "s1", "s2"}
    house.say_last("0", LOST, status)  # each rank meets the error
    house.leave("0", text="told to end")
    house.leave("1", text="told to end")
    house.tick(1.0)
    assert house.seat("2").slot is None, "no spare takes a place"
    assert house.core.state.generation_number == 1 and not house.core.state.causes, "and no recovery begins"
    assert not [send for send in house.ready.sends if isinstance(send.message, RoundOpened)]


def test_error_that_a_retry_may_not_repeat_does_not_end_the_job() -> None:
    house = training_house()
    house.say_last("1", "train.py:3: samebits.kv was not answered", 90)
    assert house.ended is None and not house.records(JobInterrupted)


def test_stop_after_the_scripts_own_end_is_not_the_cause() -> None:
    house = failed_house()
    house.stop("its follower")
    assert house.ended is not None and house.ended.kind is EndKind.SCRIPT_FAILED
    assert "ValueError: loss is nan" in house.ended.text


def test_register_keeps_the_emptied_job_alive() -> None:
    house = training_house()
    house.close("s0", gone=True)
    house.close("s1", gone=True)
    for _ in range(25):
        house.tick(1.0)
        house.register("1", session="new")
    assert house.ended is None


def test_waiting_process_on_a_busy_host_learns_of_the_end_without_asking_again() -> None:
    """A process that is not notified would use the free address for a job of its own."""
    house = training_house(1)
    house.register("another", session="waits")
    retry_after_s = house.refusal("waits").retry_after_s
    assert retry_after_s > 0
    for _ in range(int(retry_after_s + house.policy.node_timeout_s) + 2):
        house.beat("0")
        house.tick(1.0)
    house.beat("0", Activity.DONE, step=10)
    house.leave("0")
    assert house.ended is not None and house.ended.kind is EndKind.FINISHED
    assert house.last("waits", EndJob).kind is EndKind.FINISHED


def test_process_that_waited_and_died_does_not_keep_the_job_alive() -> None:
    house = training_house()
    house.close("s0", gone=True)
    house.close("s1", gone=True)
    house.register("1", session="new")
    house.close("new", gone=True)
    house.tick()
    house.tick(10.0)
    assert house.ended is not None and house.ended.kind is EndKind.INTERRUPTED


def test_scheduler_that_no_worker_has_called_yet_waits() -> None:
    house = House(policy(2))
    house.tick(1700.0)
    assert house.ended is None
    house = training_house()
    house.crash(after_s=1.0)
    house.tick(5.0)
    house.tick(20.0)
    assert house.ended is None, "the workers are being started again"


def test_pause_does_not_count_as_an_empty_job() -> None:
    house = training_house()
    house.close("s0", gone=True)
    house.close("s1", gone=True)
    house.tick(1.0)
    house.stall(60.0)
    house.tick(9.9)
    assert house.ended is None
    house.tick(0.1)
    assert house.ended is not None


def abandoned_house() -> House:
    house = training_house()
    house.close("s0", gone=True)
    house.close("s1", gone=True)
    house.tick()
    return house


def test_starting_replacements_keep_the_job_alive_while_that_is_repeated() -> None:
    house = abandoned_house()
    for _ in range(20):
        house.now += 9.9
        assert house.step(Restarting()).is_empty
        house.tick()
    assert house.ended is None
    house.tick(9.9)
    assert house.ended is None
    house.tick(0.2)
    assert house.ended is not None and house.ended.kind is EndKind.INTERRUPTED


def test_replacements_that_never_register_end_with_their_round() -> None:
    house = abandoned_house()
    for _ in range(int(house.policy.topo_timeout_s / 9) + 1):
        house.step(Restarting())
        house.tick(9.0)
    assert house.ended is not None and house.ended.kind is EndKind.FORMATION_TIMEOUT


def test_finished_training_waits_for_a_starting_replacement_but_not_forever() -> None:
    house = finished_house(topo_timeout_s=300.0)
    house.close("s0", gone=True)
    house.close("s1", gone=True)
    house.tick()
    deserted_at = house.now
    while house.ended is None and house.now < 4000:
        house.now += 5.0
        house.step(Restarting())
        house.tick()
    assert house.ended is not None and house.ended.kind is EndKind.INTERRUPTED
    assert 300.0 <= house.now - deserted_at <= 350.0


# ---- ENABLE_RECOVERY=0


def test_death_with_recovery_off_ends_the_job_for_all() -> None:
    house = training_house(recovery=False)
    house.close("s1", gone=True)
    text = "worker 1 (pid 1001 on host-a) is lost: its connection closed and its process is gone (ENABLE_RECOVERY=0)"
    assert house.records(SeatLost) and house.records(JobInterrupted) == [
        JobInterrupted(EndKind.FAILED, 0, text, generation=1)
    ]
    assert house.answer("s0", EndJob) == EndJob("job-1", 1, EndKind.FAILED, text)
    house.leave("0", on_purpose=False, text="told to end")
    assert house.ended == JobEnded(EndKind.FAILED, text)


def test_with_recovery_off_a_script_without_elastic_run_is_left_alone() -> None:
    house = House(policy(2, recovery=False, topo_timeout_s=60.0)).fill()
    for _ in range(200):
        house.now += 1
        house.beat("0", Activity.SEATED)
        house.beat("1", Activity.SEATED)
        house.tick()
    assert house.ended is None
    house.leave("0")
    assert house.ended is None
    house.leave("1")
    assert house.ended == JobEnded(EndKind.FINISHED, "job finished")


def test_with_recovery_off_a_generation_forms_as_usual() -> None:
    house = training_house(recovery=False)
    assert house.core.phase() == "training"
    house.beat("0", Activity.DONE, step=9)
    house.beat("1", Activity.DONE, step=9)
    assert house.core.state.final == Point(9, 1)


def test_with_recovery_off_a_death_after_the_end_is_ignored() -> None:
    house = training_house(recovery=False)
    house.beat("0", Activity.DONE, step=9)
    house.beat("1", Activity.DONE, step=9)
    house.close("s1", gone=True)
    assert not house.records(JobInterrupted)


def test_with_recovery_off_a_connection_may_break_and_return() -> None:
    house = training_house(recovery=False)
    house.close("s1")
    house.now += 0.3
    house.register("1", incarnation=1, job="job-1")
    house.tick(1.0)
    assert house.ended is None and not house.records(SeatResumed)
