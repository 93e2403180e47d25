"""Evaluation of recoveries by restart, from handwritten events; and one real recovery."""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
from collections.abc import Iterator
from dataclasses import astuple, fields
from pathlib import Path

import pytest

from benchmarks import recovery
from benchmarks.moments import Channel, Moment
from benchmarks.recovery_peers import (
    TORCHFT,
    TORCHRUN,
    Restart,
    name_torchft,
    rejoined,
    restart,
    torchft_needs,
    torchrun_needs,
)
from benchmarks.recovery_report import RESTART_PHASES, SPARE_PHASES, Spares, Trials, people, percentile_95, report
from benchmarks.recovery_spares import Loss
from benchmarks.recovery_trials import Timeline, detection_s, is_recovered, recover_ours, timeline
from benchmarks.report import MISSING, problems

NEW, LEFT = 9, frozenset({1, 2})
KILLED_S, SPAWNED_S = 100.0, 100.25


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    channel = Channel(tmp_path / "moments", watch=lambda: None)
    yield channel
    channel.close()


def write(channel: Channel, *moments: tuple[str, int, float] | tuple[str, int, float, int]) -> None:
    for name, pid, at_s, *step in moments:
        channel.moments.append(Moment(name, f"worker_{pid}", pid, at_s, 0.0, *step))
        if step:
            channel.reached[pid] = step[0]


def test_timeline_of_a_recovery(channel: Channel) -> None:
    write(
        channel,
        *(("asks", pid, 50.0) for pid in (1, 2, 3)),
        # the victim, pid 3, has finished one step more than the survivors
        *(("stepped", 1, 99.0, 16), ("stepped", 2, 99.5, 16), ("stepped", 3, 99.75, 17)),
        *(("failed", 1, 100.125), ("told", 1, 100.25), ("told", 2, 100.375)),
        *(("enters", 1, 100.5), ("enters", 2, 100.625)),
        *(("asks", NEW, 103.0), ("seated", NEW, 103.125), ("enters", NEW, 104.0)),
        *(("placed", pid, 104.25) for pid in (1, 2, NEW)),
        *(("formed", 1, 104.5), ("formed", 2, 104.75), ("formed", NEW, 104.625)),
        *(("trains", 1, 105.0, 15), ("trains", 2, 105.0, 15), ("trains", NEW, 105.25, 15)),
        *(("stepped", pid, 105.5, 16) for pid in (1, 2, NEW)),
        *(("stepped", pid, 106.0, 17) for pid in (1, 2, NEW)),
        *(("stepped", 1, 106.5, 18), ("stepped", 2, 106.75, 18), ("stepped", NEW, 106.625, 18)),
        *(("stepped", pid, 107.0, 19) for pid in (1, 2, NEW)),
    )
    found = timeline(channel, KILLED_S, SPAWNED_S, LEFT, NEW)
    assert found == Timeline(
        told_s=0.375,
        waits_s=0.625,
        spawned_s=0.25,
        asks_s=3.0,
        seated_s=3.125,
        enters_s=4.0,
        placed_s=4.25,
        formed_s=4.75,
        trains_s=5.25,
        stepped_s=5.5,
        total_s=6.75,
        redone_steps=2,
    )
    assert (found.own_start_s, found.above_start_s, found.script_s) == (2.75, 4.0, 0.875)
    assert found.above_start_and_script_s == 3.125


def test_recovery_after_a_step_that_was_committed_but_not_recorded(channel: Channel) -> None:
    """The victim committed step 17 and was killed before it could record it: the first new step is 18."""
    write(
        channel,
        *(("stepped", 1, 99.0, 16), ("stepped", 2, 99.5, 16), ("told", 1, 100.25), ("told", 2, 100.375)),
        *(("enters", 1, 100.5), ("enters", 1, 100.75), ("asks", NEW, 103.0), ("seated", NEW, 103.125)),
        *(("enters", NEW, 104.0), *(("placed", pid, 104.25) for pid in (1, 2, NEW))),
        *(("formed", pid, 104.5) for pid in (1, 2, NEW)),
        *(("trains", pid, 105.0, 17) for pid in (1, 2, NEW)),
    )
    assert not is_recovered(channel, KILLED_S, LEFT, NEW), "one survivor has left twice, the other never"
    write(channel, ("enters", 2, 100.625))
    assert not is_recovered(channel, KILLED_S, LEFT, NEW), "no process has made a step"
    write(channel, *(("stepped", pid, 105.5, 18) for pid in (1, 2, NEW)))
    assert is_recovered(channel, KILLED_S, LEFT, NEW)
    found = timeline(channel, KILLED_S, SPAWNED_S, LEFT, NEW)
    assert (found.redone_steps, found.stepped_s, found.total_s) == (0, 5.5, 5.5)


