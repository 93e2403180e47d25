"""A job's events as spans: start and end of each, emitted once, whatever the order of events."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from samebits.account.events import EventKind, JobEvent
from samebits.account.spans import Span, Spans
from tests.core.test_core_goodput import KILL, START, drawn, event

JOB = [JobEvent(EventKind.JOB, 100, text="train.py", more={"job": "job-1"})]
BEGUN = [
    event(EventKind.SCHEDULER, 100),
    event(EventKind.ROUND, 103),
    event(EventKind.GENERATION, 104, members=2, last="1"),
    *START[2:],
]


def spans_of(events: Sequence[JobEvent]) -> list[Span]:
    fold = Spans()
    return [span for one in events for span in fold.add(one)]


def test_start_is_a_register_and_a_form_span() -> None:
    register, form = spans_of([*JOB, *BEGUN])
    assert (register.name, register.began_at, register.ended_at) == ("register", 100, 103)
    assert (form.name, form.began_at, form.ended_at) == ("form", 103, 104)
    assert form.attributes == {
        "samebits.job": "job-1",
        "samebits.generation": 1,
        "samebits.last_to_join": "1",
        "samebits.members": 2,
    }


def test_recovery_is_one_span_with_its_phases_inside() -> None:
    (form, recover) = spans_of([*JOB, *BEGUN, *KILL])[2:]
    assert form.name == "form"
    assert (recover.name, recover.began_at, recover.ended_at) == ("recover", 120, 130)
    assert recover.attributes["samebits.cause"] == "worker 1: " and recover.attributes["samebits.steps_lost"] == 50
    assert [(part.name, part.began_at, part.ended_at) for part in recover.parts] == [
        ("recover.decide", 120, 120),
        ("recover.wait_for_seats", 120, 127),
        ("recover.meet", 127, 128),
        ("recover.restore", 128, 130),
    ]


def test_checkpoint_span_starts_at_the_previous_point_and_has_the_steps_wait() -> None:
    points = [
        event(EventKind.COMMITTED, 110, 40, point=40, stalled_ms=12.5),
        event(EventKind.COMMITTED, 120, 90, point=80),
    ]
    one, other = spans_of([*BEGUN, *points])[2:]
    assert (one.name, one.began_at, one.ended_at) == ("checkpoint", 105, 110)
    assert (one.attributes["samebits.step"], one.attributes["samebits.stalled_ms"]) == (40, 12.5)
    assert (other.began_at, other.ended_at) == (110, 120) and "samebits.stalled_ms" not in other.attributes


@pytest.mark.parametrize("seed", range(100))
def test_no_span_ends_before_it_begins_and_reading_in_parts_gives_the_same(seed: int) -> None:
    events = drawn(random.Random(seed), 60)
    fold, told = Spans(), []
    for one in events:
        told += fold.add(one)
    assert told == spans_of(events)
    for span in told:
        assert span.began_at <= span.ended_at
        assert all(part.began_at <= part.ended_at for part in span.parts)
