"""``samebits drill``: its plan, its comparison of weights and its report; and complete drills of the digits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.account.event_log import read_events
from samebits.account.events import EventKind, JobEvent
from samebits.commands.drill.command import html_of, lines_of, main, report
from samebits.commands.drill.compare import Compared, Differing, compare
from samebits.commands.drill.faults import flip_bit
from samebits.commands.drill.plan import (
    AwaitedEvent,
    DrillFault,
    DrillOutcome,
    Injected,
    NotInjected,
    Planned,
    drawn,
    faults_of,
    steps_of,
)
from samebits.commands.drill.rehearsal import (
    REVIVE_AFTER_S,
    EventsFileWatch,
    Rehearsal,
    _is_noticed,
    free_environment,
    trains_since,
    warnings_in,
)
from samebits.core.point import Point
from samebits.errors import UsageError
from samebits.store.checkpoint import PointHeader, TensorPart, write_point
from tests.store.points import LAYOUT, TREE, save

ROOT = Path(__file__).resolve().parents[2]
DIGITS = "examples/digits/train.py"


def test_plan_follows_from_its_seed_with_every_fault_equally_often() -> None:
    kinds = faults_of("kill, stop,scheduler")
    plan = drawn(kinds, 9, seed=4)
    assert plan == drawn(kinds, 9, seed=4) != drawn(kinds, 9, seed=5)
    assert Counter(one.fault for one in plan) == {DrillFault.KILL: 3, DrillFault.STOP: 3, DrillFault.SCHEDULER: 3}
    assert all(0 < one.share < 1 and 0 <= one.draw < 1 for one in plan)


@given(count=st.integers(0, 40), more=st.integers(1, 2000), seed=st.integers(0, 99))
def test_every_fault_has_its_own_step_before_the_last_in_any_job(count: int, more: int, seed: int) -> None:
    plan = drawn([DrillFault.KILL], count, seed)
    steps = steps_of(plan, count + more)
    assert len(steps) == count and steps == sorted(set(steps))
    assert all(1 <= step < count + more for step in steps)
    with pytest.raises(UsageError, match=f"ends at step {count}, too early for --kills {count}: .*Fix: "):
        steps_of(plan, count)


def test_target_is_a_member() -> None:
    members = ["worker_0", "worker_1", "worker_2"]
    assert [Planned(DrillFault.KILL, 0.5, draw).pick(members) for draw in (0, 0.4, 0.99999)] == members


@pytest.mark.parametrize("text", ["", ",", "kill,flood", "Kill", "kill scheduler"])
def test_unknown_fault_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected some of kill,segfault,.*Fix: --faults kill"):
        faults_of(text)


def test_equal_checkpoints_are_equal_at_every_common_step(tmp_path: Path) -> None:
    for rank in range(2):
        for step in (10, 20):
            save(tmp_path / "a", step, 1, rank=rank)
        save(tmp_path / "b", 20, 1, rank=rank)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found == Compared((20,), 2, 4)
    assert found.is_equal


def test_first_differing_step_and_tensor_are_named(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        save(tmp_path / folder, 10)
    save(tmp_path / "a", 20)
    header = PointHeader("another", Point(20, 3), 4, 0, 0, "0")
    wrong = [TensorPart("weight", "F32", (8, 3), bytes(96)), TensorPart("bias", "BF16", (3,), bytes(range(6)))]
    write_point(tmp_path / "b", header, wrong, TREE, LAYOUT)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.difference, found.is_equal) == ("tensor weight of rank 0 differs at step 20", False)
    assert (found.equal_until, found.first_step, found.differing) == (10, 20, (Differing(0, "weight"),))


def test_differing_plain_values_are_named_too(tmp_path: Path) -> None:
    tree = {**TREE, "lr": 0.2, "sampler": {"consumed": [0, 7]}}
    for folder, data, values in [("a", bytes(96), TREE), ("b", bytes([1]) * 96, tree)]:
        header = PointHeader("a job", Point(20, 3), 4, 0, 0, "0")
        write_point(tmp_path / folder, header, [TensorPart("weight", "F32", (8, 3), data)], values, LAYOUT)
    found = compare(tmp_path / "a", tmp_path / "b")
    names = [one.name for one in found.differing if not one.is_tensor]
    assert names == ["lr", "sampler.consumed[0]", "sampler.consumed[1]"]


def test_generator_counts_only_once_both_jobs_had_it_equal(tmp_path: Path) -> None:
    """An unseeded generator differs in every run; a wrongly restored one was equal before."""

    def kept(folder: str, step: int, numpy: int, torch: int) -> None:
        header = PointHeader("a job", Point(step, 1), 4, 0, 0, "0")
        states = [
            TensorPart(f"state.own.rng.{name}", "U8", (96,), bytes([state]) * 96)
            for name, state in (("numpy.1", numpy), ("torch", torch))
        ]
        python = {"own": {"rng": {"python": [3, [numpy] * 625]}}}
        weight = TensorPart("weight", "F32", (8, 3), bytes(96))
        write_point(tmp_path / folder, header, [weight, *states], {**TREE, **python}, LAYOUT)

    for step in (10, 20):
        kept("a", step, numpy=1, torch=5)
        kept("b", step, numpy=2, torch=5)
    assert compare(tmp_path / "a", tmp_path / "b") == Compared((10, 20), 1, 6)
    kept("a", 30, numpy=1, torch=6)
    kept("b", 30, numpy=2, torch=7)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.difference == "generator own.rng.torch of rank 0 differs at step 30"
    assert found.differing == (Differing(0, "own.rng.torch"),)


def test_every_differing_rank_is_counted_however_many_tensors_it_has(tmp_path: Path) -> None:
    names = [f"weight.{number}" for number in range(600)]
    for folder, content in (("a", 0), ("b", 1)):
        for rank in range(2):
            header = PointHeader("a job", Point(10, 1), 4, rank, rank, str(rank))
            parts = [TensorPart(name, "U8", (1,), bytes([content])) for name in names]
            write_point(tmp_path / folder, header, parts, TREE, LAYOUT)
    told = report(DrillOutcome(FINISHED), DrillOutcome(FINISHED), compare(tmp_path / "a", tmp_path / "b"), 7, [])
    assert (told["differing_ranks"], len(told["differing"])) == ([0, 1], 100)


def test_point_that_the_drill_damaged_is_left_out(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        for step in (10, 20):
            save(tmp_path / folder, step)
    (data,) = (tmp_path / "b").rglob("*0000000010*/data.safetensors")
    flip_bit(data, 0.999)
    assert not compare(tmp_path / "a", tmp_path / "b").is_equal
    assert compare(tmp_path / "a", tmp_path / "b", {data.parent}) == Compared((20,), 1, 2)


def test_no_common_point_does_not_count_as_equal(tmp_path: Path) -> None:
    save(tmp_path / "a", 10)
    assert not compare(tmp_path / "a", tmp_path / "b").is_equal
    save(tmp_path / "b", 20)
    assert compare(tmp_path / "a", tmp_path / "b").difference == "the two jobs have no checkpoint of the same step"
    save(tmp_path / "b", 10)
    assert compare(tmp_path / "a", tmp_path / "b").difference == "one job ended at step 10, the other at step 20"


def test_damaged_checkpoint_is_a_difference(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        save(tmp_path / folder, 10)
    (data,) = (tmp_path / "b").rglob("data.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.chmod(0o600)
    data.write_bytes(content)
    assert "step 10, rank 0: " in compare(tmp_path / "a", tmp_path / "b").difference


FINISHED = [
    JobEvent(EventKind.SCHEDULER, 1.0),
    JobEvent(EventKind.TRAINING, 2.0),
    JobEvent(EventKind.FINISHED, 9.0, step=50),
]


@pytest.mark.parametrize(("seen_s", "is_right"), [(8.0, True), (7.2, True), (9.2, False), (None, True)])
def test_buckets_that_do_not_sum_to_the_measured_time_fail_the_drill(
    seen_s: float | None, is_right: bool, tmp_path: Path
) -> None:
    told = report(DrillOutcome(FINISHED), DrillOutcome(FINISHED, seen_s=seen_s), Compared((50,), 2, 3), 7, [])
    assert told["passed"] is is_right
    said = "account: disturbed took 9.20 s, but its time categories add up to 8.00 s"
    assert (said in lines_of(told, tmp_path)) is not is_right
    long = [
        JobEvent(EventKind.SCHEDULER, 1.0),
        JobEvent(EventKind.TRAINING, 2.0),
        JobEvent(EventKind.FINISHED, 1001.0, step=50),
    ]
    off = report(DrillOutcome(long), DrillOutcome(long, seen_s=1006.0), Compared((50,), 2, 3), 7, [])
    near = report(DrillOutcome(long), DrillOutcome(long, seen_s=1004.0), Compared((50,), 2, 3), 7, [])
    assert (off["passed"], near["passed"]) == (False, True), "half a percent of a long run"


def test_last_event_is_seen_at_once_whatever_the_drill_waits_for(tmp_path: Path) -> None:
    looked = threading.Event()

    class Told(EventsFileWatch):
        def _look(self) -> None:
            super()._look()
            looked.set()

    path = tmp_path / "events.jsonl"
    path.write_text("{}\n")
    began_s, span = time.monotonic(), Told(tmp_path)
    with path.open("a") as file:
        file.write("{}\n")
    for _ in range(2):  # one check may be in progress
        looked.clear()
        assert looked.wait(60)
    noticed_s = time.monotonic()
    time.sleep(0.1)
    seen_s = span.close()
    assert seen_s is not None and seen_s <= noticed_s - began_s
    assert span.close() == seen_s
    assert EventsFileWatch(tmp_path / "nothing").close() is None


def test_job_that_has_just_lost_a_member_does_not_count_as_training() -> None:
    training = FINISHED[:2]
    assert trains_since(training) == trains_since([*training, JobEvent(EventKind.LOST, 3.0, more={"spare": 1})]) == 2.0
    assert trains_since([*training, JobEvent(EventKind.LOST, 3.0)]) is None
    assert trains_since([*training, JobEvent(EventKind.LEFT, 3.0)]) is None
    assert trains_since([*training, JobEvent(EventKind.ROLLED_BACK, 3.0)]) is None
    assert trains_since([*training, JobEvent(EventKind.SCHEDULER, 3.0)]) is None


def test_worker_that_left_when_asked_to_counts_as_lost() -> None:
    training = FINISHED[:2]
    left = [*training, JobEvent(EventKind.LEFT, 3.0)]
    assert not _is_noticed(AwaitedEvent.LOSS, training, left), "its slot is empty"
    assert _is_noticed(AwaitedEvent.LOSS, training, [*left, JobEvent(EventKind.TRAINING, 4.0)])


def test_replica_that_is_rolled_back_in_its_process_has_met_its_fault() -> None:
    training = FINISHED[:2]
    assert not _is_noticed(AwaitedEvent.END, training, training)
    assert _is_noticed(AwaitedEvent.END, training, [*training, JobEvent(EventKind.ROLLED_BACK, 3.0)])


@pytest.mark.parametrize(("is_running", "restarted"), [(True, 0), (False, 1)])
def test_follower_that_still_starts_processes_is_not_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_running: bool, restarted: int
) -> None:
    job = Rehearsal(tmp_path, ["train.py"], {}, 3, 1, lambda _: None)
    followed: list[Sequence[str]] = []
    monkeypatch.setattr(job, "_running", dict)
    monkeypatch.setattr(job, "_events", lambda: FINISHED[:2])
    monkeypatch.setattr(job, "_leave_followers", lambda: None)
    monkeypatch.setattr(job, "_follow", followed.append)
    follower = subprocess.Popen(["sleep", "600"])
    job._followers.append(follower)
    try:
        if not is_running:
            follower.kill()
            follower.wait()
        job._whole_at = time.monotonic() - REVIVE_AFTER_S - 1
        job._revive()
        assert len(followed) == restarted
    finally:
        follower.kill()
        follower.wait()


def test_verdict_names_what_was_compared_and_advises_on_differences(tmp_path: Path) -> None:
    good = DrillOutcome(FINISHED, [Injected(DrillFault.KILL, "worker_1", 20, 4.0, 0.5)], wall_s=9.0)
    passed = report(DrillOutcome(FINISHED), good, Compared((40, 50), 2, 24), 7, [])
    assert passed["passed"] and passed["verdict"] == "passed"
    assert "bits: equal in 24 tensors of 2 ranks, steps 40, 50; the last is 50" in lines_of(passed, tmp_path)
    failed = report(
        DrillOutcome(FINISHED), good, Compared((50,), 2, 3, "step 50, rank 1: tensor x differs"), 7, ["this"]
    )
    assert not failed["passed"] and failed["verdict"] == "failed"
    assert {"bits: step 50, rank 1: tensor x differs", "look: this"} <= set(lines_of(failed, tmp_path))
    lost = report(DrillOutcome(FINISHED), DrillOutcome(problem="it was stopped"), Compared((50,), 2, 3), 7, [])
    assert "survived: no: it was stopped" in lines_of(lost, tmp_path)
    assert lines_of(lost, tmp_path)[0] == "drill FAILED: the job did not survive 0 faults"
    assert lines_of(passed, tmp_path)[0].startswith("drill PASSED: 1 fault, ")
    broken = report(DrillOutcome(FINISHED, problem="it failed"), DrillOutcome(), Compared((), 0, 0), 7, [])
    lines = lines_of(broken, tmp_path)
    assert lines[0] == "drill FAILED: the script does not finish, although no fault was given"
    assert "survived: no: undisturbed: it failed" in lines and lines[-1].startswith("next: ")
    assert not any(line.startswith(("bits", "disturbed")) for line in lines), "nothing was compared, nor run"
    json.dumps([passed, failed, lost])


def test_fault_that_was_not_injected_is_reported_and_never_passes(tmp_path: Path) -> None:
    away = Injected(DrillFault.SCHEDULER, "scheduler", 20, 4.0, 1.5, "SIGKILL to the scheduler", trained_on=True)
    assert str(away).endswith("; the ranks trained on; a scheduler answered again after 1.5 s")
    assert str(replace(away, trained_on=False)).endswith("; all ranks trained again after 1.5 s")
    missing = [NotInjected(DrillFault.CLOCK_JUMP, "no C compiler (cc) is here to build the preloaded library with")]
    given = DrillOutcome(FINISHED, [Injected(DrillFault.KILL, "worker_1", 20, 4.0, 0.5, "SIGKILL to pid 7")], missing)
    told = report(DrillOutcome(FINISHED), given, Compared((50,), 2, 24), 7, [])
    assert (told["passed"], told["verdict"], [one["fault"] for one in told["faults"]]) == (
        False,
        "incomplete",
        ["kill"],
    )
    assert told["faults"][0]["did"] == "SIGKILL to pid 7"
    lines = lines_of(told, tmp_path)
    assert lines[0].startswith("drill INCOMPLETE")
    assert "not injected: clock-jump: no C compiler (cc) is here to build the preloaded library with" in lines
    json.dumps(told)


def test_report_page_shows_everything_and_runs_no_script(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    given = [
        Injected(DrillFault.KILL, "worker_1", 20, 4.0, 0.5, f"SIGKILL to {bad}"),
        Injected(DrillFault.ALL, "", 30, 5.0),
    ]
    lost = JobEvent(EventKind.LOST, 3.0, 1, 1, 20, "1", bad, {"slot": 1})
    events = [
        *FINISHED[:2],
        lost,
        JobEvent(EventKind.ROUND, 3.1),
        JobEvent(EventKind.GENERATION, 3.2),
        JobEvent(EventKind.TRAINING, 3.5),
        FINISHED[2],
    ]
    missing = [NotInjected(DrillFault.OOM, bad)]
    told = report(DrillOutcome(FINISHED), DrillOutcome(events, given, missing), Compared((50,), 2, 24), 7, [bad])
    page = html_of(told, lines_of(told, tmp_path))
    assert "<script" not in page and page.count("&lt;script&gt;") == 5
    assert '<h1 class="incomplete">drill INCOMPLETE' in page
    assert "<td>decide 100, wait for seats 100, restore 300</td>" in page
    assert "<td>never</td>" in page and '<td class="n">0.5</td>' in page and "<td>productive</td>" in page


def test_workers_warnings_about_a_script_line_are_merged(tmp_path: Path) -> None:
    line = "2026-11-25 10:00:00 samebits worker {}: train.py:46: count was 1 and is 7. Fix: make it the state's\n"
    for node in "01":
        (tmp_path / f"worker_{node}.log").write_text(
            f"epoch 1\n{line.format(node)}2026-11-25 10:00:00 samebits worker {node}: seated: slot 0 of 2\n"
        )
    assert warnings_in(tmp_path) == ["train.py:46: count was 1 and is 7. Fix: make it the state's"]


def test_dry_run_prints_the_plan_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--dry-run", "--faults", "kill,all", "--kills", "2", "--", "train.py", "--kills", "9"]) == 0
    said = capsys.readouterr().out
    assert "train.py --kills 9 undisturbed, in drill/undisturbed" in said
    assert "kill -9 of a worker" in said and "kill -9 of every worker" in said
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--dry-run", "--faults", "disk-full,kill", "--kills", "2", "--", "train.py"]) == 0
    assert "not possible here: disk-full: no C compiler (cc) is here" in capsys.readouterr().out


def test_drill_without_spares_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--spares", "0", "--kills", "1", "--workers", "1", "--", "train.py"]) == 0
    assert main(["--dry-run", "--kills", "10000", "--", "train.py"]) == 0
    for wrong in (("--spares", "-1"), ("--kills", "0"), ("--kills", "10001"), ("--workers", "0")):
        with pytest.raises(SystemExit):
            main(["--dry-run", *wrong, "--", "train.py"])
        assert f"argument {wrong[0]}" in (said := capsys.readouterr().err.replace("-n/", "")) and "expected " in said


def test_existing_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "drill").mkdir()
    with pytest.raises(UsageError, match="this folder already exists"):
        main(["--", "train.py"])
    with pytest.raises(UsageError, match="no such script"):
        main(["--", "other.py"])


def test_settings_of_an_outer_job_are_not_inherited() -> None:
    found = free_environment({"LOG_DIR": "/theirs", "MS_NODE_ID": "3", "HOME": "/home", "SCHED_PORT": "1"})
    assert found.keys() == {"HOME", "PYTHONPATH"}


def drilled(tmp_path: Path, faults: list[str], *options: str, steps: int) -> dict[str, Any]:
    """Return the report of a real drill of the digits with the planned faults."""
    words = ["--faults", ",".join(faults), "--kills", str(len(faults)), "--seed", "2", "--json", *options]
    done = subprocess.run(
        [sys.executable, "-m", "samebits", "drill", *words, "--", str(ROOT / DIGITS), "--steps", str(steps)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "REGISTER_COOLDOWN": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    logs = "\n".join(log.read_text()[-2000:] for log in tmp_path.rglob("follower.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["survived"] and told["equal_bits"] and told["not_injected"] == []
    planned = drawn(faults_of(",".join(faults)), len(faults), 2)
    assert [one["fault"] for one in told["faults"]] == [str(one.fault) for one in planned]
    assert all(one["did"] for one in told["faults"])
    for name in ("undisturbed", "disturbed"):
        buckets, events = told[name]["buckets_s"], read_events(tmp_path / "drill" / name / "recovery")
        assert sum(buckets.values()) == pytest.approx(events[-1].at - events[0].at, rel=0.005)
        assert buckets["checkpoint_stalls"] > 0, "steps have waited for saves"
    return told


@pytest.mark.system
def test_digits_survive_a_kill_with_equal_bits(tmp_path: Path) -> None:
    (given,) = drilled(tmp_path, ["kill"], "-n", "1", "--spares", "0", steps=120)["faults"]
    assert given["did"].startswith("SIGKILL to worker_0 (pid ")


@pytest.mark.system
@pytest.mark.thorough
def test_digits_survive_faults_by_signals(tmp_path: Path) -> None:
    drilled(tmp_path, ["kill", "pause", "scheduler", "slow-rank", "host"], steps=400)


@pytest.mark.system
@pytest.mark.thorough
def test_digits_survive_faults_inside_a_process(tmp_path: Path) -> None:
    drilled(tmp_path, ["held-gil", "oom", "bitflip-memory"], steps=400)


@pytest.mark.system
@pytest.mark.thorough
def test_digits_survive_requests_to_end_and_their_own_errors(tmp_path: Path) -> None:
    drilled(tmp_path, ["terminate", "interrupt", "exception", "async-exception", "abort", "hang"], steps=400)


@pytest.mark.system
@pytest.mark.thorough
def test_digits_survive_wrong_values_in_one_replica(tmp_path: Path) -> None:
    wrong = ["stale-memory", "bitflip-gradient", "drift", "unreduced", "desync"]
    drilled(tmp_path, wrong, "-n", "3", steps=600)


@pytest.mark.system
@pytest.mark.thorough
def test_digits_survive_faults_of_their_surroundings(tmp_path: Path) -> None:
    drilled(
        tmp_path, ["partition", "disk-full", "disk-error", "clock-jump", "bitflip", "truncated", "missing"], steps=400
    )
    assert "ignored the restore point" in "".join(log.read_text() for log in tmp_path.rglob("worker_*.log"))
