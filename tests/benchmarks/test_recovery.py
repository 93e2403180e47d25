"""What the moments of a recovery say, from moments written down by hand; and one real recovery, without a clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import astuple, fields
from pathlib import Path

import pytest

from benchmarks.moments import Channel, Moment
from benchmarks.recovery import PHASES, Trials, people, report
from benchmarks.recovery_trials import TORCHRUN, Restart, Timeline, recover_ours, restart, timeline
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


def test_the_timeline_of_a_recovery(channel: Channel) -> None:
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
    assert (found.own_start_s, found.above_start_s) == (2.75, 4.0)


def test_the_timeline_of_a_restart(channel: Channel) -> None:
    write(
        channel,
        *(("stepped", 1, 99.0, 16), ("stepped", 2, 99.5, 17)),
        *(("asks", 8, 103.0), ("asks", 9, 103.5), ("trains", 8, 104.0, 10), ("trains", 9, 104.0, 10)),
        *(("stepped", pid, 105.0, 11) for pid in (8, 9)),
        *(("stepped", 8, 107.0, 18), ("stepped", 9, 107.5, 18)),
    )
    found = restart(channel, KILLED_S, frozenset({1, 2}), frozenset({8, 9}))
    assert found == Restart(asks_s=3.5, stepped_s=5.0, total_s=7.5, redone_steps=7)


def a_timeline(total_s: float) -> Timeline:
    return Timeline(0.1, 0.2, 0.1, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6, 3.7, total_s, 4)


def test_the_report() -> None:
    restarts: dict[str, list[Restart | None]] = {
        TORCHRUN: [Restart(4, 6, total_s, 3) for total_s in (7, 8, 9)],
        "torchrun_default": [None],
    }
    trials = Trials([a_timeline(total_s) for total_s in (3.8, 4.0, 4.6)], restarts, [10, 11, 12], [1, 2, 3])
    document = report(trials).document()
    assert problems(document) == []
    assert document["ours"]["total_s"] == 4
    assert document["ours"]["above_start_s"] == pytest.approx(1.0)
    assert document["ours"]["above_start_worst_s"] == pytest.approx(1.6)
    assert document["ours"]["phases"]["process_start_ms"] == pytest.approx(3000)
    assert document["peers"]["torchrun"]["total_s"] == 8
    assert document["peers"]["torchrun_default"]["total_s"] is None
    assert document["ratios"]["total_vs_torchrun"] == 0.5
    assert "1 of 1 never" in people(trials)


def test_a_peer_that_fails_once_has_no_figures() -> None:
    trials = Trials([a_timeline(4.0)], {TORCHRUN: [Restart(4, 6, 7, 3), None]}, [10], [1])
    document = report(trials).document()
    assert document["peers"]["torchrun"]["total_s"] is None
    assert document["ratios"]["total_vs_torchrun"] is None
    assert "1 of 2 never" in people(trials)


def test_a_peer_that_is_not_installed_is_missing() -> None:
    trials = Trials([a_timeline(4.0)], {}, [10], [1])
    assert report(trials).document()["peers"] == {TORCHRUN: MISSING}
    assert MISSING in people(trials)


def test_the_phases_that_follow_each_other_leave_no_gap() -> None:
    following = [(begin, end) for _, key, begin, end in PHASES if key not in ("notice_ms", "break_ms")]
    assert following[0][0] is None
    assert [begin for begin, _ in following[1:]] == [end for _, end in following[:-1]]
    assert following[-1][1] == "total_s"
    assert {end for _, _, _, end in PHASES} == {one.name for one in fields(Timeline)} - {"redone_steps"}


@pytest.mark.system
def test_a_real_recovery_passes_through_all_points_in_order() -> None:
    found, step_ms = recover_ours(victim=1, rng=random.Random(1))
    told_s, waits_s, *following = astuple(found)[:-1]
    assert 0 < told_s <= waits_s <= found.placed_s
    assert following == sorted(following)
    assert found.redone_steps >= 0
    assert step_ms > 0
