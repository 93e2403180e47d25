"""Escalation: a level is left after enough failed attempts and starts over after a success."""

from __future__ import annotations

import pytest

from samebits.core.causes.escalation import (
    LONGEST_WAIT_S,
    STEADY_S,
    STRATEGY_WORDS,
    Escalation,
    RestartScope,
    Tried,
    levels_of,
)
from samebits.settings_table import STRATEGY_WORDS as READ_WORDS

PROCESS, POD, JOB = RestartScope.PROCESS, RestartScope.POD, RestartScope.JOB
ALL = (PROCESS, POD, JOB)


def each(attempts: int) -> dict[RestartScope, int]:
    return dict.fromkeys(ALL, attempts)


def levels_after(escalation: Escalation, *held_s: float) -> list[tuple[RestartScope | None, int]]:
    steps = [escalation.died(one) for one in held_s]
    return [(step.level, step.attempt) for step in steps]


def test_each_level_is_tried_its_number_of_times_before_the_next() -> None:
    escalation = Escalation(each(2))
    assert levels_after(escalation, *[0.0] * 7) == [
        *((PROCESS, 1), (PROCESS, 2), (POD, 1), (POD, 2), (JOB, 1), (JOB, 2)),
        (None, 0),
    ]


def test_process_that_held_its_seat_resets_the_escalation() -> None:
    escalation = Escalation(each(1))
    assert levels_after(escalation, 0.0, 0.0, STEADY_S, STEADY_S - 0.1) == [
        *((PROCESS, 1), (POD, 1), (PROCESS, 1), (POD, 1))
    ]


def test_next_container_continues_where_the_previous_one_stopped() -> None:
    first = Escalation(each(1))
    levels_after(first, 0.0, 0.0)
    second = Escalation(each(1), Tried.read(str(first.tried)))
    assert levels_after(second, 0.0) == [(JOB, 1)]


def test_note_for_another_strategy_is_forgotten() -> None:
    assert levels_after(Escalation({POD: 2}, Tried(PROCESS, 2)), 0.0) == [(POD, 1)]


def test_each_step_says_what_failed_before() -> None:
    escalation = Escalation({PROCESS: 1, POD: 1})
    said = [escalation.died(0.0).said for _ in range(3)]
    assert said == [
        "process level, attempt 1 of 1",
        "pod level, attempt 1 of 1, as 1 attempt at the process level failed",
        "no level is left: 1 attempt at the pod level failed",
    ]
    assert Escalation({}).died(0.0).said == "no level is to be tried"


def test_first_attempt_is_immediate_and_later_ones_wait_longer() -> None:
    escalation = Escalation(each(1000))
    waits = [escalation.died(0.0).wait_s for _ in range(1000)]
    assert waits[:4] == [0.0, 1.0, 2.0, 4.0]
    assert waits == sorted(waits) and waits[-1] == LONGEST_WAIT_S


@pytest.mark.parametrize(
    ("words", "process", "pod", "levels"),
    [
        ("process,pod", None, None, (PROCESS, POD)),
        ("job,process", None, None, (PROCESS, JOB)),
        ("retry,recover,dump,exit", None, None, (PROCESS, JOB)),
        ("retry,recover,dump,exit", None, True, ALL),
        ("recover-in-place", False, True, (POD,)),
        ("elastic-training,dump", None, None, ()),
        ("elastic-training,dump", True, None, (PROCESS,)),
        ("process,pod", None, False, (PROCESS,)),
    ],
)
def test_strategy_is_also_read_in_ascends_spelling(
    words: str, process: bool | None, pod: bool | None, levels: tuple[RestartScope, ...]
) -> None:
    assert tuple(levels_of(dict.fromkeys(words.split(",")), process=process, pod=pod)) == levels


def test_each_level_has_its_own_number_of_attempts() -> None:
    levels = levels_of({"recover": 1, "dump": None, "exit": None}, pod=True)
    assert levels == {PROCESS: 1, POD: 3, JOB: 3}
    assert levels_after(Escalation(levels), *[0.0] * 5) == [(PROCESS, 1), (POD, 1), (POD, 2), (POD, 3), (JOB, 1)]


def test_every_accepted_word_has_a_meaning() -> None:
    assert sorted(READ_WORDS) == sorted(STRATEGY_WORDS)


@pytest.mark.parametrize("nonsense", ["", "pod", "pod 0", "pod -1", "pod 1 1", "node 1", "pod ١", "pod " + "9" * 9])
def test_invalid_note_is_ignored(nonsense: str) -> None:
    assert Tried.read(nonsense) is None
