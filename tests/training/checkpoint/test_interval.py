"""The arithmetic of save intervals: Young's formula, the expected failure rate, and the time of the next check."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.training.checkpoint.save_schedule import (
    FURTHEST_LOOK_STEPS,
    MAX_INTERVAL_S,
    MIN_INTERVAL_S,
    PRIOR_MTBF_OF_A_PROCESS_S,
    choose_save_interval,
    mean_time_between_failures_s,
    spoken,
    steps_to_next_look,
    text_of_seconds,
)

HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("world_size", "failures", "watched_h", "expected_h"),
    [
        (1, 0, 0, 50_000),
        (16_384, 0, 0, 3.0518),  # the prior's source
        (50_000, 1, 1, 1.0),  # the prior counts as one failure in its hour
        (50_000, 9, 19, 2.0),
        (4, 999, 100, 12.6),
    ],
)
def test_observed_and_assumed_failures(world_size: int, failures: int, watched_h: float, expected_h: float) -> None:
    found_s = mean_time_between_failures_s(world_size, failures, watched_h * HOUR_S)
    assert found_s / HOUR_S == pytest.approx(expected_h, rel=1e-4)


@pytest.mark.parametrize(
    ("cost_s", "world_size", "failures", "watched_h", "expected_s", "text"),
    [
        (0.12, 50_000, 1, 5, 50.91, "saves every 339 steps (51 s): a save costs 0.12 s, a failure is expected every "
         "3.0 h (1 seen in 5.0 h)"),
        (2.0, 16_384, 0, 0, 209.65, "saves every 1398 steps (3.5 min): a save costs 2 s, a failure is expected every "
         "3.1 h (0 seen in 0 s)"),
        (0.0, 4, 0, 0, MIN_INTERVAL_S, "; more often than every 5.0 s does not pay"),
        (30.0, 4, 0, 0, MAX_INTERVAL_S, "; less often than every 60 min does not pay"),
    ],
)  # fmt: skip
def test_youngs_interval_and_its_reason(
    cost_s: float, world_size: int, failures: int, watched_h: float, expected_s: float, text: str
) -> None:
    choice = choose_save_interval(
        cost_s=cost_s, step_s=0.15, world_size=world_size, failures=failures, watched_s=watched_h * HOUR_S
    )
    assert choice.interval_s == pytest.approx(expected_s, rel=1e-3)
    assert text in choice.text


@given(
    cost_s=st.floats(0, 1e4),
    step_s=st.floats(0, 1e4),
    world_size=st.integers(1, 100_000),
    failures=st.integers(0, 10_000),
    watched_s=st.floats(0, 1e9),
)
def test_choice_is_sane_for_any_measurement(
    cost_s: float, step_s: float, world_size: int, failures: int, watched_s: float
) -> None:
    def chosen(**other: float) -> float:
        known = {"cost_s": cost_s, "world_size": world_size, "failures": failures, "watched_s": watched_s}
        return choose_save_interval(step_s=step_s, **{**known, **other}).interval_s  # type: ignore[arg-type]

    assert MIN_INTERVAL_S <= chosen() <= MAX_INTERVAL_S
    assert chosen(failures=failures + 1) <= chosen(), "more failures mean more saves"
    assert chosen(world_size=world_size + 1) <= chosen(), "more processes fail more often"
    assert chosen(cost_s=cost_s * 2) >= chosen(), "dearer saves are rarer"
    assert chosen(watched_s=watched_s * 2) >= chosen(), "a longer time without failures means rarer saves"


@given(cost_s=st.floats(0.01, 10), mtbf_s=st.floats(1000, 1e6), factor=st.floats(0.5, 2))
def test_no_other_interval_loses_less(cost_s: float, mtbf_s: float, factor: float) -> None:
    """Young's argument: one save per interval, and half an interval redone per failure."""

    def lost(interval_s: float) -> float:
        return cost_s / interval_s + interval_s / 2 / mtbf_s

    world_size = 1
    watched_s, failures = 0.0, max(0, round(PRIOR_MTBF_OF_A_PROCESS_S / mtbf_s) - 1)
    mtbf_s = mean_time_between_failures_s(world_size, failures, watched_s)
    choice = choose_save_interval(
        cost_s=cost_s, step_s=1.0, world_size=world_size, failures=failures, watched_s=watched_s
    )
    if MIN_INTERVAL_S < choice.interval_s < MAX_INTERVAL_S:
        assert lost(choice.interval_s) <= lost(choice.interval_s * factor) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("left_s", "step_s", "steps"),
    [
        (60.0, 0.1, 300),
        (0.3, 0.1, 1),
        (0.5, 0.1, 2),
        (0.05, 0.1, 1),
        (-3.0, 0.1, 1),
        (60.0, 0.0, 1),
        (1e9, 1e-6, FURTHEST_LOOK_STEPS),
    ],
)
def test_time_of_the_next_check(left_s: float, step_s: float, steps: int) -> None:
    assert steps_to_next_look(left_s, step_s) == steps


@given(left_s=st.floats(-1e6, 1e9), step_s=st.floats(0, 1e6))
def test_check_is_never_after_the_due_time(left_s: float, step_s: float) -> None:
    steps = steps_to_next_look(left_s, step_s)
    assert steps >= 1
    assert steps == 1 or steps * step_s <= left_s


@given(steps=st.integers(1, 100_000))
def test_few_checks_lead_to_the_next_point(steps: int) -> None:
    left, looks = float(steps), 0
    while left >= 0.5:
        left -= steps_to_next_look(left, 1.0)
        looks += 1
    assert abs(left) < 1.0
    assert looks <= 2 * math.log2(steps + 1) + 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0301, "30 ms"), (3.04, "3.0 s"), (51.2, "51 s"), (180, "3.0 min"), (10_800, "3.0 h"), (864_000, "10 days")],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert spoken(seconds) == text


def test_users_seconds_are_shown_in_steps() -> None:
    assert text_of_seconds(60.0, 0.15) == "saves every 400 steps (60 s, save_checkpoint_seconds): a step takes 0.15 s"
    assert text_of_seconds(1.0, 2.0).startswith("saves every step (1.0 s, ")