def test_timeline_of_a_restart(channel: Channel) -> None:
    write(
        channel,
        *(("stepped", 1, 99.0, 16), ("stepped", 2, 99.5, 17)),
        *(("asks", 8, 103.0), ("asks", 9, 103.5), ("trains", 8, 104.0, 10), ("trains", 9, 104.0, 10)),
        *(("stepped", pid, 105.0, 11) for pid in (8, 9)),
        *(("stepped", 8, 107.0, 18), ("stepped", 9, 107.5, 18)),
    )
    found = restart(channel, KILLED_S, frozenset({1, 2}), frozenset({8, 9}))
    assert found == Restart(asks_s=3.5, stepped_s=5.0, total_s=7.5, redone_steps=7)


def test_timeline_of_a_process_that_rejoins_the_others(channel: Channel) -> None:
    write(
        channel,
        *(("stepped", 1, 99.0, 16), ("stepped", 2, 99.5, 17)),
        *(("stepped", 1, 100.5, 17), ("stepped", 1, 101.0, 18), ("stepped", 2, 101.5, 18)),
        *(("asks", NEW, 103.0), ("stepped", 1, 104.0, 30), ("stepped", NEW, 104.5, 30)),
    )
    found = rejoined(channel, KILLED_S, frozenset({1, 2}), NEW)
    assert found == Restart(asks_s=3.0, stepped_s=1.5, total_s=4.5, redone_steps=0)


def a_timeline(total_s: float) -> Timeline:
    return Timeline(0.1, 0.2, 0.1, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6, 3.7, total_s, 4)


def a_loss(total_s: float, lost_steps: int = 0) -> Loss:
    return Loss(*(total_s * place / 10 for place in range(1, 11)), lost_steps=lost_steps, victims_steps=1)


def some_trials(peers: dict[str, list[Restart | None]]) -> Trials:
    return Trials(
        [a_timeline(total_s) for total_s in (3.8, 4.0, 4.6)],
        peers,
        step_ms=[10, 11, 12],
        start_alone_s=[1, 2, 3],
        detection_s=[0.01, 0.02, 0.03],
        spares=Spares([a_loss(0.03), a_loss(0.04), a_loss(5.5, 2)], 10.0, 1, 3, 1, 99, "ab", True, False),
        spares_8=Spares([a_loss(0.08)], 24.0),
        stopped=[a_loss(2.25)],
        lease_s=2.0,
    )


def test_report() -> None:
    restarts: dict[str, list[Restart | None]] = {
        TORCHRUN: [Restart(4, 6, total_s, 3) for total_s in (7, 8, 9)],
        "torchrun_default": [None],
    }
    trials = some_trials(restarts)
    document = report(trials).document()
    assert problems(document) == []
    ours, floor = document["ours"], document["floor"]
    assert (ours["spare_median_s"], ours["spare_p95_s"], ours["spare_worst_s"]) == (0.04, 5.5, 5.5)
    assert (ours["spare_median_8_s"], ours["sigstop_s"], ours["sigstop_above_lease_s"]) == (0.08, 2.25, 0.25)
    assert (ours["steps_lost"], ours["steps_repeated"], ours["hangs"], ours["victims_own_steps"]) == (5, 1, 2, 4)
    assert ours["phases"]["total_ms"] == pytest.approx(40)
    assert floor["detection_s"] == 0.02
    assert floor["spare_s"] == pytest.approx(0.02 + 2.5 * 0.010)
    assert floor["spare_8_s"] == pytest.approx(0.02 + 2.5 * 0.024)
    assert document["ratios"]["spare_8_vs_floor"] == 1
    assert ours["total_s"] == 4
    assert ours["above_start_s"] == pytest.approx(1.0)
    assert ours["above_start_worst_s"] == pytest.approx(1.6)
    assert ours["restart_phases"]["process_start_ms"] == pytest.approx(3000)
    assert document["peers"]["torchrun"]["total_s"] == 8
    assert document["peers"]["torchrun_default"]["total_s"] is None
    assert document["peers"][TORCHFT] == MISSING
    assert document["ratios"]["total_vs_torchrun"] == 0.5
    assert document["ratios"]["spare_vs_torchrun"] == 0.005
    assert document["ratios"]["spare_weights_vs_undisturbed"] == 1
    assert document["ratios"]["spare_weights_vs_stock_ddp"] == 0
    assert "1 of 1 never" in people(trials)


