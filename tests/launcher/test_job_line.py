"""The status line, its figures, and the question after Ctrl-C: values in, text out."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from samebits import config
from samebits.account.job_view import JobView
from samebits.launcher.interrupts import ASK_S, InterruptAnswer, Question
from samebits.launcher.progress_line import (
    Pace,
    ProgressFacts,
    Screen,
    Showing,
    line_of,
    phase_text,
    seconds,
    shown_value,
    world_text,
)
from samebits.store.progress_report import ProgressReport, read_report, report_file, write_report
from tests.launcher.views import view, worker

REPOSITORY = Path(__file__).resolve().parents[2]

FULL = ProgressFacts(
    script="train.py",
    world="4/4 workers, 1 spare",
    step=1180,
    total_steps=3000,
    steps_per_s=43.4,
    values={"loss": "0.0312", "accuracy": "0.97"},
    recoveries=3,
    lost_s=0.41,
)


def test_line_has_all_parts_in_order() -> None:
    assert line_of(FULL) == (
        "train.py · step 1,180/3,000 · 43 steps/s · loss 0.0312 · accuracy 0.97 · 42 s left · 4/4 workers, 1 spare · "
        "3 recoveries, 0.4 s lost"
    )


def test_unknown_parts_are_omitted() -> None:
    assert line_of(ProgressFacts("train.py", "0/2 workers")) == "train.py · 0/2 workers"
    forming = replace(FULL, phase="filling; waiting for 2, 5", phase_s=12.0, step=0, values={}, recoveries=0, lost_s=0)
    assert line_of(forming) == "train.py · filling; waiting for 2, 5 · 12 s · step 0/3,000 · 4/4 workers, 1 spare"
    assert forming.left_s is None, "it stands still"
    assert line_of(replace(FULL, total_steps=None)).count("left") == 0
    assert "1 recovery, 2.0 s lost" in line_of(replace(FULL, recoveries=1, lost_s=2.0))


@pytest.mark.parametrize("columns", [*range(1, 40), 80, 81, 100, 120, 200])
@pytest.mark.parametrize(
    "standing",
    [
        FULL,
        replace(FULL, script="a/very/long/name_of_a_script_that_nobody_wants_to_read.py"),
        replace(FULL, phase="filling; waiting for " + ", ".join(map(str, range(100))), phase_s=99.0),
        ProgressFacts("train.py", "4/4 workers"),
    ],
)
def test_line_never_wraps(standing: ProgressFacts, columns: int) -> None:
    assert len(line_of(standing, columns)) < max(columns, 21)


def test_least_important_part_is_dropped_first_and_the_step_never() -> None:
    assert line_of(FULL, 200) == line_of(FULL)
    assert line_of(FULL, 80) == "step 1,180/3,000 · 43 steps/s · loss 0.0312 · 42 s left · 4/4 workers, 1 spare"
    assert "accuracy" not in line_of(FULL, 110)
    for columns in (30, 45, 60, 80, 120):
        assert "step 1,180/3,000" in line_of(FULL, columns)
    assert line_of(FULL, 44) == "step 1,180/3,000 · 4/4 workers, 1 spare"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.2, "1 s"), (41.0, "41 s"), (90.0, "2 min"), (5400.0, "1.5 h"), (864000.0, "10 days")],
)
def test_durations_in_words(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.03123, "0.03123"), (2.30251, "2.303"), (1e-05, "1e-05"), (1e9, "1e+09")]
)
def test_number_format(value: float, text: str) -> None:
    assert shown_value(value) == text
    assert shown_value(float("nan")) == "nan"


# ---- figures over time


def test_speed_is_that_of_the_last_minutes_of_training() -> None:
    pace = Pace()
    assert pace.steps_per_s() is None
    for second in range(200):
        pace.look(view(step=second * (10 if second < 60 else 40)), float(second))
    assert pace.steps_per_s() == pytest.approx(40, rel=0.2)
    pace.look(view(step=100, generation=2), 201.0)
    assert pace.steps_per_s() is None, "it went back: earlier points are on another line"
    pace.look(view(step=120, generation=2), 203.0)
    assert pace.steps_per_s() == 10.0
    pace.look(view(step=120, generation=2, phase="forming; waiting for 1"), 204.0)
    assert pace.steps_per_s() is None


def test_recoveries_are_counted_with_the_time_that_training_stood_still() -> None:
    pace = Pace()
    for now, seen in [
        (0.0, view(phase="filling; waiting for 0", generation=0, alive=2)),
        (9.0, view()),  # the first start is no recovery
        (10.0, view(alive=2)),
        (10.2, view(phase="forming; waiting for 1", alive=3)),
        (10.4, view(generation=2)),
        (20.0, view(generation=2)),
        (21.0, view(generation=2, phase="filling; waiting for 1", alive=2)),
    ]:
        pace.look(seen, now)
    assert pace.recoveries == 1
    assert pace.lost_s(21.5) == pytest.approx(0.9)
    assert pace.phase_s(21.5) == 0.5
    pace.look(view(generation=3), 22.0)
    assert (pace.recoveries, pace.lost_s(30.0)) == (2, pytest.approx(1.4))
    pace.look(view(generation=3, phase="finishing", training_finished=True, alive=1), 31.0)
    assert pace.lost_s(40.0) == pytest.approx(1.4), "a finished job is not held up"


# ---- sources of the line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return False


def showing(folder: Path) -> tuple[Showing, io.StringIO]:
    stream = io.StringIO()
    settings, _ = config.read({"LOG_DIR": str(folder), "WORKER_NUM": "3"}, role_required=False)
    return Showing(settings, Screen(stream), "train.py", ["worker_1"]), stream


def shown(one: tuple[Showing, io.StringIO], seen: JobView | None, now: float, *, linked: bool = True) -> list[str]:
    look, stream = one
    stream.seek(0)
    stream.truncate()
    look.show(seen, is_linked=linked, running=3, now=now)
    return stream.getvalue().splitlines()


def test_tutorial_shows_the_first_line_as_it_is_printed() -> None:
    settings, _ = config.read({"LOG_DIR": "device", "WORKER_NUM": "4"}, role_required=False)
    stream = io.StringIO()
    Showing(settings, Screen(stream), "train.py", is_served=True).show(None, is_linked=False, running=4, now=0.0)
    for page in ("get-started.md", "get-started.zh-CN.md"):
        lines = (REPOSITORY / "docs" / "tutorials" / page).read_text(encoding="utf-8").splitlines()
        assert {one for one in lines if one.endswith("workers running")} == {stream.getvalue().strip()}, page


def test_line_shows_the_report_or_else_a_log(tmp_path: Path) -> None:
    write_report(tmp_path, "0", ProgressReport(1, 99, {"loss": 9.0}))  # an earlier job's
    one = showing(tmp_path)
    assert shown(one, None, 0.0, linked=False) == ["train.py · waiting for the scheduler · 3 workers running"]
    (tmp_path / "worker_0.log").write_text("epoch 0 step 20 loss 0.5\n")
    (tmp_path / "worker_1.log").write_text("hello\n")
    assert shown(one, view(), 10.0) == ["[worker_1]: hello", "train.py · step 7 · loss 0.5 · 3/3 workers"]
    write_report(tmp_path, "0", ProgressReport(8, 100, {"loss": 0.25, "lr": 1e-3}))
    assert shown(one, view(step=9), 20.0) == [
        "train.py · step 9/100 · 0.2 steps/s · loss 0.25 · lr 0.001 · 8 min left · 3/3 workers"
    ]
    another = view(step=10, workers=(worker(4, slot=0), worker(1), worker(2)))
    write_report(tmp_path, "4", ProgressReport(10, 100, {"loss": 0.125}))
    assert "loss 0.125" in shown(one, another, 30.0)[0]
    away = shown(one, changed(another, seat_free_in_s=3.2), 40.0, linked=False)
    assert away[0].startswith("train.py · scheduler unreachable · step 10/100")
    waits = shown(one, changed(another, phase="filling; waiting for 1", seat_free_in_s=23.2, alive=2), 50.0)
    assert waits[0].endswith("2/3 workers · seat free in 24 s")


def test_a_seat_s_time_runs_down_and_no_earlier_step_is_shown_while_a_new_scheduler_hears_none(tmp_path: Path) -> None:
    one = showing(tmp_path)
    shown(one, view(step=107), 0.0)
    away = view(step=0, phase="forming; waiting for 0, 1", alive=0, seat_free_in_s=25.0)
    assert "step 107" in shown(one, away, 10.0)[0]
    assert shown(one, away, 20.0)[0].endswith("seat free in 15 s")
    assert "seat free" not in shown(one, away, 36.0)[0]
    assert "step 107" in shown(one, view(step=100), 50.0)[0], "the scheduler has not heard the last steps yet"
    assert "step 100" in shown(one, view(generation=2, restore_step=100, step=100), 60.0)[0], "they are repeated"
    assert "step 100" in shown(one, view(generation=1, step=107), 70.0)[0], "a late look at the last generation"
    assert "step" not in shown(showing(tmp_path), away, 80.0)[0], "a new follower does not know it either"


def test_phase_is_in_words_and_names_workers(tmp_path: Path) -> None:
    start = view(phase="filling; waiting for 0, 1, 2", generation=0)
    assert phase_text(start) == "starting; waiting for workers 0, 1 and 2"
    assert phase_text(view(phase="forming; waiting for 1.1")) == "recovering; waiting for worker 1"
    assert phase_text(view(phase="filling; all are here", generation=0)) == "starting; all workers are here"
    assert phase_text(view(phase="finished")) == "finished"
    settings, _ = config.read({"LOG_DIR": str(tmp_path), "WORKER_NUM": "3"}, role_required=False)
    stream = io.StringIO()
    served = Showing(settings, Screen(stream), "train.py", is_served=True), stream
    assert "asking the scheduler" in shown(served, None, 0.0, linked=False)[0], "it runs, and has not answered yet"


def test_values_of_an_earlier_step_are_not_shown_for_the_last(tmp_path: Path) -> None:
    one, over = showing(tmp_path), view(step=100, phase="finished", training_finished=True)
    write_report(tmp_path, "0", ProgressReport(98, 100, {"loss": 0.25}))
    assert "loss 0.25" in shown(one, view(step=98), 0.0)[0]
    assert "loss" not in shown(one, over, 10.0)[0]
    write_report(tmp_path, "0", ProgressReport(100, 100, {"loss": 0.125}))
    assert "loss 0.125" in shown(one, changed(over, alive=2), 20.0)[0]


def test_no_pace_is_shown_while_no_step_comes() -> None:
    pace = Pace()
    for now in range(20):
        pace.look(view(step=10 * now), float(now))
    assert pace.steps_per_s() == pytest.approx(10)
    for now in range(20, 27):
        pace.look(view(step=190), float(now))
    assert pace.steps_per_s() is None, "saving holds it up"
    pace.look(view(step=200), 27.0)
    assert pace.steps_per_s() is not None


def test_awaited_workers_do_not_count_as_ready() -> None:
    forming = view(phase="forming; waiting for 0, 1", ready=1)
    assert world_text(forming, forming.alive) == "1/3 workers ready"
    assert world_text(view(ready=3), 3) == "3/3 workers"


def test_time_lost_counts_as_a_recovery_only_once_it_is_over() -> None:
    assert line_of(ProgressFacts("train.py", "2/3 workers", lost_s=40.8)).endswith("2/3 workers · 40.8 s lost so far")
    assert line_of(ProgressFacts("train.py", "3/3 workers", recoveries=1, lost_s=2.0)).endswith(
        "1 recovery, 2.0 s lost"
    )


def test_follower_without_the_jobs_history_claims_no_cost_of_a_recovery(tmp_path: Path) -> None:
    one = showing(tmp_path)
    shown(one, view(), 0.0)
    assert shown(one, view(generation=2), 10.0)[-1].endswith("1 recovery, time lost unknown on this host")
    shown(one, view(generation=2, alive=2), 20.0)
    assert shown(one, view(generation=3), 24.0)[-1].endswith("2 recoveries, at least 4.0 s lost")
    one[0].settle(2, 9.1)
    assert shown(one, view(generation=3), 30.0)[-1].endswith("2 recoveries, 9.1 s lost")


def test_notice_is_shown_once_from_scheduler_or_log(tmp_path: Path) -> None:
    one = showing(tmp_path)
    odd = (1, "worker 1 (rank 1), step 20: the loss is not a number")
    assert shown(one, view(notices=(odd,)), 0.0)[0] == f"samebits: {odd[1]}"
    assert not any("loss" in line for line in shown(one, view(notices=(odd,)), 10.0)), "shown already"
    (tmp_path / "worker_0.log").write_text("2026-11-26 18:44:19 samebits worker 0: hidden state: h moved. Fix: do\n")
    told = shown(one, view(notices=(odd, (2, "worker 1 (rank 1), step 9: hidden state: h moved. Fix: do"))), 20.0)
    assert sum("hidden state" in line for line in told) == 1
    again = shown(one, view(term=2, notices=((1, "worker 2 (rank 2), step 3: the loss is infinite"),)), 30.0)
    assert "samebits: worker 2 (rank 2), step 3: the loss is infinite" in again, "numbers restart in a new term"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"step": 1',
        b'{"step": -1, "total_steps": null, "values": {}}',
        b'{"step": 1, "total_steps": 0, "values": {}}',
        b'{"step": 1, "total_steps": null, "values": {"loss": "high"}}',
        b'{"step": 1, "total_steps": null, "values": []}',
        b'{"step": 1e999, "total_steps": null, "values": {}}',
        b'{"step": 1, "total_steps": null, "values": {' + b", ".join(b'"n%d": 1' % n for n in range(13)) + b"}}",
        b"[" * 5000,
    ],
)
def test_invalid_report_is_ignored(data: bytes, tmp_path: Path) -> None:
    report_file(tmp_path, "0").write_bytes(data)
    assert read_report(tmp_path, "0") is None


def test_report_round_trip_without_control_characters(tmp_path: Path) -> None:
    report = ProgressReport(7, 10, {"loss": float("nan"), "best": float("inf"), "lr": 0.5})
    write_report(tmp_path, "0", report)
    assert repr(read_report(tmp_path, "0")) == repr(report)
    assert report_file(tmp_path, "0").stat().st_mode & 0o777 == 0o600
    report_file(tmp_path, "0").write_bytes(b'{"step": 1, "total_steps": null, "values": {"\\u001b[2J": 1, "a": 2}}')
    assert read_report(tmp_path, "0") == ProgressReport(1, None, {"a": 2.0})
    report_file(tmp_path, "0").unlink()
    report_file(tmp_path, "0").symlink_to("/etc/passwd")
    assert read_report(tmp_path, "0") is None


# ---- the question


def test_second_ctrl_c_within_three_seconds_ends_the_job() -> None:
    question = Question()
    assert question.interrupted(10.0) is InterruptAnswer.ASKED
    assert question.wake_at() == 10.0 + ASK_S
    assert question.interrupted(12.9) is InterruptAnswer.END
    assert question.wake_at() is None


def test_single_ctrl_c_ends_nothing() -> None:
    question = Question()
    assert question.passed(0.0) is None
    question.interrupted(10.0)
    assert question.passed(12.9) is None
    assert question.passed(13.0) is InterruptAnswer.GO_ON
    assert question.interrupted(13.5) is InterruptAnswer.ASKED, "it asks again"
    assert question.pressed(b"") is None
    assert question.pressed(b"x") is InterruptAnswer.GO_ON
    assert question.pressed(b"d") is None, "the question has expired"


@pytest.mark.parametrize("key", [b"d", b"D", b"dd"])
def test_d_leaves_the_job_running(key: bytes) -> None:
    question = Question()
    question.interrupted(10.0)
    assert question.pressed(key) is InterruptAnswer.LEAVE
    assert question.wake_at() is None


def test_job_that_dies_with_its_starter_cannot_be_left_running() -> None:
    question = Question(may_leave=False)
    question.interrupted(10.0)
    assert question.pressed(b"d") is InterruptAnswer.GO_ON
