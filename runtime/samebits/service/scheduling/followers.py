"""Answer status queries and push snapshots to followers, at a limited cost.

Any process that can connect may send queries, as often as it likes. The cost of answers is therefore limited instead of
the queries: all queries in one pass get the same snapshot, and creating snapshots takes at most ``SNAPSHOT_SHARE`` of
the scheduler's time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from samebits.account.job_view import JobView
from samebits.core.messages import Status, StatusQuery
from samebits.core.scheduler import SchedulerCore
from samebits.net.server import Arrived, ConnectionLost, Server
from samebits.service import clock
from samebits.service.status import message_of, snapshot

MAX_FOLLOWERS = 64
MAX_ASKING = 1024  # queries in one pass; further ones must be repeated
FOLLOW_INTERVAL_S = 0.5  # progress is pushed at most this often, other changes at once
SNAPSHOT_SHARE = 0.1
"""A snapshot that took t s is reused for t × (1 / share - 1) s: 1 ms for few workers, longer for thousands."""
FAREWELL_S = 3.0
NOTHING = Status(b"")


class _Snapshot:
    """The latest snapshot of one kind, renewed as often as SNAPSHOT_SHARE allows."""

    def __init__(self, *, whole: bool) -> None:
        self._is_whole = whole
        self._latest = NOTHING
        self.view: JobView | None = None
        self._serves_until = float("-inf")

    def latest(self, core: SchedulerCore) -> Status:
        began = clock.now_s()
        if began >= self._serves_until:
            self.view = snapshot(core, whole=self._is_whole)
            self._latest = message_of(self.view)
            done = clock.now_s()
            self._serves_until = done + (done - began) * (1 / SNAPSHOT_SHARE - 1)
        return self._latest

    def serves_for_s(self, now: float) -> float:
        """Return for how many seconds after ``now`` the snapshot remains in use."""
        return max(0.0, self._serves_until - now)


@dataclass(slots=True)
class _Told:
    snapshot: Status
    at: float


class Followers:
    """Answers queries and pushes snapshots at the end of a pass, when their content is durable."""

    def __init__(self) -> None:
        self._following: dict[str, _Told] = {}  # by peer
        self._asking: dict[str, None] = {}  # by peer, in order
        self._whole = _Snapshot(whole=True)
        self._pushed = _Snapshot(whole=False)
        self._doubted: dict[str, float] = {}  # followers that may be gone, and when to check them
        self._is_owed = False  # a change was not pushed yet, to limit the cost of snapshots

    def __len__(self) -> int:
        return len(self._following)

    def ask(self, peer: str, *, follow: bool) -> None:
        """Answer this peer and, with ``follow``, push to it at every change."""
        if len(self._asking) < MAX_ASKING:
            self._asking[peer] = None
        if follow and len(self._following) < MAX_FOLLOWERS:
            self._following[peer] = _Told(NOTHING, clock.now_s())

    def doubt(self, peer: str) -> None:
        """Record that a connection of the peer was closed. The peer may have opened another one."""
        if peer in self._following:
            self._doubted[peer] = clock.now_s() + FOLLOW_INTERVAL_S

    def look_for_doubted(self, server: Server) -> None:
        """Drop followers that cannot be reached, once ZeroMQ has had time to notice."""
        now = clock.now_s()
        for peer in [peer for peer, due_at in self._doubted.items() if due_at <= now]:
            del self._doubted[peer]
            told = self._following.get(peer)
            if told is not None and not server.send(peer, told.snapshot):
                del self._following[peer]

    def pause_s(self, now: float) -> float | None:
        """Return how long the scheduler may sleep before the next push, or None without followers."""
        if not self._following:
            return None
        return min(FOLLOW_INTERVAL_S, self._pushed.serves_for_s(now)) if self._is_owed else FOLLOW_INTERVAL_S

    def tell(self, server: Server, core: SchedulerCore, *, changed: bool) -> None:
        """Answer queries and push to followers with outdated snapshots."""
        self.look_for_doubted(server)
        if self._asking:
            asking, self._asking = self._asking, {}
            answer = self._whole.latest(core)
            for peer in asking:
                server.send(peer, answer)
        if self._following:
            self._push(server, core, changed=changed or self._is_owed)

    def tell_last(self, server: Server, core: SchedulerCore) -> None:
        """Answer and push with the final state, even if the latest snapshot is recent.

        There is no later pass that would do so.
        """
        self._whole, self._pushed = _Snapshot(whole=True), _Snapshot(whole=False)
        self.tell(server, core, changed=True)

    def see_off(self, server: Server, waiting: Iterable[str]) -> None:
        """Wait, at most ``FAREWELL_S`` seconds, until other processes know that the job is over.

        A ZeroMQ client that queues nothing while it is unconnected also drops unread messages when the connection
        closes. A follower on another host would then restart its workers, and a process without a seat would consider
        itself the first one of the next job. A follower that has the final state sends a question; a process without a
        seat closes its connection.

        Args:
            server: the server, which is not used any more afterwards.
            waiting: the peers without a seat.
        """
        there, followers = set(waiting), set(self._following)
        until = clock.now_s() + FAREWELL_S
        while (there or followers) and (left_s := until - clock.now_s()) > 0:
            server.wait(left_s)
            for incoming in server.drain():
                match incoming:
                    case ConnectionLost(peer):
                        there.discard(peer)
                        followers.discard(peer)
                    case Arrived(peer, StatusQuery()):
                        followers.discard(peer)

    def tell_of_wait(self, server: Server, core: SchedulerCore, why: str) -> None:
        """Push the last snapshot with a warning while the scheduler waits for its journal.

        The core may contain decisions that are not durable, so no new snapshot is created.
        """
        now, view = (
            clock.now_s(),
            self._pushed.view or self._whole.view,
        )  # maybe only an answer was sent
        if view is None:
            return
        waits = msgspec.structs.replace(view, ailments=(*view.ailments, why), notices=tuple(core.notices))
        message = message_of(waits)
        for peer, told in list(self._following.items()):
            if now - told.at >= FOLLOW_INTERVAL_S and server.send(peer, message):
                self._following[peer] = _Told(message, now)
        self._is_owed = True

    def _push(self, server: Server, core: SchedulerCore, *, changed: bool) -> None:
        now, latest = clock.now_s(), None
        self._is_owed = changed and self._pushed.serves_for_s(now) > 0
        for peer, told in list(self._following.items()):
            if not changed and now - told.at < FOLLOW_INTERVAL_S:
                continue
            latest = latest or self._pushed.latest(core)
            if latest == told.snapshot or server.send(peer, latest):
                self._following[peer] = _Told(latest, now)
            else:
                del self._following[peer]
