"""What the goodput benchmark makes of its runs: the figure, its buckets, a peer that is missing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.goodput import Kept, Members, Paired, Run, people, report
from benchmarks.moments import Channel, Notebook
from benchmarks.report import MISSING, problems

PLAIN = Run(wall_s=10, steps=1000)
SLOWER = Run(wall_s=10, steps=940)
SPARE = Run(wall_s=100, steps=9700, kills=6, buckets_s={"productive": 97.0, "forming": 3.0})


def test_goodput_is_the_share_of_steps_that_an_undisturbed_run_would_have_made() -> None:
    peer = Run(wall_s=100, steps=5000, kills=6)
    trials = {"spare": Paired(SPARE, PLAIN, PLAIN), "torchrun": Paired(peer, PLAIN, PLAIN)}
    document = report(trials).document()
    assert problems(document) == []
    assert document["ratios"] == {"goodput_spare": 0.97, "goodput_torchrun": 0.5}
    assert document["ours"]["spare"]["productive_s"] == 97
    assert document["floor"]["undisturbed_step_ms"] == 10


def test_a_contestant_is_held_against_the_windows_around_it_alone() -> None:
    fast, slow = Run(wall_s=10, steps=2000), Run(wall_s=10, steps=1000)
    trials = {
        "spare": Paired(Run(wall_s=10, steps=1900), fast, fast),
        "restart": Paired(Run(wall_s=10, steps=900), slow, slow),
    }
    document = report(trials).document()
    assert document["ratios"] == {"goodput_spare": 0.95, "goodput_restart": 0.9}
    floor = document["floor"]
    assert (floor["undisturbed_fastest_step_ms"], floor["undisturbed_slowest_step_ms"]) == (5, 10)


def test_windows_that_differ_make_a_figure_that_is_shown_and_no_ratio() -> None:
    odd = Paired(SPARE, PLAIN, SLOWER)
    assert not odd.is_comparable and Paired(SPARE, PLAIN, Run(wall_s=10, steps=960)).is_comparable
    document = report({"spare": odd}).document()
    assert problems(document) == [] and document["ratios"] == {}
    assert document["ours"]["spare"]["undisturbed_before_ms"] == 10
    said = people({"spare": odd})
    assert "not comparable" in said and "(1.000)" in said


def test_a_peer_that_is_missing_is_said_to_be() -> None:
    trials = {"spare": Paired(SPARE, PLAIN, PLAIN)}
    assert report(trials).document()["peers"] == {"torchrun": MISSING, "torchft": MISSING}
    assert "torchrun" not in people(trials)


def test_who_trains_is_who_stepped_of_late(tmp_path: Path) -> None:
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
def test_no_step_at_all_is_a_goodput_of_nothing(steps: int) -> None:
    assert Run(wall_s=10, steps=steps).goodput(0.01) == steps / 1000


def test_what_was_measured_is_kept_for_the_same_question_alone(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    first = Kept(file, "4 ranks")
    assert first.run("spare", lambda: SPARE) == SPARE and not first.has("restart")
    again = Kept(file, "4 ranks")
    assert again.has("spare")
    assert again.run("spare", lambda: pytest.fail("it is measured twice")) == SPARE
    with pytest.raises(SystemExit, match=r"keeps 4 ranks, this is 8 ranks\. Fix: "):
        Kept(file, "8 ranks")
    assert not Kept(None, "4 ranks").has("spare")
