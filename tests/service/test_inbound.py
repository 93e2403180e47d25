"""What arrives and what the core is told of it: of decisions no more than a history has room for."""

from __future__ import annotations

import pytest

from runtime.core.messages import Decision
from runtime.core.scheduler import Decided
from runtime.net.server import Arrived
from runtime.service import clock
from runtime.service.followers import Followers
from runtime.service.inbound import DECISIONS_S, MOST_DECISIONS, Inbound
from runtime.service.unknown_peers import UnknownPeers
from tests.hostile.test_hostile_core import Line


def test_so_many_decisions_are_taken_in_a_while_and_more_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "now_s", lambda: now)
    inbound = Inbound(Line(), Followers(), UnknownPeers())

    def taken() -> int:
        events = [inbound.event_of(Arrived("peer", Decision("text", ()))) for _ in range(2 * MOST_DECISIONS)]
        assert {event for event in events if event is not None} <= {Decided("text", ())}
        return sum(event is not None for event in events)

    assert taken() == MOST_DECISIONS
    now += DECISIONS_S - 0.5
    assert taken() == 0
    now += 0.5
    assert taken() == MOST_DECISIONS
