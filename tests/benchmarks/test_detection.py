"""The detection benchmark: what counts as noticed and as correctly named, and the form of its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.detection import PEERS_SAY, main, report
from benchmarks.detection_faults import FAULTS, first_notice, is_right, line_of
from benchmarks.detection_trials import FLOOR, OURS, Trial, Trials

BY_NAME = {fault.name: fault for fault in FAULTS}
LOST = "worker 1 (pid 7 on vm) is lost: "
ENDS = LOST.replace("is lost", "ends")
SILENT = f"{LOST}silent for 5 s (NODE_TIMEOUT): it "
RIGHT = {
    "kill": f"{LOST}its process ended (seen by worker 0 on the same host)",
    "exception": f"{ENDS}failed at benchmarks/workers/{line_of('exception')}: RuntimeError: a fault",
    "stop": f"{SILENT}is stopped (SIGSTOP). Fix: kill -CONT 7",
    "sleep": f"no step for 5 s: worker 1 is in {line_of('sleep')} (time.sleep), worker 0 waits for it in all_reduce #9",
    "deadlock": f"no step for 5 s: worker 1 is in {line_of('deadlock')} (lock.acquire), worker 0 waits for it in x #9",
    "gil": f"{SILENT}runs no Python: something in it holds Python's lock (the GIL). Fix: x",
    "loader": f"no step for 5 s: worker 1 is in {line_of('loader')} (time.sleep) and waits for data, worker 0 waits",
    "returns": "no step for 5 s: worker 1 has returned from the training function, worker 0 waits for it in x #9",
    "partition": f"{SILENT}runs, but its messages do not arrive: the network between it and the scheduler is down",
}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_sentence_is_right_only_for_its_own_fault(name: str) -> None:
    asked = f"{line_of('gil')} in fail_if_told"
    assert [other for other in BY_NAME if is_right(BY_NAME[other], RIGHT[name], asked)] == [name]
    assert not is_right(BY_NAME[name], RIGHT[name].replace("worker 1", "worker 0"), asked), "the other worker is blamed"


@pytest.mark.parametrize("asked", ["", "detection.py:1 in fail_if_told"])
def test_requested_line_must_be_right_too(asked: str) -> None:
    assert not is_right(BY_NAME["gil"], RIGHT["gil"], asked)


@pytest.mark.parametrize("name", ["exception", "sleep", "deadlock", "loader"])
def test_other_line_is_wrong(name: str) -> None:
    assert not is_right(BY_NAME[name], RIGHT[name].replace(line_of(name), "detection.py:1"))


def test_first_line_about_it_is_the_notice() -> None:
    head = "2026-11-25 10:00:00 samebits scheduler: "
    log = f"{head}generation 2 starts\n{head}{RIGHT['stop']}\n{head}{RIGHT['sleep']}\n"
    assert first_notice(log) == RIGHT["stop"]
    assert first_notice(f"{head}generation 2 starts\n") == ""


@pytest.mark.parametrize(
    ("line", "is_about_it"),
    [
        (
            "Quorum status: Valid quorum with 3 participants, waiting for 1 healthy but not participating stragglers "
            "due to join timeout [3/3 participants healthy][4 heartbeating][shrink_only=false]",
            False,
        ),
        (
            "Quorum status: New quorum not ready, only have 0 participants [0/0 participants healthy][4 heartbeating]",
            False,
        ),
        (
            "Quorum status: New quorum not ready, only have 0 participants [0/0 participants healthy][3 heartbeating]",
            True,
        ),
        ("Detected quorum change, bumping quorum_id to 5", True),
        ("[replica_2 - step 53] got exception in future", True),
    ],
)
def test_line_that_torchft_logs_every_step_is_not_a_notice(line: str, is_about_it: bool) -> None:
    assert bool(PEERS_SAY["torchft"].search(line.encode())) == is_about_it


def some_trials(into: Path | None = None) -> Trials:
    trials = Trials(into=into)
    trials.add(FLOOR, "kill", Trial(0.05))
    for noticed_s in (0.1, 0.3):
        trials.add("torchrun", "kill", Trial(noticed_s))
    trials.add("torchrun", "stop", Trial(None))
    trials.add(OURS, "kill", Trial(0.1, "x", True))
    trials.add(OURS, "stop", Trial(5.01, "x", True))
    trials.add(OURS, "stop", Trial(None, "", False))
    return trials


def test_report_has_the_agreed_form(capsys: pytest.CaptureFixture[str]) -> None:
    report(some_trials())
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["ours"]["stop"] == {"noticed_s": 5.01, "slowest_s": 5.01, "right_count": 1, "wrong_count": 1}
    assert document["peers"]["torchrun"] == {
        "looked_s": 20.0,
        "kill_s": 0.2,
        "kill_count": 2,
        "stop_s": None,
        "stop_count": 1,
    }
    assert document["ratios"]["kill_to_floor"] == 2.0 and document["ratios"]["kill_to_torchrun"] == 0.5
    report(Trials())
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["peers"] == {
        "torchrun": "missing",
        "torchft": "missing",
    }


def test_parts_are_added_to_a_file_and_reported_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "detection.jsonl"
    some_trials(file)
    Trials(into=file).add(OURS, "kill", Trial(0.3, "y", True))
    assert main(["--of", str(file)]) == 1, "one of them is wrong"
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])["ours"]
    assert ours["kill"] == {"noticed_s": 0.2, "slowest_s": 0.3, "right_count": 2, "wrong_count": 0}
    assert ours["stop"]["wrong_count"] == 1
    assert Trials.read(file).of == {
        **some_trials().of,
        OURS: {**some_trials().of[OURS], "kill": [Trial(0.1, "x", True), Trial(0.3, "y", True)]},
    }


@pytest.mark.parametrize(
    "line", ["", "{", "[]", '{"who": "samebits"}', '{"who":"x","fault":"y","trial":{"noticed_s":"1"}}']
)
def test_invalid_line_is_named(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "detection.jsonl"
    some_trials(file)
    with file.open("a") as written:
        written.write(f"{line}\n")
    with pytest.raises(SystemExit):
        main(["--of", str(file)])
    assert (
        "detection.jsonl:8 is no part of it: " in (said := capsys.readouterr().err) and "Fix: remove that line" in said
    )