def test_peer_that_fails_once_has_no_figures() -> None:
    trials = some_trials({TORCHRUN: [Restart(4, 6, 7, 3), None]})
    document = report(trials).document()
    assert document["peers"]["torchrun"]["total_s"] is None
    assert document["ratios"]["total_vs_torchrun"] is None
    assert "1 of 2 never" in people(trials)


def test_peer_that_is_not_installed_is_missing() -> None:
    trials = some_trials({})
    assert report(trials).document()["peers"] == {TORCHRUN: MISSING, TORCHFT: MISSING}
    assert MISSING in people(trials)


def test_run_without_a_completed_loss_is_still_reported() -> None:
    trials = some_trials({})
    trials.spares, trials.stopped = Spares(never=1), []
    document = report(trials).document()
    assert problems(document) == []
    assert (document["ours"]["spare_median_s"], document["ours"]["hangs"]) == (None, 1)
    assert "hangs" in people(trials)


def test_percentile_is_a_value_of_the_sample() -> None:
    assert percentile_95([float(value) for value in range(100, 0, -1)]) == 95
    assert percentile_95([1.0]) == 1


def test_consecutive_phases_leave_no_gap() -> None:
    following = [(begin, end) for _, key, begin, end in RESTART_PHASES if key not in ("notice_ms", "break_ms")]
    assert following[0][0] is None
    assert [begin for begin, _ in following[1:]] == [end for _, end in following[:-1]]
    assert following[-1][1] == "total_s"
    assert {end for _, _, _, end in RESTART_PHASES} == {one.name for one in fields(Timeline)} - {"redone_steps"}


def test_phases_of_a_loss_cover_all_its_points() -> None:
    points = [one.name for one in fields(Loss) if one.name.endswith("_s")]
    assert list(SPARE_PHASES) == points


@pytest.mark.thorough
@pytest.mark.system
def test_real_recovery_passes_all_points_in_order() -> None:
    found, step_ms = recover_ours(victim=1, rng=random.Random(1))
    told_s, waits_s, *following = astuple(found)[:-1]
    assert 0 < told_s <= waits_s <= found.placed_s
    assert following == sorted(following)
    assert found.redone_steps >= 0
    assert step_ms > 0


@pytest.mark.system
def test_kernel_reports_a_death() -> None:
    assert 0 < detection_s() < 60


# ---- missing peers


def test_peer_without_its_packages_is_left_out_with_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The environment is that of the README's first command, which installs only what a job needs."""
    find_spec, measured = importlib.util.find_spec, []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "safetensors" else find_spec(name))
    for name in ("measure_spares", "compare_weights", "measure_stops"):
        monkeypatch.setattr(recovery, name, lambda *_: measured.append(capsys.readouterr().out))
    monkeypatch.setattr(recovery, "measure_restarts", lambda *given, torchft: measured.append(given[4]))
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    trials = recovery.measure(recovery.QUICK, seed=1, torchft=str(python), quick=True)
    said = measured[0]
    assert "a job of 4 ranks and a spare starts" in said, "before anything is measured"
    assert "torchrun is missing and takes no part: it needs safetensors, which `bash scripts/setup.sh --dev`" in said
    assert f"torchft is missing and takes no part: it needs torchft and its torchft_lighthouse beside {python}" in said
    assert measured[-1] == frozenset()
    assert TORCHRUN not in trials.peers and TORCHFT not in trials.peers


def test_torchrun_takes_part_if_safetensors_is_installed() -> None:
    assert torchrun_needs() == ""
    assert "--torchft names another" in torchft_needs(sys.executable)


def test_torchft_is_found_from_any_folder_and_keeps_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (python := tmp_path / "python").symlink_to(sys.executable)
    parser = argparse.ArgumentParser()
    name_torchft(parser)
    monkeypatch.chdir(tmp_path)
    assert parser.parse_args(["--torchft", "./python"]).torchft == str(python)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert parser.parse_args(["--torchft", "python"]).torchft == str(python)
    assert parser.parse_args([]).torchft == sys.executable
