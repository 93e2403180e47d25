"""Those who watch the job: who asked for its snapshot once, who follows it, and what each was told last.

Here live the answers to ``StatusQuery`` and the pushes; the snapshot itself is ``service.status``'. The one idea:
whoever can connect may ask, as often as he likes, so the cost of answering is bounded and not the asking: everybody is
answered once a pass from one snapshot, and making snapshots takes at most ``SNAPSHOT_SHARE`` of the scheduler's time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.core.messages import Status
from runtime.core.scheduler import SchedulerCore
from runtime.net.server import Server
from runtime.service import clock
from runtime.service.status import snapshot

MAX_FOLLOWERS = 64
MAX_ASKING = 1024  # in one pass; who is not among them asks again
FOLLOW_INTERVAL_S = 0.5  # progress is pushed at most this often; every other change at once
SNAPSHOT_SHARE = 0.1
"""A snapshot that took t s to make serves for t × (1 / share - 1) s: a ms for few workers, a blink for thousands."""


class _Snapshot:
    """The latest text of one kind, made anew only when its share of the time allows."""

    def __init__(self, make: Callable[[SchedulerCore], str]) -> None:
        self._make = make
        self._text = ""
        self._serves_until = float("-inf")

    def text(self, core: SchedulerCore) -> str:
        began = clock.now_s()
        if began >= self._serves_until:
            self._text = self._make(core)
            done = clock.now_s()
            self._serves_until = done + (done - began) * (1 / SNAPSHOT_SHARE - 1)
        return self._text

    def serves_for_s(self, now: float) -> float:
        """How long from ``now`` on ``text`` will give the same one."""
        return max(0.0, self._serves_until - now)


@dataclass(slots=True)
class _Told:
    text: str
    at: float


class Followers:
    """Answers and pushes; both happen at the end of a pass, when what they tell is durable."""

    def __init__(self) -> None:
        self._following: dict[str, _Told] = {}  # by peer
        self._asking: dict[str, None] = {}  # by peer, in order
        self._whole = _Snapshot(lambda core: snapshot(core, whole=True))
        self._pushed = _Snapshot(lambda core: snapshot(core, whole=False))
        self._is_owed = False  # a change was not pushed, because snapshots had had their share

    def __len__(self) -> int:
        return len(self._following)

    def ask(self, peer: str, *, follow: bool) -> None:
        """The peer wants a snapshot, and with ``follow`` one at every change."""
        if len(self._asking) < MAX_ASKING:
            self._asking[peer] = None
        if follow and len(self._following) < MAX_FOLLOWERS:
            self._following[peer] = _Told("", clock.now_s())

    def forget(self, peer: str) -> None:
        """The peer's connection is closed."""
        self._following.pop(peer, None)
        self._asking.pop(peer, None)

    def pause_s(self, now: float) -> float | None:
        """How long the scheduler may sleep for their sake; None where nobody follows."""
        if not self._following:
            return None
        return min(FOLLOW_INTERVAL_S, self._pushed.serves_for_s(now)) if self._is_owed else FOLLOW_INTERVAL_S

    def tell(self, server: Server, core: SchedulerCore, *, changed: bool) -> None:
        """Answer who asked; push to who follows and does not know yet."""
        if self._asking:
            asking, self._asking = self._asking, {}
            answer = Status(self._whole.text(core))
            for peer in asking:
                server.send(peer, answer)
        if self._following:
            self._push(server, core, changed=changed or self._is_owed)

    def _push(self, server: Server, core: SchedulerCore, *, changed: bool) -> None:
        now, text = clock.now_s(), ""
        self._is_owed = changed and self._pushed.serves_for_s(now) > 0
        for peer, told in self._following.items():
            if not changed and now - told.at < FOLLOW_INTERVAL_S:
                continue
            text = text or self._pushed.text(core)
            if text != told.text:
                server.send(peer, Status(text))
            self._following[peer] = _Told(text, now)
