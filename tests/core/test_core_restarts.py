"""Automatic restarts: which deaths are made good, how soon, and which end the job."""

from __future__ import annotations

import random
import signal
from dataclasses import replace

import pytest

from samebits import errors
from samebits.core.causes import restarts
from samebits.core.causes.restarts import Loss, Never, RestartAt, Restarts, Sort, loss_of, sort_of
from samebits.core.causes.table import Observation

KILLED = Loss(Sort.OUTSIDE)


def own(text: str = "ValueError: x", step: int = 7) -> Loss:
    return Loss(Sort.OWN, text, step)


def test_first_kills_cost_no_wait() -> None:
    budget = Restarts(32767)
    assert [budget.died("2", KILLED, at) for at in (0.0, 1.0, 2.0)] == [RestartAt(0.0), RestartAt(1.0), RestartAt(2.0)]
    late = budget.died("2", KILLED, 3.0)
    assert isinstance(late, RestartAt) and late.at > 3.0
    assert budget.died("1", KILLED, 3.0) == RestartAt(3.0), "each place has its own count"


def test_kills_never_end_a_job_and_waits_are_bounded() -> None:
    budget, now, longest = Restarts(32767), 0.0, 0.0
    for _ in range(10_000):
        told = budget.died("2", KILLED, now)
        assert isinstance(told, RestartAt)
        longest = max(longest, told.at - now)
        now = told.at + 0.01
    assert 1.0 < longest < restarts.LONGEST_WAIT_S
    for _ in range(100):
        told = budget.died("2", KILLED, now)
        assert isinstance(told, RestartAt)
    assert told.at - now == restarts.LONGEST_WAIT_S


def test_wait_is_reset_after_a_while() -> None:
    budget = Restarts(32767)
    for number in range(20):
        budget.died("2", KILLED, float(number))
    assert budget.died("2", KILLED, 20 + 10 * restarts.FORGOTTEN_BY_HALF_S) == RestartAt(
        20 + 10 * restarts.FORGOTTEN_BY_HALF_S
    )


@pytest.mark.parametrize("most", [0, 1, 3, 50])
def test_restarts_of_a_place_are_bounded_over_any_window(most: int) -> None:
    chance, budget, now = random.Random(most), Restarts(most), 0.0
    again: list[float] = []
    for _ in range(3000):
        now += chance.choice((0.0, 0.01, 1.0, 100.0, 2000.0))
        if isinstance(budget.died("2", KILLED, now), RestartAt):
            again.append(now)
    assert len(again) >= (most > 0)
    for first, at in enumerate(again):
        within = [one for one in again[first:] if one - at < restarts.WINDOW_S]
        assert len(within) <= most


def test_quick_rejoin_does_not_bypass_the_bound() -> None:
    """Deaths count for the place, however the process returned and under whatever name."""
    budget = Restarts(2)
    told = [budget.died("2", KILLED, 0.001 * number) for number in range(3)]
    assert [type(one) for one in told] == [RestartAt, RestartAt, Never]
    assert "MAX_RESTARTS=2" in told[-1].why  # type: ignore[union-attr]


def test_same_error_at_the_same_step_twice_ends_the_job() -> None:
    budget = Restarts(32767)
    first = budget.died("2", own(), 0.0)
    assert first == RestartAt(restarts.OWN_ERROR_WAIT_S)
    second = budget.died("2", own(), 5.0)
    assert isinstance(second, Never) and second.ends_job
    assert "step 7" in second.why


def test_same_crash_at_the_same_line_twice_ends_the_job_whatever_step_was_heard_last() -> None:
    """A crash in compiled code sends no last words, so the step is that of the last heartbeat."""
    crash = "at train.py:26 in train: a collective received 1000 bytes where this rank expects 12: the ranks call"
    seen = Observation(signal=signal.SIGABRT, error=crash)
    budget = Restarts(32767)
    assert isinstance(budget.died("0", loss_of(seen, 7), 0.0), RestartAt)
    elsewhere = replace(seen, error=crash.replace(":26", ":31"))
    assert isinstance(budget.died("1", loss_of(elsewhere, 7), 1.0), RestartAt), "another place of the job"
    ended = budget.died("0", loss_of(seen, 9), 200.0)
    assert ended == Never("it failed twice with the same error, so trying again does not help")
    assert isinstance(Restarts(9).died("0", loss_of(replace(seen, error="SIGSEGV"), 7), 0.0), RestartAt)
    assert loss_of(Observation(1, error="ValueError: x", is_failure=True), 7).step == 7


