"""Those who watch the job: who asked for its snapshot once, who follows it, and what each was told last.

Here live the answers to ``StatusQuery`` and the pushes; the snapshot itself is ``service.status``'. The one idea:
whoever can connect may ask, as often as he likes, so the cost of answering is bounded and not the asking: everybody is
answered once a pass from one snapshot, and making snapshots takes at most ``SNAPSHOT_SHARE`` of the scheduler's time.
"""

from __future__ import annotations

from dataclasses import dataclass

from samebits.core.messages import Status
from samebits.core.scheduler import SchedulerCore
from samebits.net.server import Server
from samebits.service import clock
from samebits.service.status import message_of, snapshot

MAX_FOLLOWERS = 64
MAX_ASKING = 1024  # in one pass; who is not among them asks again
FOLLOW_INTERVAL_S = 0.5  # progress is pushed at most this often; every other change at once
SNAPSHOT_SHARE = 0.1
"""A snapshot that took t s to make serves for t × (1 / share - 1) s: a ms for few workers, a blink for thousands."""
NOTHING = Status(b"")


class _Snapshot:
    """The latest one of a kind, made anew only when its share of the time allows."""

    def __init__(self, *, whole: bool) -> None:
        self._is_whole = whole
        self._latest = NOTHING
        self._serves_until = float("-inf")

    def latest(self, core: SchedulerCore) -> Status:
        began = clock.now_s()
        if began >= self._serves_until:
            self._latest = message_of(snapshot(core, whole=self._is_whole))
            done = clock.now_s()
            self._serves_until = done + (done - began) * (1 / SNAPSHOT_SHARE - 1)
        return self._latest

    def serves_for_s(self, now: float) -> float:
        """How long from ``now`` on ``latest`` will give the same one."""
        return max(0.0, self._serves_until - now)


@dataclass(slots=True)
class _Told:
    snapshot: Status
    at: float


class Followers:
    """Answers and pushes; both happen at the end of a pass, when what they tell is durable."""

    def __init__(self) -> None:
        self._following: dict[str, _Told] = {}  # by peer
        self._asking: dict[str, None] = {}  # by peer, in order
        self._whole = _Snapshot(whole=True)
        self._pushed = _Snapshot(whole=False)
        self._doubted: dict[str, float] = {}  # who follows and may be gone, and when to look
        self._is_owed = False  # a change was not pushed, because snapshots had had their share

    def __len__(self) -> int:
        return len(self._following)

    def ask(self, peer: str, *, follow: bool) -> None:
        """The peer wants a snapshot, and with ``follow`` one at every change."""
        if len(self._asking) < MAX_ASKING:
            self._asking[peer] = None
        if follow and len(self._following) < MAX_FOLLOWERS:
            self._following[peer] = _Told(NOTHING, clock.now_s())

    def doubt(self, peer: str) -> None:
        """A connection of the peer's is closed; it may be back over another one, and have asked over that."""
        if peer in self._following:
            self._doubted[peer] = clock.now_s() + FOLLOW_INTERVAL_S

    def look_for_doubted(self, server: Server) -> None:
        """Forget who cannot be reached, once ZeroMQ has had its time to notice."""
        now = clock.now_s()
        for peer in [peer for peer, due_at in self._doubted.items() if due_at <= now]:
            del self._doubted[peer]
            told = self._following.get(peer)
            if told is not None and not server.send(peer, told.snapshot):
                del self._following[peer]

    def pause_s(self, now: float) -> float | None:
        """How long the scheduler may sleep for their sake; None where nobody follows."""
        if not self._following:
            return None
        return min(FOLLOW_INTERVAL_S, self._pushed.serves_for_s(now)) if self._is_owed else FOLLOW_INTERVAL_S

    def tell(self, server: Server, core: SchedulerCore, *, changed: bool) -> None:
        """Answer who asked; push to who follows and does not know yet."""
        self.look_for_doubted(server)
        if self._asking:
            asking, self._asking = self._asking, {}
            answer = self._whole.latest(core)
            for peer in asking:
                server.send(peer, answer)
        if self._following:
            self._push(server, core, changed=changed or self._is_owed)

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
