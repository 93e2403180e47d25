"""The worker's side: the end of training and the end of the process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samebits.core.agent.agent_events import (
    Completed,
    Connected,
    Disconnected,
    Heard,
    Leaving,
    MustEnd,
    Observed,
    Over,
    Passed,
)
from samebits.core.end_kinds import EndKind
from samebits.core.messages import (
    Activity,
    Admitted,
    EndJob,
    Fenced,
    Finished,
    Heartbeat,
    Leave,
    ReportEnvelope,
    RoundId,
)
from samebits.core.point import Point
from samebits.core.reports import LastWords
from tests.core.desk import CREDENTIAL, STAGES, Desk, done, finished, forming, seated, training, waiting

# ---- the end of training


@pytest.mark.parametrize("stage", [seated, waiting, forming, training, done])
def test_end_of_training_is_reported_once_in_every_stage(stage: Callable[[], Desk]) -> None:
    desk = stage()
    desk.hear(Finished("job-1", 1, Point(60, 1)))
    assert desk.ready.notices == [Over(Point(60, 1))]
    assert desk.said(Heartbeat)[0].activity is Activity.FINISHED
    desk.hear(Finished("job-1", 1, Point(60, 1)))
    assert desk.ready.notices == [] and desk.ready.sends == []


def test_step_of_a_finished_worker_is_its_last_commit() -> None:
    """Optimizer steps after the last commit are lost; the final point must be one that is on disk."""
    desk = training()
    desk.step(Completed(1, 60))
    desk.passes(1.0, step=63)
    assert desk.said(Heartbeat) == [Heartbeat(CREDENTIAL, 1, Activity.DONE, 1, RoundId(1, 1), 60)]


def test_worker_seated_after_the_end_is_notified_at_once() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.admitted(finished=Point(60, 1))
    assert [type(notice) for notice in desk.ready.notices] == [Admitted, Over]
    desk.enters()
    assert desk.agent.activity is Activity.FINISHED and desk.ready.sends == []


# ---- the end of the process


@pytest.mark.parametrize("stage", STAGES.values(), ids=[one.name for one in STAGES])
def test_fenced_process_ends_and_sends_nothing_more(stage: Callable[[], Desk]) -> None:
    desk = stage()
    desk.hear(Fenced("job-1", "mine", 1, "the seat is held by another"))
    assert desk.ready.notices == [MustEnd(EndKind.FENCED, "the seat is held by another")]
    for event in (Passed(9), Leaving(True, "bye"), Connected(), Heard(Finished("job-1", 1, Point(60, 1)))):
        desk.now += 5
        desk.step(event)
        assert desk.ready.sends == [] and desk.ready.notices == []
    assert desk.ready.wake_at is None


def test_fence_for_another_session_is_ignored() -> None:
    desk = training()
    desk.hear(Fenced("job-1", "other", 1, "text"))
    assert desk.ready.notices == []


@pytest.mark.parametrize(
    "kind", [EndKind.STOPPED, EndKind.INTERRUPTED, EndKind.FORMATION_TIMEOUT, EndKind.FAILED, EndKind.POINTS_LOST]
)
def test_end_of_the_job_ends_the_process(kind: EndKind) -> None:
    desk = training()
    desk.hear(EndJob("job-1", 1, kind, "why"))
    assert desk.ready.notices == [MustEnd(kind, "why")]
    desk.hear(EndJob("job-1", 1, kind, "why"))
    assert desk.ready.notices == []
    desk.passes(1.0)
    assert desk.said(Heartbeat), "its seat is held until the process has left"
    desk.step(Leaving(True, "why"))
    assert desk.ready.sends == [Leave(CREDENTIAL, True, "why")]


def test_job_end_from_an_earlier_term_is_ignored() -> None:
    desk = training()
    desk.step(Disconnected())
    desk.step(Connected())
    desk.admitted(term=2)
    desk.hear(EndJob("job-1", 1, EndKind.FORMATION_TIMEOUT, "late"))
    assert desk.ready.notices == []


def test_finished_job_refuses_a_newcomer_and_leaves_members_alone() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.hear(EndJob("job-1", 1, EndKind.FINISHED, "job finished"))
    assert desk.ready.notices == [MustEnd(EndKind.REFUSED, "the job is finished: there is nothing left to do")]
    desk = finished()
    desk.hear(EndJob("job-1", 1, EndKind.FINISHED, "job finished"))
    assert desk.ready.notices == []


def test_last_words_and_leave_are_sent() -> None:
    desk = training()
    desk.passes(0.1, step=17)
    desk.step(Observed(LastWords("ValueError: no such sample")))
    assert desk.ready.sends == [ReportEnvelope(CREDENTIAL, LastWords("ValueError: no such sample"), 1, 17)]
    desk.step(Leaving(False, "ValueError"))
    assert desk.ready.sends == [Leave(CREDENTIAL, False, "ValueError", 17)]
    desk.passes(10.0)
    assert desk.ready.sends == [] and desk.ready.wake_at is None


def test_process_without_a_seat_leaves_silently() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.step(Observed(LastWords("text")))
    assert desk.ready.sends == []
    desk.step(Leaving(True, "text"))
    assert desk.ready.sends == []
