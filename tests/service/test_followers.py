"""A follower stays one while it is reachable, whatever is reported of its earlier connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from samebits.core.messages import Restarting, Status, StatusQuery
from samebits.net.client import Got
from samebits.net.server import Arrived, ConnectionLost
from samebits.service import clock
from samebits.service.scheduling.followers import FAREWELL_S, FOLLOW_INTERVAL_S, Followers
from tests.core.house import training_house
from tests.net.ends import Ends, until


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_late_close_of_an_old_connection_ends_no_following_but_a_real_one_does(ends: Ends) -> None:
    followers = Followers()
    client = ends.connected("follower")
    client.send(StatusQuery(follow=True))
    until(ends.heard, lambda item: isinstance(item, Arrived))
    followers.ask("follower", follow=True)
    followers.doubt("follower")

    def looked() -> list[object]:
        followers.look_for_doubted(ends.server)
        return ends.got(client)()

    assert Got(Status(b"")) in until(looked, lambda item: isinstance(item, Got))
    assert len(followers) == 1
    client.close()
    ends.clients.remove(client)
    until(ends.heard, lambda item: item == ConnectionLost("follower"))
    followers.doubt("follower")

    def looked_and_heard() -> list[object]:
        followers.look_for_doubted(ends.server)
        return [*ends.heard(), None]

    until(looked_and_heard, lambda _: len(followers) == 0)


def test_progress_is_pushed_in_turns_and_other_changes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "now_s", lambda: now)
    house, followers, told = training_house(2), Followers(), []

    class Line:
        def send(self, peer: str, message: Status) -> bool:
            told.append((peer, message))
            return True

    line: Any = Line()

    def tells(step: int, after_s: float, *, changed: bool = False) -> int:
        nonlocal now
        now += after_s
        house.beat("0", step=step)
        before = len(told)
        followers.tell(line, house.core, changed=changed)
        return len(told) - before

    followers.ask("peer", follow=True)
    assert tells(1, FOLLOW_INTERVAL_S / 2) == 1, "the answer"
    assert tells(1, FOLLOW_INTERVAL_S / 2) == 1
    assert tells(2, FOLLOW_INTERVAL_S / 2) == 0
    assert tells(2, FOLLOW_INTERVAL_S / 2) == 1
    assert tells(2, FOLLOW_INTERVAL_S) == 0, "that is what it was sent last"
    assert tells(3, 0.0, changed=True) == 1
    assert len({message for _, message in told[1:]}) == 3


def test_last_state_is_pushed_even_right_after_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1000))
    monkeypatch.setattr(clock, "now_s", lambda: float(next(times)))  # a snapshot takes a second, and is reused for nine
    house, followers, told = training_house(2), Followers(), list[Status]()

    class Line:
        def send(self, _: str, message: Status) -> bool:
            told.append(message)
            return True

    line: Any = Line()
    followers.ask("peer", follow=True)
    followers.tell(line, house.core, changed=True)
    before = told[-1]
    house.beat("0", step=1)
    house.beat("1", step=1)
    followers.tell(line, house.core, changed=True)
    assert told[-1] == before, "it is owed"
    followers.tell_last(line, house.core)
    assert told[-1] != before


@pytest.mark.parametrize("reads", [True, False], ids=["reads the final state", "is gone"])
def test_scheduler_exits_once_each_follower_has_the_final_state(ends: Ends, reads: bool) -> None:
    """A client drops what it has not read when the connection closes."""
    followers, seen_off = Followers(), threading.Event()
    client = ends.connected("follower")
    client.send(StatusQuery(follow=True))
    until(ends.heard, lambda item: isinstance(item, Arrived))
    followers.ask("follower", follow=True)

    def see_off() -> None:
        followers.see_off(ends.server, [])
        seen_off.set()

    waiting = threading.Thread(target=see_off)
    began_s = time.monotonic()
    waiting.start()
    client.send(Restarting())  # it has not read anything yet
    assert not seen_off.wait(0.2)
    if reads:
        client.send(StatusQuery(follow=False))
    else:
        client.close()
        ends.clients.remove(client)
    waiting.join()
    assert time.monotonic() - began_s < FAREWELL_S
