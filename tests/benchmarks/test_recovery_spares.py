"""Evaluation of losses to a spare, from handwritten events; and two real losses."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.moments import Moment
from benchmarks.recovery_spares import Account, Loss, LossyJob, account, loss_from, step_ms, undisturbed
from benchmarks.workers.paced import ENDLESSLY, Pace

LEFT, VICTIM, NEW = frozenset({1, 2}), 3, 4
LOST_S = 100.0


def noted(*moments: tuple[str, int, float] | tuple[str, int, float, int]) -> list[Moment]:
    return [Moment(name, f"worker_{pid}", pid, at_s, 0.0, *step) for name, pid, at_s, *step in moments]


def a_recovery(*, restored: int, extra: Iterable[Moment] = ()) -> list[Moment]:
    """Two survivors that have finished step 16, the first of them also 17; and a spare."""
    members = (1, 2, NEW)
    return [
        *noted(("stepped", 1, 99.0, 16), ("stepped", 2, 99.25, 16), ("stepped", 1, 99.5, 17), ("enters", NEW, 50.0)),
        *noted(("failed", 1, 100.125), ("told", 2, 100.25), ("told", 1, 100.375), ("failed", 2, 100.5)),
        *noted(("dropped", 1, 100.25), ("dropped", 2, 100.625), ("dropped", 2, 105.0)),
        *noted(("enters", 1, 100.5), ("enters", 2, 100.75), ("joins", NEW, 101.0)),
        *noted(*(("placed", pid, 101.25) for pid in members), *(("formed", pid, 101.5) for pid in members)),
        *noted(*(("obtained", pid, 101.75 + pid / 16) for pid in members)),
        *noted(*(("trains", pid, 102.5, restored) for pid in members)),
        *noted(*(("stepped", pid, 103.0 + (step - restored) / 2, step)
                 for pid in members for step in range(restored + 1, 21))),
        *extra,
    ]  # fmt: skip


def test_points_of_a_loss() -> None:
    assert loss_from(a_recovery(restored=17), LOST_S, LEFT, NEW) == Loss(
        noticed_s=0.125,
        told_s=0.25,
        out_s=0.5,
        dropped_s=0.625,
        joined_s=1.0,
        placed_s=1.25,
        formed_s=1.5,
        obtained_s=2.0,
        trains_s=2.5,
        total_s=3.5,
        lost_steps=0,
        victims_steps=0,
    )


def test_step_that_a_survivor_had_finished_is_lost() -> None:
    loss = loss_from(a_recovery(restored=15), LOST_S, LEFT, NEW)
    assert (loss.lost_steps, loss.victims_steps) == (2, 0)
    assert loss.total_s == 3.0 + (18 - 15) / 2


def test_step_that_only_the_victim_had_finished_is_not_the_survivors() -> None:
    moments = a_recovery(restored=17, extra=noted(("stepped", VICTIM, 99.75, 18)))
    loss = loss_from(moments, LOST_S, LEFT, NEW)
    assert (loss.lost_steps, loss.victims_steps) == (0, 1)
    assert loss.total_s == 4.0


def test_job_that_makes_every_step_once_has_a_clean_account() -> None:
    moments = a_recovery(restored=17, extra=noted(*(("stepped", 2, 50.0 + step, step) for step in range(1, 16))))
    assert account(moments) == Account(last_step=20, repeated_steps=0, skipped_steps=0)


def test_step_that_a_process_makes_twice_is_repeated() -> None:
    moments = a_recovery(restored=15, extra=noted(*(("stepped", 2, 50.0 + step, step) for step in range(1, 16))))
    assert account(moments).repeated_steps == 3  # 16 and 17 of the first, 16 of the second


def test_step_that_no_process_made_is_skipped() -> None:
    moments = noted(("stepped", 1, 1.0, 1), ("stepped", 1, 2.0, 2), ("trains", 2, 3.0, 4), ("stepped", 2, 4.0, 5))
    assert account(moments) == Account(last_step=5, repeated_steps=0, skipped_steps=1)


def test_step_is_timed_within_one_process() -> None:
    first = noted(*(("stepped", 1, at_s, step) for step, at_s in enumerate((1.0, 1.5, 2.0, 9.0, 9.5), start=1)))
    second = noted(("stepped", 2, 1.25, 3), ("stepped", 2, 5.0, 7))  # not consecutive
    assert step_ms(first + second) == 500
    assert math.isnan(step_ms(second))


def test_pace_stops_all_at_the_same_step(tmp_path: Path) -> None:
    setter = Pace(tmp_path / "pace")
    getter = Pace(tmp_path / "pace")
    said: list[str] = []
    getter.wait_beyond(7, lambda: said.append("pauses"), lambda: said.append("waits"))
    assert said == []
    setter.last_step = 7

    def meanwhile() -> None:
        said.append("waits")
        setter.last_step = ENDLESSLY

    getter.wait_beyond(6, lambda: said.append("too early"), meanwhile)
    getter.wait_beyond(7, lambda: said.append("pauses"), meanwhile)
    assert said == ["pauses", "waits"]


@pytest.mark.thorough
@pytest.mark.system
def test_spare_takes_over_twice_and_every_step_is_made_once() -> None:
    with LossyJob(2) as job:
        losses = [job.lose(signal.SIGKILL, random.Random(1)) for _ in range(2)]
    for loss in losses:
        points = [loss.noticed_s, loss.told_s, loss.out_s, loss.joined_s, loss.placed_s, loss.formed_s, loss.trains_s]
        assert points == sorted(points)
        assert loss.lost_steps == 0
    accounted = account(job.moments)
    assert (accounted.repeated_steps, accounted.skipped_steps) == (0, 0)
    last = max(job.digests)
    assert job.digests[last] == undisturbed(2, last) == undisturbed(2, last, plain=True)