@pytest.mark.parametrize("between", [own("KeyError: y"), own(step=8)])
def test_different_error_or_step_does_not_end_the_job(between: Loss) -> None:
    budget = Restarts(32767)
    for loss in (own(), between, own()):
        assert isinstance(budget.died("2", loss, 0.0), RestartAt)


def test_consecutive_equal_errors_end_the_job_although_others_progress() -> None:
    budget = Restarts(32767)
    told = [budget.died("2", own(step=step), 3.0 * step) for step in range(restarts.SAME_ERRORS)]
    assert [type(one) for one in told] == [RestartAt] * (restarts.SAME_ERRORS - 1) + [Never]
    assert "10 times in a row with the same error" in told[-1].why  # type: ignore[union-attr]


@pytest.mark.parametrize("apart_s", [3.0, restarts.SAME_ERROR_WITHIN_S + 1])
def test_rare_or_alternating_errors_are_retried(apart_s: float) -> None:
    budget = Restarts(32767)
    for step in range(100):
        error = own("ValueError: x" if apart_s > restarts.SAME_ERROR_WITHIN_S or step % 5 else "KeyError: y", step)
        assert isinstance(budget.died("2", error, apart_s * step), RestartAt)


def test_kill_in_between_does_not_make_an_error_new() -> None:
    budget = Restarts(32767)
    assert isinstance(budget.died("2", own(), 0.0), RestartAt)
    assert isinstance(budget.died("2", KILLED, 1.0), RestartAt)
    assert isinstance(budget.died("2", own(), 2.0), Never)


def test_same_error_on_several_ranks_is_one_attempt() -> None:
    budget = Restarts(32767)
    assert all(isinstance(budget.died(place, own(), 0.0), RestartAt) for place in "0123")


@pytest.mark.parametrize(
    ("status", "is_failure", "sort"),
    [
        (None, False, Sort.OUTSIDE),
        (None, True, Sort.OWN),  # adopted: the status is unknown, its log has the error
        (1, True, Sort.OWN),
        (0, False, Sort.OWN),
        (3, False, Sort.OWN),
        (143, False, Sort.OUTSIDE),  # SIGTERM: preemption
        (errors.SettingsError.exit_code, False, Sort.HOPELESS),
        (errors.RefusedError.exit_code, False, Sort.HOPELESS),
        (errors.NumericsError.exit_code, False, Sort.HOPELESS),
        (errors.ForeignFolderError.exit_code, True, Sort.HOPELESS),
        (errors.ScriptFailedError.exit_code, False, Sort.ENDED),
        (errors.UntrainedError.exit_code, False, Sort.ENDED),
        (errors.UnequalError.exit_code, False, Sort.ENDED),
        (errors.SupersededError.exit_code, False, Sort.ENDED),  # the job continues with another scheduler
        (errors.SchedulerUnreachableError.exit_code, False, Sort.OUTSIDE),
        (errors.StuckError.exit_code, False, Sort.OUTSIDE),
        (errors.SchedulerLeftError.exit_code, False, Sort.OUTSIDE),
        (errors.StoreError.exit_code, False, Sort.OWN),
    ],
)
def test_exit_status_is_classified(status: int | None, is_failure: bool, sort: Sort) -> None:
    assert sort_of(Observation(status, is_failure=is_failure)) is sort


def test_failure_without_a_retry_ends_the_job_at_once_and_that_end_is_not_a_death() -> None:
    budget = Restarts(32767)
    hopeless = budget.died("2", Loss(Sort.HOPELESS), 0.0)
    assert isinstance(hopeless, Never) and hopeless.ends_job
    over = budget.died("2", Loss(Sort.ENDED), 0.0)
    assert isinstance(over, Never) and not over.ends_job


@pytest.mark.parametrize(
    ("status", "error", "is_refused"),
    [
        (2, "train.py: error: unrecognized arguments: --lrr 3", True),
        (2, "Error: No such option: --lrr", True),  # click
        (1, "train.py: error: unrecognized arguments: --lrr 3", False),
        (2, "fatal: no such device", False),
        (2, "", False),
    ],
)
def test_script_that_rejected_its_arguments_is_not_restarted(status: int, error: str, is_refused: bool) -> None:
    sort = sort_of(Observation(status, error=error))
    assert (sort is Sort.ARGUMENTS) == is_refused
    assert isinstance(Restarts(32767).died("2", Loss(sort, error), 0.0), Never if is_refused else RestartAt)
