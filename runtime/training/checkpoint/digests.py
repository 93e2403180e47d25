"""When this rank's state is compared with the others', and what it reports: one digest for each such commit.

Here live the moments (the first commits of a generation, every save, the end) and what is remembered of them. Never
here: what is hashed (``state.compared``), what follows where ranks differ (``core.equality``). The one idea: a rank
reports and goes on; nobody waits for another rank's digest but in the end, where all wait for each other anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from runtime.core.messages import FINAL, MAX_DIGESTS, Digest
from runtime.core.point import Point
from runtime.service import log
from runtime.service.agent import Agent
from runtime.training.state.base_state import State
from runtime.training.state.compared import digest_of, parts_of

__all__ = ["FIRST_COMMITS", "Digests"]

FIRST_COMMITS = 3
"""What is not averaged differs after the first step; two more are for what begins later, as a schedule's warm-up."""


class Digests:
    """The digests of one state in one process.

    Args:
        agent: reports them.
        state: whose.
    """

    def __init__(self, agent: Agent, state: State) -> None:
        self._agent = agent
        self._state = state
        self._first: list[Digest] = []  # of this generation
        self._saves: deque[Digest] = deque(maxlen=MAX_DIGESTS - FIRST_COMMITS - 1)
        self._has_said = False

    def begin(self) -> None:
        """A generation begins."""
        self._first.clear()
        if not self._has_said and self._state.compared() is None:
            self._has_said = True
            log.say(
                f"the ranks' states are not compared: a {type(self._state).__name__} marks nothing as shared; "
                "shared_values() may name what must be equal on every rank"
            )

    def committed(self, point: Point, commits: int, *, averages: bool, is_save: bool) -> None:
        """The state as it stands is this commit.

        One that was told already stays as it was told: at the end the commit is saved again, and behind it a loop may
        have gone to the next epoch, which other ranks have done or not when they are compared.
        """
        if any((one.point, one.commits) == (point, commits) for one in (*self._first, *self._saves)):
            return
        is_first = len(self._first) < FIRST_COMMITS and commits > 0
        if not (is_first or is_save):
            return
        digest = self._digest(point, commits, averages=averages)
        if is_first:
            self._first.append(digest)
        if is_save:
            self._saves.append(digest)
        self._agent.report_digests(self._all())

    def through(self, point: Point, *, averages: bool) -> Sequence[Digest]:
        """The training function has returned, with the state as it stands: what is to be reported with that."""
        return self._all(self._digest(point, FINAL, averages=averages))

    def _digest(self, point: Point, commits: int, *, averages: bool) -> Digest:
        shared, loose = parts_of(self._state.compared() or ()), parts_of(self._state.loose())
        return Digest(point, commits, digest_of(shared), digest_of(loose), averages, (*shared, *loose))

    def _all(self, *last: Digest) -> Sequence[Digest]:
        by_key = {(one.point, one.commits): one for one in (*self._saves, *self._first, *last)}
        return tuple(by_key.values())
