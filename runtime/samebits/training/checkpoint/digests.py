"""When this rank's state is compared with the others', and what it reports: one digest for each such commit.

Here live the moments (the first commits of a generation, every save, every so many steps, the end) and what is
remembered of them. Never here: what is hashed (``state.compared``), what follows where ranks differ
(``core.watch.equality``). The one idea: a rank reports and goes on; no rank waits for another rank's digest but in the
end, where all wait for each other anyway; and what was copied is hashed by a thread of its own, beside the next step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from samebits.core.point import Point
from samebits.core.reports import FINAL, MAX_DIGESTS, Digest
from samebits.service import log
from samebits.service.agent import Agent
from samebits.training.checkpoint.rollback_copies import KeptState
from samebits.training.state.base_state import State
from samebits.training.state.compared import digest_of, parts_of

__all__ = ["FIRST_COMMITS", "Digests"]

FIRST_COMMITS = 3
"""What is not averaged differs after the first step; two more are for what begins later, as a schedule's warm-up."""
DUE = 4
"""Of the comparisons that were due, so many digests are remembered."""


def _nothing(_seconds: float) -> None:
    """Nobody wants to know."""


class Digests:
    """The digests of one state in one process.

    Args:
        agent: reports them.
        state: whose.
        took: told how many seconds a digest has taken that a thread of its own has made.
    """

    def __init__(self, agent: Agent, state: State, took: Callable[[float], None] = _nothing) -> None:
        self._agent = agent
        self._state = state
        self._took = took
        self._hashing: threading.Thread | None = None
        self._due: deque[Digest] = deque(maxlen=DUE)
        self._first: list[Digest] = []  # of this generation
        self._saves: deque[Digest] = deque(maxlen=MAX_DIGESTS - FIRST_COMMITS - DUE - 1)
        self._has_said = False

    def begin(self) -> None:
        """A generation begins."""
        self.settle()
        self._first.clear()
        if not self._has_said and self._state.compared() is None:
            self._has_said = True
            log.say(
                f"the ranks' states are not compared: a {type(self._state).__name__} marks nothing as shared; "
                "shared_values() may name what must be equal on every rank"
            )

    def committed(
        self,
        point: Point,
        commits: int,
        *,
        averages: bool,
        is_save: bool,
        is_due: bool = False,
        kept: KeptState | None = None,
    ) -> None:
        """The state as it stands is this commit; where it is also ``kept``, the copy is what is hashed.

        It is reported where it is one of the first, a save, or ``is_due``.

        One that was told already stays as it was told: at the end the commit is saved again, and behind it a loop may
        have gone to the next epoch, which other ranks have done or not when they are compared.
        """
        is_first = len(self._first) < FIRST_COMMITS and commits > 0
        if not (is_first or is_save or is_due):
            return
        self.settle()  # they are told in their order
        if any((one.point, one.commits) == (point, commits) for one in self._all()):
            return
        if kept is None:
            digest = self._digest(point, commits, averages=averages)
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
        """Return once what is being hashed is reported."""
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
        """Of the state as it stands; it is not told."""
        self.settle()
        return self._digest(point, commits, averages=averages)

    def tell(self, digest: Digest) -> None:
        """One that all are to be compared by, as those of commits are."""
        self._remember(digest, is_first=False, is_save=False, is_due=True)

    def through(self, point: Point, *, averages: bool) -> Sequence[Digest]:
        """The training function has returned, with the state as it stands: what is to be reported with that."""
        self.settle()
        return self._all(self._digest(point, FINAL, averages=averages))

    def _digest(self, point: Point, commits: int, *, averages: bool) -> Digest:
        shared, loose = parts_of(self._state.compared() or ()), parts_of(self._state.loose())
        return Digest(point, commits, digest_of(shared), digest_of(loose), averages, (*shared, *loose))

    def _all(self, *last: Digest) -> Sequence[Digest]:
        by_key = {(one.point, one.commits): one for one in (*self._saves, *self._first, *self._due, *last)}
        return tuple(by_key.values())
