"""The order in which a scheduler processes events that arrived together."""

from __future__ import annotations

from samebits.core.messages import Credential, ReportEnvelope, StopJob
from samebits.core.reports import LastWords
from samebits.core.scheduler import Closed, Received, SchedulerEvent, SchedulerPaused
from samebits.service.scheduling.loop import closes_first


def said(session: str, step: int = 0) -> Received:
    return Received(session, ReportEnvelope(Credential("job", session, session, 1), LastWords(""), step=step))


def test_messages_of_closed_connections_come_first_then_closes_then_others() -> None:
    events: list[SchedulerEvent] = [
        said("b"),
        said("a", 1),
        said("c"),
        said("a", 2),
        Closed("a", gone=True),
        Closed("d", gone=False),
    ]
    assert closes_first(events) == [
        [said("a", 1), said("a", 2), Closed("a", gone=True), Closed("d", gone=False)],
        [said("b"), said("c")],
    ]


def test_event_without_a_sender_keeps_its_place_before_the_closes() -> None:
    events: list[SchedulerEvent] = [SchedulerPaused(3.0), StopJob("somebody"), said("b"), Closed("a", gone=True)]
    assert closes_first(events) == [[SchedulerPaused(3.0), StopJob("somebody"), Closed("a", gone=True)], [said("b")]]


def test_without_a_close_the_order_is_unchanged() -> None:
    events: list[SchedulerEvent] = [SchedulerPaused(3.0), said("b"), said("a")]
    assert closes_first(events) == [events]
    assert closes_first([]) == [[]]
