"""Messages that the scheduler passes to the core: only as many decisions and reports as a history has room for."""

from __future__ import annotations

import pytest

from samebits.core.causes.table import Observation
from samebits.core.hangs import Doing, ProcessState
from samebits.core.messages import SCHEMA, OperatorDecision, ProcessEnded
from samebits.core.values import replace
from samebits.net.server import Arrived
from samebits.service import clock
from samebits.service.scheduling.followers import Followers
from samebits.service.scheduling.inbound import DECISIONS_S, MOST_DECISIONS, MOST_ENDS, Inbound
from samebits.service.scheduling.unknown_peers import UnknownPeers, implausible
from samebits.service.status import process_ended, process_seen
from samebits.store.process_identity import ProcessIdentity
from tests.hostile.test_hostile_core import Line


def test_decisions_are_rate_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "now_s", lambda: now)
    inbound = Inbound(Line(), Followers(), UnknownPeers())

    def taken() -> int:
        events = [inbound.event_of(Arrived("peer", OperatorDecision("text", ()))) for _ in range(2 * MOST_DECISIONS)]
        assert {event for event in events if event is not None} <= {OperatorDecision("text", ())}
        return sum(event is not None for event in events)

    assert taken() == MOST_DECISIONS
    now += DECISIONS_S - 0.5
    assert taken() == 0
    now += 0.5
    assert taken() == MOST_DECISIONS


def test_exit_reports_are_rate_limited_and_made_printable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now_s", lambda: 100.0)
    inbound = Inbound(Line(), Followers(), UnknownPeers())
    end = ProcessEnded("1", "host", 7, 1, "was killed by signal 9 (SIGKILL)", signal=9)
    taken = [inbound.event_of(Arrived("peer", end)) for _ in range(2 * MOST_ENDS)]
    assert taken == [end] * MOST_ENDS + [None] * MOST_ENDS
    for liar in (replace(end, text="\x1b[2J"), replace(end, error="a\nb"), replace(end, host="\x07")):
        assert Inbound(Line(), Followers(), UnknownPeers()).event_of(Arrived("peer", liar)) is None


def test_followers_exit_report_fits_whatever_its_log_has() -> None:
    identity = ProcessIdentity(7, 1)
    seen = Observation(None, 11, "\x1b[31m" + "x" * 9000)
    end = process_ended("1", identity, seen, "was killed\n" + "y" * 9000)
    assert SCHEMA.unpack(SCHEMA.pack(end)) == end
    assert implausible(end) is None and (end.pid, end.started_at, end.signal) == (7, 1, 11)


def test_process_observation_is_accepted_only_in_printable_words() -> None:
    seen = process_seen("1", ProcessIdentity(7, 1), ProcessState(Doing.STOPPED, 3.0))
    assert SCHEMA.unpack(SCHEMA.pack(seen)) == seen
    assert Inbound(Line(), Followers(), UnknownPeers()).event_of(Arrived("peer", seen)) == seen
    for liar in (replace(seen, node="\x1b[2J"), replace(seen, host="\n")):
        assert Inbound(Line(), Followers(), UnknownPeers()).event_of(Arrived("peer", liar)) is None
