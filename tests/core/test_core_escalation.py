"""A level is left after so many attempts in vain, and a process that held its seat has shown that it was enough."""

from __future__ import annotations

import pytest

from samebits.core.causes.escalation import (
    LONGEST_WAIT_S,
    STEADY_S,
    STRATEGY_WORDS,
    Escalation,
    Level,
    Tried,
    levels_of,
)
from samebits.settings_table import STRATEGY_WORDS as READ_WORDS

PROCESS, POD, JOB = Level.PROCESS, Level.POD, Level.JOB
ALL = (PROCESS, POD, JOB)


def levels_after(escalation: Escalation, *held_s: float) -> list[tuple[Level | None, int]]:
    steps = [escalation.died(one) for one in held_s]
    return [(step.level, step.attempt) for step in steps]


def test_each_level_is_tried_so_often_and_then_the_next() -> None:
    escalation = Escalation(ALL, 2)
    assert levels_after(escalation, *[0.0] * 7) == [
        *((PROCESS, 1), (PROCESS, 2), (POD, 1), (POD, 2), (JOB, 1), (JOB, 2)),
        (None, 0),
    ]


def test_a_process_that_held_its_seat_begins_anew() -> None:
    escalation = Escalation(ALL, 1)
    assert levels_after(escalation, 0.0, 0.0, STEADY_S, STEADY_S - 0.1) == [
        *((PROCESS, 1), (POD, 1), (PROCESS, 1), (POD, 1))
    ]


def test_the_next_container_goes_on_where_the_one_before_it_was() -> None:
    first = Escalation(ALL, 1)
    levels_after(first, 0.0, 0.0)
    second = Escalation(ALL, 1, Tried.read(str(first.tried)))
    assert levels_after(second, 0.0) == [(JOB, 1)]


def test_what_is_noted_for_another_strategy_is_forgotten() -> None:
    assert levels_after(Escalation((POD,), 2, Tried(PROCESS, 2)), 0.0) == [(POD, 1)]


def test_each_step_says_what_was_in_vain() -> None:
    escalation = Escalation((PROCESS, POD), 1)
    said = [escalation.died(0.0).said for _ in range(3)]
    assert said == [
        "process level, attempt 1 of 1",
        "pod level, attempt 1 of 1, as 1 attempt at the process level failed",
        "no level is left: 1 attempt at the pod level failed",
    ]
    assert Escalation((), 3).died(0.0).said == "no level is to be tried"


def test_the_first_attempt_is_made_at_once_and_others_ever_later() -> None:
    escalation = Escalation(ALL, 1000)
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
def test_a_strategy_is_read_as_ascend_spells_it_too(
    words: str, process: bool | None, pod: bool | None, levels: tuple[Level, ...]
) -> None:
    assert levels_of(words.split(","), process=process, pod=pod) == levels


def test_every_word_that_is_read_has_a_meaning() -> None:
    assert sorted(READ_WORDS) == sorted(STRATEGY_WORDS)


@pytest.mark.parametrize("nonsense", ["", "pod", "pod 0", "pod -1", "pod 1 1", "node 1", "pod ١", "pod " + "9" * 9])
def test_a_note_that_is_none_counts_for_nothing(nonsense: str) -> None:
    assert Tried.read(nonsense) is None
