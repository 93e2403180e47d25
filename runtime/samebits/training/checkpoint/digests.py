"""Decide at which commits ranks are compared, and report a digest of this rank's state at each of them.

Ranks are compared at the first commits of a generation, at every save, at a fixed interval of steps, and at the end. A
rank reports its digest and continues training. It waits for the other ranks' digests only at the end, where all ranks
wait for each other anyway. Copies are hashed in a separate thread during the next step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from samebits.core.point import Point
from samebits.core.reports import FINAL, MAX_DIGESTS, Digest, Part
from samebits.core.values import replace
from samebits.service import log
from samebits.service.agent import Agent
from samebits.training.checkpoint.rollback_copies import RollbackCopy
from samebits.training.state.base_state import State
from samebits.training.state.compared import digest_of, parts_of, shard_parts

FIRST_COMMITS = 3
"""State that is not averaged differs after the first step; two more commits catch differences that begin later."""
DUE = 4
"""Number of digests remembered from the periodic comparisons."""


def _nothing(_seconds: float) -> None:
    """Ignore the time that a digest took."""


class StateDigests:
    """Computes and reports the digests of one state.

    Args:
        agent: reports the digests.
        state: the state to hash.
        took: called with the seconds that each digest took in its own thread.
    """

    def __init__(self, agent: Agent, state: State, took: Callable[[float], None] = _nothing) -> None:
        self._agent = agent
        self._state = state
        self._took = took
        self._hashing: threading.Thread | None = None
        self._due: deque[Digest] = deque(maxlen=DUE)
        self._first: list[Digest] = []  # first commits of this generation
        self._saves: deque[Digest] = deque(maxlen=MAX_DIGESTS - FIRST_COMMITS - DUE - 1)
        self._has_said = False
        self._replica: tuple[int, ...] | None = None

    def begin(self, replica: tuple[int, ...] | None = None) -> None:
        """Begin a generation.

        Args:
            replica: this rank's replica key if others hold the same shards, which are then compared; None: none does.
        """
        self.settle()
        self._replica = replica
        self._first.clear()
        if not self._has_said and self._state.compared() is None:
            self._has_said = True
            log.say(
                f"the ranks' states are not compared: a {type(self._state).__name__} does not define which values "
                "must be equal on every rank. Fix: implement shared_values()"
            )

    def committed(
        self,
        point: Point,
        commits: int,
        *,
        averages: bool,
        is_save: bool,
        is_due: bool = False,
        kept: RollbackCopy | None = None,
        shards: Sequence[Part] | None = None,
    ) -> None:
        """Report the current state's digest if this commit is among the first, a save, or ``is_due``.

        If ``kept``, a copy of the state, is given, the copy is hashed in a separate thread. ``shards`` are the parts of
        this rank's shards if they have been hashed already.

        A digest is reported only once for a commit. The last commit is saved again at the end, and by then a loop may
        have advanced to the next epoch on some ranks only.
        """
        is_first = len(self._first) < FIRST_COMMITS and commits > 0
        if not (is_first or is_save or is_due):
            return
        self.settle()  # digests are reported in the order of their commits
        if any((one.point, one.commits) == (point, commits) for one in self._all()):
            return
        if kept is None:
            digest = self._digest(point, commits, averages=averages, shards=shards)
            self._remember(digest, is_first=is_first, is_save=is_save, is_due=is_due)
            return
        loose = parts_of(self._state.loose()) if is_first or is_save else []

        def hash_it() -> None:
            began_s = time.monotonic()
            shared = parts_of(kept.named)
            kept.shared = digest_of(shared)
            loosely = digest_of(loose) if loose else b""
            digest = Digest(point, commits, kept.shared, loosely, averages, (*shared, *loose), is_kept=True)
            self._remember(digest, is_first=is_first, is_save=is_save, is_due=True)
            self._took(time.monotonic() - began_s)

        self._hashing = threading.Thread(target=hash_it, name="samebits-digest", daemon=True)
        self._hashing.start()

    def settle(self) -> None:
        """Wait until the digest that is being computed has been reported."""
        hashing, self._hashing = self._hashing, None
        if hashing is not None:
            hashing.join()

    def _remember(self, digest: Digest, *, is_first: bool, is_save: bool, is_due: bool) -> None:
        if is_first:
            self._first.append(digest)
        if is_save:
            self._saves.append(digest)
        if is_due:
            self._due.append(digest)
        self._agent.report_digests(self._all())

    def now(self, point: Point, commits: int, *, averages: bool) -> Digest:
        """Return the digest of the current state without reporting it."""
        self.settle()
        return self._digest(point, commits, averages=averages)

    def tell(self, digest: Digest) -> None:
        """Report a digest, which is compared with those of all other ranks."""
        self._remember(digest, is_first=False, is_save=False, is_due=True)

    def through(self, point: Point, *, averages: bool) -> Sequence[Digest]:
        """Return the digests to report after the training function has returned, including the final state's."""
        self.settle()
        return self._all(self._digest(point, FINAL, averages=averages))

    def _digest(self, point: Point, commits: int, *, averages: bool, shards: Sequence[Part] | None = None) -> Digest:
        shared, loose = parts_of(self._state.compared() or ()), parts_of(self._state.loose())
        digest = Digest(point, commits, digest_of(shared), digest_of(loose), averages, (*shared, *loose))
        if self._replica is None:
            return digest
        shards = shard_parts(self._state.shards(moments=True)) if shards is None else shards
        return replace(digest, parts=(*digest.parts, *shards), key=self._replica, held=digest_of(shards))

    def _all(self, *last: Digest) -> Sequence[Digest]:
        by_key = {(one.point, one.commits): one for one in (*self._saves, *self._first, *self._due, *last)}
        return tuple(by_key.values())
