"""Who follows stays a follower for as long as it can be reached, whatever is said of connections it once had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.core.messages import Status, StatusQuery
from runtime.net.client import Got
from runtime.net.server import Arrived, Lost
from runtime.service.followers import Followers
from tests.net.ends import Ends, until


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_a_close_that_is_read_late_ends_nobodys_following_and_a_real_one_does(ends: Ends) -> None:
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
    until(ends.heard, lambda item: item == Lost("follower"))
    followers.doubt("follower")

    def looked_and_heard() -> list[object]:
        followers.look_for_doubted(ends.server)
        return [*ends.heard(), None]

    until(looked_and_heard, lambda _: len(followers) == 0)
