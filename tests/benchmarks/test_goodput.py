"""Figures of the goodput benchmark, its buckets, and a missing peer."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks import parts
from benchmarks.goodput import Members, Part, Run, by_name, main, people, report
from benchmarks.moments import Channel, Notebook
from benchmarks.report import MISSING, problems

PLAIN = Run(wall_s=10, steps=1000)
SLOWER = Run(wall_s=10, steps=940)
LOST = Run(wall_s=100, steps=9700, kills=6, buckets_s={"productive": 97.0, "forming": 3.0})
SPARE = Part("spare", 4, 15, LOST, PLAIN, PLAIN)
ODD = Part("spare", 4, 15, LOST, PLAIN, SLOWER)


def test_goodput_is_the_share_of_undisturbed_steps() -> None:
    peer = Part("torchrun", 4, 15, Run(wall_s=100, steps=5000, kills=6), PLAIN, PLAIN)
    document = report(by_name([SPARE, peer])).document()
    assert problems(document) == []
    assert document["ratios"] == {"goodput_spare_every_15": 0.97, "goodput_torchrun_every_15": 0.5}
    assert document["ours"]["spare_every_15"]["productive_s"] == 97
    assert document["ours"]["spare_every_15"]["INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION_s"] == 3
    assert document["peers"]["torchrun_every_15"]["kills_count"] == 6 and document["peers"]["torchft"] == MISSING
    assert document["floor"]["undisturbed_step_ms"] == 10


def test_contestant_is_compared_only_with_the_windows_around_it() -> None:
    fast, slow = Run(wall_s=10, steps=2000), Run(wall_s=10, steps=1000)
    restart = Part("restart", 4, 15, Run(wall_s=10, steps=900), slow, slow)
    document = report(by_name([Part("spare", 4, 15, Run(wall_s=10, steps=1900), fast, fast), restart])).document()
    assert document["ratios"] == {"goodput_spare_every_15": 0.95, "goodput_restart_every_15": 0.9}
    floor = document["floor"]
    assert (floor["undisturbed_fastest_step_ms"], floor["undisturbed_slowest_step_ms"]) == (5, 10)


def test_differing_windows_give_a_figure_without_a_ratio() -> None:
    assert not ODD.is_comparable and Part("spare", 4, 15, LOST, PLAIN, Run(wall_s=10, steps=960)).is_comparable
    document = report(by_name([ODD])).document()
    assert problems(document) == [] and document["ratios"] == {}
    ours = document["ours"]["spare_every_15"]
    assert ours["undisturbed_fastest_step_ms"] == 10 and ours["comparable_parts_count"] == 0
    said = people(by_name([ODD]))
    assert "not comparable" in said and "(1.000)" in said


def test_parts_of_one_contestant_and_interval_are_summed() -> None:
    half = Part("spare", 4, 15, Run(wall_s=300, steps=15000, kills=18), PLAIN, PLAIN)
    rarer = Part("spare", 4, 60, LOST, PLAIN, PLAIN)
    document = report(by_name([SPARE, ODD, half, rarer])).document()
    assert document["ratios"] == {"goodput_spare_every_15": 0.6175, "goodput_spare_every_60": 0.97}
    ours = document["ours"]["spare_every_15"]
    assert (ours["parts_count"], ours["comparable_parts_count"], ours["kills_count"]) == (3, 2, 30)


def test_missing_peer_is_reported() -> None:
    measured = by_name([SPARE])
    assert report(measured).document()["peers"] == {"torchrun": MISSING, "torchft": MISSING}
    assert "torchrun" not in people(measured)


def test_training_processes_are_those_with_recent_steps(tmp_path: Path) -> None:
    channel = Channel(tmp_path / "moments", lambda: None)
    notebook = Notebook(tmp_path / "moments", "worker_1")
    notebook.note("stepped", 7)
    notebook.note("trains", 900)
    members = Members(channel)
    members.look()
    assert (members.now(), members.highest) == ({os.getpid(): "worker_1"}, 7)
    members.seen[os.getpid()] = ("worker_1", time.monotonic() - 60)
    assert members.now() == {}
    channel.close()


@pytest.mark.parametrize("steps", [0, 1])
def test_no_step_gives_zero_goodput(steps: int) -> None:
    part = Part("spare", 4, 15, Run(wall_s=10, steps=steps), PLAIN, PLAIN)
    assert report(by_name([part])).document()["ratios"] == {"goodput_spare_every_15": steps / 1000}


def test_report_covers_the_whole_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "goodput.jsonl"
    for part in (SPARE, ODD):
        parts.add(file, part)
    main(["--of", str(file)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ours"]["spare_every_15"]["parts_count"] == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "goodput.jsonl:2 is no part of it: "),
        ('{"who":"spare"}', "goodput.jsonl:2 is no part of it: "),
        (
            msgspec.json.encode(SPARE).decode().replace('"wall_s":100', '"wall_s":0'),
            "goodput.jsonl:2 is no part of it: ",
        ),
        (msgspec.json.encode(SPARE).decode().replace('"workers":4', '"workers":2'), "found [2, 4]. Fix: a file for"),
    ],
)
def test_foreign_file_is_refused(tmp_path: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "goodput.jsonl"
    parts.add(file, SPARE)
    with file.open("a") as written:
        written.write(f"{line}\n")
    with pytest.raises(SystemExit):
        main(["--of", str(file)])
    assert said in capsys.readouterr().err
